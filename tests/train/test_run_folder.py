"""What a run leaves on disk, and which checkpoint is taken for what."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import qkv
from qkv.checkpoint import store
from qkv.checkpoint.store import best_of, checkpoints_of, find_checkpoint, load_checkpoint, read_state
from qkv.config.errors import ConflictError, DamagedError, QkvError
from qkv.config.run import Config
from qkv.train import run_folder
from qkv.train.loop import Trainer, fit
from qkv.train.resume import resume
from qkv.train.run_folder import RunFolder

from .small import assert_same_checkpoint, config, metrics, rewrite_state, step, steps_of, train

Usage = namedtuple("Usage", "total used free")


def losses_by_step(monkeypatch: pytest.MonkeyPatch, table: dict[int, float]) -> None:
    """Let validation find these losses."""

    def validate(self: Trainer, max_batches: int | None = None) -> float:
        return table.get(self.step, 9.0)

    monkeypatch.setattr(Trainer, "validate", validate)


# --- layout -----------------------------------------------------------------------------------------------------------


def test_a_run_folder_has_the_promised_parts() -> None:
    run = train("run", "train.steps=3", "train.eval_every=2", "train.save_every=2")
    assert {path.name for path in run.iterdir()} >= {
        "config.yaml",
        "metrics.jsonl",
        "env.json",
        "checkpoints",
        "samples",
    }
    assert steps_of(run) == ["step-000002", "step-000003"]
    for folder in (step(run, 2), step(run, 3)):
        assert {path.name for path in folder.iterdir()} == {
            "config.yaml",
            "tokenizer",
            "model.safetensors",
            "training.safetensors",
            "state.json",
        }


def test_the_saved_configuration_is_resolved_and_makes_the_same_run() -> None:
    run = train("run", "model.dropout=0.1", "model.layers=[{repeat: 1, dropout: 0.2}, {repeat: 1}]")
    saved = Config.load(run / "config.yaml")
    tree = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    assert [layer["dropout"] for layer in tree["model"]["layers"]] == [0.2, 0.1]
    assert tree["model"]["vocab_size"] == 260
    assert saved == Config.load(step(run, 4) / "config.yaml")
    again = fit(saved, run_dir="again")
    assert_same_checkpoint(step(run, 4), step(again.path, 4))


def test_metrics_have_the_promised_keys() -> None:
    run = train("run", "train.eval_every=2")
    training = [line for line in metrics(run) if "loss" in line]
    assert [line["step"] for line in training] == [1, 2, 3, 4]
    assert all(line.keys() == {"step", "loss", "lr", "grad_norm", "tokens", "tokens_per_second"} for line in training)
    assert [line["tokens"] for line in training] == sorted(line["tokens"] for line in training)
    assert all(line["tokens_per_second"] > 0 for line in training)
    held_out = [line for line in metrics(run) if "val_loss" in line]
    assert [line["step"] for line in held_out] == [2, 4]
    assert all(line.keys() == {"step", "tokens", "val_loss"} for line in held_out)


@pytest.mark.parametrize(("every", "logged"), [(3, [1, 3, 6, 7]), (100, [1, 7])])
def test_the_first_and_the_last_step_are_always_logged(every: int, logged: list[int]) -> None:
    run = train("run", "train.steps=7", f"train.log_every={every}", "data.validation=0")
    assert [line["step"] for line in metrics(run)] == logged


def test_the_environment_names_versions_commit_hardware_and_seed() -> None:
    told = json.loads((train("run", "train.seed=5") / "env.json").read_text(encoding="utf-8"))
    assert told["packages"]["torch"] == torch.__version__
    assert told["packages"]["qkv"] == qkv.__version__
    assert (told["seed"], told["threads"]) == (5, torch.get_num_threads())
    assert told["commit"] is None or re.fullmatch("[0-9a-f]{40}", told["commit"])
    assert told.keys() >= {"python", "platform", "processor", "cores", "gpus"}


def test_runs_latest_points_at_the_newest_run() -> None:
    first, second = (fit(config("train.steps=1"), name=name).path for name in ("first", "second"))
    assert first.parent == second.parent == Path("runs")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d{6}_first_[0-9a-f]{4}", first.name)
    assert Path("runs/latest").resolve() == second.resolve()
    assert qkv.load("runs/latest").config.train.steps == 1
    train("elsewhere", "train.steps=1")
    assert Path("runs/latest").resolve() == second.resolve()


def test_resuming_latest_goes_on_in_the_run_itself() -> None:
    first = fit(config("train.steps=1"), name="first").path
    run = resume("runs/latest", steps=2)
    assert run.path.resolve() == first.resolve()
    assert steps_of(first) == ["step-000001", "step-000002"]


def test_something_called_latest_that_is_no_link_is_left_alone() -> None:
    Path("runs/latest").mkdir(parents=True)
    fit(config("train.steps=1"))
    assert not Path("runs/latest").is_symlink()
    assert sorted(path.name[:4] for path in Path("runs").iterdir())[-1] == "late"
    assert not list(Path("runs").glob(".latest*"))


# --- a folder in use --------------------------------------------------------------------------------------------------


def test_a_folder_with_something_in_it_is_a_conflict() -> None:
    Path("used").mkdir()
    Path("used/notes.txt").write_text("precious", encoding="utf-8")
    with pytest.raises(ConflictError, match=r"not empty[\s\S]*try another --run-dir$") as conflict:
        train("used")
    assert conflict.value.exit_code == 5
    assert [path.name for path in Path("used").iterdir()] == ["notes.txt"]


def test_a_file_in_its_place_is_a_conflict() -> None:
    with pytest.raises(ConflictError):
        train("corpus.txt")


def test_the_conflict_is_found_before_the_text_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    train("run", "train.steps=1")
    shutil.rmtree("cache")
    with pytest.raises(ConflictError):
        train("run", "tokenizer.kind=bpe", "tokenizer.vocab_size=300")
    assert not Path("cache").exists()


def test_an_empty_folder_is_as_good_as_none() -> None:
    Path("empty").mkdir()
    assert train("empty", "train.steps=1") == Path("empty")


# --- rotation, best and newest ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep", "table", "left"),
    [
        (2, {1: 5.0, 2: 4.0, 3: 3.0, 4: 2.0, 5: 1.0, 6: 0.5}, [5, 6]),
        (2, {1: 5.0, 2: 1.0, 3: 3.0, 4: 3.5, 5: 4.0, 6: 4.5}, [2, 5, 6]),
        (1, {1: 0.1, 2: 1.0, 3: 3.0, 4: 3.5, 5: 4.0, 6: 4.5}, [1, 6]),
        (1, {}, [6]),  # all alike: the newest is the best
        (9, {}, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_rotation_keeps_the_newest_and_the_best(
    keep: int, table: dict[int, float], left: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    losses_by_step(monkeypatch, table)
    run = train("run", "train.steps=6", "train.eval_every=1", "train.save_every=1", f"train.keep={keep}")
    assert steps_of(run) == [f"step-{number:06d}" for number in left]
    best = min(left, key=lambda number: (table.get(number, 9.0), -number))
    assert find_checkpoint(run) == step(run, best)
    assert find_checkpoint(run, newest=True) == step(run, 6)
    assert load_checkpoint(run).path == step(run, best)


def test_a_checkpoint_that_was_not_validated_does_not_borrow_the_loss_of_an_earlier_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    losses_by_step(monkeypatch, {2: 1.0, 4: 2.0, 6: 3.0})
    run = train("run", "train.steps=6", "train.eval_every=2", "train.save_every=1", "train.keep=1")
    assert steps_of(run) == ["step-000002", "step-000006"]
    assert load_checkpoint(run).path == step(run, 2)


def test_resuming_takes_the_newest_and_rotation_still_knows_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    losses_by_step(monkeypatch, {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0})
    changes = ("train.eval_every=1", "train.save_every=1", "train.keep=1")
    train("run", *changes, "train.steps=3")
    assert resume("run", steps=4).step == 4
    assert steps_of("run") == ["step-000001", "step-000004"]


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_nothing_is_refused(keep: int) -> None:
    with pytest.raises(QkvError, match="keep"):
        config(f"train.keep={keep}")


def test_a_loss_that_is_no_number_is_never_the_best() -> None:
    run = train("run", "train.eval_every=1", "train.save_every=1")
    for number, loss in ((1, float("nan")), (2, "low"), (3, None)):
        rewrite_state(step(run, number), val_loss=loss)
    assert best_of(checkpoints_of(run)) == step(run, 4)


def test_copies_that_people_make_are_not_checkpoints_of_the_run() -> None:
    run = train("run")
    shutil.copytree(step(run, 4), run / "checkpoints/step-000004-copy")
    shutil.copytree(step(run, 4), run / "checkpoints/step-best")
    assert checkpoints_of(run) == [step(run, 4)]
    assert resume(run, steps=5).step == 5
    assert load_checkpoint(run / "checkpoints/step-best").state["step"] == 4


def test_more_steps_than_the_name_has_digits_for_are_still_in_order() -> None:
    run = train("run")
    for number in (999_999, 1_000_000):
        shutil.copytree(step(run, 4), run / f"checkpoints/step-{number}")
    assert [path.name for path in checkpoints_of(run)] == ["step-000004", "step-999999", "step-1000000"]


# --- half-written checkpoints -----------------------------------------------------------------------------------------


def half_written(run: Path, number: int) -> None:
    """What a kill in the middle of saving leaves beside the checkpoints."""
    beside = run / f"checkpoints/.step-{number:06d}.tmp-12345"
    shutil.copytree(step(run, 2), beside)
    (beside / "model.safetensors").write_bytes(b"half")


def test_a_half_written_checkpoint_is_never_chosen_and_is_cleared_away() -> None:
    run = train("run", "train.save_every=2")
    shutil.rmtree(step(run, 4))
    half_written(run, 4)
    assert checkpoints_of(run) == [step(run, 2)]
    assert find_checkpoint(run) == find_checkpoint(run, newest=True) == step(run, 2)
    assert resume(run).step == 4
    assert steps_of(run) == ["step-000002", "step-000004"]


def test_a_checkpoint_without_its_state_is_never_chosen_and_is_taken_again() -> None:
    run = train("run", "train.save_every=2")
    whole = shutil.copytree(step(run, 4), "whole")
    (step(run, 4) / "state.json").unlink()
    (step(run, 4) / "config.yaml").unlink()
    assert load_checkpoint(run).path == step(run, 2)
    assert resume(run).step == 4
    assert_same_checkpoint(step(run, 4), Path(whole))


@pytest.mark.parametrize("what", ["a folder as its state", "a file"])
def test_what_stands_where_a_checkpoint_belongs_is_found_before_a_resumed_step(what: str) -> None:
    run = train("run", "train.save_every=2")
    before = metrics(run)
    shutil.rmtree(step(run, 4))
    if what == "a file":
        step(run, 4).write_text("precious", encoding="utf-8")
    else:
        (step(run, 4) / "state.json").mkdir(parents=True)
    with pytest.raises(ConflictError, match=r"is where that of step 4 belongs\n  at .*step-000004\n  try moving it"):
        resume(run)
    assert metrics(run) == before
    step(run, 4).rename("aside")
    assert resume(run).step == 4


def test_a_run_with_nothing_but_half_a_checkpoint_has_no_model() -> None:
    run = train("run")
    (step(run, 4) / "state.json").unlink()
    for load in (load_checkpoint, qkv.load, resume):
        with pytest.raises(DamagedError, match=r"the checkpoint's state\.json is missing"):
            load(run)


def test_a_deletion_that_stops_half_way_leaves_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    run = train("run", "train.steps=2", "train.save_every=1")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *arguments, **options: None)
        RunFolder(run).rotate(1)
    assert checkpoints_of(run) == [step(run, 2)]
    RunFolder(run).rotate(1)
    assert steps_of(run) == ["step-000002"]


@pytest.mark.parametrize("file", ["state.json", "config.yaml", "model.safetensors", "training.safetensors"])
def test_one_flipped_byte_names_the_file_and_where_the_run_can_go_on_from(file: str) -> None:
    run = train("run", "train.save_every=2")
    content = (step(run, 4) / file).read_bytes()
    place = content.index(b'"step": 4') + 8 if file == "state.json" else len(content) // 2
    (step(run, 4) / file).write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    said = rf"{file} is not what was written\n  at .*{file}\n  try removing step-000004: .* goes on from .*step-000002"
    with pytest.raises(DamagedError, match=said):
        resume(run, steps=5)
    shutil.rmtree(step(run, 4))
    assert resume(run).step == 4


# --- disks ------------------------------------------------------------------------------------------------------------


def test_too_little_free_space_is_found_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def usage(path: Path) -> Usage:
        asked.append(Path(path))
        return Usage(10**9, 10**9, 10**5)

    settings = config()
    monkeypatch.setattr(run_folder.shutil, "disk_usage", usage)
    monkeypatch.setattr("qkv.data.cache._check_space", lambda *arguments: None)
    with pytest.raises(QkvError, match=r"the checkpoints need \d+ MB, and the disk has 0 MB free"):
        fit(settings, run_dir="deep/er/run")
    assert not Path("deep").exists()
    assert asked[0].exists()


@pytest.mark.parametrize(
    ("needed", "free", "said"),
    [
        (3_000_000_000, 1_000_000, "need 3,000 MB, and the disk has 1 MB free"),
        (1_400_000, 600_000, "need 1,400 kB, and the disk has 600 kB free"),
        (345_000, 200_000, "need 345 kB, and the disk has 200 kB free"),
        (1_000_100, 1_000_000, "need 1,000,100 bytes, and the disk has 1,000,000 bytes free"),
    ],
)
def test_the_space_that_is_needed_reads_as_more_than_there_is(
    needed: int, free: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder.shutil, "disk_usage", lambda path: Usage(free, 0, free))
    with pytest.raises(QkvError, match=said):
        run_folder.require_space(Path("run"), needed)


def test_too_little_free_space_is_found_before_a_resumed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    run = train("run", "train.save_every=2")
    shutil.rmtree(step(run, 4))
    before = metrics(run)
    monkeypatch.setattr(run_folder.shutil, "disk_usage", lambda path: Usage(1, 1, 0))
    with pytest.raises(QkvError, match="the disk has 0 MB free"):
        resume(run)
    assert metrics(run) == before


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("file", ["config.yaml", "model.safetensors", "training.safetensors", "state.json", "folder"])
def test_an_error_at_any_moment_of_saving_leaves_the_earlier_checkpoint(
    file: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = [False]

    def flush(path: Path) -> None:
        if failing[0] and (path.name == file or (file == "folder" and path.is_dir())):
            raise OSError(number, os.strerror(number))

    def listen(event: dict[str, Any]) -> None:
        failing[0] = failing[0] or event["event"] == "checkpoint"

    said = rf"could not be written: {os.strerror(number)}[\s\S]*step-000004"
    monkeypatch.setattr(store, "_flush", flush)
    with pytest.raises(QkvError, match=said) as failure:
        fit(config("train.save_every=2"), run_dir="run", listener=listen)
    assert failure.value.exit_code == 1
    assert steps_of("run") == ["step-000002"]
    assert read_state(step("run", 2))["step"] == 2
    assert load_checkpoint(Path("run")).path == step("run", 2)


def test_a_kill_of_python_while_saving_leaves_the_earlier_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second Ctrl-C, say: not an Exception."""
    save = store.save_file
    calls = [0]

    def stop(*arguments: Any) -> None:
        calls[0] += 1
        if calls[0] > 2:  # each checkpoint is two such files
            raise KeyboardInterrupt
        save(*arguments)

    monkeypatch.setattr(store, "save_file", stop)
    with pytest.raises(KeyboardInterrupt):
        train("run", "train.save_every=2")
    assert steps_of("run") == ["step-000002"]
    assert load_checkpoint(Path("run")).path == step("run", 2)


