"""Our own format: a folder that is complete by itself.

    config.yaml            the resolved configuration
    tokenizer/             the tokenizer, where there is one
    source-tokenizer/      that of the sources, where they have one of their own
    model.safetensors      every parameter once (a tied matrix under the name of its first owner)
    training.safetensors   optimiser state and generators, where training goes on
    state.json             format_version, step, ..., and size and sha256 of every other file; written last

A checkpoint is written beside its place and renamed into it, so that whatever happens the earlier ones stay loadable
and a half-written one is never taken for a whole one.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from qkv.config.errors import ConflictError, NotFoundError, QkvError
from qkv.config.load import load_config, preset_names
from qkv.config.run import Config
from qkv.nn.transformer import Transformer
from qkv.tokenizer.tokenizer import Tokenizer

FORMAT_VERSION = 1

_ALIGNMENT = 64  # bytes, of every tensor that torch allocates on the CPU


class DamagedError(QkvError):
    """A file that is not what it claims to be."""


@dataclass
class Loaded:
    """What a model folder holds. `tokenizer` is None where there is none, and `source_tokenizer` where the other reads
    both sides."""

    network: Transformer
    tokenizer: Tokenizer | None
    source_tokenizer: Tokenizer | None
    config: Config
    path: Path
    state: dict[str, Any]


def save_checkpoint(
    folder: Path,
    network: Transformer,
    config: Config,
    tokenizer: Tokenizer | None = None,
    *,
    source_tokenizer: Tokenizer | None = None,
    training: Mapping[str, Tensor] | None = None,
    state: Mapping[str, Any] | None = None,
) -> None:
    """Write a complete checkpoint at `folder`, which must not exist yet. `state` is plain JSON."""
    if folder.exists():
        raise ConflictError("there is something at the checkpoint's place already", where=str(folder))
    beside = folder.parent / f".{folder.name}.tmp-{os.getpid()}"
    shutil.rmtree(beside, ignore_errors=True)
    try:
        beside.mkdir(parents=True)
        (beside / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
        for name, one in (("tokenizer", tokenizer), ("source-tokenizer", source_tokenizer)):
            if one is not None:
                one.save(beside / name)
        weights = {name: parameter.detach().contiguous().cpu() for name, parameter in network.named_parameters()}
        save_file(weights, beside / "model.safetensors")
        if training is not None:
            save_file(
                {name: value.contiguous().cpu() for name, value in training.items()}, beside / "training.safetensors"
            )
        files = {}
        for path in sorted(p for p in beside.rglob("*") if p.is_file()):
            _flush(path)
            files[path.relative_to(beside).as_posix()] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        text = json.dumps({"format_version": FORMAT_VERSION, **(state or {}), "files": files}, indent=1)
        (beside / "state.json").write_text(text + "\n", encoding="utf-8")
        _flush(beside / "state.json")
        _flush(beside)
        beside.rename(folder)
        _flush(folder.parent)
    except (OSError, SafetensorError) as error:  # a full disk is the latter where safetensors was writing
        shutil.rmtree(beside, ignore_errors=True)
        raise QkvError(
            f"the checkpoint could not be written: {getattr(error, 'strerror', None) or error}",
            where=str(folder),
            hint="freeing space or another folder; earlier checkpoints are untouched",
        ) from error
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def _flush(path: Path) -> None:
    """Have the disk hold what was written, not just the operating system."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """The sha256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_state(folder: Path, *, verify: bool = True) -> dict[str, Any]:
    """A checkpoint's state.json; with `verify`, after every file has been found to be what was written.

    Raises NotFoundError where no complete checkpoint is, DamagedError naming the file that differs.
    """
    path = folder / "state.json"
    if not path.is_file():
        raise NotFoundError("no complete checkpoint is here (state.json, written last, is missing)", where=str(folder))
    try:
        state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version = state["format_version"]
        told = dict(state["files"]) if version == FORMAT_VERSION else {}
        files = {name: (file["bytes"], file["sha256"]) for name, file in told.items()}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else error
        raise DamagedError(f"state.json is damaged: {what}", where=str(path)) from None
    if version != FORMAT_VERSION:
        raise QkvError(
            f"the checkpoint has format {version}, and this qkv reads {FORMAT_VERSION}",
            where=str(path),
            hint="the version of qkv that wrote it",
        )
    for name, (size, digest) in files.items() if verify else ():
        file = folder / name
        if not file.is_file():
            raise DamagedError(f"the checkpoint's {name} is missing", where=str(folder))
        if file.stat().st_size != size or sha256_of(file) != digest:
            raise DamagedError(f"{name} is not what was written", where=str(file), hint="an earlier checkpoint")
    return state


