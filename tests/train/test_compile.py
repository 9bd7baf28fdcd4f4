"""How many graphs a compiled training run makes of its batches, and how it computes attention."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from qkv.config.run import Config
from qkv.nn.transformer import Transformer
from qkv.train.compute import Compute, choose_compute, compile_blocks

V = 20
SHAPES = [(3, 3, 3), (4, 7, 7), (8, 8, 5), (1, 9, 6), (16, 5, 16), (1, 4, 4), (2, 2, 2), (5, 30, 4), (7, 6, 21)]
SHAPES += [(64, 3, 2), (12, 13, 12), (2, 40, 40), (1, 2, 30)]
"""(rows, source slots, target slots): the first ones are equal where others are not."""


@pytest.fixture(autouse=True)
def _forgotten_afterwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No code is generated: which graphs there are does not depend on it."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_batches_of_any_lengths_are_a_graph_per_kind_of_block_and_one_more_each_for_a_single_row() -> None:
    """Encoder block and decoder block, whatever the number of layers: far from the limit of eight."""
    config = Config.load("encoder-decoder-tiny", "model.d_model=16", "model.num_layers=2", "model.dropout=0.1")
    network = Transformer(config.model.with_vocab_size(V), generator=torch.Generator().manual_seed(0))
    compute = Compute(torch.device("cpu"), torch.float32, True, ())
    compile_blocks(network, one_shape=False)
    seen = []
    before = graphs()
    for rows, source, target in SHAPES:
        ids_BS, ids_BT = torch.randint(0, V, (rows, source)), torch.randint(0, V, (rows, target))
        lengths = {"lengths": torch.full((rows,), target), "source_lengths": torch.full((rows,), source)}
        with compute.forward_passes():
            network(ids_BT, source=ids_BS, labels=ids_BT, **lengths).loss_sum.backward()
        seen.append(graphs() - before)
    assert seen == [2] * 3 + [4] * (len(SHAPES) - 3)


def test_each_length_of_a_ramp_is_a_graph_of_its_own() -> None:
    config = Config.load("llama-tiny", "model.num_layers=2", "model.max_seq_len=32")
    network = Transformer(config.model.with_vocab_size(V), generator=torch.Generator().manual_seed(0))
    compile_blocks(network)
    seen, before = [], graphs()
    for length in (8, 8, 16, 32, 32, 8):
        ids_BT = torch.randint(0, V, (4, length))
        with Compute(torch.device("cpu"), torch.float32, True, ()).forward_passes():
            network(ids_BT, labels=ids_BT).loss_sum.backward()
        seen.append(graphs() - before)
    assert seen == [1, 1, 2, 3, 3, 3]


@pytest.mark.parametrize(
    ("compiled", "max_seq_len", "kernel"),
    [
        (True, 512, "attention by math (512 tokens at most)"),
        (True, 513, "attention by sdpa"),
        (False, 128, "attention by math (128 tokens at most)"),
        (False, 129, "attention by sdpa"),
    ],
)
def test_attention_of_short_rows_is_trained_as_matrix_products(compiled: bool, max_seq_len: int, kernel: str) -> None:
    config = Config.load("decoder-tiny", "train.device=cpu", f"model.max_seq_len={max_seq_len}", "model.vocab_size=9")
    network = Transformer(config.model, device="meta")
    assert kernel in choose_compute(config.train, network, compiled).why
