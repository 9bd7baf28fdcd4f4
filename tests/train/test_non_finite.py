"""A loss or a gradient that is no number: the batch is named and passed over, and the run stops when there are many."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from media_files import WRITE, media_config
from safetensors.torch import load_file

from qkv.config.run import Config
from qkv.data import BatchLoader, prepare
from qkv.data.places import places
from qkv.data.prefetch import Prefetched
from qkv.data.rows import Batch
from qkv.data.tokenizers import has_texts, tokenizer_for
from qkv.evaluate.runs import summarise_run
from qkv.train import loop
from qkv.train.loop import NonFiniteError, Trainer, fit
from qkv.train.resume import resume

from .small import (
    TASKS,
    assert_equal,
    assert_same_checkpoint,
    config,
    first_steps,
    losses,
    metrics,
    step,
    steps_of,
    train,
)
from .test_experts import MIXED
from .test_ramp import BATCHES as RAMP_OF_BATCHES
from .test_resume import stop_at

UNEVEN = ("train.micro_batch_tokens=48", "train.save_every=1")


def second_batch(settings: Config) -> int:
    """Where the last row of step 2 begins."""
    return int(first_steps(settings, 2)[1][-1].origins_B[-1])


def poison(monkeypatch: pytest.MonkeyPatch, origin: int, what: str) -> None:
    """Let the loss, or only its gradient, be nan wherever the row that begins at `origin` is trained on."""
    forward = Trainer._forward

    def poisoned(self: Trainer, batch: Batch) -> Any:
        output = forward(self, batch)
        if torch.is_grad_enabled() and origin in batch.origins_B:
            if what == "loss":
                return replace(output, loss_sum=output.loss_sum * math.nan)
            output.loss_sum.register_hook(lambda gradient: gradient * math.nan)
        return output

    monkeypatch.setattr(Trainer, "_forward", poisoned)


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_batch_passed_over_leaves_everything_as_if_it_had_not_been_there(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, optimiser state, and the loads that experts' biases follow."""
    changes = (MIXED, *UNEVEN)
    origin = second_batch(config(*changes))
    with monkeypatch.context() as patch:
        poison(patch, origin, what)
        train("run", *changes)
    take = BatchLoader.__next__

    def without(self: BatchLoader) -> list[Batch]:
        batches = take(self)
        return take(self) if any(origin in batch.origins_B for batch in batches) else batches

    monkeypatch.setattr(BatchLoader, "__next__", without)
    train("other", *changes)
    assert losses("run") == losses("other")
    for file in ("model.safetensors", "training.safetensors"):
        assert_equal(load_file(step("run", 4) / file), load_file(step("other", 4) / file))