def checkpoints_of(run: Path) -> list[Path]:
    """The complete checkpoints of a run folder, oldest first."""
    steps = {path: path.name.removeprefix("step-") for path in (run / "checkpoints").glob("step-*")}
    found = [path for path, step in steps.items() if step.isdecimal() and (path / "state.json").is_file()]
    return sorted(found, key=lambda path: int(steps[path]))


def best_of(checkpoints: list[Path]) -> Path:
    """The checkpoint that validation found best: by the task's own measure where it has one, else by the loss; the
    newest where none was validated."""

    def rank(path: Path) -> tuple[float, int]:
        state = read_state(path, verify=False)
        measure = state.get("measure")
        told = measure if isinstance(measure, dict) else {"value": state.get("val_loss")}
        value = told.get("value")
        if not isinstance(value, int | float) or not math.isfinite(value):
            value = math.inf
        elif told.get("higher_is_better"):
            value = -value
        return (value, -checkpoints.index(path))

    return min(checkpoints, key=rank)


def find_checkpoint(path: Path, *, newest: bool = False) -> Path:
    """The checkpoint folder that `path` (a checkpoint folder, or a run folder: its best or newest) means."""
    if (path / "state.json").is_file():
        return path
    if not path.exists():
        untrained = str(path) in preset_names()
        raise NotFoundError(
            "a preset is a configuration without weights" if untrained else "there is no such file or folder",
            where=str(path),
            hint=f"`qkv train {path} data.train=[FILE]`" if untrained else "`qkv runs` for the list",
        )
    checkpoints = checkpoints_of(path)
    if not checkpoints:
        raise NotFoundError(
            "no model is here: neither a checkpoint nor a run with one", where=str(path), hint="`qkv runs` for the list"
        )
    return checkpoints[-1] if newest else best_of(checkpoints)


def load_checkpoint(path: Path, *, newest: bool = False, allow: tuple[str, ...] = ()) -> Loaded:
    """The model at `path` (see find_checkpoint), on the CPU in the precision it was saved in.

    allow: packages whose parts the configuration may import (see qkv.config.base); by default a model folder runs no
    code. Raises QkvError for what is missing, damaged or not allowed; every missing or unexpected tensor is named.
    """
    folder = find_checkpoint(path, newest=newest)
    state = read_state(folder)
    config = load_config(folder / "config.yaml", allow=allow)
    tokenizer, source_tokenizer = (
        Tokenizer.load(folder / name) if (folder / name).is_dir() else None
        for name in ("tokenizer", "source-tokenizer")
    )
    try:
        network = Transformer(config.model, device="meta")
    except RuntimeError as error:  # sizes beyond what can be counted
        raise DamagedError(f"no model has these sizes: {error}", where=str(folder / "config.yaml")) from None
    readers = [tokenizer if side == "decoder" else source_tokenizer or tokenizer for side in config.model.stacks]
    for reader, stack in zip(readers, config.model.stacks.values(), strict=True):
        if reader is not None and stack.vocab_size is not None and reader.vocab_size > stack.vocab_size:
            raise DamagedError(
                f"the tokenizer has {reader.vocab_size} ids and the model's vocabulary {stack.vocab_size}",
                where=str(folder),
            )
    fill(network, read_tensors(folder / "model.safetensors"), folder / "model.safetensors")
    return Loaded(network, tokenizer, source_tokenizer, config, folder, state)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file. Raises NotFoundError or DamagedError."""
    try:
        return load_file(path)
    except FileNotFoundError:
        raise NotFoundError("the weights are missing", where=str(path)) from None
    except (SafetensorError, OSError, ValueError) as error:
        raise DamagedError(f"the weights cannot be read: {error}", where=str(path)) from None


def fill(network: Transformer, tensors: Mapping[str, Tensor], where: Path) -> None:
    """Give a network built on the meta device its weights, each exactly once."""
    wanted = dict(network.named_parameters())
    missing, unexpected = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    if missing or unexpected:
        parts = [f"missing: {', '.join(missing)}"] if missing else []
        parts += [f"unexpected: {', '.join(unexpected)}"] if unexpected else []
        raise DamagedError(f"the weights do not belong to the configuration; {'; '.join(parts)}", where=str(where))
    wrong = [
        f"{name} has shape {list(tensors[name].shape)}, expected {list(parameter.shape)}"
        for name, parameter in wanted.items()
        if parameter.shape != tensors[name].shape
    ]
    wrong += [
        f"{name} holds {tensors[name].dtype}, expected floating point"
        for name in wanted
        if not tensors[name].is_floating_point()
    ]
    if wrong:
        raise DamagedError("\n".join(wrong), where=str(where))
    network.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.data = _aligned(tensors[name])


def _aligned(tensor: Tensor) -> Tensor:
    """The same where torch itself would put it: kernels round otherwise elsewhere, and a resume is bit for bit."""
    return tensor if tensor.data_ptr() % _ALIGNMENT == 0 else tensor.clone()
