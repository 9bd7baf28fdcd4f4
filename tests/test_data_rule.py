"""With QKV_DATA set, a skip for missing data is a failure (tests/conftest.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

TESTS = """
import pytest

def test_folder(qkv_data):
    assert qkv_data.is_dir()

def test_present(data_file):
    assert data_file("present.txt").read_text(encoding="utf-8") == "here"

def test_absent(data_file):
    data_file("absent.txt")

def test_other_skip():
    pytest.skip("no GPU")

@pytest.mark.xfail
def test_expected_failure():
    assert False
"""
MODULE = """
import os, pathlib, pytest

if not pathlib.Path(os.environ.get("QKV_DATA", ""), "absent.txt").is_file():
    pytest.skip("needs the shared test data: absent.txt", allow_module_level=True)
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A scratch project with this project's conftest, and a data folder that has one of two files."""
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text(encoding="utf-8"))
    data = pytester.mkdir("data")
    (data / "present.txt").write_text("here", encoding="utf-8")
    return pytester


def test_without_qkv_data_tests_are_skipped(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QKV_DATA", raising=False)
    project.makepyfile(test_some=TESTS, test_module=MODULE)
    result = project.runpytest_inprocess("-rs")
    assert result.ret == pytest.ExitCode.OK
    result.assert_outcomes(skipped=5, xfailed=1)
    result.stdout.fnmatch_lines(["*needs the shared test data: set QKV_DATA"])


def test_with_qkv_data_a_missing_file_fails(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QKV_DATA", str(project.path / "data"))
    project.makepyfile(test_some=TESTS)
    result = project.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=2, failed=1, skipped=1, xfailed=1)
    result.stdout.fnmatch_lines(["*QKV_DATA is set, so this may not be skipped*absent.txt is missing*"])


def test_with_qkv_data_a_missing_folder_fails(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QKV_DATA", str(project.path / "nowhere"))
    project.makepyfile(test_some=TESTS)
    result = project.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(errors=3, skipped=1, xfailed=1)


def test_with_qkv_data_a_module_skipped_for_data_fails(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QKV_DATA", str(project.path / "data"))
    project.makepyfile(test_module=MODULE)
    result = project.runpytest_inprocess()
    assert result.ret != pytest.ExitCode.OK
    result.assert_outcomes(errors=1)
