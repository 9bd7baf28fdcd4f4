"""All kernels compute one function, forward and backward: compared with a reference in float64 written out here."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from qkv.config.model import ModelConfig
from qkv.nn import Attention, Transformer
from qkv.nn.bias import Bias
from qkv.nn.kernels import (
    FlexKernel,
    Kernel,
    MathKernel,
    SdpaKernel,
    TiledKernel,
    base,
    kernels_of,
    new_kernel,
    use_kernel,
)
from qkv.nn.mask import Causal, Documents, Mask, Padding, Prefix, Rule, Window
from qkv.nn.score import Scoring

from .matrix import one_thread  # noqa: F401

B, D, E = 2, 6, 5
"""Rows; width of queries and keys; width of values."""
PLAIN = Scoring(0.7)

KERNELS: dict[str, Callable[[], Kernel]] = {
    "math": MathKernel,
    "sdpa": SdpaKernel,
    "tiled": TiledKernel,
    **{f"tiled-{tile}": lambda tile=tile: TiledKernel(tile) for tile in (1, 2, 3, 4, 7)},  # type: ignore[misc]
}
every_kernel = pytest.mark.parametrize("kernel", [pytest.param(new(), id=name) for name, new in KERNELS.items()])

QUERY_DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2], [0, 0, 0, 0, 0, 1, 2, 2]])
KEY_DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1, 1, 2, 2, 2, 2], [0, 1, 1, 1, 2, 2, 2, 2, 2, 3]])
LENGTHS = torch.tensor([3, 7])


def square(rule: Rule | None) -> Mask:
    """8 tokens attending to each other."""
    return Mask.square(rule, 8, torch.device("cpu"))


def across(rule: Rule | None) -> Mask:
    """8 queries of one sequence, 10 keys of another."""
    return Mask(rule, torch.arange(8), 10, aligned=False)


def ending(rule: Rule | None, queries: int, keys: int) -> Mask:
    """The last queries of a cache."""
    return Mask(rule, torch.arange(keys - queries, keys), keys, aligned=True)


def by_row(rule: Rule | None) -> Mask:
    """3 queries at places of their own in each row of a cache of fixed size."""
    return Mask(rule, torch.tensor([[1, 2, 3], [5, 6, 7]]), 10, aligned=False)


MASKS: dict[str, Mask] = {
    "nothing-hidden": square(None),
    "nothing-hidden-across": across(None),
    "causal": square(Causal()),
    "causal-end": ending(Causal(), 3, 10),
    "causal-one-query": ending(Causal(), 1, 10),
    "causal-by-row": by_row(Causal()),
    "causal-more-queries-than-keys": ending(Causal(), 8, 5),
    "window": square(Window(3)),
    "causal-window": square(Causal() & Window(3)),
    "causal-window-end": ending(Causal() & Window(3), 4, 10),
    "causal-window-by-row": by_row(Causal() & Window(2)),
    "prefix": square(Causal() | Prefix(LENGTHS)),
    "documents": square(Documents(QUERY_DOCUMENTS, QUERY_DOCUMENTS)),
    "causal-documents": square(Causal() & Documents(QUERY_DOCUMENTS, QUERY_DOCUMENTS)),
    "documents-across": across(Documents(QUERY_DOCUMENTS, KEY_DOCUMENTS)),
    "padding": square(Padding(LENGTHS)),
    "padding-across": across(Padding(LENGTHS)),
    "causal-padding": square(Causal() & Padding(LENGTHS)),
    "one-row-empty": square(Padding(torch.tensor([0, 8]))),
    "documents-padding-across": across(Documents(QUERY_DOCUMENTS, KEY_DOCUMENTS) & Padding(LENGTHS)),
    "everything-at-once": square(
        Window(4) & (Causal() | Prefix(LENGTHS)) & Documents(QUERY_DOCUMENTS, QUERY_DOCUMENTS) & Padding(LENGTHS)
    ),
    "padding-or-causal": square(Causal() | Padding(LENGTHS)),
}
every_mask = pytest.mark.parametrize("mask", [pytest.param(mask, id=name) for name, mask in MASKS.items()])


def draw(mask: Mask, heads: int = 4, kv_heads: int = 2, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Queries [B, H, T, D], keys [B, G, S, D] and values [B, G, S, E]."""
    generator = torch.Generator().manual_seed(0)
    shapes = (heads, mask.num_queries, D), (kv_heads, mask.num_keys, D), (kv_heads, mask.num_keys, E)
    return tuple(torch.randn(B, *shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scoring: Scoring = PLAIN) -> Tensor:
    """softmax(cap(q k^T scale) + bias) v over what the mask allows and a sink, in float64; 0 for a query that may
    attend to nothing."""
    bias, softcap = scoring.bias, scoring.softcap
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("bhtd,bhsd->bhts", q, k) * scoring.scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if isinstance(bias, Slope):
        slots = mask.q_slots.expand(B, -1)[:, None, :, None]
        scores = scores + bias.weight[None, :, None, None].double() * (torch.arange(mask.num_keys) - slots)
    scores = scores.masked_fill(~mask.tensor(), float("-inf"))
    if scoring.sinks_H is not None:
        sink = scoring.sinks_H.double()[:, None, None].expand(*scores.shape[:-1], 1)
        scores, v = torch.cat((scores, sink), dim=-1), torch.cat((v, torch.zeros_like(v[:, :, :1])), dim=2)
    largest = scores.detach().amax(-1, keepdim=True).clamp(min=-1e300)
    weights = (scores - largest).exp()
    total = weights.sum(-1, keepdim=True)
    return torch.einsum("bhts,bhse->bhte", weights / torch.where(total == 0, 1.0, total), v)


class Slope(Bias):
    """A number for each head times the distance from query to key."""

    def values(self, weight: Tensor, q_BT1: Tensor, k_11S: Tensor) -> Tensor:
        return weight[None, :, None, None] * (k_11S - q_BT1).unsqueeze(1)


def slope(heads: int = 4, dtype: torch.dtype = torch.float64) -> Slope:
    return Slope(torch.randn(heads, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype) / 3)


def sinks(heads: int = 4, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(heads, generator=torch.Generator().manual_seed(4), dtype=torch.float64).to(dtype)


def with_gradients(
    function: Callable[..., Tensor], qkv: tuple[Tensor, ...], mask: Mask, scoring: Scoring = PLAIN
) -> tuple[Tensor, ...]:
    """Output, and the gradients of queries, keys, values, a bias and sinks for a random gradient of the output."""
    leaves = [tensor.clone().requires_grad_(True) for tensor in qkv]
    if scoring.bias is not None:
        leaves.append(scoring.bias.weight.clone().requires_grad_(True))
        scoring = replace(scoring, bias=type(scoring.bias)(leaves[-1]))
    if scoring.sinks_H is not None:
        leaves.append(scoring.sinks_H.clone().requires_grad_(True))
        scoring = replace(scoring, sinks_H=leaves[-1])
    out = function(*leaves[:3], mask, scoring)
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype)
    return out.detach(), *torch.autograd.grad(out, leaves, d_out)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    assert actual.shape == expected.shape
    assert actual.isfinite().all()
    gap = float((actual.double() - expected).abs().max())
    assert gap <= tolerance * max(1.0, float(expected.abs().max())), f"differs by {gap:.1e}"


# --- the function -----------------------------------------------------------------------------------------------------


@every_kernel
@every_mask
def test_a_kernel_computes_attention(kernel: Kernel, mask: Mask) -> None:
    qkv = draw(mask)
    assert_close(kernel(*qkv, mask, PLAIN), reference(*qkv, mask), 1e-13)


@every_kernel
@every_mask
def test_a_kernel_gives_the_gradients_of_attention(kernel: Kernel, mask: Mask) -> None:
    qkv = draw(mask)
    for actual, expected in zip(with_gradients(kernel, qkv, mask), with_gradients(reference, qkv, mask), strict=True):
        assert_close(actual, expected, 1e-12)


@every_kernel
@every_mask
@pytest.mark.parametrize("softcap", [None, 0.8], ids=["bias", "bias-and-cap"])
def test_a_kernel_adds_a_bias_and_gives_its_gradient(kernel: Kernel, mask: Mask, softcap: float | None) -> None:
    qkv, scoring = draw(mask), replace(PLAIN, softcap=softcap, bias=slope())
    expected = with_gradients(reference, qkv, mask, scoring)
    for actual, wanted in zip(with_gradients(kernel, qkv, mask, scoring), expected, strict=True):
        assert_close(actual, wanted, 1e-12)
    assert_close(kernel(*qkv, mask, scoring), expected[0], 1e-12)  # no gradient is wanted


@every_kernel
@every_mask
@pytest.mark.parametrize("scoring", [PLAIN, replace(PLAIN, bias=slope())], ids=["sinks", "sinks-and-bias"])
def test_a_kernel_lets_heads_attend_to_sinks_and_gives_their_gradient(
    kernel: Kernel, mask: Mask, scoring: Scoring
) -> None:
    qkv, scoring = draw(mask), replace(scoring, sinks_H=sinks())
    expected = with_gradients(reference, qkv, mask, scoring)
    for actual, wanted in zip(with_gradients(kernel, qkv, mask, scoring), expected, strict=True):
        assert_close(actual, wanted, 1e-12)
    assert_close(kernel(*qkv, mask, scoring), expected[0], 1e-12)  # no gradient is wanted


@every_kernel
@pytest.mark.parametrize("name", ["nothing-hidden", "causal", "causal-one-query", "one-row-empty"])
def test_sinks_that_score_very_little_are_none(kernel: Kernel, name: str) -> None:
    mask = MASKS[name]
    qkv = draw(mask)
    far = replace(PLAIN, sinks_H=torch.full((4,), -1e4, dtype=torch.float64))
    assert_close(kernel(*qkv, mask, far), kernel(*qkv, mask, PLAIN), 1e-14)


@every_kernel
@pytest.mark.parametrize("name", ["nothing-hidden", "causal", "causal-end", "everything-at-once"])
def test_a_kernel_caps_scores(kernel: Kernel, name: str) -> None:
    mask, scoring = MASKS[name], replace(PLAIN, softcap=0.8)
    qkv = draw(mask)
    expected = with_gradients(reference, qkv, mask, scoring)
    assert float((expected[0] - reference(*qkv, mask)).abs().max()) > 0.01
    for actual, wanted in zip(with_gradients(kernel, qkv, mask, scoring), expected, strict=True):
        assert_close(actual, wanted, 1e-12)


@every_kernel
@pytest.mark.parametrize("frozen", [False, True], ids=["learned", "frozen"])
def test_a_bias_for_grouped_heads_in_half_precision(kernel: Kernel, frozen: bool) -> None:
    mask, bias = MASKS["causal-window-by-row"], slope(6, torch.bfloat16)
    bias.weight.requires_grad_(not frozen)
    qkv, scoring = draw(mask, 6, 2, dtype=torch.bfloat16), replace(PLAIN, bias=bias)
    out = kernel(*qkv, mask, scoring)
    assert out.dtype == torch.bfloat16
    assert_close(out.detach(), reference(*qkv, mask, scoring).detach(), 3e-2)


@every_kernel
def test_sinks_of_grouped_heads_in_half_precision(kernel: Kernel) -> None:
    mask, scoring = MASKS["causal-window-by-row"], replace(PLAIN, sinks_H=sinks(6, torch.bfloat16))
    qkv = draw(mask, 6, 2, dtype=torch.bfloat16)
    out = kernel(*qkv, mask, scoring)
    assert out.dtype == torch.bfloat16
    assert_close(out, reference(*qkv, mask, scoring), 3e-2)


def test_a_bias_becomes_a_tensor_once_for_all_masks_of_the_same_slots() -> None:
    bias, slots = slope(), torch.arange(8)
    first, second = (Mask(rule, slots, 8, aligned=True) for rule in (Causal(), Causal() & Window(3)))
    assert bias.tensor(first) is bias.tensor(second)
    assert bias.tensor(MASKS["causal-end"]).shape == (1, 4, 3, 10)


@every_kernel
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 2), (4, 1), (1, 1)])
@pytest.mark.parametrize("name", ["nothing-hidden", "causal", "causal-end", "everything-at-once"])
def test_query_heads_share_key_value_heads(kernel: Kernel, heads: int, kv_heads: int, name: str) -> None:
    mask = MASKS[name]
    qkv = draw(mask, heads, kv_heads)
    for actual, expected in zip(with_gradients(kernel, qkv, mask), with_gradients(reference, qkv, mask), strict=True):
        assert_close(actual, expected, 1e-12)


