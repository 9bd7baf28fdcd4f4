"""docs/behaviours.md is complete, and every test it names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = {
    "Tokenizers and text": 11,
    "Data and labels": 3,
    "Masks and positions": 4,
    "KV cache and compile": 4,
    "RoPE, weights, conversion": 7,
    "Safety of files": 3,
    "Precision and memory": 4,
    "Training loop": 5,
    "Checkpoints": 4,
    "Distributed": 5,
    "Generation": 6,
    "Beams, translation, scoring": 5,
    "Server": 6,
    "Inspector": 3,
}
"""Section -> number of behaviours: none is dropped in silence."""


def sections() -> dict[str, list[tuple[str, str]]]:
    """Section -> its rows as (behaviour, held by)."""
    result: dict[str, list[tuple[str, str]]] = {}
    rows: list[tuple[str, str]] = []
    for line in (ROOT / "docs/behaviours.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            rows = result.setdefault(line.removeprefix("## "), [])
        elif line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            assert len(cells) == 2, f"a row has two cells: {line}"
            rows.append((cells[0], cells[1]))
    for section, table in result.items():
        assert table[:2] == [("behaviour", "held by"), ("---", "---")], section
        del table[:2]
    return result


@cache
def names_in(path: Path) -> frozenset[str]:
    """Names of the tests of a file: `test_x` and `TestClass::test_x`."""

    def walk(body: list[ast.stmt], prefix: str) -> list[str]:
        names: list[str] = []
        for node in body:
            if isinstance(node, ast.ClassDef):
                names += walk(node.body, f"{prefix}{node.name}::")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                names.append(prefix + node.name)
        return names

    return frozenset(walk(ast.parse(path.read_text(encoding="utf-8")).body, ""))


def fault(held_by: str) -> str | None:
    """What is wrong with a cell: test ids joined by commas, or a reason; several of either joined by <br>."""
    for part in re.split(r"\s*<br>\s*", held_by):
        if part.startswith(("not yet:", "by design:")):
            if not part.partition(":")[2].strip():
                return "a reason without words"
            continue
        for name in re.split(r"\s*,\s*", part):
            file, _, test = name.strip("`").partition("::")
            if not re.fullmatch(r"tests/[\w/]+\.py", file) or not test:
                return f"neither a test id nor a reason: {name!r}"
            if not (ROOT / file).is_file():
                return f"no such file: {file}"
            if test not in names_in(ROOT / file):
                return f"{file} has no {test}"
    return None


def test_no_behaviour_is_dropped() -> None:
    assert {section: len(rows) for section, rows in sections().items()} == ROWS


def test_every_behaviour_has_a_key_of_its_own() -> None:
    keys = []
    for behaviour, _ in [row for rows in sections().values() for row in rows]:
        match = re.match(r"`([a-z0-9]+(?:-[a-z0-9]+)*)`: \S", behaviour)
        assert match, f"a row begins with its `key`: {behaviour}"
        keys.append(match[1])
    assert sorted(keys) == sorted(set(keys))


def test_every_behaviour_is_held_by_a_test_or_has_a_reason() -> None:
    faults = {behaviour: fault(held_by) for rows in sections().values() for behaviour, held_by in rows}
    assert {behaviour: what for behaviour, what in faults.items() if what} == {}


@pytest.mark.parametrize(
    ("held_by", "accepted"),
    [
        ("tests/test_behaviours.py::test_no_behaviour_is_dropped", True),
        ("`tests/test_behaviours.py::test_no_behaviour_is_dropped`", True),
        ("`tests/test_readme.py::test_the_python_runs`, `tests/test_readme.py::test_the_demo_is_there`", True),
        ("tests/test_readme.py::test_the_python_runs<br>not yet: on another machine", True),
        ("by design: there is no such thing", True),
        ("", False),
        ("not yet:", False),
        ("later", False),
        ("tests/test_behaviours.py", False),
        ("tests/test_absent.py::test_absent", False),
        ("tests/test_behaviours.py::test_absent", False),
        ("tests/test_behaviours.py::TestAbsent::test_no_behaviour_is_dropped", False),
        ("tests/test_behaviours.py::test_no_behaviour_is_dropped, tests/test_behaviours.py::test_absent", False),
    ],
)
def test_a_name_that_leads_nowhere_is_found(held_by: str, accepted: bool) -> None:
    assert (fault(held_by) is None) == accepted
