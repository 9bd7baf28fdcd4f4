"""Which kernels compute a network's attention, and what stands in the way of the chosen one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from generate.tiny import config, network

from qkv.evaluate import KernelUse, kernels_used
from qkv.nn import Transformer, use_kernel

CAP, SINKS, BIAS = "a soft cap on scores", "the gradient of sinks", "the gradient of a learned bias"


def use(lacking: str, attentions: int = 2, chosen: str = "sdpa") -> KernelUse:
    return KernelUse(chosen, "math" if lacking else chosen, lacking, attentions)


@pytest.mark.parametrize(
    ("changes", "expected", "in_training"),
    [
        ({}, [use("")], [use("")]),
        ({"attention": {"num_heads": 4, "softcap": 9.0}}, [use(CAP)], [use(CAP)]),
        ({"attention": {"num_heads": 4, "sinks": True}}, [use("")], [use(SINKS)]),
        ({"position": {"kind": "relative"}}, [use("")], [use(BIAS)]),
        ({"attention": {"kind": "latent", "num_heads": 4}}, [use("")], [use("")]),
        ({"attention": {"num_heads": 4, "value_residual": "learned"}}, [use("")], [use("")]),
        ({"family": "encoder-decoder", "encoder": {"d_model": 32}}, [use("", 6)], [use("", 6)]),
        (
            {"num_layers": 3, "layers": [{"attention": {"softcap": 9.0}}, {}]},
            [use(CAP), use("", 1)],
            [use(CAP), use("", 1)],
        ),
    ],
)
def test_a_fallback_is_told_with_its_reason(
    changes: dict[str, Any], expected: list[KernelUse], in_training: list[KernelUse]
) -> None:
    made = Transformer(config(**changes), device="meta")
    assert kernels_used(made) == expected
    assert kernels_used(made, training=True) == in_training


def test_the_chosen_kernel_is_asked_and_the_network_left_as_it_was() -> None:
    made = network(attention={"num_heads": 4, "dropout": 0.5})
    use_kernel(made, "tiled")
    ids = torch.tensor([[1, 2, 3]])
    before = made(ids)
    assert kernels_used(made) == [use("", chosen="tiled")]
    assert kernels_used(made, training=True) == [use("dropout on attention weights", chosen="tiled")]
    assert torch.equal(made(ids), before)