@every_kernel
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 3e-2)], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize("name", ["nothing-hidden", "causal", "causal-end", "everything-at-once", "one-row-empty"])
def test_a_kernel_is_as_exact_as_its_numbers(kernel: Kernel, dtype: torch.dtype, tolerance: float, name: str) -> None:
    mask = MASKS[name]
    qkv = draw(mask, dtype=dtype)
    out = kernel(*qkv, mask, PLAIN)
    assert out.dtype == dtype
    assert_close(out, reference(*qkv, mask), tolerance)


def test_the_tiled_gradients_are_the_derivatives_of_its_output() -> None:
    mask = MASKS["causal-padding"]
    qkv = [tensor[:, :, :5].clone().requires_grad_(True) for tensor in draw(mask)]
    mask = Mask.square(mask.rule, 5, torch.device("cpu"))
    assert torch.autograd.gradcheck(lambda q, k, v: TiledKernel(2)(q, k, v, mask, PLAIN), qkv)


@every_kernel
def test_large_scores_do_not_overflow(kernel: Kernel) -> None:
    mask = MASKS["causal"]
    q, k, v = draw(mask, dtype=torch.float32)
    q, k = q * 30, k * 30
    out, *gradients = with_gradients(kernel, (q, k, v), mask)
    assert_close(out, reference(q, k, v, mask), 1e-3)
    for gradient in gradients:
        assert gradient.isfinite().all()


