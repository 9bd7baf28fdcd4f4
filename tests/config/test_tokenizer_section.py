"""A tokenizer is had in one way: to name another replaces the section, whatever it said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qkv.config.errors import ConfigError
from qkv.config.load import load_config

TRAINED, SAVED, SIDES = (
    "tokenizer: {kind: bpe, vocab_size: 500}",
    "tokenizer: {path: saved}",
    "tokenizer: {source: {kind: char}, target: {kind: bpe, vocab_size: 300}}",
)


def tokenizer(below: str, *overrides: str, family: str = "encoder-decoder") -> dict[str, Any]:
    Path("below.yaml").write_text(f"model: {{family: {family}}}\n{below}\n", encoding="utf-8")
    return load_config("below.yaml", overrides).tokenizer.model_dump(exclude_defaults=True)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("below", [TRAINED, SIDES, "tokenizer: {vocab_size: 500}", "tokenizer:", ""])
@pytest.mark.parametrize("override", ["tokenizer.path=X", "tokenizer={path: X}"])
def test_a_path_replaces_what_was_to_be_trained(below: str, override: str) -> None:
    assert tokenizer(below, override) == {"path": "X"}


@pytest.mark.parametrize(
    ("below", "overrides", "expected"),
    [
        (SAVED, ["tokenizer.kind=char"], {"kind": "char"}),
        (SAVED, ["tokenizer.kind=bpe"], {}),
        (SIDES, ["tokenizer={kind: char}"], {"kind": "char"}),
        (
            TRAINED,
            ["tokenizer={source: {kind: char}, target: {kind: byte}}"],
            {"source": {"kind": "char"}, "target": {"kind": "byte"}},
        ),
        (SIDES, ["tokenizer.target.path=X"], {"source": {"kind": "char"}, "target": {"path": "X"}}),
        (TRAINED, ["tokenizer.path=X", "tokenizer.vocab_size=null"], {"path": "X"}),
        (TRAINED, ["tokenizer.path=null"], {"vocab_size": 500}),
        (TRAINED, ["tokenizer.vocab_size=400"], {"vocab_size": 400}),
        (TRAINED, ["tokenizer.kind=bpe"], {"vocab_size": 500}),
    ],
)
def test_the_last_way_named_is_meant(below: str, overrides: list[str], expected: dict[str, Any]) -> None:
    assert tokenizer(below, *overrides) == expected


def test_a_file_that_extends_another_replaces_too_and_spelled_out_trees_do() -> None:
    Path("above.yaml").write_text(f"extends: below.yaml\n{SAVED}\n", encoding="utf-8")
    tokenizer(TRAINED)
    saved = load_config("above.yaml")
    assert saved.tokenizer.model_dump(exclude_defaults=True) == {"path": "saved"}
    Path("spelled.yaml").write_text(saved.to_yaml(), encoding="utf-8")
    assert load_config("spelled.yaml", ["tokenizer.kind=char"]).tokenizer.model_dump(exclude_defaults=True) == {
        "kind": "char"
    }


@pytest.mark.parametrize(
    ("below", "override", "said"),
    [
        (SAVED, "tokenizer.vocab_size=400", "a saved tokenizer has its own size"),
        (SIDES, "tokenizer.vocab_size=400", "a tokenizer for each side has its own size"),
        (TRAINED, "tokenizer={path: X, vocab_size: 5}", "a saved tokenizer has its own size"),
        (TRAINED, "tokenizer.source.kind=char", "only one is given"),
    ],
)
def test_what_cannot_be_both_is_still_refused(below: str, override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        tokenizer(below, override)
