"""The front pages and the how-to never lie: their commands and their Python run, their links lead somewhere, both
languages say the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ("README", "docs/own-parts")
INSTALL = "python -m pip install -c constraints.txt "


def read(name: str) -> tuple[str, list[tuple[str, str]]]:
    """A page's prose, and its code blocks as (language, code)."""
    blocks: list[tuple[str, str]] = []

    def take(match: re.Match[str]) -> str:
        blocks.append((match[1], match[2]))
        return ""

    text = (ROOT / name).read_text(encoding="utf-8")
    prose = re.sub(r"^```(.*)\n((?:.*\n)*?)^```$", take, text, flags=re.MULTILINE)
    assert "```" not in prose, f"{name} has a code block that does not end"
    return prose, blocks


def heading_levels(name: str) -> list[int]:
    return [len(marks) for marks in re.findall(r"^(#+) ", read(name)[0], re.MULTILINE)]


def code(language: str, page: str = "README.md") -> list[str]:
    return [text for kind, text in read(page)[1] if kind == language]


def shell_lines(*, fetched: bool = False) -> list[str]:
    """The commands of the page, or those that need models from the network."""
    blocks = [block for block in code("bash") if ("qkv fetch" in block) is fetched]
    return [line for block in blocks for line in block.splitlines() if line.strip() and line[0] != "#"]


def run(command: list[str], folder: Path) -> None:
    """Run a command as a user of this Python does, and fail with what it printed."""
    environment = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=300,
    )
    assert done.returncode == 0, f"{command[-1]!r} exits {done.returncode}:\n{done.stdout}"


@pytest.mark.parametrize("page", PAGES)
def test_both_languages_have_the_same_headings_and_code(page: str) -> None:
    english, chinese = f"{page}.md", f"{page}.zh-CN.md"
    assert len(heading_levels(english)) > 1
    assert heading_levels(chinese) == heading_levels(english)
    assert read(chinese)[1] == read(english)[1]


def test_the_page_opens_with_a_picture_and_two_commands() -> None:
    assert [kind for kind, _ in read("README.md")[1]][:3] == ["text", "bash", "bash"]


@pytest.mark.parametrize(("index", "main_job"), [(0, "qkv demo"), (1, "python -m pytest")])
def test_a_set_up_line_installs_torch_first_and_then_does_its_job(index: int, main_job: str) -> None:
    steps = shell_lines()[index].split(" && ")
    installs = [step for step in steps if " pip install " in step]
    assert steps == [*installs, main_job]
    assert all(step.startswith(INSTALL) for step in installs)
    assert installs[0] == INSTALL + "torch"
    assert len(installs) == 2
    assert installs[1].startswith(INSTALL + "-e ")


def test_the_demo_is_there(tmp_path: Path) -> None:
    run(["bash", "-c", "qkv demo --help"], tmp_path)


def test_every_other_command_runs(tmp_path: Path) -> None:
    lines = shell_lines()[2:]
    assert lines
    for line in lines:  # in order and in one folder: a command may use what an earlier one wrote
        run(["bash", "-c", line], tmp_path)


@pytest.mark.slow
def test_commands_with_fetched_models_run(tmp_path: Path) -> None:
    for line in shell_lines(fetched=True):
        run(["bash", "-c", line], tmp_path)


def test_the_python_runs(tmp_path: Path) -> None:
    blocks = code("python")
    assert blocks
    for block in blocks:
        run([sys.executable, "-c", block], tmp_path)


def test_the_parts_of_the_how_to_train_and_pass_the_tests_of_the_how_to(tmp_path: Path) -> None:
    page = "docs/own-parts.md"
    for block in code("python", page) + code("yaml", page):  # the first line names the file
        with (tmp_path / block.partition("\n")[0].removeprefix("# ")).open("a", encoding="utf-8") as file:
            file.write(block)
    run(["bash", "-e", "-c", "".join(code("bash", page))], tmp_path)


@pytest.mark.parametrize("name", [page + language for page in PAGES for language in (".md", ".zh-CN.md")])
def test_links_lead_somewhere(name: str) -> None:
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", read(name)[0])]
    relative = [link for link in links if link and not re.match(r"[a-z]+:", link)]
    assert relative
    missing = [link for link in relative if not ((ROOT / name).parent / link).is_file()]
    assert not missing