def test_math_also_gives_the_weights() -> None:
    for mask in MASKS.values():
        q, k, v = draw(mask)
        out, weights = MathKernel().attend(q, k, v, mask, PLAIN)
        assert weights.shape == (B, 4, mask.num_queries, mask.num_keys)
        assert (weights.masked_select(~mask.tensor()) == 0).all()
        some = mask.tensor().any(-1).expand(B, 4, -1)
        torch.testing.assert_close(weights.sum(-1), some.double())
        torch.testing.assert_close(weights @ v.repeat_interleave(2, 1), out)


# --- rows and slots that hold nothing ---------------------------------------------------------------------------------


@every_kernel
@pytest.mark.parametrize(
    "name", ["one-row-empty", "causal-more-queries-than-keys", "documents-padding-across", "everything-at-once"]
)
def test_a_query_that_may_attend_to_nothing_gives_zeros_and_no_gradient(kernel: Kernel, name: str) -> None:
    mask = MASKS[name]
    empty = ~mask.tensor().any(-1).expand(B, 4, -1)
    assert empty.any()
    assert not empty.all()
    out, d_q, d_k, d_v = with_gradients(kernel, draw(mask), mask)
    assert (out[empty] == 0).all()
    assert (d_q[empty] == 0).all()
    assert d_k.isfinite().all()
    assert d_v.isfinite().all()


