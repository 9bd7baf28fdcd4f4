"""What runs left behind: metrics and how far each came. Broken files are named, and reading goes on."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from qkv.config.errors import NotFoundError, QkvError, nearest

State = Literal["complete", "interrupted", "damaged"]


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
    def last_step(self) -> int:
        """The last step there is a line for; 0 where there is none."""
        return max((record["step"] for record in self.records), default=0)


@dataclass(frozen=True)
class RunSummary:
    """One run. `steps` is how many it was to take, `loss` the last of training, `best_val_loss` the lowest (nats per
    token); each None where it is not known. `problems` names damaged files and what is wrong with them."""

    name: str
    path: str
    step: int
    steps: int | None
    loss: float | None
    best_val_loss: float | None
    state: State
    newest: bool
    problems: list[str]


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
        try:
            record = json.loads(line)
            if not isinstance(record["step"], int) or isinstance(record["step"], bool):
                raise TypeError
            records.append(record)
        except (ValueError, KeyError, TypeError, RecursionError):
            if line.strip() and line.endswith("\n"):
                problems.append(f"metrics.jsonl:{number} is damaged")
    return Metrics(records, problems)


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
    metrics = Metrics([])
    try:
        metrics = read_metrics(path)
        problems += metrics.problems
    except NotFoundError:
        problems.append("metrics.jsonl is missing")
    except QkvError as error:
        problems.append(f"metrics.jsonl: {error.what}")
    steps = _planned_steps(path, problems)
    losses, validations = metrics.series("loss")[1], metrics.series("val_loss")[1]
    step = metrics.last_step
    state: State = "interrupted"
    if problems:
        state = "damaged"
    elif steps is not None and step >= steps:
        state = "complete"
    return RunSummary(
        name=path.name,
        path=str(path),
        step=step,
        steps=steps,
        loss=losses[-1] if losses else None,
        best_val_loss=min(validations, default=None),
        state=state,
        newest=newest,
        problems=problems,
    )


def _planned_steps(path: Path, problems: list[str]) -> int | None:
    """`train.steps` of the newest checkpoint, which a resumed run may have raised, or else of the run."""
    saved = sorted(path.glob("checkpoints/step-*/config.yaml"))
    for file in [*saved[-1:], path / "config.yaml"]:
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


def config_hash(source: Path | str) -> str | None:
    """The first 8 hexadecimal digits of the SHA-256 of a configuration's text, or of a run's config.yaml; None where
    the run has none."""
    try:
        content = source.encode() if isinstance(source, str) else (source / "config.yaml").read_bytes()
    except OSError:
        return None
    return hashlib.sha256(content).hexdigest()[:8]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
