"""A run that stopped and went on is the run that never stopped, bit for bit."""

from __future__ import annotations

import json
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from qkv.checkpoint import store
from qkv.checkpoint.lock import locked
from qkv.checkpoint.store import find_checkpoint, load_checkpoint
from qkv.config.errors import ConfigError, ConflictError, DamagedError, NotFoundError, QkvError, UsageError
from qkv.nn.transformer import Transformer
from qkv.train.loop import Interrupted, fit
from qkv.train.resume import resume

from .small import (
    ADAMW,
    MUON,
    TASKS,
    assert_equal,
    assert_same_checkpoint,
    config,
    first_steps,
    losses,
    metrics,
    rewrite_state,
    step,
    steps_of,
    train,
    weights,
)
from .test_experts import MIXED

# dropout, micro-batches of uneven size, and steps that cross from one epoch to the next
HARD = ("model.dropout=0.2", "train.batch_tokens=160", "train.micro_batch_tokens=48", "train.schedule.warmup=3")


def stop_at(run: str, number: int, as_run: str) -> Path:
    """A copy of a run as it was when its checkpoint after step `number` had just been saved."""
    copy = Path(shutil.copytree(run, as_run))
    for folder in (copy / "checkpoints").iterdir():
        if int(folder.name.removeprefix("step-")) > number:
            shutil.rmtree(folder)
    return copy


def interrupting(at: int) -> Any:
    """A listener that presses Ctrl-C in step `at`."""

    def listen(event: dict[str, Any]) -> None:
        if event["event"] == "train" and event["step"] == at:
            signal.raise_signal(signal.SIGINT)

    return listen


@pytest.mark.parametrize("task", TASKS)
def test_the_settings_below_leave_nothing_easy(task: str) -> None:
    steps = first_steps(config(*TASKS[task], *HARD), 4)
    assert any(len({batch.target_count for batch in batches}) > 1 for batches in steps)
    if task in ("causal", "masked"):
        assert [len(batch.inputs) for batch in steps[0]] == [3, 3, 3, 1]
        assert any(batch.documents is not None for batch in steps[0])
    still = losses(train("still", *TASKS[task], *HARD, "model.dropout=0"))
    assert losses(train("dropping", *TASKS[task], *HARD))[0][1] != still[0][1]


@pytest.mark.parametrize(
    ("task", "optimizer"),
    [*((task, ADAMW) for task in TASKS), ("causal", MUON), ("masked", MUON), ("translate", MUON)],
    ids=[*TASKS, "causal-muon", "masked-muon", "translate-muon"],
)
def test_half_and_half_is_the_whole(task: str, optimizer: tuple[str, ...]) -> None:
    changes = (*TASKS[task], *HARD, *optimizer, "train.steps=16", "train.save_every=8", "train.eval_every=4")
    train("whole", *changes)
    stop_at("whole", 8, "halves")
    resume("halves")
    assert_same_checkpoint(step("whole", 16), step("halves", 16))
    assert losses("halves") == losses("whole")
    for line in (halves := metrics("halves")) + (whole := metrics("whole")):
        line.pop("tokens_per_second", None)
    assert halves == whole
    epochs = [json.loads((step("whole", n) / "state.json").read_text())["loader"]["epoch"] for n in (8, 16)]
    assert epochs[0] < epochs[1]


RESIDUALS = {
    "none": (),
    "rezero": (),
    "layerscale": (),
    "deepnorm": ("model.norm.placement=post",),
    "hyper-connections": ("model.residual.fractions=2",),
    "mhc": (),
    "attention-residuals": ("model.residual.block_size=1",),
}
OTHERS = {
    **{
        f"{kind}, {family}": (f"model.family={family}", f"model.residual.kind={kind}", *changes)
        for kind, changes in RESIDUALS.items()
        for family in ("decoder", "encoder")
    },
    **{f"{kind}, translate": (*TASKS["translate"], f"model.residual.kind={kind}") for kind in ("mhc", "rezero")},
    "value residual": ("model.attention.value_residual=learned",),
    "prefix": ("objective.kind=prefix",),
    "latent attention": ("model.attention={kind: latent, num_heads: 2, kv_rank: 16, nope_dim: 8, rope_dim: 8}",),
    "experts": (MIXED,),
    "translating experts with muon": (*TASKS["translate"], MIXED, *MUON),
    "alibi and smoothing": ("model.position.kind=alibi", "train.label_smoothing=0.1"),
    "relative positions": ("model.position.kind=relative",),
}
"""What else a run may be made of."""


