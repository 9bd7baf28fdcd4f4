"""How many graphs a compiled training run makes of its batches."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from qkv.config.run import Config
from qkv.nn.transformer import Transformer
from qkv.train.compute import Compute, compile_blocks

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
    """Encoder block, decoder block, and the loss, whatever the number of layers: far from the limit of eight."""
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
    assert seen == [3] * 3 + [6] * (len(SHAPES) - 3)
