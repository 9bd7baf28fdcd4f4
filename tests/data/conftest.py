"""Tokenizers that tests can see through: one id per UTF-8 byte, special ids above."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from qkv.data import Corpus, Pairs
from qkv.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """<eos> is 256, <mask> 257, <sep> 258; there is no <bos> and no <pad>."""
    return Tokenizer.train("", kind="byte", special={"eos": "<eos>", "mask": "<mask>", "sep": "<sep>"})


@dataclass
class ByteTokenizer:
    """A double for what a real tokenizer does not do: special ids, widths and faults at the test's choice."""

    bos_id: int | None = None
    eos_id: int | None = 256
    pad_id: int | None = None
    unk_id: int | None = None
    mask_id: int | None = 257
    cls_id: int | None = None
    sep_id: int | None = None
    vocab_size: int = 260
    sentinel_ids: tuple[int, ...] = ()
    fingerprint: str = "bytes"
    calls: int = 0

    @property
    def special_ids(self) -> tuple[int, ...]:
        return tuple(range(256, self.vocab_size))

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        self.calls += 1
        return [list(text.encode()) for text in texts]


@pytest.fixture
def make_tokenizer() -> Callable[..., ByteTokenizer]:
    return ByteTokenizer


@pytest.fixture(scope="session")
def make_corpus() -> Callable[..., Corpus]:
    """`make_corpus([1, 2, 3], [4, 5])`: documents of these ids, lying apart on purpose."""

    def make(*documents: Any) -> Corpus:
        gap = np.array([99_999], np.uint32)  # never to be seen
        parts = [part for document in documents for part in (gap, np.array(list(document), np.uint32))]
        sizes = np.array([len(document) for document in documents], np.int64)
        starts = np.cumsum(sizes + 1) - sizes
        return Corpus(np.concatenate([*parts, gap]), starts, starts + sizes)

    return make


@pytest.fixture(scope="session")
def seq2seq() -> Tokenizer:
    """One id per byte; <pad> is 256, <bos> 257, <eos> 258, <mask> 259, <extra_id_0> to <extra_id_7> are 260 to 267."""
    return Tokenizer.train([], kind="byte", sentinels=8)


@pytest.fixture(scope="session")
def make_pairs(make_corpus: Callable[..., Corpus]) -> Callable[..., Pairs]:
    """`make_pairs(([1, 2], [3]), ...)`: sources and targets of these ids, each with <bos> before and <eos> after it."""

    def make(*pairs: Any) -> Pairs:
        source, target = (make_corpus(*([257, *pair[side], 258] for pair in pairs)) for side in (0, 1))
        return Pairs(source, target)

    return make