@pytest.mark.parametrize("changes", OTHERS.values(), ids=OTHERS.keys())
def test_every_part_goes_on_where_it_stopped(changes: tuple[str, ...]) -> None:
    changes = (*changes, *HARD, *(() if MUON[0] in changes else ADAMW), "train.save_every=2", "train.eval_every=1")
    train("whole", *changes)
    stop_at("whole", 2, "halves")
    resume("halves")
    assert_same_checkpoint(step("whole", 4), step("halves", 4))
    assert losses("halves") == losses("whole")


def test_a_run_resumed_after_every_step_is_the_whole() -> None:
    changes = (*HARD, *MUON, "train.steps=5", "train.save_every=1", "train.keep=1")
    train("whole", *changes)
    with pytest.raises(Interrupted):
        fit(config(*changes), run_dir="pieces", listener=interrupting(1))
    for number in (2, 3, 4):
        with pytest.raises(Interrupted):
            resume("pieces", listener=interrupting(number))
    resume("pieces")
    assert_same_checkpoint(step("whole", 5), step("pieces", 5))
    assert losses("pieces") == losses("whole")


@pytest.mark.parametrize("position", ["learned", "sinusoidal", "none"])
def test_other_positions_tied_heads_and_biases_go_on_too(position: str) -> None:
    changes = (
        *HARD,
        f"model.position.kind={position}",
        "model.tie_embeddings=head",
        "model.norm.kind=layernorm",
        "model.attention.bias=true",
        "train.save_every=2",
    )
    train("whole", *changes)
    stop_at("whole", 2, "halves")
    resume("halves")
    assert_same_checkpoint(step("whole", 4), step("halves", 4))


@pytest.mark.parametrize("optimizer", [ADAMW, MUON], ids=["adamw", "muon"])
def test_what_had_no_gradient_is_no_obstacle(optimizer: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    build = Transformer._build

    def build_with_a_spare_part(self: Transformer, *arguments: Any) -> None:
        build(self, *arguments)
        self.spare = torch.nn.Parameter(torch.empty(3, 3))

    monkeypatch.setattr(Transformer, "_build", build_with_a_spare_part)
    train("whole", *optimizer, "train.save_every=2")
    stop_at("whole", 2, "halves")
    resume("halves")
    assert_same_checkpoint(step("whole", 4), step("halves", 4))


def test_more_steps_may_be_asked_for() -> None:
    changes = (*HARD, "train.schedule.kind=constant", "train.save_every=3")
    train("whole", *changes, "train.steps=6")
    train("longer", *changes, "train.steps=3")
    run = resume("longer", steps=6)
    assert (run.step, run.path.name) == (6, "longer")
    assert_equal(weights("whole", 6), weights("longer", 6))
    assert load_checkpoint(step("longer", 6)).config.train.steps == 6


def test_a_finished_run_says_how_to_take_more_steps() -> None:
    train("run")
    before = metrics("run")
    with pytest.raises(UsageError, match=r"taken all its 4 steps[\s\S]*train\.steps=N"):
        resume("run")
    with pytest.raises(UsageError, match="the run is at step 4 already"):
        resume("run", steps=3)
    assert metrics("run") == before
    assert steps_of("run") == ["step-000004"]


def test_the_configuration_of_a_run_says_what_is_trained_and_is_not_changed_by_hand() -> None:
    train("run", "train.steps=2")
    resume("run", steps=4, skip_non_finite=7)
    path = Path("run/config.yaml")
    assert path.read_text() == (step("run", 4) / "config.yaml").read_text()
    kept = path.read_text()
    path.write_text(kept.replace("clip: 1.0", "clip: 0.5"))
    assert path.read_text() != kept
    with pytest.raises(ConflictError, match=r"configuration was changed, .*: train\.clip\n  at .*run/config\.yaml"):
        resume("run", steps=6)
    assert steps_of("run") == ["step-000002", "step-000004"]
    path.unlink()
    resume("run", steps=6)
    assert path.read_text() == kept.replace("steps: 4", "steps: 6")


def test_what_a_run_goes_on_without_is_told() -> None:
    train("run", "train.save_every=2")
    (step("run", 4) / "state.json").unlink()
    lines = Path("run/metrics.jsonl").read_text().splitlines()
    Path("run/metrics.jsonl").write_text("\n".join([lines[0], "junk", *lines[1:]]) + "\n")
    told: list[dict[str, Any]] = []
    resume("run", listener=told.append)
    notes = [event["text"] for event in told if event["event"] == "note"]
    assert "going on from step 2" in notes
    assert "step-000004 has no state.json and is no checkpoint" in notes
    assert "lines of metrics.jsonl that could not be read and were dropped: 1" in notes
    assert steps_of("run") == ["step-000002", "step-000004"]


def test_a_run_that_ended_before_its_first_checkpoint_is_not_sent_in_circles() -> None:
    train("run")
    shutil.rmtree(step("run", 4))
    with pytest.raises(NotFoundError, match=r"ended before its first checkpoint[\s\S]*removing it"):
        resume("run")
    with pytest.raises(ConflictError, match="whose run has no checkpoint to go on from"):
        train("run")


def test_a_checkpoint_without_its_state_is_named() -> None:
    train("run")
    (step("run", 4) / "state.json").unlink()
    for place in ("run", step("run", 4)):
        with pytest.raises(DamagedError, match=r"state\.json is missing\n  at .*step-000004"):
            find_checkpoint(Path(place))


def test_the_second_ctrl_c_names_the_checkpoint_to_go_on_from() -> None:
    def listen(event: dict[str, Any]) -> None:
        if event["event"] == "train" and event["step"] == 3:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted, match=r"^interrupted; the newest checkpoint is step-000002; go on with: .* run$"):
        fit(config("train.save_every=2", "train.log_every=1"), run_dir="run", listener=listen)


