"""Training mixtures of experts: balance, which weights are updated how, and going on."""

from __future__ import annotations

import pytest
import torch

from qkv.config.training import MuonConfig
from qkv.nn.experts import Experts
from qkv.train.optimizer import build_optimizer
from qkv.train.resume import resume

from .small import MUON, TASKS, assert_same_checkpoint, config, metrics, parts, step, train, weights

MIXED = (
    "model.feed_forward={kind: moe, num_experts: 4, d_ff: 24, expert: {bias: true}, "
    "router: {balance_loss: 0.5, correction_bias: true}}"
)


@pytest.mark.parametrize("task", ["causal", "translate"])
def test_the_balance_of_a_step_does_not_depend_on_how_it_is_split(task: str) -> None:
    runs = []
    for tokens in ("null", "48", "16"):
        changes = (MIXED, f"train.micro_batch_tokens={tokens}", "train.steps=3", "train.save_every=1")
        runs.append(train(f"run-{tokens}", *TASKS[task], *changes))
    first, *others = ([line for line in metrics(run) if "loss" in line] for run in runs)
    for other in others:
        for one, two in zip(first, other, strict=True):
            assert two["load_balance_loss"] == pytest.approx(one["load_balance_loss"], rel=1e-5)
            assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5 if one["step"] == 1 else 1e-3)
    saved = [weights(run, 3) for run in runs]
    biases = [name for name in saved[0] if name.endswith("correction_bias")]
    assert biases
    for name in biases:
        assert saved[0][name].abs().max() > 0
        assert all(torch.equal(other[name], saved[0][name]) for other in saved[1:])


def test_a_run_that_went_on_is_the_whole() -> None:
    changes = (MIXED, *MUON, "train.schedule.kind=constant", "train.save_every=2", "train.micro_batch_tokens=48")
    train("whole", *changes)
    train("halves", *changes, "train.steps=2")
    resume("halves", steps=4)
    assert_same_checkpoint(step("whole", 4), step("halves", 4))


def test_muon_takes_experts_one_by_one_their_biases_do_not_decay_and_correction_biases_are_left_alone() -> None:
    _, _, network = parts(config(MIXED))
    optimizer = build_optimizer(MuonConfig(), network)
    groups = {
        optimizer.names[id(parameter)]: (type(inner).__name__, group["weight_decay"] > 0)
        for inner in optimizer.optimizers
        for group in inner.param_groups
        for parameter in group["params"]
    }
    divided = set()
    for name, module in network.named_modules():
        if isinstance(module, Experts):
            for part in ("gate", "up", "down"):
                assert [groups[f"{name}.{part}.{number}"] for number in range(4)] == [("Muon", True)] * 4
                assert groups[f"{name}.{part}_bias"] == ("AdamW", False)
                divided.add(f"{name}.{part}")
    assert {name for name, _ in network.named_parameters()} - groups.keys() - divided == {
        f"decoder.blocks.{layer}.feed_forward.function.router.correction_bias" for layer in (0, 1)
    }