@every_kernel
def test_a_call_that_hides_everything_gives_zeros_and_no_gradient(kernel: Kernel) -> None:
    mask = square(Causal() & Padding(torch.tensor([0, 0])))
    for tensor in with_gradients(kernel, draw(mask), mask):
        assert (tensor == 0).all()


@every_kernel
@pytest.mark.parametrize("rubbish", [float("nan"), float("inf"), float("-inf")], ids=["nan", "inf", "-inf"])
@pytest.mark.parametrize(
    "name",
    ["padding", "padding-across", "causal-padding", "documents-padding-across", "everything-at-once", "one-row-empty"],
)
def test_what_stands_in_padding_reaches_no_output_and_no_gradient(kernel: Kernel, rubbish: float, name: str) -> None:
    mask = MASKS[name]
    lengths = torch.tensor([0, 8]) if name == "one-row-empty" else LENGTHS
    empty = (torch.arange(mask.num_keys) >= lengths[:, None])[:, None, :, None]
    q, k, v = draw(mask)
    for scoring in (PLAIN, replace(PLAIN, bias=slope()), replace(PLAIN, sinks_H=sinks())):
        clean = with_gradients(kernel, (q, k, v), mask, scoring)
        dirty = with_gradients(kernel, (q, k.masked_fill(empty, rubbish), v.masked_fill(empty, rubbish)), mask, scoring)
        for actual, expected in zip(dirty, clean, strict=True):
            assert torch.equal(actual, expected)
        for gradient in dirty[2:4]:
            assert (gradient.masked_select(empty) == 0).all()


