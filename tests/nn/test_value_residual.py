"""Value residual: later layers attend to the first layer's values as well."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from qkv.config.errors import UsageError
from qkv.config.model import ModelConfig
from qkv.config.stack import _say_nothing_to_mix
from qkv.nn import Attention, Transformer
from qkv.nn.block import BlockInputs
from qkv.nn.mask import Causal
from qkv.nn.value_residual import FirstValues, GiveValues, LearnedMixValues

from .matrix import assert_equal, one_thread  # noqa: F401

V = 23
KINDS = pytest.mark.parametrize("kind", ["fixed", "learned"])
HEADS = {"num_heads": 4, "num_kv_heads": 2}


def tree(kind: str = "fixed", **changes: Any) -> dict[str, Any]:
    return {
        "vocab_size": V,
        "max_seq_len": 32,
        "d_model": 16,
        "num_layers": 3,
        "attention": {**HEADS, "value_residual": kind},
        "init": {"kind": "normal", "std": 0.3},
    } | changes


def network(kind: str = "fixed", **changes: Any) -> Transformer:
    config = ModelConfig.model_validate(tree(kind, **changes))
    return Transformer(config, generator=torch.Generator().manual_seed(0)).eval()


def mixing(net: torch.nn.Module) -> list[LearnedMixValues]:
    return [module for module in net.modules() if isinstance(module, LearnedMixValues)]


def with_weights(net: Transformer, own: float, first: float) -> Transformer:
    with torch.no_grad():
        for layer, module in enumerate(mixing(net)):
            module.weights.copy_(torch.tensor([own, first + layer / 8 if first else 0.0]))
    return net


def ids_of(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, V, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def test_layers_after_the_first_attend_to_both_their_values_and_its() -> None:
    net = with_weights(network("learned", position={"kind": "none"}), 0.7, -0.4)
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    expected, first = x, None
    for block in net.decoder.blocks:
        part = block.self_attention
        attention, normed = part.function, part.norm_in(expected)
        q, k, v = (
            layer(normed).unflatten(-1, (-1, 4)).transpose(1, 2)
            for layer in (attention.query, attention.key, attention.value)
        )
        if first is None:
            first = v
        else:
            own, given = attention.value_residual.weights
            v = own * v + given * first
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        expected = expected + attention.output(heads.transpose(1, 2).flatten(2))
        expected = expected + block.feed_forward.function(block.feed_forward.norm_in(expected))
    assert_equal(net.decoder(x), net.decoder.final_norm(expected))
    assert len({float(weight) for module in mixing(net) for weight in module.weights}) == 3


@torch.no_grad()
def test_learned_numbers_start_at_half_and_nothing_of_the_first_layer_is_the_baseline() -> None:
    ids = ids_of(2, 6)
    assert torch.equal(network("learned")(ids), network("fixed")(ids))
    baseline = network("none")(ids)
    assert torch.equal(with_weights(network("learned"), 1.0, 0.0)(ids), baseline)
    assert float((network("fixed")(ids) - baseline).abs().max()) > 0.01


def test_every_number_is_learned_and_the_first_layer_has_none() -> None:
    net = network("learned", family="encoder-decoder")
    net(ids_of(2, 6), source=ids_of(2, 4), labels=ids_of(2, 6, seed=1)).loss_sum.backward()
    assert len(mixing(net.encoder)) == len(mixing(net.decoder)) == 2
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert bool((parameter.grad != 0).any()), name
    for stack in (net.encoder, net.decoder):
        assert isinstance(stack.blocks[0].self_attention.function.value_residual, GiveValues)
    assert all(block.cross_attention.function.value_residual is None for block in net.decoder.blocks)


@pytest.mark.parametrize("changes", [{}, {"family": "encoder-decoder"}, {"parallel": "one-norm"}], ids=str)
@torch.no_grad()
def test_a_cache_holds_mixed_values_and_gives_the_full_forward(changes: dict[str, Any]) -> None:
    net, ids = network(**changes), ids_of(2, 6)
    source = {"source": ids_of(2, 4, seed=1)} if changes.get("family") == "encoder-decoder" else {}
    cache = net.new_cache(2)
    seen: list[Tensor] = []
    net.decoder.blocks[1].attention("self").value_residual.register_forward_hook(lambda m, args, out: seen.append(out))
    chunks = [net(ids[:, :3], **source, cache=cache), net(ids[:, 3:5], cache=cache), net(ids[:, 5:], cache=cache)]
    assert torch.equal(cache.layers[1].v_BGSD[:, :, :6], torch.cat(seen, 2))
    assert_equal(torch.cat(chunks, 1), net(ids, **source))


@torch.no_grad()
def test_beams_and_packed_documents_keep_values_apart() -> None:
    net, ids = network(), ids_of(2, 6)
    cache = net.new_cache(2)
    net(ids[:, :5], cache=cache)
    cache.select([1, 0, 1])
    rows = ids[[1, 0, 1]]
    assert_equal(net(rows[:, 5:], cache=cache), net(rows)[:, 5:])
    packed = net(ids.reshape(1, 12), documents=torch.arange(2).repeat_interleave(6)[None])
    assert_equal(packed.reshape(2, 6, V), net(ids))


@KINDS
def test_recomputing_blocks_backward_changes_no_gradient(kind: str) -> None:
    net = network(kind).train()
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    grads = []
    for recompute in (False, True):
        inputs, state = BlockInputs(Causal()), x
        for block in net.decoder.blocks:
            state = checkpoint(block, state, inputs, use_reentrant=False) if recompute else block(state, inputs)
        grads.append(torch.autograd.grad(state.square().sum(), list(net.decoder.blocks.parameters())))
    for once, again in zip(*grads, strict=True):
        assert torch.equal(once, again)


def test_the_first_layer_is_one_graph_and_all_others_are_another() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    net = network("learned", num_layers=4)
    fast = copy.deepcopy(net)
    for block in fast.decoder.blocks:
        block.compile(backend=counter)
    ids, labels = ids_of(2, 6), ids_of(2, 6, seed=1)
    for run in (net, fast):
        run(ids, labels=labels).loss_sum.backward()
    for parameter, other in zip(net.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(other.grad, parameter.grad, rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 2
    torch._dynamo.reset()


def test_a_layer_by_itself_says_what_it_misses() -> None:
    attention = network().decoder.blocks[1].attention("self")
    assert isinstance(attention, Attention)
    with pytest.raises(UsageError, match="first layer's values"):
        attention(torch.zeros(1, 2, 16), first_values=FirstValues())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"share_layers": True}, "share_layers"),
        (
            {"family": "encoder-decoder", "decoder": {"cross_attention": {"value_residual": "fixed"}}},
            "cross_attention.value_residual",
        ),
        ({"layers": [{}, {"attention": {"num_kv_heads": 4}}]}, "num_kv_heads"),
        ({"layers": [{"attention": {"head_dim": 8}}, {}]}, "head_dim"),
        ({"layers": [{"attention": {"value_residual": "none"}}, {}]}, "layers[0].attention.value_residual"),
    ],
    ids=str,
)
def test_layers_without_the_first_layers_values_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match="contradict") as refused:
        ModelConfig.model_validate(tree(**changes))
    assert named in str(refused.value)


def test_that_nothing_is_mixed_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    _say_nothing_to_mix.cache_clear()
    for _ in range(2):
        ModelConfig.model_validate(tree(num_layers=1))
        ModelConfig.model_validate(tree())
    assert caplog.messages == [
        "`attention.value_residual` of one layer changes nothing: the layers after it mix in its values"
    ]


def test_a_layer_may_keep_to_its_own_values() -> None:
    net = network("learned", layers=[{}, {}, {"attention": {**HEADS, "num_kv_heads": 4, "value_residual": "none"}}])
    assert len(mixing(net)) == 1
