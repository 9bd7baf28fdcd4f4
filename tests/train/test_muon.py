"""Muon's matrices side by side against torch.optim.Muon, which takes them one by one."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import nn

from qkv.train import muon
from qkv.train.muon import Muon, orthogonalised

SHAPES = [(16, 16), (16, 48), (48, 16), (16, 16), (48, 16), (8, 40), (16, 48), (2, 3)]


def drawn(seed: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def give_gradients(seed: int, *models: list[nn.Parameter]) -> None:
    for numbers in zip(*models, strict=True):
        generator = torch.Generator().manual_seed(seed)
        gradient = torch.randn(numbers[0].shape, generator=generator)
        for parameter in numbers:
            parameter.grad = gradient.clone()


@pytest.mark.parametrize("at_once", [1, 1500, 1 << 23])
@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_steps_are_those_of_torch(
    adjust_lr_fn: Literal["original", "match_rms_adamw"],
    nesterov: bool,
    at_once: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(muon, "AT_ONCE", at_once)
    ours, theirs = drawn(0), drawn(0)
    settings = {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9, "nesterov": nesterov, "adjust_lr_fn": adjust_lr_fn}
    optimizer, oracle = Muon(ours, **settings), torch.optim.Muon(theirs, **settings)  # type: ignore[arg-type]
    for step in range(4):
        give_gradients(step, ours, theirs)
        optimizer.step()
        oracle.step()
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=2e-3)  # updates come in bfloat16, times 0.1
            memory, expected = (o.state[p]["momentum_buffer"] for o, p in ((optimizer, one), (oracle, other)))
            assert torch.equal(memory, expected)


def test_a_matrix_without_a_gradient_stays_and_has_no_state() -> None:
    matrices = drawn(0)
    optimizer = Muon(matrices, lr=0.1)
    give_gradients(0, matrices)
    matrices[3].grad = None
    before = matrices[3].detach().clone()
    optimizer.step()
    assert torch.equal(matrices[3], before)
    assert [bool(optimizer.state.get(matrix)) for matrix in matrices] == [place != 3 for place in range(len(SHAPES))]


def test_in_float64_singular_values_come_near_one_and_directions_stay() -> None:
    x_NPQ = torch.randn(3, 12, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    left, _, right = torch.linalg.svd(x_NPQ, full_matrices=False)
    inner = left.mT @ orthogonalised(x_NPQ, (3.4445, -4.775, 2.0315), 5, 1e-7) @ right.mT
    values = inner.diagonal(dim1=-2, dim2=-1)
    assert values.min() > 0.6
    assert values.max() < 1.25
    torch.testing.assert_close(inner, torch.diag_embed(values), rtol=0, atol=1e-12)
