"""What can be said about training, and what contradicts itself."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from qkv.config import Config, TrainConfig
from qkv.config.errors import ConfigError
from qkv.config.training import AdamConfig, ScheduleFreeConfig


def train(**keys: Any) -> TrainConfig:
    return TrainConfig.model_validate(keys)


def test_schedule_free_has_a_constant_schedule_unless_another_is_named() -> None:
    made = train(optimizer={"kind": "schedule-free"}, schedule={"warmup": 7})
    assert isinstance(made.optimizer, ScheduleFreeConfig)
    assert (made.schedule.kind, made.schedule.warmup) == ("constant", 7)
    assert TrainConfig.model_validate(made.model_dump(mode="json")) == made
    assert train(optimizer=ScheduleFreeConfig()).schedule.kind == "constant"
    assert train().schedule.kind == "cosine"


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"optimizer": {"kind": "schedule-free"}, "schedule": {"kind": "wsd"}}, r"`train\.schedule\.kind` contradict"),
        ({"optimizer": {"kind": "schedule-free"}, "ema": 0.9}, r"`train\.ema` contradict"),
        ({"optimizer": {"kind": "schedule-free", "betas": [0, 0.9]}}, r"greater than 0"),
        ({"optimizer": {"kind": "adam", "weight_decay": 0.1}}, r"unknown key `weight_decay`"),
        ({"optimizer": {"kind": "muon", "adjust_lr": "match"}}, r"match-rms-adamw"),
        ({"ema": 1.0}, r"less than 1"),
        ({"schedule": {"warmup": 10, "warmup_unit": "token"}}, r"'steps' or 'tokens'"),
        ({"ramp": [{"max_seq_len": 64}]}, r"steps"),
        ({"ramp": [{"steps": 1}] * 5}, r"at most 4"),
        ({"steps": 20, "schedule": {"warmup": 50}}, r"takes 50 steps, and the run has 20"),
        (
            {"steps": 20, "batch_tokens": 10, "schedule": {"warmup": 500, "warmup_unit": "tokens"}},
            r"takes 50 steps, and the run has 20",
        ),
        ({"steps": 10, "ramp": [{"steps": 6}, {"steps": 4}]}, r"the ramp takes 10 of 10 steps"),
    ],
)
def test_what_cannot_be_meant_is_refused(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        train(**keys)


@pytest.mark.parametrize(("unit", "warmup", "shorter"), [("steps", 50, 2), ("tokens", 500, 20)])
def test_a_warm_up_that_is_too_long_is_answered_with_one_that_fits(unit: str, warmup: int, shorter: int) -> None:
    wish = f"train.schedule={{warmup: {warmup}, warmup_unit: {unit}}}"
    with pytest.raises(ConfigError) as caught:
        Config.load("decoder-tiny", "train.steps=20", "train.batch_tokens=10", wish)
    assert caught.value.hint == f"train.schedule.warmup={shorter} or train.steps=50"
    Config.load("decoder-tiny", "train.steps=20", "train.batch_tokens=10", wish, f"train.schedule.warmup={shorter}")
    Config.load("decoder-tiny", "train.steps=50", "train.batch_tokens=10", wish)


def test_adam_is_that_of_2017_by_default() -> None:
    assert (AdamConfig().betas, AdamConfig().eps) == ((0.9, 0.98), 1e-9)


def test_editors_know_the_keys() -> None:
    known = str(Config.json_schema())
    for key in ("schedule-free", "adjust_lr", "warmup_unit", "RampStageConfig", "ema"):
        assert key in known
