"""Texts and tokenizers that the tests of this room share."""

from __future__ import annotations

from collections.abc import Callable
from pydoc_data.topics import topics

import pytest

from qkv.tokenizer import Tokenizer

from .samples import CHINESE


@pytest.fixture(scope="session")
def english() -> str:
    """Some 100 KB of documentation that comes with Python."""
    return "\n".join(topics[name] for name in sorted(topics))[:100_000]


@pytest.fixture(scope="session")
def trained(english: str) -> Callable[[str], Tokenizer]:
    """`trained(kind)`: a tokenizer of English and some Chinese."""
    made: dict[str, Tokenizer] = {}

    def get(kind: str) -> Tokenizer:
        if kind not in made:
            size = None if kind in ("char", "byte") else 1200
            made[kind] = Tokenizer.train([english, CHINESE], kind=kind, vocab_size=size)
        return made[kind]

    return get