def test_steps_that_the_schedule_does_not_allow_are_refused_before_anything_is_saved() -> None:
    """A checkpoint with them could not be loaded again."""
    train("run", "train.schedule.warmup=4", "train.save_every=2")
    shutil.rmtree(step("run", 4))
    with pytest.raises(ConfigError, match=r"train\.schedule\.warmup.*train\.steps"):
        resume("run", steps=3)
    assert steps_of("run") == ["step-000002"]


# --- what the caller and the run owe each other -----------------------------------------------------------------------


@pytest.mark.parametrize("task", ["causal", "translate", "classify"])
def test_validating_and_saving_change_nothing(task: str) -> None:
    changes = (*TASKS[task], *HARD, "train.steps=6")
    plain = train("plain", *changes, "data.validation=0.1")
    busy = train("busy", *changes, "data.validation=0.1", "train.eval_every=1", "train.save_every=1")
    assert_equal(weights(plain, 6), weights(busy, 6))
    assert losses(plain) == losses(busy)


@pytest.mark.parametrize("family", ["decoder", "encoder"])
def test_a_run_without_validation_is_the_run_with_it(family: str) -> None:
    Path("held.txt").write_text("a cat sees the house\nthe dog knows\n", encoding="utf-8")
    plain = train("plain", *HARD, "data.validation=0", family=family)
    watched = train("watched", *HARD, "data.validation=[held.txt]", "train.eval_every=1", family=family)
    assert_equal(weights(plain, 4), weights(watched, 4))
    assert losses(plain) == losses(watched)


@pytest.mark.parametrize("stopped", [False, True], ids=["finished", "interrupted"])
def test_the_callers_generators_are_left_alone(stopped: bool) -> None:
    import random

    import numpy as np

    def states() -> list[Any]:
        kept = np.random.get_state()
        return [torch.get_rng_state().tolist(), random.getstate(), [str(part) for part in kept], kept[1].tolist()]

    torch.manual_seed(123)
    torch.randn(5)  # half of a pair of normal numbers stays behind in the generator
    before = states()
    if stopped:
        with pytest.raises(Interrupted):
            fit(config(*HARD), run_dir="run", listener=interrupting(2))
        resume("run")
    else:
        train("run", *HARD)
    assert states() == before


