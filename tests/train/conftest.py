"""A folder of its own for every test, with a small corpus in it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "house",
    "tree",
    "sees",
    "knows",
    "likes",
    "of",
    "in",
    "under",
    "and",
    "我",
    "爱",
    "你",
    "quickly",
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: corpus.txt has 40 lines, each a document of its own length."""
    monkeypatch.setenv("QKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    draw = random.Random(7)
    lines = [" ".join(draw.choices(WORDS, k=draw.randint(1, 12))) for _ in range(40)]
    (tmp_path / "corpus.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return tmp_path
