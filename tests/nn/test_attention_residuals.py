"""Attention Residuals: the equations, the ways to cut the depth into blocks, and what a network of them does."""

from __future__ import annotations

import copy
import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from qkv.config.model import ModelConfig
from qkv.nn import Dims, Transformer, build
from qkv.nn.attention_residuals import AttentionResiduals, DepthWeights, ReadDepth, Sources
from qkv.nn.block import Block, BlockInputs
from qkv.nn.build import apply
from qkv.nn.mask import Causal
from qkv.train.compute import Compute, compile_blocks

from .matrix import assert_equal, one_thread  # noqa: F401

V = 23
FAMILIES = pytest.mark.parametrize("family", ["decoder", "encoder", "encoder-decoder"])
CUTS: dict[str, dict[str, Any]] = {
    "full": {},
    "one-layer": {"block_size": 1},
    "two-layers": {"block_size": 2},
    "three-sublayers": {"block_size": 3, "unit": "sublayer"},
}
EVERY_CUT = pytest.mark.parametrize("cut", CUTS)


def network(family: str = "decoder", residual: dict[str, Any] | None = None, **changes: Any) -> Transformer:
    tree: dict[str, Any] = {
        "family": family,
        "vocab_size": V,
        "max_seq_len": 32,
        "d_model": 16,
        "num_layers": 4,
        "attention": {"num_heads": 4, "num_kv_heads": 2},
        "residual": {"kind": "attention-residuals"} | (residual or {}),
        "init": {"kind": "normal", "std": 0.3},
    }
    return Transformer(ModelConfig.model_validate(tree | changes), generator=torch.Generator().manual_seed(0)).eval()


def at_random(net: Transformer) -> Transformer:
    """The same network, with sites that prefer some sources."""
    generator = torch.Generator().manual_seed(1)
    for module in net.modules():
        if isinstance(module, DepthWeights):
            nn.init.normal_(module.query, generator=generator)
            nn.init.uniform_(module.gain, 0.5, 1.5, generator=generator)
    return net


def ids_of(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, V, (rows, length), generator=torch.Generator().manual_seed(seed))


def inputs_of(family: str) -> dict[str, Tensor]:
    return {"ids": ids_of(2, 6)} | ({"source": ids_of(2, 4, seed=1)} if family == "encoder-decoder" else {})


def sources_of(stream: AttentionResiduals, *values: Tensor) -> Sources:
    state = stream.enter(values[0])
    for index, value in enumerate(values[1:]):
        state = stream.new_site(index, index).write(state, value, None)
    return state


def a_stream() -> AttentionResiduals:
    config = ModelConfig.model_validate({"residual": {"kind": "attention-residuals"}}).residual
    stream: AttentionResiduals = build(config, Dims(16))
    return stream


def some_sources(count: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, 16, generator=generator) * 2.0**index for index in range(count)]


# --- one site ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_site_is_the_published_operator() -> None:
    found = importlib.util.find_spec("fla")  # importing it would need a GPU's compiler
    if found is None or not found.submodule_search_locations:
        pytest.skip("needs fla-core")
    path = Path(found.submodule_search_locations[0]) / "ops" / "attnres" / "naive.py"
    spec = importlib.util.spec_from_file_location("naive_attnres", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    read, values = ReadDepth(16), some_sources()
    nn.init.normal_(read.weights.query, generator=torch.Generator().manual_seed(1))
    nn.init.uniform_(read.weights.gain, generator=torch.Generator().manual_seed(2))
    state = sources_of(a_stream(), *values)
    expected_x, expected_weights = module.naive_attnres(
        read.weights.query, values, read.weights.gain, return_weights=True
    )
    torch.testing.assert_close(read.weights(state), expected_weights.movedim(0, -1))
    torch.testing.assert_close(read(state)[0], expected_x)


@torch.no_grad()
def test_weights_sum_to_one_and_ask_for_direction_not_length() -> None:
    read, values = ReadDepth(16), some_sources()
    nn.init.normal_(read.weights.query, generator=torch.Generator().manual_seed(1))
    weights = read.weights(sources_of(a_stream(), *values))
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3))
    longer = read.weights(sources_of(a_stream(), *values[:2], 7 * values[2], *values[3:]))
    torch.testing.assert_close(longer, weights)
    assert float((weights - 1 / 5).abs().max()) > 0.1


