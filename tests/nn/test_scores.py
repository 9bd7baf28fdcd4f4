"""Scores other than the scaled dot product: each against a loop over queries and keys, whatever is around them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from qkv.config.attention import StandardAttentionConfig
from qkv.config.model import ModelConfig
from qkv.inspect.attention import attention_weights
from qkv.nn import Attention, Dims, Transformer, build
from qkv.nn.kernels import Kernel, KernelName, MathKernel, base, use_kernel
from qkv.nn.mask import Causal
from qkv.nn.position import NO_PHASES, Phases

from .matrix import assert_equal, one_thread  # noqa: F401

V = 23
KINDS = ("scaled-dot", "dot", "cosine", "additive")
OTHERS = KINDS[1:]
every_kind = pytest.mark.parametrize("score", OTHERS)


def network(family: str = "decoder", score: str = "cosine", **changes: Any) -> Transformer:
    options = changes.pop("attention", {})
    tree: dict[str, Any] = {
        "family": family,
        "vocab_size": V,
        "max_seq_len": 40,
        "d_model": 16,
        "num_layers": 2,
        "attention": {"num_heads": 4, "num_kv_heads": 2, "score": score} | options,
        "init": {"kind": "normal", "std": 0.3},
    }
    generator = torch.Generator().manual_seed(0)
    return Transformer(ModelConfig.model_validate(tree | changes), generator=generator).eval()


def ids_of(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, V, (rows, length), generator=torch.Generator().manual_seed(seed))


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def attention_of(score: str, d_source: int | None = None, **options: Any) -> Attention:
    """In float64 and eval mode, every parameter random."""
    config = StandardAttentionConfig(num_heads=4, num_kv_heads=2, head_dim=6, score=score, **options)  # type: ignore[arg-type]
    attention: Attention = build(config, Dims(16, d_source)).double().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.normal_(0.0, 0.7, generator=generator)
    return attention


def score_of(attention: Attention, score: str, head: int, q: Tensor, k: Tensor) -> Tensor:
    """The score of one query and one key, by its definition."""
    if score == "dot":
        return (q * k).sum()
    if score == "cosine":
        return attention.query_unit.weight[head] * (q * k).sum() / (q.square().sum() * k.square().sum()).sqrt()
    if score == "additive":
        return sum(attention.additive.weight[6 * head + i] * torch.tanh(q[i] + k[i]) for i in range(6))
    return (q * k).sum() / math.sqrt(6)


def by_loops(
    attention: Attention,
    score: str,
    x: Tensor,
    y: Tensor,
    *,
    causal: bool,
    phases: Phases = NO_PHASES,
    bias: Any = None,
) -> Tensor:
    """One row of attention, a query, a key and a head at a time."""

    def heads(linear: nn.Linear, norm: nn.Module | None, tokens: Tensor, count: int) -> Tensor:
        split = linear(tokens).view(-1, count, 6)
        return (split if norm is None else norm(split)).transpose(0, 1)

    q = phases.rotate(heads(attention.query, attention.query_norm, x, 4)[None])[0]
    k = phases.rotate(heads(attention.key, attention.key_norm, y, 2)[None])[0]
    v = heads(attention.value, None, y, 2)
    rows = []
    for t in range(len(x)):
        parts = []
        for head in range(4):
            seen = range(t + 1) if causal else range(len(y))
            scores = torch.stack([score_of(attention, score, head, q[head, t], k[head // 2, s]) for s in seen])
            if attention.softcap is not None:
                scores = attention.softcap * torch.tanh(scores / attention.softcap)
            if bias is not None:
                scores = scores + bias[head, t, : len(scores)]
            parts.append(sum(w * v[head // 2, s] for w, s in zip(scores.softmax(0), seen, strict=True)))
        rows.append(attention.output(torch.cat(parts)))
    return torch.stack(rows)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "softcap": {"softcap": 0.8},
    "qk-norm": {"qk_norm": "per-head"},
}


@pytest.mark.parametrize("score", KINDS)
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("place", ["self", "cross"])
def test_scores_and_their_gradients_are_those_of_loops(score: str, options: dict[str, Any], place: str) -> None:
    attention = attention_of(score, 10 if place == "cross" else None, **options)
    x, y = randn(1, 5, 16), randn(1, 4, 10, seed=1)
    d_out = randn(1, 5, 16, seed=2)
    if place == "cross":
        outs = attention(x, y), by_loops(attention, score, x[0], y[0], causal=False)[None]
    else:
        outs = attention(x, mask=Causal()), by_loops(attention, score, x[0], x[0], causal=True)[None]
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-10, atol=1e-10)
    actual, expected = (torch.autograd.grad(out, list(attention.parameters()), d_out) for out in outs)
    for (name, _), ours, theirs in zip(attention.named_parameters(), actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")
    if score in ("cosine", "additive"):
        own = attention.query_unit or attention.additive
        (gradient,) = torch.autograd.grad(attention(x, y if place == "cross" else None), own.weight, d_out)
        assert (gradient != 0).all()


@every_kind
@pytest.mark.parametrize("position", ["rope", "alibi", "relative"])
def test_positions_turn_queries_and_keys_or_are_added_to_any_score(score: str, position: str) -> None:
    net = network(score=score, num_layers=1, position={"kind": position}, attention={"head_dim": 6}).double()
    attention, module = net.decoder.blocks[0].attention("self"), net.decoder.positions[0]
    x, phases = randn(1, 6, 16), module.phases(torch.arange(6)[None], torch.float64)
    slots = torch.arange(6)
    bias = None if phases.bias is None else phases.bias.values(phases.bias.weight, slots[None, :, None], slots)[0]
    expected = by_loops(attention, score, x[0], x[0], causal=True, phases=phases, bias=bias)
    torch.testing.assert_close(attention(x, mask=Causal(), phases=phases)[0], expected, rtol=1e-10, atol=1e-10)


@every_kind
@pytest.mark.parametrize("family", ["decoder", "encoder", "encoder-decoder"])
def test_every_kernel_gives_the_same_logits_and_gradients(score: str, family: str) -> None:
    inputs = {"ids": ids_of(3, 7), "lengths": torch.tensor([7, 3, 5]), "labels": ids_of(3, 7, seed=1)}
    if family == "encoder-decoder":
        inputs |= {"source": ids_of(3, 6, seed=2), "source_lengths": torch.tensor([2, 6, 4])}
    inputs["labels"][torch.arange(7) >= inputs["lengths"][:, None]] = -100
    gradients = []
    for kernel in ("math", "sdpa", "tiled"):
        net = network(family, score, attention={"softcap": None}).double()
        use_kernel(net, kernel)  # type: ignore[arg-type]
        net(**inputs).loss_sum.backward()
        gradients.append({name: parameter.grad for name, parameter in net.named_parameters()})
    for name, expected in gradients[0].items():
        assert expected.abs().max() > 0, name
        for other in gradients[1:]:
            torch.testing.assert_close(other[name], expected, rtol=1e-8, atol=1e-9)


@every_kind
@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
@pytest.mark.parametrize("capacity", [None, 30])
def test_cached_in_chunks_equals_the_full_forward(score: str, family: str, capacity: int | None) -> None:
    net = network(family, score, attention={"window": 5}).requires_grad_(False)
    ids = ids_of(2, 20)
    source = {"source": ids_of(2, 6, seed=1)} if family == "encoder-decoder" else {}
    cache = net.new_cache(2, capacity)
    parts = [net(ids[:, :7], cache=cache, **source)]
    parts += [net(ids[:, a:b], cache=cache) for a, b in ((7, 8), (8, 18), (18, 20))]
    assert_equal(torch.cat(parts, 1), net(ids, **source))


@every_kind
def test_weight_dropout_keeps_the_expectation_of_any_score(score: str) -> None:
    attention = attention_of(score, dropout=0.3)
    x = randn(1, 6, 16)
    with torch.no_grad():
        expected = attention(x, mask=Causal())
        torch.manual_seed(0)
        mean = attention.train()(x.expand(3000, -1, -1), mask=Causal()).mean(0)
    torch.testing.assert_close(mean, expected[0], rtol=0, atol=0.1 * float(expected.abs().max()))


def test_only_additive_scores_leave_the_fast_kernels_and_say_so_once(caplog: pytest.LogCaptureFixture) -> None:
    for kernel in ("sdpa", "tiled"):
        for score in OTHERS:
            base._say.cache_clear()
            caplog.clear()
            net = network(score=score).requires_grad_(False)
            use_kernel(net, kernel)  # type: ignore[arg-type]
            net(ids_of(1, 5))
            said = [record.getMessage() for record in caplog.records]
            assert len(said) == (score == "additive"), said
            assert all(word in text for text in said for word in (kernel, "additive", "math"))


@every_kind
def test_scores_start_small_enough_to_learn_from(score: str) -> None:
    net = network(score=score, attention={"head_dim": 64}, init={"kind": "normal", "std": 0.02})
    attention = net.decoder.blocks[1].attention("self")
    if score == "cosine":
        assert attention.query_unit.weight.tolist() == [8.0] * 4
        assert attention.key_unit.weight is None
    if score == "additive":
        assert attention.additive().shape == (4, 64)
        assert abs(float(attention.additive.weight.detach().std()) * 8 - 1) < 0.2
    twin = network(score=score, attention={"head_dim": 64}, init={"kind": "normal", "std": 0.02})
    plain = network(score="scaled-dot", attention={"head_dim": 64}, init={"kind": "normal", "std": 0.02}).state_dict()
    for name, value in net.state_dict().items():
        assert torch.equal(value, twin.state_dict()[name])
        assert name not in plain or torch.equal(value, plain[name])


@every_kind
@pytest.mark.parametrize("kernel", ["math", "sdpa", "tiled"])
def test_half_precision_and_a_query_of_zeros_stay_finite(score: str, kernel: KernelName) -> None:
    net = network(score=score, attention={"bias": False})
    use_kernel(net, kernel)
    with torch.autocast("cpu", torch.bfloat16):
        output = net(ids_of(2, 9), labels=ids_of(2, 9, seed=1))
    output.loss_sum.backward()
    assert all(parameter.grad.isfinite().all() for parameter in net.parameters())
    exact = net(ids_of(2, 9), labels=ids_of(2, 9, seed=1)).loss_sum.detach()
    assert abs(float(output.loss_sum.detach() / exact) - 1) < 0.05
    attention = net.decoder.blocks[0].attention("self")
    zeros = torch.zeros(1, 3, 16, requires_grad=True)
    attention(zeros).sum().backward()
    assert zeros.grad.isfinite().all()


@every_kind
def test_the_inspector_reads_the_weights_of_any_score(score: str) -> None:
    net = network(score=score, attention={"softcap": 1.5}, position={"kind": "alibi"})
    seen: list[Tensor] = []

    class Noting(MathKernel):
        def forward(self, *args: Any) -> Tensor:
            out, weights = self.attend(*args)
            seen.append(weights[0])
            return out

    read = attention_weights(net, ids_of(1, 8))
    for block in net.decoder.blocks:
        block.attention("self").kernel = Noting()
    net(ids_of(1, 8))
    for ours, theirs in zip(read, seen, strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-6)


def test_a_score_with_its_own_scale_refuses_another() -> None:
    with pytest.raises(ValidationError, match=r"attention\.scale.*attention\.score"):
        network(score="cosine", attention={"scale": 2.0})


def test_kernels_are_given_w_by_head() -> None:
    net = network(score="additive")
    given: list[Any] = []
    kernel: Kernel = net.decoder.blocks[0].attention("self").kernel
    kernel.register_forward_pre_hook(lambda _, args: given.append(args[4].additive_HD))
    net(ids_of(1, 4))
    assert given[0].shape == (4, 4)
