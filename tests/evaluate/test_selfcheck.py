"""Whether a model answers the same however it is run; and whether it would be told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from generate.tiny import byte_tokenizer, config, network
from torch import Tensor

from qkv.config.errors import UsageError
from qkv.evaluate import machine
from qkv.evaluate import selfcheck as checking
from qkv.evaluate.probes import probes
from qkv.evaluate.selfcheck import Check, selfcheck
from qkv.nn import Transformer, kernels
from qkv.nn.kernels import MathKernel, TiledKernel

KERNELS = ["kernel math", "kernel tiled", "kernel sdpa"]
CACHED = ["cached, token by token", "prefilled in chunks of 1, 5, 3", "cached, in a batch"]
WRITTEN = ["generated with a cache, in a batch", "streamed"]


@pytest.fixture(autouse=True)
def _without_flex(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its calls takes half a second on a CPU; one test has it."""
    if "flex" not in request.node.name:
        monkeypatch.delitem(kernels.KERNELS, "flex")


def run(made: Transformer, **options: Any) -> dict[str, Check]:
    options = {"tokenizer": byte_tokenizer(), "eos_ids": [258], "compiled": False, **options}
    return {check.name: check for check in selfcheck(made, **options)}


CAUSAL, OTHERS = ["in a batch", *CACHED, *WRITTEN, *KERNELS], ["in a batch", *KERNELS]
FEATURES = {"family": "encoder", "input": {"kind": "features", "width": 3}, "head": {"kind": "none"}}


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, CAUSAL),
        ({"family": "encoder"}, OTHERS),
        ({"family": "encoder-decoder"}, CAUSAL),
        ({"family": "encoder", "head": {"kind": "classifier", "num_classes": 3}}, OTHERS),
        ({"head": {"kind": "none"}}, ["in a batch", *CACHED, *KERNELS]),
        (FEATURES, OTHERS),
        ({"position": {"kind": "learned"}, "attention": {"num_heads": 4, "window": 5}}, CAUSAL),
        ({"prefix": True}, CAUSAL),
    ],
)
def test_a_sound_model_passes_what_it_can_be_asked(changes: dict[str, Any], names: list[str]) -> None:
    made = network(**changes).train()
    before = [module for module in made.modules() if isinstance(module, MathKernel | TiledKernel)]
    found = run(made)
    assert list(found) == [*names, "compiled"]
    for check in found.values():
        assert check.ok, check
        if check.name != "compiled":
            assert check.difference is not None
            assert check.difference <= check.tolerance
    assert found["compiled"].note == "left out"
    assert made.training
    assert before == [module for module in made.modules() if isinstance(module, MathKernel | TiledKernel)]


def test_flex_is_checked_too() -> None:
    check = run(network(num_layers=1))["kernel flex"]
    assert check.ok
    assert check.difference is not None
    assert check.difference > 0


def test_without_a_tokenizer_ids_are_enough() -> None:
    found = run(network(family="encoder-decoder"), tokenizer=None, start_ids=[257])
    assert all(check.ok for check in found.values())


class Faulty(Transformer):
    """Answers otherwise in a batch, with a cache, or with a NaN; or refuses a cache."""

    fault = ""

    def forward(self, ids: Tensor, **given: Any) -> Tensor:  # type: ignore[override]
        cached = given.get("cache") is not None
        if self.fault == "refuses" and cached:
            raise UsageError("no cache here")
        if self.fault == "raises" and cached:
            raise RuntimeError("broken\nbadly")
        found = super().forward(ids, **given)
        if self.fault == "batch" and len(ids) > 1 and not cached:
            found = found + 0.1
        if self.fault == "cache" and cached:
            found = found + torch.arange(found.shape[-1]) * 0.1
        if self.fault == "nan" and cached:
            found = found * float("nan")
        if self.fault == "nan in a row" and len(ids) > 1 and not cached:
            found = torch.cat((found[:1], found[1:] * float("nan")))
        return found


@pytest.mark.parametrize(
    ("fault", "failing"),
    [
        ("batch", {"in a batch", *KERNELS}),
        ("cache", {*CACHED, *WRITTEN}),
        ("nan", set(CACHED)),
        ("nan in a row", {"in a batch", *KERNELS}),
        ("raises", {*CACHED, *WRITTEN}),
        ("refuses", set()),
    ],
)
def test_a_fault_is_found_and_named(fault: str, failing: set[str]) -> None:
    made = Faulty(config(), generator=torch.Generator().manual_seed(0))
    made.fault = fault
    found = run(made)
    assert {name for name, check in found.items() if not check.ok} == failing
    if fault == "raises":
        assert found[CACHED[0]].note == "RuntimeError: broken"
    if fault == "refuses":
        assert found[CACHED[0]].note == "refused: no cache here"
    if fault == "cache":
        assert found[CACHED[0]].difference == pytest.approx(25.9, abs=0.1)
        assert found["streamed"].difference >= 1


def test_a_kernel_that_computes_something_else_is_found(monkeypatch) -> None:
    usual = TiledKernel.forward
    monkeypatch.setattr(TiledKernel, "forward", lambda self, *given: 1.001 * usual(self, *given))
    assert [name for name, check in run(network()).items() if not check.ok] == ["kernel tiled"]


def test_of_half_precision_differences_are_reported_and_nothing_is_promised() -> None:
    found = run(network().bfloat16())
    assert all(check.tolerance is None and check.ok for check in found.values())
    assert found["in a batch"].difference is not None


def test_without_a_compiler_the_check_says_so(monkeypatch) -> None:
    monkeypatch.setattr(checking, "compiler", lambda: None)
    check = run(network(), compiled=True)["compiled"]
    assert (check.difference, check.ok, check.note) == (None, True, "left out: there is no C++ compiler")


@pytest.mark.slow
def test_compiled_layers_answer_the_same_and_are_eager_again_afterwards() -> None:
    if machine.compiler() is None:
        pytest.skip("there is no C++ compiler")
    made = network()
    check = run(made, compiled=True)["compiled"]
    assert check.ok
    assert check.difference is not None
    assert all(getattr(module, "_compiled_call_impl", None) is None for module in made.modules())


def test_half_of_what_a_prefix_lm_reads_is_its_prefix() -> None:
    seen: list[Tensor | None] = []

    class Watched(Transformer):
        def forward(self, ids: Tensor, **given: Any) -> Tensor:  # type: ignore[override]
            seen.append(given.get("prefix_lengths"))
            found: Tensor = super().forward(ids, **given)
            return found

    made = Watched(config(prefix=True), generator=torch.Generator().manual_seed(0)).eval()
    lengths = [probe.ids.shape[1] for probe in probes(made)]
    next(selfcheck(made, compiled=False))
    alone, together = seen[: len(lengths)], seen[len(lengths)]
    assert [int(prefix) for prefix in alone if prefix is not None] == [length // 2 for length in lengths]
    assert together is not None
    assert together.tolist() == [length // 2 for length in lengths]
