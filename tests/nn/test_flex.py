"""The flex kernel, which compiles each rule into itself, computes what `math` does, and leaves to it what it cannot."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from qkv.config.model import ModelConfig
from qkv.nn import Transformer
from qkv.nn.kernels import FlexKernel, MathKernel, base, flex
from qkv.nn.kernels.flex import NARROWEST
from qkv.nn.mask import Causal, Mask, Rule, Window
from qkv.nn.score import Scoring

from .matrix import (
    CASES,
    TOLERANCE,
    Case,
    assert_equal,
    draw_inputs,
    network_of,
    one_thread,  # noqa: F401
    redraw,
    set_kernel,
)
from .test_kernels import MASKS, PLAIN, D, assert_close, draw, reference, sinks, slope, square

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

SCORINGS: dict[str, Scoring] = {
    "plain": PLAIN,
    "sinks": replace(PLAIN, sinks_H=sinks()),
    "all": replace(PLAIN, softcap=0.8, bias=slope(), sinks_H=sinks()),
}


@pytest.fixture(autouse=True)
def _forgotten_afterwards() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_every_rule_is_one_about_single_slots() -> None:
    for name, mask in MASKS.items():
        if mask.rule is None:
            continue
        sees = flex._mask_mod(mask, 2, sinks=False)
        b, t, s = torch.meshgrid(*map(torch.arange, (2, mask.num_queries, mask.num_keys)), indexing="ij")
        assert torch.equal(sees(b, b, t, s), mask.tensor()[:, 0].expand(2, -1, -1)), name


@pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS)
@pytest.mark.parametrize("name", ["nothing-hidden", "everything-at-once", "causal-window-by-row", "one-row-empty"])
@torch.no_grad()
def test_flex_computes_attention(name: str, scoring: Scoring) -> None:
    qkv, mask = draw(MASKS[name], dtype=torch.float32), MASKS[name]
    assert_close(FlexKernel()(*qkv, mask, scoring), reference(*qkv, mask, scoring), 2e-6)


@torch.no_grad()
def test_a_rolling_cache_has_keys_at_slots_of_their_own() -> None:
    slots = torch.tensor([[8, 9, 10, 7], [4, -1, 2, 3]])
    mask = Mask(Causal() & Window(3), torch.tensor([[9, 10], [3, 4]]), 4, aligned=False, k_slots=slots)
    qkv = draw(mask, dtype=torch.float32)
    assert_close(FlexKernel()(*qkv, mask, PLAIN), reference(*qkv, mask), 2e-6)


@torch.no_grad()
def test_padding_of_nan_reaches_nothing() -> None:
    mask = MASKS["causal-padding"]
    q, k, v = draw(mask, dtype=torch.float32)
    empty = (torch.arange(8) >= torch.tensor([3, 7])[:, None])[:, None, :, None]
    dirty = FlexKernel()(q, k.masked_fill(empty, torch.nan), v.masked_fill(empty, torch.nan), mask, PLAIN)
    assert torch.equal(dirty, FlexKernel()(q, k, v, mask, PLAIN))


@torch.no_grad()
def test_layers_share_what_is_made_of_a_mask_and_it_goes_with_the_mask() -> None:
    mask = square(Causal())
    qkv = draw(mask, dtype=torch.float32)
    FlexKernel()(*qkv, mask, PLAIN)
    made = flex._block_mask(mask, 2, sinks=False)
    assert flex._block_mask(mask, 2, sinks=False) is made
    held = len(flex._block_masks)
    del mask
    gc.collect()
    assert len(flex._block_masks) < held


class _Everywhere(Rule):
    """A rule that only its author knows."""

    def allow(self, q_BT1: torch.Tensor, k_1S: torch.Tensor) -> torch.Tensor:
        return k_1S >= 0


@pytest.mark.parametrize(
    ("changes", "dropout", "rule", "feature"),
    [
        ({}, 0.5, Causal(), "dropout"),
        ({"additive_HD": torch.ones(4, D, dtype=torch.float64)}, 0.0, Causal(), "additive scores"),
        ({"sinks_H": sinks().requires_grad_()}, 0.0, Causal(), "gradient of sinks"),
        ({}, 0.0, Causal() & _Everywhere(), "another's making"),
        ({"scale": 0.7}, 0.0, Causal(), "gradients on a CPU"),
    ],
)
def test_what_flex_cannot_do_it_leaves_to_math_and_says_so(
    changes: dict[str, Any], dropout: float, rule: Rule, feature: str, caplog: pytest.LogCaptureFixture
) -> None:
    mask, scoring = square(rule), replace(PLAIN, **changes)
    qkv = tuple(tensor.requires_grad_("CPU" in feature) for tensor in draw(mask))
    base._say.cache_clear()
    outs = []
    with caplog.at_level(logging.WARNING, logger="qkv"):
        for kernel in (FlexKernel(), MathKernel()):
            torch.manual_seed(1)
            outs.append(kernel(*qkv, mask, scoring, dropout))
    assert torch.equal(*outs)
    (record,) = caplog.records
    assert all(word in record.getMessage() for word in ("flex", feature, "math"))


CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
)


def network_on(device: str, case: Case) -> Transformer:
    """The case's network; on a GPU with heads as wide as flex wants them there, and weights not chosen for rounding."""
    if device == "cpu":
        return copy.deepcopy(network_of(case))
    tree = case.tree
    if case.options["attention"] == "latent":
        tree["attention"] |= {"nope_dim": NARROWEST, "rope_dim": NARROWEST, "value_dim": NARROWEST}
    else:
        tree["attention"]["head_dim"] = NARROWEST + (tree["attention"]["head_dim"] or 0)
    network = Transformer(ModelConfig.model_validate(tree)).eval().requires_grad_(False)
    redraw(network, draw_inputs(case, 4, 12))
    return network.to(device)


@pytest.mark.slow  # each rule is traced anew
@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("case", CASES, ids=str)
@torch.no_grad()
def test_flex_gives_the_logits_of_the_matrix(case: Case, device: str, caplog: pytest.LogCaptureFixture) -> None:
    network = network_on(device, case)
    inputs = {**draw_inputs(case, 3, 11, 7), "lengths": torch.tensor([5, 11, 8])}
    real = torch.arange(11) < inputs["lengths"][:, None]
    inputs = {name: value.to(device) for name, value in inputs.items()}
    base._say.cache_clear()
    caplog.clear()
    logits = {}
    for kernel in ("flex", "math"):
        set_kernel(network, kernel)  # type: ignore[arg-type]
        logits[kernel] = network(**inputs)[real.to(device)]
    assert_equal(logits["flex"], logits["math"], TOLERANCE if device == "cpu" else 1e-3)
    said = [record.getMessage() for record in caplog.records if record.name == "qkv"]
    additive = case.options["scores"] == "additive-scores"
    assert said == (["the flex kernel cannot do additive scores: using math"] if additive else [])