def test_the_callers_generators_have_no_say() -> None:
    torch.manual_seed(1)
    one = weights(train("one", *HARD), 4)
    torch.manual_seed(2)
    assert_equal(one, weights(train("other", *HARD), 4))


def test_another_seed_is_another_run() -> None:
    one, other = losses(train("one", *HARD)), losses(train("other", *HARD, "train.seed=1"))
    assert all(first[1] != second[1] for first, second in zip(one, other, strict=True))


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------


def test_ctrl_c_saves_once_and_names_the_run_to_resume() -> None:
    saved: list[int] = []
    notes: list[str] = []

    def listen(event: dict[str, Any]) -> None:
        interrupting(3)(event)
        if event["event"] == "checkpoint":
            saved.append(event["step"])
        if event["event"] == "note":
            notes.append(event["text"])

    changes = (*HARD, "train.steps=6", "train.save_every=3")  # the step would be saved anyway
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted, match=r"qkv train --resume run$") as stop:
        fit(config(*changes), run_dir="run", listener=listen)
    assert stop.value.run == Path("run")
    assert saved == [3]
    assert notes == ["stopping after this step; Ctrl-C again stops at once and saves nothing"]
    assert signal.getsignal(signal.SIGINT) is before
    resume("run")
    train("whole", *changes)
    assert_same_checkpoint(step("whole", 6), step("run", 6))


def test_ctrl_c_while_saving_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    save = store.save_file

    def press(*arguments: Any) -> None:
        if not Path("run/checkpoints/step-000002").exists():
            signal.raise_signal(signal.SIGINT)
            monkeypatch.setattr(store, "save_file", save)
        save(*arguments)

    changes = (*HARD, "train.save_every=2", "train.steps=6")
    monkeypatch.setattr(store, "save_file", press)
    with pytest.raises(Interrupted):
        fit(config(*changes), run_dir="run")
    assert steps_of("run") == ["step-000002", "step-000003"]
    resume("run")
    assert_same_checkpoint(step(train("whole", *changes), 6), step("run", 6))


def test_the_command_to_go_on_can_be_pasted() -> None:
    with pytest.raises(Interrupted, match=r"qkv train --resume 'my run'$"):
        fit(config(), run_dir="my run", listener=interrupting(1))


def test_ctrl_c_in_the_last_step_finishes_the_run() -> None:
    run = fit(config(), run_dir="run", listener=interrupting(4))
    assert run.step == 4
    assert steps_of("run") == ["step-000004"]


def test_a_second_ctrl_c_stops_at_once_and_saves_nothing() -> None:
    def listen(event: dict[str, Any]) -> None:
        for _ in range(2):
            interrupting(2)(event)

    with pytest.raises(KeyboardInterrupt) as stop:
        fit(config(), run_dir="run", listener=listen)
    assert not isinstance(stop.value, Interrupted)
    assert steps_of("run") == []


def test_training_works_outside_the_main_thread() -> None:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(fit(config(), run_dir="run").step))
    thread.start()
    thread.join()
    assert found == [4]


# --- what a resume refuses, and says ----------------------------------------------------------------------------------


def test_resuming_prints_the_loss_of_one_fixed_batch_beside_the_saved_one() -> None:
    train("run", "train.save_every=2")
    shutil.rmtree(step("run", 4))
    notes: list[str] = []
    resume("run", listener=lambda event: notes.append(event["text"]) if event["event"] == "note" else None)
    told = json.loads((step("run", 2) / "state.json").read_text())["probe_loss"]
    assert notes == [f"loss on the fixed batch: {told:.6f} when saved, {told:.6f} now", "going on from step 2"]


def test_a_model_that_is_not_the_one_that_was_saved_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    train("run", "train.save_every=2")
    shutil.rmtree(step("run", 4))
    told = json.loads((step("run", 2) / "state.json").read_text())["probe_loss"]
    rewrite_state(step("run", 2), probe_loss=told + 0.1)
    with pytest.raises(QkvError, match="not the one that was saved"):
        resume("run")