@pytest.mark.parametrize(("what", "rows"), [("loss", 2), ("gradient", 8)])
def test_what_was_passed_over_is_told_and_recorded(what: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the rows of the micro-batch where it is known, else by all of the step."""
    origin = second_batch(config(*UNEVEN))
    poison(monkeypatch, origin, what)
    told: list[dict[str, Any]] = []
    fit(config(*UNEVEN), run_dir="run", listener=told.append)
    (event,) = [event for event in told if event["event"] == "skip"]
    (record,) = [line for line in metrics("run") if "skipped" in line]
    assert {key: event[key] for key in record} == record
    assert (record["step"], record["skipped"]) == (2, 1)
    assert record["non_finite"] == ("loss" if what == "loss" else "gradient norm")
    assert len(record["places"]) == min(rows, 5)
    assert record["places"][-1].endswith("" if rows <= 4 else " more")
    assert event["text"].startswith(f"the {record['non_finite']} is nan at step 2: batch passed over (1 of at most 3)")
    assert [number for number, _ in losses("run")] == [1, 2, 3, 4]


def test_over_the_budget_the_run_stops_with_the_step_and_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, second_batch(config(*UNEVEN)), "loss")
    with pytest.raises(NonFiniteError, match=r"the loss is nan at step 2\n  at document \d+ of corpus\.txt") as stop:
        train("run", *UNEVEN, "train.skip_non_finite=0")
    assert stop.value.exit_code == 1
    assert "the last checkpoint is intact" in str(stop.value.hint)
    assert steps_of("run") == ["step-000001"]
    assert metrics("run")[-1] == {"step": 2, "failed": "the loss is nan at step 2"}
    summary = summarise_run(Path("run"))
    assert (summary.state, summary.step) == ("failed", 1)
    assert "\nThe run stopped: the loss is nan at step 2.\n" in Path("run/report.md").read_text()
    assert not any("skipped" in line for line in metrics("run"))
    with pytest.raises(NonFiniteError, match="the last checkpoint is intact"):  # going on meets the same batch
        resume("run")
    resume("run", skip_non_finite=1)
    train("other", *UNEVEN, "train.skip_non_finite=1")
    assert_same_checkpoint(step("other", 4), step("run", 4))


def test_the_budget_is_that_of_the_whole_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was passed over before the checkpoint counts after it."""
    poison(monkeypatch, second_batch(config(*UNEVEN)), "loss")
    changes = (*UNEVEN, "model.dropout=0.2", "train.skip_non_finite=1", "train.steps=20")  # of about 12 to an epoch
    with pytest.raises(NonFiniteError, match="at step 1"):
        train("run", *changes)
    last = len(steps_of("run"))
    stop_at("run", last - 1, "again")
    with pytest.raises(NonFiniteError):
        resume("again")
    assert_same_checkpoint(step("run", last), step("again", last))


def test_a_stage_of_a_ramp_ends_when_its_steps_have_been_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second batch is passed over, and the stage of two steps still has two; going on from any step is the same."""
    changes = (RAMP_OF_BATCHES, "model.dropout=0.2", "train.steps=6", "train.save_every=1")
    origin = second_batch(config(*changes))
    rows: list[int] = []
    poison(monkeypatch, origin, "loss")
    take = Prefetched.__next__

    def watched(self: Prefetched) -> list[Batch]:
        batches = take(self)
        rows.append(sum(len(batch.inputs) for batch in batches))
        return batches

    with monkeypatch.context() as patch:
        patch.setattr(Prefetched, "__next__", watched)
        train("whole", *changes)
    assert [line["step"] for line in metrics("whole") if "skipped" in line] == [2]
    assert rows == [1, 1, 1, 3, 3, 8, 8]
    for number in (1, 2, 3, 4):
        stop_at("whole", number, f"resumed-{number}")
        resume(f"resumed-{number}")
        assert_same_checkpoint(step("whole", 6), step(f"resumed-{number}", 6))


def test_weights_that_are_not_finite_are_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    def ruin(network: Any) -> None:
        with torch.no_grad():
            network.head.weight[0, 0] = math.inf

    train("run", "train.steps=2", "data.validation=0")
    monkeypatch.setattr(loop, "correct_biases", ruin)
    with pytest.raises(loop.QkvError, match=r"the weights of head\.weight are not all finite after step 3"):
        resume("run", steps=3)
    assert steps_of("run") == ["step-000002"]


# --- places -----------------------------------------------------------------------------------------------------------


def named(settings: Config, loader: Callable[..., BatchLoader] = BatchLoader) -> list[str]:
    """The places of every row of an epoch's first step."""
    tokenizer = tokenizer_for(settings, "cache") if has_texts(settings) else None
    prepared = prepare(settings, tokenizer, "cache/data")
    objective = settings.objective.model_copy(update={"labels": prepared.labels}) if prepared.labels else None
    batches = next(
        loader(
            prepared.train,
            objective or settings.objective,
            tokenizer,
            max_seq_len=settings.model.context,
            batch_tokens=settings.train.batch_tokens,
        )
    )
    return places(prepared, batches, tokenizer, most=100)


@pytest.mark.parametrize("task", [*TASKS, "prefix"])
def test_rows_of_text_are_named_by_number_and_first_words(task: str) -> None:
    settings = config(*TASKS.get(task, ("objective.kind=prefix",)))
    file, header = {"translate": ("pairs.tsv", 0), "classify": ("reviews.tsv", 1)}.get(task, ("corpus.txt", 0))
    lines = Path(file).read_text(encoding="utf-8").splitlines()[header:]
    found = named(settings)
    assert len(set(found)) > 1
    for place in found:
        unit, number, words = re.fullmatch(rf'(\w+) (\d+) of {file} from "(.*)"', place).groups()
        assert unit == {"translate": "pair", "classify": "text"}.get(task, "document")
        words = re.sub("<.*?>|\ufffd", "", words).strip()  # a window may begin and end inside a character
        assert words in lines[int(number) - 1].partition("\t")[0]


@pytest.mark.parametrize("kind", ["images", "audio"])
@pytest.mark.parametrize("task", ["classify", "translate"])
def test_images_and_recordings_are_named_by_their_files(kind: str, task: str, tmp_path: Path) -> None:
    found = named(media_config(kind, task, WRITE[kind](tmp_path)))
    assert found
    assert all(Path(place).is_file() and Path(place).suffix in (".png", ".wav") for place in found)


def test_one_of_several_files_is_told_by_the_number_among_all() -> None:
    Path("more.txt").write_text(Path("corpus.txt").read_text(encoding="utf-8"), encoding="utf-8")
    assert "of the 2 training files from" in named(config("data.train=[corpus.txt, more.txt]"))[0]