@torch.no_grad()
def test_the_stream_keeps_its_dtype_and_mixes_in_float32() -> None:
    read, values = ReadDepth(16).bfloat16(), [value.bfloat16() for value in some_sources()]
    nn.init.normal_(read.weights.query, generator=torch.Generator().manual_seed(1))
    state = sources_of(a_stream(), *values)
    exact = copy.deepcopy(read).float()(sources_of(a_stream(), *(value.float() for value in values)))[0]
    x = read(state)[0]
    assert x.dtype == torch.bfloat16
    assert read.weights(state).dtype == torch.float32
    torch.testing.assert_close(x, exact.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):  # weights in float32, sublayers in bfloat16
        mixed = sources_of(a_stream(), *(value.float() for value in values[:1]), *values[1:])
        assert {value.dtype for value in mixed.values} == {torch.float32}
        torch.testing.assert_close(copy.deepcopy(read).float()(mixed)[0], exact)


# --- the network ------------------------------------------------------------------------------------------------------


def mixture(read: ReadDepth, sources: list[Tensor]) -> Tensor:
    """The equations, source by source."""
    query, gain = read.weights.query, read.weights.gain
    scores = [(query * gain * v / (v.square().mean(-1, keepdim=True) + 1e-6).sqrt()).sum(-1) for v in sources]
    total = sum(score.exp() for score in scores)
    return sum(
        ((score.exp() / total)[..., None] * v for score, v in zip(scores, sources, strict=True)), torch.zeros(())
    )


def parts(block: Block) -> list[Any]:
    """Of each sublayer: its site, and its function."""
    found = []
    for name, part in block.named_children():
        more = {"mask": Causal()} if name == "self_attention" else {}
        found.append((part.site.read, lambda x, part=part, more=more: part.function(apply(part.norm_in, x), **more)))
    return found


@torch.no_grad()
def test_every_sublayer_reads_all_outputs_before_it() -> None:
    net = at_random(network(position={"kind": "none"}))
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    sources = [x]
    for block in net.decoder.blocks:
        for read, function in parts(block):
            sources.append(function(sources[0] if len(sources) == 1 else mixture(read, sources)))
    expected = net.decoder.final_norm(mixture(net.decoder.residual.readout, sources))
    assert_equal(net.decoder(x), expected)


@pytest.mark.parametrize("size", [1, 2, 3, 9])
@torch.no_grad()
def test_blocks_of_layers_are_wired_as_in_kimi_k3(size: int) -> None:
    """The embedding is the first block; a layer that opens a block stores what the last one came to, unmixed."""
    net = at_random(network(residual={"block_size": size}, position={"kind": "none"}))
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    blocks: list[Tensor] = []
    partial: Tensor | None = x
    for number, layer in enumerate(net.decoder.blocks):
        (read_attention, attention), (read_feed_forward, feed_forward) = parts(layer)
        assert partial is not None
        h = mixture(read_attention, [*blocks, partial]) if blocks else partial
        if number % size == 0:
            blocks.append(partial)
            partial = None
        partial = attention(h) if partial is None else partial + attention(h)
        partial = partial + feed_forward(mixture(read_feed_forward, [*blocks, partial]))
    assert partial is not None
    expected = net.decoder.final_norm(mixture(net.decoder.residual.readout, [*blocks, partial]))
    assert_equal(net.decoder(x), expected)


def opened(stack: Any) -> list[int]:
    """The sublayers whose output is a source of its own at first."""
    sites = [part.site for block in stack.blocks for part in block.children()]
    return [index for index, site in enumerate(sites) if site.write.opens]


def test_blocks_of_layers_begin_at_layers_and_blocks_of_sublayers_anywhere() -> None:
    by_layer = network("encoder-decoder", {"block_size": 2})
    assert opened(by_layer.encoder) == [0, 4]
    assert opened(by_layer.decoder) == [0, 6]  # three sublayers in a layer
    assert opened(network(residual=CUTS["three-sublayers"]).decoder) == [0, 3, 6]
    assert opened(network(residual={"block_size": 2}, parallel="one-norm").decoder) == [0, 2]
    assert opened(network().decoder) == list(range(8))


@torch.no_grad()
def test_blocks_of_one_sublayer_are_the_full_kind() -> None:
    full, one = at_random(network()), at_random(network(residual={"block_size": 1, "unit": "sublayer"}))
    assert torch.equal(one(ids_of(2, 6)), full(ids_of(2, 6)))