@pytest.mark.parametrize("change", ["changed", "longer", "gone"])
def test_changed_data_are_refused(change: str) -> None:
    train("run", "train.save_every=2")
    shutil.rmtree(step("run", 4))
    before = metrics("run")
    corpus = Path("corpus.txt")
    text = corpus.read_text(encoding="utf-8")
    if change == "gone":
        corpus.unlink()
        with pytest.raises(NotFoundError, match=r"corpus\.txt"):
            resume("run")
    else:
        changed = (
            text + "one more line\n" if change == "longer" else text[:-2] + ("a" if text[-2] != "a" else "b") + "\n"
        )
        corpus.write_text(changed, encoding="utf-8")
        with pytest.raises(QkvError, match="not what they were"):
            resume("run")
    assert metrics("run") == before
    corpus.write_text(text, encoding="utf-8")
    assert resume("run").step == 4


def test_a_run_that_is_going_on_is_not_resumed_whether_it_has_a_checkpoint_or_not() -> None:
    train("run", "train.save_every=2")
    for left in (4, 2, None):
        with locked(Path("run")), pytest.raises(ConflictError, match=r"going on in process \d+ on .* since"):
            resume("run", steps=9)
        if left:
            shutil.rmtree(step("run", left))


def test_there_must_be_something_to_resume() -> None:
    with pytest.raises(NotFoundError, match="no such file or folder"):
        resume("nowhere")
    Path("empty").mkdir()
    with pytest.raises(NotFoundError, match="no model is here"):
        resume("empty")


def test_a_checkpoint_that_the_run_has_left_behind_is_refused_before_a_step_is_taken() -> None:
    train("run", "train.save_every=2")
    before = metrics("run")
    with pytest.raises(ConflictError, match=r"gone on[\s\S]*step-000004"):
        resume(step("run", 2), steps=8)
    assert metrics("run") == before
    assert resume(step("run", 4), steps=5).path.name == "run"


def test_a_model_outside_a_run_is_not_resumed() -> None:
    train("run")
    shutil.copytree(step("run", 4), "models/model")
    with pytest.raises(UsageError, match="not in a run"):
        resume("models/model", steps=8)
    assert [path.name for path in Path("models").iterdir()] == ["model"]


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_metrics_after_the_resumed_step_are_dropped_and_taken_again() -> None:
    train("run", "train.steps=6", "train.save_every=2", "train.eval_every=1")
    whole = metrics("run")
    shutil.rmtree(step("run", 6))
    shutil.rmtree(step("run", 4))
    with (Path("run") / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 7, "loss": 1.')  # cut off by a kill
    resume("run")
    for line in (again := metrics("run")) + whole:
        line.pop("tokens_per_second", None)
    assert again == whole


@pytest.mark.parametrize(
    "left",
    [
        b"",
        b'{"step": 1, "lo',
        b"\n",
        b"[]\n",
        b"7\n",
        b"null\n",
        b"\xff\n",
        b"[" * 99999,
        b'{"step": "x"}\n',
        b"{}\n",
        None,
    ],
)
def test_a_metrics_file_that_says_little_is_no_obstacle(left: bytes | None) -> None:
    train("run", "train.save_every=2")
    shutil.rmtree(step("run", 4))
    path = Path("run/metrics.jsonl")
    path.unlink() if left is None else path.write_bytes(left)
    resume("run")
    assert [number for number, _ in losses("run")] == [3, 4]


def test_a_folder_of_samples_that_is_gone_is_made_again() -> None:
    train("run", "train.save_every=2")
    shutil.rmtree(step("run", 4))
    shutil.rmtree(Path("run/samples"))
    resume("run")
    assert Path("run/samples/step-000004.txt").is_file()


def test_a_damaged_older_checkpoint_is_found_before_a_step_is_taken() -> None:
    train("run", "train.save_every=2")
    (step("run", 2) / "state.json").write_text("{", encoding="utf-8")
    with pytest.raises(
        QkvError, match=r"removing this checkpoint: the run has later ones, up to .*step-000004"
    ) as error:
        resume("run", steps=6)
    assert "step-000002" in str(error.value.where)
    assert [number for number, _ in losses("run")] == [1, 2, 3, 4]
