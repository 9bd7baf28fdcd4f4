"""Weights that are evaluated and saved, where they are not those that are trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from qkv.checkpoint.store import load_checkpoint
from qkv.config.errors import DamagedError
from qkv.config.training import ScheduleFreeConfig, TrainConfig
from qkv.nn.transformer import Transformer
from qkv.train.averaging import Averaging, build_averaging
from qkv.train.optimizer import build_optimizer
from qkv.train.resume import resume

from .small import assert_equal, assert_same_checkpoint, config, losses, metrics, parts, step, train, weights
from .test_resume import HARD, stop_at

EMA = ("train.ema=0.9",)
SCHEDULE_FREE = ("train.optimizer={kind: schedule-free, lr: 0.01}", "train.schedule={kind: constant, warmup: 3}")
AVERAGES = pytest.mark.parametrize("changes", [EMA, SCHEDULE_FREE], ids=["ema", "schedule-free"])


def trained(run: Path, number: int) -> dict[str, Tensor]:
    """The weights from which a run goes on."""
    tensors = load_file(step(run, number) / "training.safetensors")
    return {name.removeprefix("weights/"): value for name, value in tensors.items() if name.startswith("weights/")}


def averaging(train: TrainConfig) -> tuple[Transformer, Averaging]:
    _, _, network = parts(config())
    optimizer = build_optimizer(train.optimizer, network)
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(1.0)
    made = build_averaging(train, network, optimizer)
    made.update(1)
    return network, made


def test_the_moving_average_is_that_of_the_weights_after_each_step() -> None:
    run = train("run", *EMA, "train.steps=5", "train.save_every=1")
    average: dict[str, Tensor] = {}
    for number in range(1, 6):
        weights_then = {name: weight.double() for name, weight in trained(run, number).items()}
        decay = min(0.9, (1 + number) / (10 + number))
        average = {
            name: decay * average.get(name, weight) + (1 - decay) * weight for name, weight in weights_then.items()
        }
        found = weights(run, number)
        assert found.keys() == average.keys()
        for name, weight in found.items():
            torch.testing.assert_close(weight.double(), average[name], rtol=0, atol=1e-6, msg=name)


def test_averaging_changes_nothing_about_training() -> None:
    changes = (*HARD, "train.eval_every=2", "train.save_every=2")
    plain, averaged = train("plain", *changes), train("averaged", *changes, *EMA)
    assert losses(plain) == losses(averaged)
    assert_equal(weights(plain, 4), trained(averaged, 4))
    assert trained(plain, 4) == {}


@AVERAGES
def test_what_is_saved_is_what_was_validated(changes: tuple[str, ...]) -> None:
    run = train("run", *changes, "train.steps=6", "train.save_every=6", "train.eval_every=6")
    network = load_checkpoint(step(run, 6)).network
    assert_equal(dict(network.named_parameters()), weights(run, 6))
    assert any(not torch.equal(weight, trained(run, 6)[name]) for name, weight in weights(run, 6).items())
    told = json.loads((step(run, 6) / "state.json").read_text())
    assert told["val_loss"] == metrics(run)[-1]["val_loss"]
    # where there is one validation batch, it is the probe
    resumed: list[str] = []
    resume(run, steps=7, listener=lambda event: resumed.append(event["text"]) if event["event"] == "note" else None)
    assert f"loss on the fixed batch: {told['probe_loss']:.6f} when saved, {told['probe_loss']:.6f} now" in resumed


@AVERAGES
@pytest.mark.parametrize("number", [2, 4])
def test_half_and_half_is_the_whole(changes: tuple[str, ...], number: int) -> None:
    changes = (*HARD, *changes, "train.steps=6", "train.save_every=2", "train.eval_every=1")
    train("whole", *changes)
    stop_at("whole", number, "halves")
    resume("halves")
    assert_same_checkpoint(step("whole", 6), step("halves", 6))
    assert losses("halves") == losses("whole")


@pytest.mark.parametrize(
    "settings", [TrainConfig(ema=0.9), TrainConfig(optimizer=ScheduleFreeConfig())], ids=["ema", "schedule-free"]
)
def test_the_average_takes_the_place_of_the_weights_and_gives_it_back(settings: TrainConfig) -> None:
    network, made = averaging(settings)
    for parameter in network.parameters():
        parameter.data.add_(1.0)
    before = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    with made.applied():
        assert all(not torch.equal(parameter, before[name]) for name, parameter in network.named_parameters())
    assert_equal(dict(network.named_parameters()), before)


def test_trained_weights_that_are_missing_or_damaged_are_refused_by_name() -> None:
    _, made = averaging(TrainConfig(ema=0.9))
    state = made.state()
    name = "weights/decoder.final_norm.weight"
    for faulty in ({key: value for key, value in state.items() if key != name}, {**state, name: torch.ones(3)}):
        with pytest.raises(
            DamagedError, match=r"trained weights of decoder\.final_norm\.weight are missing or damaged"
        ):
            made.load_state(faulty)


@pytest.mark.parametrize(
    "changes",
    [
        (*EMA, "train.optimizer.lr=0.01"),
        SCHEDULE_FREE,
        ("train.optimizer={kind: adam, lr: 0.01}",),
        ("train.optimizer.lr=0.01",),
        ("train.optimizer.kind=muon",),
        ("train.optimizer={kind: muon, lr: 0.01, adjust_lr: match-rms-adamw}",),
    ],
    ids=["ema", "schedule-free", "adam", "adamw", "muon", "muon-matched"],
)
def test_every_optimiser_learns(changes: tuple[str, ...]) -> None:
    run = train("run", *changes, "train.steps=40", "train.eval_every=40", "train.log_every=40")
    first, *_, last = metrics(run)
    assert last["val_loss"] < 0.65 * first["loss"]
