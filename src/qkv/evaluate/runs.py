"""What runs left behind: metrics, how far each came, what was trained where. Broken files are named, and reading goes
on."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from qkv.checkpoint.lock import holder
from qkv.config.base import MAX_COUNT
from qkv.config.errors import NotFoundError, QkvError, nearest
from qkv.config.load import read_tree

State = Literal["running", "complete", "interrupted", "failed", "damaged"]


@dataclass(frozen=True)
class Metrics:
    """The lines of a metrics.jsonl that can be read, in their order; `problems` names the others by line."""

    records: list[dict[str, Any]]
    problems: list[str] = field(default_factory=list)

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of the lines that have a finite `key`."""
        points = [(record["step"], record[key]) for record in self.records if _is_number(record.get(key))]
        return [step for step, _ in points], [float(value) for _, value in points]

    @property
    def keys(self) -> list[str]:
        """What was measured, in the order in which it first comes; the step is not."""
        found = dict.fromkeys(key for record in self.records for key, value in record.items() if _is_number(value))
        return [key for key in found if key != "step"]

    @property
    def last_step(self) -> int:
        """The last step that was taken, and that there is a line for; 0 where there is none."""
        return max((record["step"] for record in self.records if not {"skipped", "failed"} & record.keys()), default=0)

    @property
    def failure(self) -> str | None:
        """What ended the run before its end, where that was an error."""
        return str(self.records[-1]["failed"]) if self.records and "failed" in self.records[-1] else None


@dataclass(frozen=True)
class RunSummary:
    """One run. `steps` is how many it was to take, `loss` the last of training, `best_val_loss` the lowest (nats per
    token) and `best_val_step` the first step that had it; each None where it is not known. `problems` names damaged
    files and what is wrong with them."""

    name: str
    path: str
    step: int
    steps: int | None
    loss: float | None
    best_val_loss: float | None
    best_val_step: int | None
    state: State
    newest: bool
    problems: list[str]


@dataclass(frozen=True)
class RunRecords:
    """All that a run folder says of itself. What is missing or damaged is empty here and named in `problems`.

    config: the tree of the newest checkpoint, which a resumed run may have changed, or else of the run. environment:
    env.json. states: the state.json of each complete checkpoint by its step, oldest first. The metrics of a damaged
    metrics.jsonl are the lines that can be read.
    """

    summary: RunSummary
    metrics: Metrics
    config: dict[str, Any]
    environment: dict[str, Any]
    states: dict[int, dict[str, Any]]
    problems: list[str]

    @property
    def data_fingerprint(self) -> str | None:
        """The fingerprint of the prepared data; None where neither env.json nor a checkpoint says it."""
        told = [self.environment.get("data_fingerprint"), *(state.get("data") for state in self.states.values())]
        return next((value for value in told if isinstance(value, str)), None)


def read_run(run: Path) -> RunRecords:
    """Everything in a run folder. Raises NotFoundError where `run` is none."""
    if not _is_run(run):
        raise _not_a_run(run)
    summary = summarise_run(run)
    problems = list(summary.problems)
    try:
        metrics = read_metrics(run)
    except QkvError:  # the summary has said it
        metrics = Metrics([])
    config: dict[str, Any] = {}
    for file in _configs(run):
        try:
            config = read_tree(file).data
            break
        except QkvError:  # so has it
            continue
    environment = _read_object(run, run / "env.json", problems)
    states = {step: _read_object(run, path, problems) for step, path in _saved(run, "state.json").items()}
    return RunRecords(summary, metrics, config, environment, states, problems)


def _read_object(run: Path, path: Path, problems: list[str]) -> dict[str, Any]:
    """A JSON object, or an empty one and a word in `problems`."""
    name = path.relative_to(run)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        problems.append(f"{name} is missing")
        return {}
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{name} is damaged ({type(error).__name__})")
        return {}
    if not isinstance(found, dict):
        problems.append(f"{name} is damaged: it holds no object")
        return {}
    return found


def read_metrics(run: Path) -> Metrics:
    """The metrics of a run folder. A last line without its end is what a killed run leaves, and no problem.

    Raises NotFoundError where there is no metrics.jsonl, QkvError where it cannot be read.
    """
    path = run / "metrics.jsonl"
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except FileNotFoundError:
        raise _not_a_run(run) from None
    except OSError as error:
        raise QkvError(f"the metrics cannot be read: {error.strerror}", where=str(path)) from None
    records, problems = [], []
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        record = read_record(line)
        if record is not None:
            records.append(record)
        elif line.strip() and line.endswith("\n"):
            problems.append(f"metrics.jsonl:{number} is damaged")
    return Metrics(records, problems)


