"""The folder a run leaves behind: configuration, metrics, environment, checkpoints."""

from __future__ import annotations

import errno
import json
import os
import platform
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from qkv.checkpoint.store import best_of, checkpoints_of, steps_in
from qkv.config.errors import ConflictError, QkvError, sizes_apart
from qkv.config.run import Config
from qkv.evaluate.runs import read_record


class RunFolder:
    """A run's place on disk. `create` makes a new one; the constructor opens one that is there."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(
        cls, config: Config, name: str, path: Path | None = None, space: int = 0, about: Mapping[str, Any] | None = None
    ) -> RunFolder:
        """A new run folder: `path` itself, or runs/<date>_<name>_<id>, to which runs/latest then points.

        about: what env.json says beside the machine. Raises ConflictError where something is there already, QkvError
        where the disk lacks `space` bytes.
        """
        chosen = path or Path("runs") / f"{datetime.now():%Y-%m-%d_%H%M%S}_{name}_{secrets.token_hex(2)}"
        require_unused(chosen)
        require_space(chosen, space)
        try:
            (chosen / "checkpoints").mkdir(parents=True)
            (chosen / "samples").mkdir()
            (chosen / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
            told = environment(config) | dict(about or {})
            (chosen / "env.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
            if path is None:
                _point_latest(chosen)
        except OSError as error:
            raise QkvError(f"the run folder cannot be made: {error.strerror}", where=str(chosen)) from None
        return cls(chosen)

    @property
    def checkpoints(self) -> list[Path]:
        """The complete checkpoints, oldest first."""
        return checkpoints_of(self.path)

    def checkpoint_path(self, step: int) -> Path:
        """Where the checkpoint of `step` belongs; an incomplete one, which stands in the way, is removed."""
        path = self._place(step)
        if _incomplete(path):
            shutil.rmtree(path)
        return path

    def require_places(self, first: int, last: int) -> None:
        """Raise ConflictError where one of these steps could not have its checkpoint: something else is there."""
        for path, step in steps_in(self.path).items():
            if first <= step <= last and path == self._place(step) and not _incomplete(path):
                raise ConflictError(
                    f"something that is no checkpoint is where that of step {step} belongs",
                    where=str(path),
                    hint="moving it away",
                )

    def incomplete_after(self, step: int) -> list[Path]:
        """Folders of later steps that are no checkpoints, for want of a state.json."""
        return [path for path, number in steps_in(self.path).items() if number > step and _incomplete(path)]

    def _place(self, step: int) -> Path:
        return self.path / "checkpoints" / f"step-{step:06d}"

    def log(self, record: dict[str, Any]) -> None:
        """Append one line to metrics.jsonl."""
        path = self.path / "metrics.jsonl"
        with written("the metrics", path), path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def write_config(self, config: Config) -> None:
        """Have config.yaml say what is trained."""
        replace_text("the configuration", self.path / "config.yaml", config.to_yaml())

    def forget_after(self, step: int) -> int:
        """Drop metrics of steps that an interrupted run took after its last checkpoint: they will be taken again.
        Returns how many lines were dropped that could not be read, but for a last one that a kill has cut off."""
        path = self.path / "metrics.jsonl"
        if not path.is_file():
            return 0
        kept, unread = [], 0
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        for number, line in enumerate(lines, 1):
            record = read_record(line)
            if record is None:
                unread += number < len(lines)
            elif record["step"] <= step:
                kept.append(line + "\n")
        replace_text("the metrics", path, "".join(kept))
        return unread

    def rotate(self, keep: int) -> None:
        """Delete old checkpoints: the newest `keep` and the best by validation stay; what is half-written goes."""
        checkpoints = self.checkpoints
        if not checkpoints:
            return
        kept = {*checkpoints[-keep:], best_of(checkpoints)}
        for path in checkpoints:
            if path not in kept:
                # renamed first, so that a half-deleted checkpoint is not taken for a whole one
                path.rename(path.with_name(f".{path.name}.tmp-{os.getpid()}"))
        self.clear()

    def clear(self) -> None:
        """Delete what a kill has left half-written or half-deleted."""
        for leftover in (self.path / "checkpoints").glob(".step-*.tmp-*"):
            shutil.rmtree(leftover, ignore_errors=True)


def _incomplete(path: Path) -> bool:
    """A checkpoint without its state.json, which is written last."""
    return path.is_dir() and not (path / "state.json").exists()


def replace_text(what: str, path: Path, text: str) -> None:
    """Write a file beside its place and rename it, so that an error leaves the older one. Raises as `written` does."""
    beside = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    with written(what, path):
        try:
            beside.write_text(text, encoding="utf-8")
            beside.replace(path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise


@contextmanager
def written(what: str, path: Path) -> Iterator[None]:
    """A full disk or a folder that may not be written, as an error people read."""
    try:
        yield
    except OSError as error:
        cure = {errno.ENOSPC: "freeing space", errno.EISDIR: "moving the folder away"}.get(error.errno or 0)
        hint = f"{cure or 'looking at its permissions'}; the checkpoints are untouched"
        raise QkvError(f"{what} cannot be written: {error.strerror}", where=str(path), hint=hint) from None


def require_unused(path: Path) -> None:
    """Raise ConflictError where a run folder cannot be made because something is there."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        hint = "another --run-dir"
        if path.is_dir() and checkpoints_of(path):
            hint = f"`qkv train --resume {path}` to go on with the run that is there, or another --run-dir"
        elif (path / "checkpoints").is_dir():
            hint = "another --run-dir, or removing this one, whose run has no checkpoint to go on from"
        raise ConflictError("the run folder is not empty", where=str(path), hint=hint)


def require_space(path: Path, needed: int, *, under_way: bool = False) -> None:
    """Raise QkvError unless the disk has room for `needed` bytes at `path`, which need not exist yet; `under_way`: with
    steps of the run already taken."""
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    free = shutil.disk_usage(there).free
    if free < needed:
        wanted, there_is = sizes_apart(needed, free)
        then = f", then `qkv train --resume {path}`" if under_way else ", or another --run-dir"
        raise QkvError(
            f"the checkpoints need {wanted}, and the disk has {there_is} free",
            where=str(path),
            hint=f"freeing space{then}",
        )


def _point_latest(run: Path) -> None:
    link = run.parent / "latest"
    beside = run.parent / f".latest-{os.getpid()}"
    try:
        beside.unlink(missing_ok=True)
        beside.symlink_to(run.name, target_is_directory=True)
        beside.replace(link)
    except OSError:  # a file system without links: the run is found by its name
        beside.unlink(missing_ok=True)


def environment(config: Config) -> dict[str, Any]:
    """What ran where: versions, commit, hardware, seed."""
    packages: dict[str, str | None] = {}
    for name in ("qkv", "torch", "numpy", "tokenizers", "safetensors"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = None
    packages["torch"] = str(torch.__version__)  # names the build too: 2.13.0+cu130
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "python": sys.version.split()[0],
        "packages": packages,
        "commit": _commit(),
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": devices,
        "seed": config.train.seed,
    }


def _commit() -> str | None:
    """The commit of the checkout that qkv runs from, if it runs from one."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
