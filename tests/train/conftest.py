"""A folder of its own for every test, with small files to learn from in it."""

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
    """The working folder: corpus.txt has 40 lines, each a document of its own length; pairs.tsv has a sentence and its
    words in reverse on a line, reviews.tsv a sentence and whether it speaks of a cat."""
    monkeypatch.setenv("QKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    draw = random.Random(7)
    lines = [" ".join(draw.choices(WORDS, k=draw.randint(1, 12))) for _ in range(40)]
    (tmp_path / "corpus.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    short = [draw.choices(WORDS, k=draw.randint(1, 2)) for _ in range(60)]
    pairs = [f"{' '.join(words)}\t{' '.join(reversed(words))}\n" for words in short]
    (tmp_path / "pairs.tsv").write_text("".join(pairs), encoding="utf-8")
    reviews = [f"{' '.join(words)}\t{'yes' if 'cat' in words else 'no'}\n" for words in [["cat"], *short]]
    (tmp_path / "reviews.tsv").write_text("".join(["text\tlabel\n", *reviews]), encoding="utf-8")
    return tmp_path