def read_record(line: str) -> dict[str, Any] | None:
    """One line of a metrics.jsonl; None for what no run writes."""
    try:
        record = json.loads(line)
        step = record["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return record if type(step) is int and 0 <= step <= MAX_COUNT else None


def _not_a_run(run: Path) -> NotFoundError:
    if run.is_dir():
        return NotFoundError("this folder is no run: it has no metrics.jsonl", where=str(run))
    beside = [path.name for path in run.parent.iterdir() if path.is_dir()] if run.parent.is_dir() else []
    guess = nearest(run.name, beside)
    return NotFoundError(
        "there is no such run", where=str(run), hint=str(run.with_name(guess)) if guess else "`qkv runs` for the list"
    )


def list_runs(folder: Path) -> list[RunSummary]:
    """The runs in a folder such as runs/, oldest first. Raises NotFoundError where the folder is missing."""
    if not folder.is_dir():
        raise NotFoundError("there is no such folder of runs", where=str(folder), hint="`qkv train`, which makes runs/")
    paths = [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.is_symlink() and _is_run(path)]
    paths.sort(key=_started)
    newest = _newest(folder, paths)
    return [summarise_run(path, newest=path == newest) for path in paths]


def _is_run(path: Path) -> bool:
    return any((path / name).exists() for name in ("metrics.jsonl", "env.json", "checkpoints"))


def _started(path: Path) -> tuple[float, str]:
    """When a run began: its configuration is written once, before the first step."""
    for name in ("config.yaml", "env.json", "."):
        try:
            return (path / name).stat().st_mtime, path.name
        except OSError:
            continue
    return 0.0, path.name


def _newest(folder: Path, paths: Sequence[Path]) -> Path | None:
    """What runs/latest points at; without it the one that began last."""
    latest = folder / "latest"
    if latest.is_symlink():
        target = latest.resolve()
        for path in paths:
            if path.resolve() == target:
                return path
    return paths[-1] if paths else None


def summarise_run(path: Path, *, newest: bool = False) -> RunSummary:
    """One run folder in a line; never raises for what is broken inside it."""
    problems: list[str] = []
    metrics, running = Metrics([]), holder(path) is not None
    try:
        metrics = read_metrics(path)
        problems += metrics.problems
    except NotFoundError:
        if not running:  # one that has just begun has none yet
            problems.append("metrics.jsonl is missing")
    except QkvError as error:
        problems.append(f"metrics.jsonl: {error.what}")
    steps = _planned_steps(path, problems)
    losses, validated = metrics.series("loss")[1], zip(*metrics.series("val_loss"), strict=True)
    best_val_step, best_val_loss = min(validated, key=lambda point: point[1], default=(None, None))
    step = metrics.last_step
    state: State = "interrupted"
    if running:
        state = "running"
    elif problems:
        state = "damaged"
    elif steps is not None and step >= steps:
        state = "complete"
    elif metrics.failure is not None:
        state = "failed"
    return RunSummary(
        name=path.name,
        path=str(path),
        step=step,
        steps=steps,
        loss=losses[-1] if losses else None,
        best_val_loss=best_val_loss,
        best_val_step=best_val_step,
        state=state,
        newest=newest,
        problems=problems,
    )


def _planned_steps(path: Path, problems: list[str]) -> int | None:
    """`train.steps` of the newest checkpoint, which a resumed run may have raised, or else of the run."""
    for file in _configs(path):
        if not file.is_file():
            problems.append(f"{file.relative_to(path)} is missing")
            continue
        try:
            steps = yaml.safe_load(file.read_text(encoding="utf-8"))["train"]["steps"]
            if _is_number(steps):
                return int(steps)
            problems.append(f"{file.relative_to(path)}: train.steps is no number")
        except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError, RecursionError) as error:
            problems.append(f"{file.relative_to(path)} is damaged ({type(error).__name__})")
    return None


def _configs(run: Path) -> list[Path]:
    """The newest checkpoint's configuration, where there is one, and the run's."""
    return [*list(_saved(run, "config.yaml").values())[-1:], run / "config.yaml"]


def _saved(run: Path, name: str) -> dict[int, Path]:
    """The files of this name in the checkpoints, by step, oldest first."""
    files = {path.parent.name.removeprefix("step-"): path for path in run.glob(f"checkpoints/step-*/{name}")}
    return dict(sorted((int(step), path) for step, path in files.items() if step.isdecimal()))


def config_hash(source: Path | str) -> str | None:
    """The first 8 hexadecimal digits of the SHA-256 of a configuration's text, or of a run's config.yaml; None where
    the run has none."""
    try:
        content = source.encode() if isinstance(source, str) else (source / "config.yaml").read_bytes()
    except OSError:
        return None
    return hashlib.sha256(content).hexdigest()[:8]


def _is_number(value: object) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False