@FAMILIES
@EVERY_CUT
@torch.no_grad()
def test_at_the_start_it_is_the_network_with_plain_residuals(family: str, cut: str) -> None:
    norm = {"kind": "rmsnorm", "eps": 1e-12}
    plain = network(family, norm=norm, residual={"kind": "plain"}).double()
    mixed = network(family, CUTS[cut] | {"eps": 1e-12}, norm=norm).double()
    torch.testing.assert_close(mixed(**inputs_of(family)), plain(**inputs_of(family)), rtol=1e-8, atol=1e-8)
    other = at_random(mixed)
    assert float((other(**inputs_of(family)) - plain(**inputs_of(family))).abs().max()) > 0.1


@FAMILIES
@pytest.mark.parametrize("cut", ["full", "two-layers"])
def test_gradients_reach_every_parameter(family: str, cut: str) -> None:
    net = at_random(network(family, CUTS[cut]))
    net(**inputs_of(family), labels=ids_of(2, 6, seed=2)).loss_sum.backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert float(parameter.grad.abs().max()) > 0, name


def test_sites_come_to_prefer_some_sources() -> None:
    net = network(residual={"block_size": 1}, num_layers=2).train()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    ids = ids_of(4, 8)
    seen: dict[str, Tensor] = {}
    for name, module in net.named_modules():
        if isinstance(module, DepthWeights):
            module.register_forward_hook(lambda _, args, out, name=name: seen.update({name: out.detach()}))
    for _ in range(100):
        loss = net(ids, labels=ids.roll(-1, 1)).loss_sum
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert sorted(seen) == [
        "decoder.blocks.0.feed_forward.site.read.weights",
        "decoder.blocks.1.feed_forward.site.read.weights",
        "decoder.blocks.1.self_attention.site.read.weights",
        "decoder.residual.readout.weights",
    ]
    for name, weights in seen.items():
        assert float((weights - 1 / weights.shape[-1]).abs().max()) > 0.05, name


@EVERY_CUT
@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
@torch.no_grad()
def test_a_cache_in_chunks_gives_the_full_forward(family: str, cut: str) -> None:
    net, inputs = at_random(network(family, CUTS[cut])), inputs_of(family)
    cache, ids = net.new_cache(2), inputs.pop("ids")
    chunks = [net(ids[:, :3], **inputs, cache=cache), net(ids[:, 3:5], cache=cache), net(ids[:, 5:], cache=cache)]
    assert_equal(torch.cat(chunks, 1), net(ids, **inputs))


@pytest.mark.parametrize("cut", ["full", "two-layers"])
def test_recomputing_blocks_backward_changes_no_gradient(cut: str) -> None:
    net = at_random(network(residual=CUTS[cut]))
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    inputs = BlockInputs(Causal())
    grads = []
    for recompute in (False, True):
        stream, state = net.decoder.residual, net.decoder.residual.enter(x)
        for block in net.decoder.blocks:
            state = checkpoint(block, state, inputs, use_reentrant=False) if recompute else block(state, inputs)
        used = list(net.decoder.parameters())[:-1]  # without the final norm
        grads.append(torch.autograd.grad(stream.exit(state).square().sum(), used))
    for once, again in zip(*grads, strict=True):
        assert torch.equal(once, again)


def test_each_function_of_a_sublayer_is_compiled_once_whatever_the_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder's self-attention, a decoder's, cross-attention, the feed-forward of both."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    net = at_random(network("encoder-decoder", CUTS["two-layers"]))
    fast = copy.deepcopy(net)
    compile_blocks(fast, one_shape=False)
    seen = []
    for rows, length in ((3, 6), (2, 9), (1, 6), (1, 7)):  # batches of one row are graphs of their own
        ids, source, labels = ids_of(rows, length), ids_of(rows, length + 2), ids_of(rows, length, seed=1)
        with Compute(torch.device("cpu"), torch.float32, True, ()).forward_passes():
            losses = [run(ids, source=source, labels=labels).loss for run in (net, fast)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(losses[1], losses[0])
        seen.append(counter.frame_count)
    for parameter, other in zip(net.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(other.grad, parameter.grad, rtol=1e-4, atol=1e-5)
    assert seen == [4, 4, 8, 8]
    torch._dynamo.reset()
