"""Training with multi-token prediction: the further loss of a step, and going on."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from qkv.checkpoint.store import load_checkpoint, save_checkpoint
from qkv.train.resume import resume

from .small import MUON, assert_equal, assert_same_checkpoint, metrics, step, train

AHEAD = ("model.mtp={depth: 2, weight: 0.5}",)


def test_the_further_loss_of_a_step_does_not_depend_on_how_it_is_split() -> None:
    runs = []
    for tokens in ("null", "48", "16"):
        run = train(f"run-{tokens}", *AHEAD, f"train.micro_batch_tokens={tokens}", "train.steps=2")
        runs.append([line for line in metrics(run) if "loss" in line])
    first, *others = runs
    assert 0.4 < first[0]["mtp_loss"] / first[0]["loss"] < 0.5, "at the end of a document there is no further token"
    for other in others:
        for one, two in zip(first, other, strict=True):
            assert two["mtp_loss"] == pytest.approx(one["mtp_loss"], rel=1e-5)
            assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)


def test_a_run_that_went_on_is_the_whole() -> None:
    changes = (*AHEAD, *MUON, "train.schedule.kind=constant", "train.save_every=2")
    train("whole", *changes)
    train("halves", *changes, "train.steps=2")
    resume("halves", steps=4)
    assert_same_checkpoint(step("whole", 4), step("halves", 4))


def test_what_is_saved_is_loaded() -> None:
    folder = step(train("run", *AHEAD), 4)
    loaded = load_checkpoint(folder)
    assert loaded.network.mtp is not None
    save_checkpoint(folder.parent / "again", loaded.network, loaded.config, loaded.tokenizer)
    assert_equal(load_file(folder / "model.safetensors"), load_file(folder.parent / "again" / "model.safetensors"))
