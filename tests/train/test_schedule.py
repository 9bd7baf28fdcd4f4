"""The learning rate over the steps, and that it is the one the optimiser uses."""

from __future__ import annotations

import math
from typing import Any

import pytest

from qkv.config.errors import ConfigError
from qkv.config.training import (
    ConstantScheduleConfig,
    CosineScheduleConfig,
    InverseSqrtScheduleConfig,
    ScheduleConfig,
    WSDScheduleConfig,
)
from qkv.train import loop
from qkv.train.optimizer import Optimizer, build_optimizer
from qkv.train.schedule import share_of_peak

from .small import MUON, config, metrics, parts, train, weights

KINDS = [CosineScheduleConfig, WSDScheduleConfig, InverseSqrtScheduleConfig, ConstantScheduleConfig]


def shares(schedule: ScheduleConfig, steps: int) -> list[float]:
    return [share_of_peak(schedule, step, steps) for step in range(1, steps + 1)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("warmup", "steps"), [(1, 1), (1, 20), (7, 20), (19, 20), (20, 20)])
def test_warm_up_rises_in_equal_parts_from_above_zero_to_the_peak(
    kind: type[ScheduleConfig], warmup: int, steps: int
) -> None:
    rising = shares(kind(warmup=warmup), steps)[:warmup]
    assert rising == pytest.approx([step / warmup for step in range(1, warmup + 1)], rel=1e-12)
    assert rising[-1] == 1.0


@pytest.mark.parametrize("schedule", [CosineScheduleConfig(), WSDScheduleConfig(), ConstantScheduleConfig()])
def test_without_warm_up_the_first_step_has_the_peak(schedule: ScheduleConfig) -> None:
    assert share_of_peak(schedule, 1, 20) == 1.0


