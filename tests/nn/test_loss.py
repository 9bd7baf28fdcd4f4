"""The loss by chunks is the loss of all logits at once, in value and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

from qkv.config.model import ModelConfig
from qkv.nn import IGNORE, Transformer, loss
from qkv.nn.kernels.math import capped

N, M, V = 22, 6, 13
CHUNK = 4


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "LOGITS_AT_ONCE", V * 3)
    monkeypatch.setattr(loss, "LEAST_CHUNK", CHUNK)


@pytest.fixture
def rows_multiplied(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many rows each product with a matrix had."""
    rows: list[int] = []
    linear = F.linear

    def noted(x: Tensor, *rest: Any) -> Tensor:
        rows.append(x.shape[0])
        return linear(x, *rest)

    monkeypatch.setattr(F, "linear", noted)
    return rows


def tensors(dtype: torch.dtype = torch.float64, *, bias: bool = True, ignored: int = 5) -> list[Tensor | None]:
    """Hidden vectors, matrix, bias, labels."""
    generator = torch.Generator().manual_seed(0)
    h, weight, b = (
        torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
        for shape in ((N, M), (V, M), (V,))
    )
    labels = torch.randint(0, V, (N,), generator=generator)
    labels[torch.randperm(N, generator=generator)[:ignored]] = IGNORE
    return [h, weight, b if bias else None, labels]


def whole(
    h: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, softcap: float | None, label_smoothing: float
) -> Tensor:
    logits = F.linear(h, weight, bias)
    logits = logits if softcap is None else capped(logits, softcap)
    return F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum", label_smoothing=label_smoothing)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("ignored", [0, 5, N - 1])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_value_and_gradients_are_those_of_all_logits_at_once(
    softcap: float | None, label_smoothing: float, bias: bool, ignored: int, dtype: torch.dtype, tolerance: float
) -> None:
    seen: list[list[Tensor]] = []
    for compute in (whole, loss.cross_entropy):
        h, weight, b, labels = tensors(dtype, bias=bias, ignored=ignored)
        value = compute(h, weight, b, labels, softcap=softcap, label_smoothing=label_smoothing)
        (value / 7).backward()
        seen.append([value.detach(), *(part.grad for part in (h, weight, b) if part is not None)])
    for expected, found in zip(*seen, strict=True):
        assert found.dtype == expected.dtype
        assert (found - expected).abs().max() <= tolerance * expected.abs().max()


def test_logits_are_computed_by_chunks_and_only_of_tokens_with_a_label(rows_multiplied: list[int]) -> None:
    loss.cross_entropy(*tensors(ignored=5)).backward()
    assert rows_multiplied == [CHUNK] * 4 + [1]


def test_a_large_vocabulary_still_has_chunks_of_some_tokens(
    rows_multiplied: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "LEAST_CHUNK", 10)
    loss.cross_entropy(*tensors(ignored=0))
    assert rows_multiplied == [10, 10, 2]


def test_without_gradients_the_value_is_the_same_and_nothing_can_be_learnt() -> None:
    arguments = tensors()
    learning = loss.cross_entropy(*arguments, label_smoothing=0.1)
    with torch.no_grad():
        value = loss.cross_entropy(*arguments, label_smoothing=0.1)
    assert value == learning
    assert learning.requires_grad
    assert not value.requires_grad


def test_backward_may_be_taken_twice() -> None:
    h, *rest = tensors()
    value = loss.cross_entropy(h, *rest)
    first, second = (torch.autograd.grad(value, h, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_under_autocast_products_are_rounded_and_sums_are_not() -> None:
    seen: list[list[Tensor]] = []
    for autocast in (False, True):
        h, weight, bias, labels = tensors(torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            value = loss.cross_entropy(h, weight, bias, labels)
        value.backward()
        assert value.dtype == weight.grad.dtype == bias.grad.dtype == h.grad.dtype == torch.float32
        seen.append([value.detach(), h.grad, weight.grad, bias.grad])
    for exact, rounded in zip(*seen, strict=True):
        assert 0 < (rounded - exact).abs().max() < 0.03 * exact.abs().max()


HEADS: dict[str, dict[str, Any]] = {
    "tied": {"tie_embeddings": "head"},
    "scaled": {"tie_embeddings": "head", "head": {"kind": "language-model", "scale": "rsqrt-d-model"}},
    "softcap": {"head": {"kind": "language-model", "softcap": 3.0, "bias": True}},
    "masked": {"family": "encoder", "head": {"kind": "masked-language-model"}},
}


@pytest.mark.parametrize("head", HEADS)
def test_every_head_over_a_vocabulary_learns_as_from_its_logits(head: str) -> None:
    tree = {"vocab_size": V, "max_seq_len": 16, "d_model": 8, "num_layers": 1, "attention": {"num_heads": 2}}
    config = ModelConfig.model_validate({**tree, "init": {"kind": "normal", "std": 0.4}, **HEADS[head]})
    net = Transformer(config, generator=torch.Generator().manual_seed(0)).double()
    ids = torch.randint(0, V, (2, 9), generator=torch.Generator().manual_seed(1))
    labels = ids.roll(-1, 1).index_fill(1, torch.tensor([0, 8]), IGNORE)
    seen = []
    for value in (
        F.cross_entropy(net(ids).flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"),
        net(ids, labels=labels).loss_sum,
    ):
        seen.append([value.detach(), *torch.autograd.grad(value, list(net.parameters()))])
    for expected, found in zip(*seen, strict=True):
        assert (found - expected).abs().max() <= 1e-12 * max(1.0, expected.abs().max())


def test_any_number_of_tokens_is_at_most_two_graphs() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compute = torch.compile(loss.cross_entropy, backend=counter, fullgraph=True)
    torch._dynamo.reset()
    for count in (22, 7, 12, 3):
        h, weight, bias, labels = tensors()
        expected = torch.autograd.grad(loss.cross_entropy(h[:count], weight, bias, labels[:count]), weight)[0]
        found = torch.autograd.grad(compute(h[:count], weight, bias, labels[:count]), weight)[0]
        assert torch.equal(found, expected)
    assert counter.frame_count <= 2
    torch._dynamo.reset()
