"""Tiny networks with weights large enough that every token's loss is its own, and tokenizers that are see-through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from qkv import Transformer
from qkv.config.model import ModelConfig
from qkv.data import Corpus
from qkv.tokenizer.tokenizer import Tokenizer

VOCABULARY = 300


@pytest.fixture
def make_network() -> Callable[..., Transformer]:
    """`make_network(family="encoder", position={"kind": "learned"})`."""

    def make(**changes: Any) -> Transformer:
        config = {
            "vocab_size": VOCABULARY,
            "max_seq_len": 8,
            "d_model": 16,
            "num_layers": 2,
            "attention": {"num_heads": 2},
            "feed_forward": {"d_ff": 24},
            "init": {"kind": "normal", "std": 0.4},
            **changes,
        }
        return Transformer(ModelConfig.model_validate(config), generator=torch.Generator().manual_seed(1))

    return make


@pytest.fixture
def network(make_network: Callable[..., Transformer]) -> Transformer:
    return make_network().eval()


@pytest.fixture
def byte_tokenizer() -> Tokenizer:
    """The id of a byte is its value; <bos> and <eos> are above."""
    return Tokenizer.train([], kind="byte")


@pytest.fixture
def make_corpus() -> Callable[..., Corpus]:
    """`make_corpus([1, 2], [3])`: documents of these ids."""

    def make(*documents: list[int]) -> Corpus:
        ends = np.cumsum([len(document) for document in documents])
        starts = np.concatenate([[0], ends[:-1]])
        return Corpus(np.array([i for document in documents for i in document], np.uint32), starts, ends)

    return make


@pytest.fixture
def random_ids() -> Callable[[int], list[int]]:
    """`random_ids(n)`: n ids, the same in every call."""
    return lambda count: np.random.default_rng(0).integers(0, 250, count).tolist()