@pytest.mark.parametrize("steps", [1, 2, 3, 10])
@pytest.mark.parametrize("warmup", [0, 1, 10])
@pytest.mark.parametrize("decay", [0.0, 0.01, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("final", [0.0, 0.1, 1.0])
def test_every_corner_of_wsd_is_a_share_and_never_zero(steps: int, warmup: int, decay: float, final: float) -> None:
    values = shares(WSDScheduleConfig(warmup=min(warmup, steps), decay=decay, final=final), steps)
    assert all(0 < value <= 1 for value in values)
    peak = values.index(1.0)
    assert values[peak:] == sorted(values[peak:], reverse=True)


@pytest.mark.parametrize("steps", [1, 2, 3, 10])
@pytest.mark.parametrize("warmup", [0, 1, 10])
def test_every_corner_of_cosine_is_a_share(steps: int, warmup: int) -> None:
    values = shares(CosineScheduleConfig(warmup=min(warmup, steps), final=0.1), steps)
    assert all(0.1 <= value <= 1 for value in values if value >= 1 / (warmup or 1))
    assert 1.0 in values


def test_wsd_without_decay_stays_at_the_peak() -> None:
    assert shares(WSDScheduleConfig(warmup=2, decay=0.0), 6) == [0.5, 1, 1, 1, 1, 1]


def test_wsd_warms_up_stays_and_falls_in_a_line_that_would_end_one_step_later() -> None:
    values = shares(WSDScheduleConfig(warmup=2, decay=0.4, final=0.0), 10)
    assert values == pytest.approx([0.5, 1, 1, 1, 1, 1, 4 / 5, 3 / 5, 2 / 5, 1 / 5])


def test_wsd_of_decay_one_falls_from_the_end_of_warm_up() -> None:
    values = shares(WSDScheduleConfig(warmup=2, decay=1.0, final=0.25), 5)
    assert values == pytest.approx([0.5, 1, 1 - 0.75 / 4, 1 - 2 * 0.75 / 4, 1 - 3 * 0.75 / 4])


def test_cosine_is_half_a_cosine_from_the_peak_to_the_final_share_on_the_last_step() -> None:
    steps, warmup, final = 50, 10, 0.1
    values = shares(CosineScheduleConfig(warmup=warmup, final=final), steps)
    for step in range(warmup, steps + 1):
        progress = (step - warmup) / (steps - warmup)
        assert values[step - 1] == pytest.approx(final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2)
    assert values[-1] == pytest.approx(final)


def test_inverse_square_root_is_the_schedule_of_2017_up_to_its_scale() -> None:
    """lrate = d^-0.5 min(step^-0.5, step warmup^-1.5)."""
    warmup, d_model = 40, 512
    values = shares(InverseSqrtScheduleConfig(warmup=warmup), 400)
    paper = [d_model**-0.5 * min(step**-0.5, step * warmup**-1.5) for step in range(1, 401)]
    ratios = [value / rate for value, rate in zip(values, paper, strict=True)]
    assert ratios == pytest.approx([(d_model * warmup) ** 0.5] * 400)


def test_inverse_square_root_may_end_within_its_warm_up() -> None:
    assert shares(InverseSqrtScheduleConfig(warmup=4000), 2) == [1 / 4000, 2 / 4000]


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
def test_a_warm_up_longer_than_the_run_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"train\.schedule\.warmup.*train\.steps"):
        config("train.steps=5", f"train.schedule.kind={kind}", "train.schedule.warmup=6")


@pytest.mark.parametrize(
    ("tokens", "steps"), [(1, 1), (128, 1), (129, 2), (1000, 8), (96, 1)], ids=["one", "full", "over", "many", "part"]
)
def test_a_warm_up_in_tokens_takes_the_steps_that_they_fill(tokens: int, steps: int) -> None:
    warm = ("train.steps=10", f"train.schedule.warmup={tokens}", "train.schedule.warmup_unit=tokens")
    assert config(*warm).train.schedule_by_step == CosineScheduleConfig(warmup=steps)


@pytest.mark.parametrize(("tokens", "steps"), [(64, 2), (96, 3), (97, 4), (192, 5), (193, 6), (448, 7)])
def test_a_warm_up_in_tokens_counts_the_smaller_steps_of_a_ramp(tokens: int, steps: int) -> None:
    ramp = "train.ramp=[{steps: 3, batch_tokens: 32}, {steps: 2, batch_tokens: 48}]"
    train = config("train.steps=10", ramp, f"train.schedule={{warmup: {tokens}, warmup_unit: tokens}}").train
    assert train.schedule_by_step.warmup == steps
    assert train.tokens == 3 * 32 + 2 * 48 + 5 * 128


def test_a_warm_up_in_tokens_longer_than_the_run_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the warm-up takes 6 steps, and the run has 5"):
        config("train.steps=5", "train.schedule={warmup: 641, warmup_unit: tokens}")


def test_a_run_warms_up_over_its_tokens() -> None:
    run = train("run", "train.schedule={kind: constant, warmup: 384, warmup_unit: tokens}", "train.optimizer.lr=0.03")
    assert [line["lr"] for line in metrics(run) if "lr" in line] == pytest.approx([0.01, 0.02, 0.03, 0.03])


@pytest.mark.parametrize("optimizer", [("train.optimizer.lr=0.01",), MUON], ids=["adamw", "muon"])
@pytest.mark.parametrize("schedule", ["cosine", "wsd", "inverse-sqrt", "constant"])
def test_the_logged_learning_rate_is_the_one_that_the_optimiser_holds(
    optimizer: tuple[str, ...], schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Optimizer] = []
    applied: list[float] = []

    def build(*arguments: Any) -> Optimizer:
        built.append(build_optimizer(*arguments))
        return built[-1]

    def listen(event: dict[str, Any]) -> None:
        if event["event"] == "train":
            groups = [group["lr"] for inner in built[0].optimizers for group in inner.param_groups]
            share = share_of_peak(settings.train.schedule, event["step"], settings.train.steps)
            assert event["lr"] == groups[0]
            peaks = [peak for peaks in built[0].peaks for peak in peaks]
            assert groups == [peak * share for peak in peaks]
            applied.append(event["lr"])

    monkeypatch.setattr(loop, "build_optimizer", build)
    changes = (*optimizer, f"train.schedule.kind={schedule}", "train.schedule.warmup=2", "train.steps=5")
    settings = config(*changes)
    run = loop.fit(settings, run_dir="run", listener=listen)
    assert [line["lr"] for line in metrics(run.path) if "lr" in line] == applied
    assert max(applied) == applied[1] == settings.train.optimizer.lr


def test_the_logged_learning_rate_is_how_far_the_first_step_goes() -> None:
    """Adam's first step moves every weight by the learning rate, whatever its gradient."""
    changes = (
        "train.optimizer.lr=0.01",
        "train.optimizer.weight_decay=0",
        "train.schedule.warmup=4",
        "train.clip=null",
    )
    settings = config(*changes, "train.steps=4", "train.save_every=1")
    run = train("run", *changes, "train.steps=4", "train.save_every=1")
    _, _, network = parts(settings)
    after = weights(run, 1)
    moved = {name: (after[name] - weight).abs().max().item() for name, weight in network.named_parameters()}
    assert metrics(run)[0]["lr"] == 0.0025
    for name, distance in moved.items():
        assert distance == pytest.approx(0.0025, rel=1e-2), name
