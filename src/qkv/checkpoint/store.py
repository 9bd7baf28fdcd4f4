"""Our own format: a folder that is complete by itself.

    config.yaml            the resolved configuration
    tokenizer/             the tokenizer, where there is one
    source-tokenizer/      that of the sources, where they have one of their own
    model.safetensors      every parameter once (a tied matrix under the name of its first owner)
    training.safetensors   optimiser state and generators, where training goes on
    state.json             format_version, step, ..., size and sha256 of every other file, its own; written last

A checkpoint is written beside its place and renamed into it, so that whatever happens the earlier ones stay loadable
and a half-written one is never taken for a whole one.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from qkv.checkpoint.mapping import Bond, Same
from qkv.checkpoint.tensors import check, fill, look_at
from qkv.config.errors import ConflictError, DamagedError, NotFoundError, QkvError, UsageError
from qkv.config.load import load_config, preset_names
from qkv.config.model import ModelConfig
from qkv.config.run import Config
from qkv.nn.quantized import is_quantized
from qkv.nn.transformer import Transformer
from qkv.tokenizer.tokenizer import Tokenizer

FORMAT_VERSION = 1


PoolingKind = Literal["mean", "cls", "max"]


@dataclass(frozen=True)
class Pooling:
    """How the hidden vectors of a text become one, as the sentence-transformers library has it: the "mean" or "max" of
    its tokens, or the first one ("cls"); then divided by its length where `normalise`. A text is cut to `max_seq_len`
    tokens (None: to the context)."""

    kind: PoolingKind
    normalise: bool
    max_seq_len: int | None = None


@dataclass
class Loaded:
    """What a model folder holds. `tokenizer` is None where there is none, and `source_tokenizer` where the other reads
    both sides; `pooling` where a text's vector is made by no rule of the folder's own."""

    network: Transformer
    tokenizer: Tokenizer | None
    source_tokenizer: Tokenizer | None
    config: Config
    path: Path
    state: dict[str, Any]
    pooling: Pooling | None = None


def save_checkpoint(
    folder: Path,
    network: Transformer,
    config: Config,
    tokenizer: Tokenizer | None = None,
    *,
    source_tokenizer: Tokenizer | None = None,
    pooling: Pooling | None = None,
    training: Mapping[str, Tensor] | None = None,
    state: Mapping[str, Any] | None = None,
) -> None:
    """Write a complete checkpoint at `folder`, which must not exist yet. `state` is plain JSON."""
    refuse_quantized(network)
    state = {"format_version": FORMAT_VERSION, **(state or {})}
    if pooling is not None:
        state["pooling"] = asdict(pooling)
    with whole(folder, "checkpoint") as beside:
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
            files[path.relative_to(beside).as_posix()] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        state = {**state, "files": files}
        text = json.dumps({**state, "sha256": _digest(state)}, indent=1)
        (beside / "state.json").write_text(text + "\n", encoding="utf-8")


def _digest(state: Mapping[str, Any]) -> str:
    """What state.json says, however it is laid out."""
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def refuse_quantized(network: Transformer) -> None:
    """Raise UsageError for matrices that are held as blocks."""
    if is_quantized(network):
        raise UsageError("quantised weights are not written", hint="loading without quantize")


@contextmanager
def whole(folder: Path, kind: str) -> Iterator[Path]:
    """A folder beside `folder` to write into, which takes its place at the end: all of it appears, or nothing. `kind`
    is what errors call it. Raises ConflictError where something is there already."""
    if folder.exists():
        raise ConflictError(f"there is something at the {kind}'s place already", where=str(folder))
    beside = folder.parent / f".{folder.name}.tmp-{os.getpid()}"
    shutil.rmtree(beside, ignore_errors=True)
    try:
        beside.mkdir(parents=True)
        yield beside
        for path in beside.rglob("*"):
            if path.is_file():
                path.chmod(0o644)  # the libraries' own are private
            _flush(path)
        _flush(beside)
        beside.rename(folder)
        _flush(folder.parent)
    except (OSError, SafetensorError) as error:  # a full disk is the latter where safetensors was writing
        shutil.rmtree(beside, ignore_errors=True)
        raise QkvError(
            f"the {kind} could not be written: {getattr(error, 'strerror', None) or error}",
            where=str(folder),
            hint=f"freeing space or another folder; earlier {kind}s are untouched",
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
        own_digest = state.pop("sha256", None)
        told = dict(state["files"]) if version == FORMAT_VERSION else {}
        files = {name: (file["bytes"], file["sha256"]) for name, file in told.items()}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else error
        raise DamagedError(f"state.json is damaged: {what}", where=str(path), hint=_earlier(folder)) from None
    if version != FORMAT_VERSION:
        raise QkvError(
            f"the checkpoint has format {version}, and this qkv reads {FORMAT_VERSION}",
            where=str(path),
            hint="the version of qkv that wrote it",
        )
    if own_digest is not None and own_digest != _digest(state):
        raise DamagedError("state.json is not what was written", where=str(path), hint=_earlier(folder))
    for name, (size, digest) in files.items() if verify else ():
        file = folder / name
        if not file.is_file():
            raise DamagedError(f"the checkpoint's {name} is missing", where=str(folder), hint=_earlier(folder))
        if file.stat().st_size != size or sha256_of(file) != digest:
            raise DamagedError(f"{name} is not what was written", where=str(file), hint=_earlier(folder))
    return state


def _earlier(folder: Path) -> str:
    """What to try where a checkpoint is damaged."""
    found = checkpoints_of(folder.resolve().parent.parent)
    before = found[: found.index(folder.resolve())] if folder.resolve() in found else []
    if not before and len(found) > 1:
        return f"removing this checkpoint: the run has later ones, up to {found[-1]}"
    if not before:
        return "an earlier checkpoint"
    return f"removing {folder.name}: the run then goes on from {before[-1]}"


def checkpoints_of(run: Path) -> list[Path]:
    """The complete checkpoints of a run folder, oldest first."""
    return [path for path in steps_in(run) if (path / "state.json").is_file()]


def steps_in(run: Path) -> dict[Path, int]:
    """What bears the name of a step's checkpoint in a run folder, whole or not, and the number of the step, rising."""
    names = {path: path.name.removeprefix("step-") for path in (run / "checkpoints").glob("step-*")}
    steps = {path: int(name) for path, name in names.items() if name.isdecimal()}
    return dict(sorted(steps.items(), key=lambda item: item[1]))