def test_a_place_where_no_folder_can_be_made_is_one_clear_error() -> None:
    with pytest.raises(QkvError, match=r"the run folder cannot be made: Not a directory\n  at corpus\.txt/run"):
        train("corpus.txt/run")


def test_metrics_that_cannot_be_written_are_one_clear_error() -> None:
    run = train("run", "train.save_every=2")
    shutil.rmtree(step(run, 4))
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    with pytest.raises(QkvError, match=r"the metrics cannot be written: Is a directory\n  at .*metrics\.jsonl"):
        resume(run)
    assert steps_of(run) == ["step-000002"]


def test_folders_that_may_not_be_written_are_one_clear_error() -> None:
    Path("locked").mkdir(mode=0o500)
    if os.access("locked", os.W_OK):
        pytest.skip("root may write everywhere")
    with pytest.raises(QkvError, match="the run folder cannot be made: Permission denied"):
        train("locked/run")
    with pytest.raises(QkvError, match="the run folder cannot be made: Permission denied"):
        train("locked")
    run = train("run", "train.save_every=2")
    shutil.rmtree(step(run, 4))
    (run / "checkpoints").chmod(0o500)
    with pytest.raises(QkvError, match="the checkpoint could not be written: Permission denied"):
        resume(run)
    run.chmod(0o500)
    with pytest.raises(QkvError, match="the metrics cannot be written: Permission denied"):
        resume(run)
    for path in (run, run / "checkpoints"):
        path.chmod(0o700)
    assert load_checkpoint(run).path == step(run, 2)


def test_steps_are_in_the_order_of_their_numbers_however_many_digits_these_have(tmp_path: Path) -> None:
    names = ["step-000004", "step-999999", "step-1000000"]
    for name in (*names, "step-last"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert [path.name for path in RunFolder(tmp_path).incomplete_after(0)] == names
    assert [path.name for path in RunFolder(tmp_path).incomplete_after(999_999)] == names[2:]
