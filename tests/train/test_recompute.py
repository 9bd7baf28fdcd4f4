"""Activation checkpointing: the same gradients, of blocks computed twice."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from qkv.config.model import ModelConfig
from qkv.nn import Transformer
from qkv.train.compute import compile_blocks, recompute_blocks

V = 17
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"dropout": 0.2, "attention": {"num_heads": 2, "dropout": 0.1}},
    "encoder-decoder": {"family": "encoder-decoder", "dropout": 0.1},
    "experts": {
        "feed_forward": {"kind": "moe", "num_experts": 4, "top_k": 2, "router": {"balance_loss": 0.01}},
    },
    "growing-stream": {"residual": {"kind": "attention-residuals"}},
    "value-residual": {"attention": {"num_heads": 2, "value_residual": "learned"}},
    "relative": {"position": {"kind": "relative"}},
    "shared": {"share_layers": True},
}


def network(kind: str) -> Transformer:
    tree = {"vocab_size": V, "max_seq_len": 16, "d_model": 8, "num_layers": 2, "attention": {"num_heads": 2}}
    config = ModelConfig.model_validate(tree | KINDS[kind])
    return Transformer(config, generator=torch.Generator().manual_seed(0)).train()


def gradients(net: Transformer) -> list[Tensor]:
    ids = torch.randint(0, V, (3, 9), generator=torch.Generator().manual_seed(1))
    source = {"source": ids.flip(1)} if net.config.family == "encoder-decoder" else {}
    torch.manual_seed(2)
    output = net(ids, labels=ids.roll(-1, 1), **source)
    (output.loss_sum + sum(output.aux.values())).backward()
    after = torch.get_rng_state()
    return [after, *(p.grad for p in net.parameters() if p.grad is not None)]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_and_random_numbers_are_bit_for_bit_those_of_kept_activations(kind: str) -> None:
    net = network(kind)
    twin = copy.deepcopy(net)
    recompute_blocks(twin)
    kept, recomputed = gradients(net), gradients(twin)
    assert len(kept) == len(recomputed) > 5
    for expected, found in zip(kept, recomputed, strict=True):
        assert torch.equal(expected, found)


def calls_of_first_block(net: Transformer) -> list[str]:
    calls: list[str] = []
    net.decoder.blocks[0].feed_forward.register_forward_pre_hook(lambda *_: calls.append("block"))
    return calls


def test_a_block_runs_again_in_the_backward_pass_of_training_only() -> None:
    net = network("plain")
    recompute_blocks(net)
    calls = calls_of_first_block(net)
    gradients(net)
    assert len(calls) == 2
    gradients(net.eval())
    assert len(calls) == 3


def test_compiled_blocks_are_computed_again_too(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiler(function, backend="aot_eager"))
    torch._dynamo.reset()
    net = network("dropout")
    twin = copy.deepcopy(net)
    recompute_blocks(twin)
    compile_blocks(net)
    compile_blocks(twin)
    for expected, found in zip(gradients(net), gradients(twin), strict=True):
        assert torch.equal(expected, found)
    torch._dynamo.reset()
