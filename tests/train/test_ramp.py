"""Runs that begin with shorter rows or smaller batches."""

from __future__ import annotations

from typing import Any

import pytest

from qkv.config.errors import ConfigError
from qkv.train.loop import fit
from qkv.train.resume import resume

from .small import TASKS, assert_same_checkpoint, config, first_steps, losses, metrics, step, train
from .test_resume import HARD, stop_at

RAMP = "train.ramp=[{steps: 2, max_seq_len: 4, batch_tokens: 32}, {steps: 2, max_seq_len: 8}]"
BATCHES = "train.ramp=[{steps: 2, batch_tokens: 16}, {steps: 2, batch_tokens: 48}]"


def test_stages_have_the_rows_and_steps_that_were_stated() -> None:
    steps = first_steps(config(RAMP, "train.steps=8"), 6)
    assert [(len(batch.inputs), batch.inputs.shape[1]) for (batch,) in steps] == [(8, 4)] * 2 + [(16, 8)] * 2 + [
        (8, 16)
    ] * 2


def test_tokens_are_counted_as_they_are_seen() -> None:
    settings = config(RAMP, "train.steps=6")
    seen = [sum(batch.tokens for batch in batches) for batches in first_steps(settings, 6)]
    counted = [line["tokens"] for line in metrics(train("run", RAMP, "train.steps=6")) if "tokens_per_second" in line]
    assert counted == [sum(seen[: number + 1]) for number in range(6)]


@pytest.mark.parametrize(
    ("task", "ramp"),
    [(task, RAMP) for task in ("causal", "masked")] + [(task, BATCHES) for task in TASKS],
    ids=lambda value: {RAMP: "lengths", BATCHES: "batches"}.get(value, value),
)
def test_a_run_resumed_in_any_stage_is_the_whole(task: str, ramp: str) -> None:
    changes = (*TASKS[task], *HARD, ramp, "train.steps=6", "train.save_every=1")
    train("whole", *changes)
    for number in (1, 2, 4):
        stop_at("whole", number, f"resumed-{number}")
        resume(f"resumed-{number}")
        assert_same_checkpoint(step("whole", 6), step(f"resumed-{number}", 6))
        assert losses(f"resumed-{number}") == losses("whole")


def test_the_start_tells_the_stages() -> None:
    told: list[dict[str, Any]] = []
    fit(config(RAMP, "train.steps=5"), run_dir="run", listener=told.append)
    assert told[0]["ramp"] == [
        "steps 1 to 2: 32 tokens each in rows of 4",
        "steps 3 to 4: 128 tokens each in rows of 8",
    ]


@pytest.mark.parametrize("task", ["translate", "classify"])
def test_lengths_are_refused_where_examples_are_whole(task: str) -> None:
    with pytest.raises(ConfigError, match=rf"`train\.ramp` and `objective\.kind`.*{task} takes its examples whole"):
        config(*TASKS[task], RAMP, "train.steps=8")


@pytest.mark.parametrize("task", ["denoise", "span"])
def test_texts_that_are_corrupted_are_cut_as_short_as_a_stage_says(task: str) -> None:
    ramp = "train.ramp=[{steps: 1, max_seq_len: 8}]"
    (first,), (second,) = first_steps(config(*TASKS[task], ramp, "train.batch_tokens=100000"), 2)
    assert first.source.shape[1] <= 8 < second.source.shape[1]


def test_rows_longer_than_the_context_are_refused() -> None:
    with pytest.raises(ConfigError, match="rows of 17 tokens are longer than the context of 16"):
        config("train.ramp=[{steps: 1, max_seq_len: 17}]")


def test_a_ramp_that_takes_the_whole_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="the ramp takes 4 of 4 steps"):
        config(RAMP)