def best_of(checkpoints: list[Path]) -> Path:
    """The checkpoint that validation found best: by the task's own measure where it has one, else by the loss; the
    newest where none was validated."""

    return min(checkpoints, key=lambda path: (_badness(path), -checkpoints.index(path)))


def _badness(checkpoint: Path) -> float:
    """What validation made of a checkpoint, lower for a better one; infinite where it was not validated."""
    state = read_state(checkpoint, verify=False)
    measure = state.get("measure")
    told = measure if isinstance(measure, dict) else {"value": state.get("val_loss")}
    value = told.get("value")
    if not isinstance(value, int | float) or not math.isfinite(value):
        return math.inf
    return -value if told.get("higher_is_better") else value


def told_choice(path: Path) -> str | None:
    """Which checkpoint `find_checkpoint` takes of a run folder, and why, for people; None where it has no choice."""
    checkpoints = [] if (path / "state.json").is_file() else checkpoints_of(path)
    if not checkpoints:
        return None
    best = best_of(checkpoints)
    why = f"the best of {len(checkpoints)} by validation"
    if len(checkpoints) == 1:
        why = "the only one"
    elif math.isinf(_badness(best)):
        why = f"the newest of {len(checkpoints)}, none of which was validated"
    return f"{best}, {why}"


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
        for folder in (path, *steps_in(path)):
            if (folder / "config.yaml").is_file() and (folder / "model.safetensors").is_file():
                raise DamagedError("the checkpoint's state.json is missing", where=str(folder), hint="a copy of it")
        if (path / "config.yaml").is_file() and (path / "checkpoints").is_dir():
            raise NotFoundError(
                "the run ended before its first checkpoint", where=str(path), hint="removing it, and training again"
            )
        raise NotFoundError(
            "no model is here: neither a checkpoint nor a run with one", where=str(path), hint="`qkv runs` for the list"
        )
    return checkpoints[-1] if newest else best_of(checkpoints)


def load_checkpoint(
    path: Path, *, newest: bool = False, dtype: torch.dtype | None = None, allow: tuple[str, ...] = ()
) -> Loaded:
    """The model at `path` (see find_checkpoint), on the CPU, by default in the precision it was saved in.

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
    network = build_empty(config.model, folder / "config.yaml")
    readers = [tokenizer if side == "decoder" else source_tokenizer or tokenizer for side in config.model.stacks]
    for reader, stack in zip(readers, config.model.stacks.values(), strict=True):
        if reader is not None and stack.vocab_size is not None and reader.vocab_size > stack.vocab_size:
            raise DamagedError(
                f"the tokenizer has {reader.vocab_size} ids and the model's vocabulary {stack.vocab_size}",
                where=str(folder),
            )
    weights = folder / "model.safetensors"
    stored = look_at(weights)
    bonds = [Bond((name,), (name,), Same()) for name, _ in network.named_parameters()]
    check(network, bonds, stored, weights, unexpected=stored.keys() - dict(network.named_parameters()))
    fill(network, bonds, stored, dtype)
    return Loaded(network, tokenizer, source_tokenizer, config, folder, state, _pooling(state, folder))


def _pooling(state: Mapping[str, Any], folder: Path) -> Pooling | None:
    told = state.get("pooling")
    if told is None:
        return None
    limit = told.get("max_seq_len") if isinstance(told, dict) else None
    whole_limit = limit is None or (type(limit) is int and limit > 0)
    if not isinstance(told, dict) or told.get("kind") not in get_args(PoolingKind) or not whole_limit:
        raise DamagedError("state.json is damaged: no such pooling", where=str(folder / "state.json"))
    return Pooling(told["kind"], told.get("normalise") is True, limit)


def build_empty(config: ModelConfig, where: Path) -> Transformer:
    """A network on the meta device: shapes without memory. Raises DamagedError for sizes that cannot be."""
    try:
        return Transformer(config, device="meta")
    except RuntimeError as error:  # sizes beyond what can be counted
        raise DamagedError(f"no model has these sizes: {error}", where=str(where)) from None


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file. Raises NotFoundError or DamagedError."""
    return {name: stored.read(None) for name, stored in look_at(path).items()}
