"""Blocks whose parts stand side by side, and layers that share one block's parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from qkv.config.model import ModelConfig
from qkv.inspect.attention import attention_weights
from qkv.inspect.summary import summarise
from qkv.nn import Attention, LayerNorm, Transformer
from qkv.nn.build import apply
from qkv.nn.mask import Causal

from .matrix import assert_equal, one_thread  # noqa: F401

V = 23


def network(family: str = "decoder", seed: int = 0, **changes: Any) -> Transformer:
    tree: dict[str, Any] = {
        "family": family,
        "vocab_size": V,
        "max_seq_len": 32,
        "d_model": 16,
        "num_layers": 3,
        "attention": {"num_heads": 4, "num_kv_heads": 2},
        "norm": {"kind": "layernorm"},
        "init": {"kind": "normal", "std": 0.3},
    }
    net = Transformer(ModelConfig.model_validate(tree | changes), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) / 4)
    return net.eval()


def ids_of(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, V, (rows, length), generator=torch.Generator().manual_seed(seed))


# --- parallel ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parallel", "placement"),
    [
        ("one-norm", "pre"),
        ("one-norm", "post"),
        ("one-norm", "sandwich"),
        ("one-norm", "output"),
        ("two-norms", "pre"),
        ("two-norms", "sandwich"),
    ],
)
@torch.no_grad()
def test_attention_and_feed_forward_read_the_same_stream_and_are_added(parallel: str, placement: str) -> None:
    net = network(parallel=parallel, norm={"kind": "layernorm", "placement": placement}, position={"kind": "none"})
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    expected = x
    for block in net.decoder.blocks:
        part = block.parallel
        normed = apply(part.norm_in, expected)
        second = part.norm_feed_forward(expected) if parallel == "two-norms" else normed
        both = part.attention(normed, mask=Causal()) + part.feed_forward(second)
        expected = apply(part.norm_stream, expected + apply(part.norm_out, both))
    assert_equal(net.decoder(x), net.decoder.final_norm(expected))


@pytest.mark.parametrize(("parallel", "norms"), [("one-norm", 1), ("two-norms", 2)])
def test_a_parallel_block_is_one_sublayer_with_the_norms_it_says(parallel: str, norms: int) -> None:
    block = network(parallel=parallel).decoder.blocks[0]
    assert list(dict(block.named_children())) == ["parallel"]
    assert sum(isinstance(module, LayerNorm) for module in block.modules()) == norms
    assert isinstance(block.attention("self"), Attention)
    assert block.attention("cross") is None


def test_the_encoder_of_an_encoder_decoder_may_be_parallel() -> None:
    net = network("encoder-decoder", encoder={"parallel": "one-norm"})
    assert net(ids_of(2, 5), source=ids_of(2, 6)).shape == (2, 5, V)


# --- shared layers ----------------------------------------------------------------------------------------------------


def unshared(net: Transformer) -> Transformer:
    """The same network with a copy of the shared block in each layer."""
    tree = net.config.model_dump() | {"share_layers": False}
    twin = Transformer(ModelConfig.model_validate(tree)).eval()
    state = net.state_dict()
    for name in twin.state_dict():
        head, _, tail = name.partition(".blocks.")
        if tail:
            state[name] = state[f"{head}.blocks.0.{tail.partition('.')[2]}"]
    twin.load_state_dict(state)
    return twin


@pytest.mark.parametrize("family", ["decoder", "encoder"])
def test_shared_layers_equal_layers_with_the_same_parameters(family: str) -> None:
    net = network(family, share_layers=True)
    names = {name for name in net.state_dict() if ".blocks." in name}
    assert {name.split(".blocks.")[1].partition(".")[0] for name in names} == {"0"}
    twin, ids = unshared(net), ids_of(2, 9)
    assert torch.equal(net(ids), twin(ids))
    for one, other in zip(attention_weights(net, ids[:1]), attention_weights(twin, ids[:1]), strict=True):
        assert torch.equal(one, other)
    last = attention_weights(net, ids[:1], layers=[2])[0]
    assert torch.equal(last, attention_weights(twin, ids[:1])[2])


def test_the_gradient_of_a_shared_block_is_the_sum_over_the_layers() -> None:
    net = network(share_layers=True).double()
    twin, ids = unshared(net).double(), ids_of(2, 9)
    for one in (net, twin):
        one(ids, labels=ids.roll(1, 1)).loss_sum.backward()
    for name, parameter in net.decoder.blocks[0].named_parameters():
        parts = [dict(block.named_parameters())[name].grad for block in twin.decoder.blocks]
        torch.testing.assert_close(parameter.grad, sum(parts))


def test_shared_layers_have_a_cache_each() -> None:
    net, ids = network(share_layers=True).requires_grad_(False), ids_of(2, 9)
    cache = net.new_cache(2)
    logits = torch.cat([net(ids[:, :4], cache=cache), net(ids[:, 4:5], cache=cache), net(ids[:, 5:], cache=cache)], 1)
    assert len(cache.layers) == 3
    assert_equal(logits, net(ids))


def test_the_numbers_of_a_shared_model_are_those_of_its_layers_but_for_the_parameters() -> None:
    shared, apart = (summarise(network(share_layers=share).config) for share in (True, False))
    assert shared.flops_per_token_forward == apart.flops_per_token_forward
    assert shared.kv_cache_bytes_per_token == apart.kv_cache_bytes_per_token
    block = network().decoder.blocks[0]
    assert apart.params - shared.params == 2 * sum(parameter.numel() for parameter in block.parameters())