@every_kernel
@pytest.mark.parametrize("name", ["nothing-hidden", "causal", "causal-by-row", "padding", "documents"])
def test_what_stands_in_another_row_reaches_nothing(kernel: Kernel, name: str) -> None:
    mask = MASKS[name]
    qkv = draw(mask)
    clean = with_gradients(kernel, qkv, mask)
    for tensor in qkv:
        tensor[0] = float("nan")
    for actual, expected in zip(with_gradients(kernel, qkv, mask), clean, strict=True):
        assert torch.equal(actual[1], expected[1])


# --- order, memory, dropout -------------------------------------------------------------------------------------------


@every_kernel
def test_the_order_of_keys_moved_with_their_mask_does_not_matter(kernel: Kernel) -> None:
    q, k, v = draw(MASKS["documents-across"])
    order = torch.randperm(10, generator=torch.Generator().manual_seed(3))
    mask, moved = (
        across(Documents(QUERY_DOCUMENTS, KEY_DOCUMENTS)),
        across(Documents(QUERY_DOCUMENTS, KEY_DOCUMENTS[:, order])),
    )
    expected = with_gradients(kernel, (q, k, v), mask)
    actual = with_gradients(kernel, (q, k[:, :, order], v[:, :, order]), moved)
    back = order.argsort()
    for a, e in zip((*actual[:2], actual[2][:, :, back], actual[3][:, :, back]), expected, strict=True):
        assert_close(a, e, 1e-13)


@every_kernel
def test_the_order_of_keys_before_the_padding_does_not_matter(kernel: Kernel) -> None:
    mask = across(Padding(torch.tensor([4, 4])))
    q, k, v = draw(mask)
    order = torch.tensor([2, 0, 3, 1, 4, 5, 6, 7, 8, 9])
    assert_close(kernel(q, k[:, :, order], v[:, :, order], mask, PLAIN), kernel(q, k, v, mask, PLAIN), 1e-13)


