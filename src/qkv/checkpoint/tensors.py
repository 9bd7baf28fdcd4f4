"""Tensors in files: looked at without being read, then read one at a time into a network.

So a load stops at the first look where a tensor is missing, unexpected or of another shape, and needs little more
memory than the network itself.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from qkv.checkpoint.mapping import Bond, published
from qkv.config.errors import DamagedError, NotFoundError
from qkv.nn.transformer import Transformer, in_float32

_ALIGNMENT = 64  # bytes, of every tensor that torch allocates on the CPU
_PIECE = 1 << 21  # numbers
_MOST_NAMED = 100  # names in one error
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
"""What safetensors calls them."""

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Packed:
    """A matrix as blocks of few bits (`qkv.nn.quantized`): `kind` and what reads the bytes, [rows, bytes]."""

    kind: str
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class Stored:
    """A tensor in a file. `dtype`: its values', or the format's name for what is none of torch. `read` gives them in a
    precision, None being the file's own; `packed` gives the blocks of a matrix that is held so."""

    shape: tuple[int, ...]
    dtype: torch.dtype | str
    read: Callable[[torch.dtype | None], Tensor]
    packed: Packed | None = None


# --- safetensors ------------------------------------------------------------------------------------------------------


def look_at(path: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file, by name. Raises NotFoundError or DamagedError."""
    try:
        with safe_open(path, "pt") as file:  # the library holds the header to the format: sizes, offsets, overlaps
            names = set(file.keys())
        header = _header(path)
    except FileNotFoundError:
        raise NotFoundError("the weights are missing", where=str(path)) from None
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise DamagedError(f"the weights cannot be read: {error}", where=str(path)) from None
    header.pop("__metadata__", None)
    if set(header) != names:
        raise DamagedError("the weights cannot be read: their header is ambiguous", where=str(path))
    return {
        name: _look_at_one(path, name, tuple(told["shape"]), _DTYPES.get(told["dtype"], told["dtype"]))
        for name, told in header.items()
    }


def _header(path: Path) -> dict[str, Any]:
    """The JSON that the file begins with. Raises ValueError where it says a thing twice, which the library allows."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(size), object_pairs_hook=without_doubles)
        return header


def without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises ValueError for a key that stands there twice: readers differ in which one they believe."""
    found = dict(pairs)
    if len(found) != len(pairs):
        ((double, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"`{double:.200}` stands there twice")
    return found


def _look_at_one(path: Path, name: str, shape: tuple[int, ...], own: torch.dtype | str) -> Stored:
    def rows(first: int, last: int) -> Tensor:
        with safe_open(path, "pt") as file:  # for these rows: while it is open, what was read counts as memory
            part: Tensor = file.get_slice(name)[first:last] if shape else file.get_tensor(name)
        return part

    def read(dtype: torch.dtype | None) -> Tensor:
        assert isinstance(own, torch.dtype)
        try:
            return in_pieces(shape, dtype or own, rows)
        except (SafetensorError, OSError) as error:
            raise DamagedError(f"`{name:.200}` cannot be read: {error}", where=str(path)) from None

    return Stored(shape, own, read)


def in_pieces(shape: tuple[int, ...], dtype: torch.dtype, rows: Callable[[int, int], Tensor]) -> Tensor:
    """A tensor made of some `rows` (first, last) at a time, so that little is held beside it."""
    whole = torch.empty(shape, dtype=dtype)
    step = max(1, _PIECE // max(1, math.prod(shape[1:])))
    for first in range(0, shape[0], step) if shape else ():
        last = min(first + step, shape[0])
        whole[first:last] = rows(first, last)
    return whole if shape else whole.copy_(rows(0, 1))


# --- into a network ---------------------------------------------------------------------------------------------------


def check(
    network: Transformer, found: Sequence[Bond], stored: Mapping[str, Stored], where: Path, unexpected: Iterable[str]
) -> None:
    """Raise DamagedError that names every tensor that is missing, of another shape or of no floating point, and every
    `unexpected` one, which belongs nowhere. Nothing is read."""
    parameters = dict(network.named_parameters())
    wanted = {name: tuple(tensor.shape) for name, tensor in published(found, parameters).items()}
    missing = sorted(wanted.keys() - stored.keys())
    unexpected = sorted(unexpected)
    if missing or unexpected:
        parts = [f"missing: {listed(missing)}"] if missing else []
        parts += [f"unexpected: {listed(unexpected)}"] if unexpected else []
        raise DamagedError(f"the weights do not belong to the configuration; {'; '.join(parts)}", where=str(where))
    wrong = [
        f"{name} has shape {list(stored[name].shape)}, expected {list(shape)}"
        for name, shape in wanted.items()
        if stored[name].shape != shape
    ]
    wrong += [
        f"{name} holds {stored[name].dtype}, expected floating point"
        for name in wanted
        if stored[name].dtype not in FLOATS
    ]
    if wrong:
        raise DamagedError("\n".join(wrong[:_MOST_NAMED]), where=str(where))


def fill(
    network: Transformer, found: Sequence[Bond], stored: Mapping[str, Stored], dtype: torch.dtype | None = None
) -> None:
    """Give a network built on the meta device its weights, each exactly once, on the CPU; `check` comes first.

    dtype: None is the file's own. What its module lists in an attribute `float32` has no fewer bits than that.
    """
    kept = in_float32(network).keys()
    tensors: dict[str, Tensor] = {}
    for bond in found:
        wide = not kept.isdisjoint(bond.ours)
        ours = bond.view.load(tuple(_read(stored[name], dtype, wide) for name in bond.theirs))
        tensors.update(zip(bond.ours, map(_placed, ours), strict=True))
    tensors.update({name: tensors[owner] for name, owner in shared(network).items()})
    network.load_state_dict(tensors, strict=False, assign=True)  # kept blocks come by themselves


def _read(stored: Stored, dtype: torch.dtype | None, wide: bool) -> Tensor:
    if not wide:
        return stored.read(dtype)
    own = dtype or stored.dtype
    assert isinstance(own, torch.dtype)
    return stored.read(torch.promote_types(own, torch.float32))


def shared(network: Transformer) -> dict[str, str]:
    """Of each further name of a parameter (tied matrices, shared layers), its first."""
    first: dict[int, str] = {}
    further = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(parameter), name)
        if owner != name:
            further[name] = owner
    return further


def listed(names: Sequence[str]) -> str:
    """Names for an error, which a stranger's file must not make endless."""
    shown = ", ".join(f"{name:.200}" for name in names[:_MOST_NAMED])
    return shown if len(names) <= _MOST_NAMED else f"{shown} and {len(names) - _MOST_NAMED} more"


def _placed(tensor: Tensor) -> Tensor:
    """The same where and as torch itself would put it: kernels round otherwise elsewhere, and a resume is bit for bit.
    What is a part of something larger would keep all of it."""
    alone = tensor.untyped_storage().nbytes() == tensor.nbytes
    fits = alone and tensor.is_contiguous() and tensor.data_ptr() % _ALIGNMENT == 0
    return tensor if fits else tensor.clone(memory_format=torch.contiguous_format)
