"""Going on with a run: what is checked and restored before the next step."""

from __future__ import annotations

import shlex
from pathlib import Path

from qkv.checkpoint.lock import holder, in_use, locked
from qkv.checkpoint.store import best_of, find_checkpoint, load_checkpoint, read_tensors
from qkv.config.errors import ConflictError, NotFoundError, QkvError, UsageError
from qkv.config.load import load_config
from qkv.config.paths import cache_folder
from qkv.config.run import Config
from qkv.data.prepare import prepare
from qkv.data.tokenizers import has_texts
from qkv.evaluate.run_differences import config_differences
from qkv.train.compute import choose_compute
from qkv.train.loop import Listener, Run, Trainer
from qkv.train.run_folder import RunFolder, require_space

CHANGEABLE = ("train.steps", "train.skip_non_finite")
"""What may be another when a run goes on."""


def resume(
    run_dir: str | Path,
    *,
    steps: int | None = None,
    skip_non_finite: int | None = None,
    listener: Listener | None = None,
    allow: tuple[str, ...] = (),
) -> Run:
    """Go on with a run from its newest checkpoint, inside its folder; only the number of steps, and how many may be
    passed over, can change.

    On one CPU the result is bit for bit that of a run that never stopped. Other `steps` stretch the schedule: the
    learning rate is then the one that a run of that many steps has at this point. allow: as in `qkv.load`.

    Raises ConflictError where a process is training in the folder, else what `fit` raises.
    """
    if who := holder(Path(run_dir)):  # it may have no checkpoint yet
        raise in_use(Path(run_dir), who)
    folder = find_checkpoint(Path(run_dir), newest=True)
    run = RunFolder(folder.resolve().parent.parent)
    if folder.resolve() not in run.checkpoints:
        raise UsageError("this model is not in a run that could go on", where=str(folder))
    changes = dict(zip(CHANGEABLE, (steps, skip_non_finite), strict=True))
    overrides = [f"{key}={value}" for key, value in changes.items() if value is not None]
    with locked(run.path):
        return _restored(run, folder, overrides, listener, allow).run_in(run)


def _restored(
    run: RunFolder, folder: Path, overrides: list[str], listener: Listener | None, allow: tuple[str, ...]
) -> Trainer:
    """A run as it was when its checkpoint in `folder` was saved."""
    if folder.resolve() != run.checkpoints[-1]:
        raise ConflictError(
            "the run has gone on from this checkpoint",
            where=str(folder),
            hint=f"--resume {run.path}, which goes on from {run.checkpoints[-1].name}, or removing the later ones",
        )
    best_of(run.checkpoints)  # one that is damaged is found now, not by the first rotation
    loaded = load_checkpoint(folder, allow=allow)
    training = read_tensors(folder / "training.safetensors")
    config = load_config(folder / "config.yaml", overrides, allow) if overrides else loaded.config
    done = int(loaded.state["step"])
    _require_config(run, loaded.config, allow)
    if done >= (planned := config.train.steps):
        what = f"the run has taken all its {done} steps" if done == planned else f"the run is at step {done} already"
        raise UsageError(what, where=str(run.path), hint=f"train.steps=N above {done}")
    if loaded.tokenizer is None and has_texts(config):
        raise QkvError("the checkpoint has no tokenizer", where=str(folder))
    run.require_places(done + 1, config.train.steps)
    try:
        prepared = prepare(config, loaded.tokenizer, cache_folder() / "data", source_tokenizer=loaded.source_tokenizer)
    except NotFoundError as error:
        error.hint = "the folder that the run began in, if its paths are relative, or putting the file back"
        raise
    told = loaded.state.get("data")
    if told != prepared.fingerprint:
        raise QkvError(
            "the training data are not what they were when the run began",
            where=str(folder),
            hint="the same files, or `qkv finetune`, for a new run that starts from this model",
        )
    compute = choose_compute(config.train, loaded.network, compiled=bool(loaded.state["compiled"]))
    trainer = Trainer(config, loaded.network, loaded.tokenizer, prepared, compute, listener, loaded.source_tokenizer)
    if config.train.steps != loaded.config.train.steps:
        text = f"the schedule now spans {config.train.steps} steps instead of {loaded.config.train.steps}"
        trainer.tell({"event": "note", "text": text})
    trainer.take_up(loaded.state, training)
    run.clear()
    require_space(run.path, trainer.space, under_way=True)
    notes = [f"going on from step {trainer.step}"]
    notes += [f"{path.name} has no state.json and is no checkpoint" for path in run.incomplete_after(trainer.step)]
    if unread := run.forget_after(trainer.step):
        notes.append(f"lines of metrics.jsonl that could not be read and were dropped: {unread}")
    for text in notes:
        trainer.tell({"event": "note", "text": text})
    run.write_config(config)
    return trainer


def _require_config(run: RunFolder, trained: Config, allow: tuple[str, ...]) -> None:
    """Raise ConflictError where the run's config.yaml is no longer that of its checkpoint, `trained`: a run goes on as
    it began. Where there is none, the run gets it anew."""
    path = run.path / "config.yaml"
    if not path.exists():
        return
    told, began = (read.model_dump(mode="json") for read in (load_config(path, (), allow), trained))
    changed = [found.key for found in config_differences(began, told) if found.key not in CHANGEABLE]
    if changed:
        raise ConflictError(
            f"the run's configuration was changed, and it goes on as it began: {', '.join(changed)}",
            where=str(path),
            hint=f"`qkv train {shlex.quote(str(path))}`, for a new run, or undoing the change",
        )