class LargestTensor(TorchDispatchMode):
    """Remembers the largest number of elements of a tensor that any operation made."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


@pytest.mark.parametrize("rule", [None, Causal(), Causal() & Window(20)], ids=["none", "causal", "window"])
@pytest.mark.parametrize("bias", [None, slope()], ids=["", "bias"])
def test_the_tiled_kernel_never_holds_all_scores(rule: Rule | None, bias: Bias | None) -> None:
    length, tile = 96, 16
    mask = Mask.square(rule, length, torch.device("cpu"))
    qkv = draw(mask)
    with LargestTensor() as seen:
        with_gradients(TiledKernel(tile), qkv, mask, replace(PLAIN, bias=bias, sinks_H=sinks()))
    assert seen.largest <= B * 4 * max(length * D, tile * tile)
    with LargestTensor() as seen:
        with_gradients(MathKernel(), qkv, mask)
    assert seen.largest >= B * 4 * length * length


@pytest.mark.parametrize("kernel", [MathKernel(), SdpaKernel(), TiledKernel()], ids=["math", "sdpa", "tiled"])
@pytest.mark.parametrize("name", ["nothing-hidden", "causal", "everything-at-once"])
def test_dropped_weights_keep_their_expectation(kernel: Kernel, name: str) -> None:
    mask, times = MASKS[name], 3000
    many = Mask(mask.rule, mask.q_slots, mask.num_keys, aligned=mask.aligned)
    many._tensor = mask.tensor().expand(B, -1, -1, -1).repeat_interleave(times, 0)
    if name == "everything-at-once":  # its rules hold tensors of B rows
        many = Mask(_Given(many._tensor[:, 0]), mask.q_slots, mask.num_keys, aligned=False)
    torch.manual_seed(0)
    qkv = draw(mask, dtype=torch.float32)
    outs = kernel(*(tensor.repeat_interleave(times, 0) for tensor in qkv), many, PLAIN, 0.3)
    outs = outs.unflatten(0, (B, times))
    error = outs.std(1) / times**0.5
    expected = kernel(*qkv, mask, PLAIN)
    assert ((outs.mean(1) - expected).abs() <= 5 * error + 1e-6).all()
    assert outs.std(1).max() > 0.1
    if name == "everything-at-once":
        assert (outs.mean(1)[expected == 0] == 0).all()


class _Given(Rule):
    """A rule given as a tensor."""

    def __init__(self, allowed_BTS: Tensor) -> None:
        self.allowed_BTS = allowed_BTS

    def allow(self, q_BT1: Tensor, k_1S: Tensor) -> Tensor:
        return self.allowed_BTS


LEARNED = Slope(torch.ones(4, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize(
    ("name", "options", "feature"),
    [
        ("tiled", {"dropout": 0.5}, "dropout"),
        ("tiled", {"softcap": 2.0}, "soft cap"),
        ("tiled", {"additive_HD": torch.ones(4, D, dtype=torch.float64)}, "additive scores"),
        ("sdpa", {"softcap": 2.0}, "soft cap"),
        ("sdpa", {"additive_HD": torch.ones(4, D, dtype=torch.float64)}, "additive scores"),
        ("sdpa", {"bias": LEARNED}, "gradient of a learned bias"),
        ("sdpa", {"sinks_H": LEARNED.weight}, "gradient of sinks"),
    ],
)
def test_what_a_kernel_cannot_do_it_leaves_to_math_and_says_so_once(
    name: Any, options: dict[str, Any], feature: str, caplog: pytest.LogCaptureFixture
) -> None:
    mask = MASKS["causal"]
    qkv, dropout = draw(mask), options.get("dropout", 0.0)
    scoring = replace(PLAIN, **{key: value for key, value in options.items() if key != "dropout"})
    base._say.cache_clear()
    with caplog.at_level(logging.WARNING, logger="qkv"):
        torch.manual_seed(1)
        out = new_kernel(name)(*qkv, mask, scoring, dropout)
        new_kernel(name)(*qkv, mask, scoring, dropout)
    torch.manual_seed(1)
    assert torch.equal(out, MathKernel()(*qkv, mask, scoring, dropout))
    (record,) = caplog.records
    for word in (name, feature, "math"):
        assert word in record.getMessage()


def test_a_bias_that_learns_nothing_is_no_reason_to_leave_a_kernel(caplog: pytest.LogCaptureFixture) -> None:
    base._say.cache_clear()
    with caplog.at_level(logging.WARNING, logger="qkv"):
        for kernel in (SdpaKernel(), TiledKernel()):
            kernel(*draw(MASKS["causal"]), MASKS["causal"], replace(PLAIN, bias=slope(), sinks_H=sinks()))
        with torch.no_grad():
            learned = replace(PLAIN, bias=LEARNED, sinks_H=LEARNED.weight)
            SdpaKernel()(*draw(MASKS["causal"]), MASKS["causal"], learned)
    assert caplog.records == []


# --- choosing one -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["decoder", "encoder", "encoder-decoder"])
@pytest.mark.parametrize(
    ("name", "kind"), [("math", MathKernel), ("tiled", TiledKernel), ("sdpa", SdpaKernel), ("flex", FlexKernel)]
)
def test_a_kernel_is_chosen_for_every_attention_of_a_network(family: str, name: Any, kind: type[Kernel]) -> None:
    config = {"family": family, "vocab_size": 5, "d_model": 8, "num_layers": 2, "attention": {"num_heads": 2}}
    network = Transformer(ModelConfig.model_validate(config))
    use_kernel(network, name)
    kernels = [module.kernel for module in network.modules() if isinstance(module, Attention)]
    assert len(kernels) == {"decoder": 2, "encoder": 2, "encoder-decoder": 6}[family]
    assert {type(kernel) for kernel in kernels} == {kind}
    assert kernels_of(network) == [name]


def test_an_unknown_kernel_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ValueError, match=r"flash.*math, tiled, sdpa, flex"):
        new_kernel("flash")  # type: ignore[arg-type]
