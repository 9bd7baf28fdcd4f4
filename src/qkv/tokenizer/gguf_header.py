"""The header of a GGUF file (the format of ggml and llama.cpp): metadata, and where the tensors lie.

Read within bounds, because a stranger's header may claim anything: nothing is believed that the file has no bytes for.
The layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qkv.config.errors import DamagedError, NotFoundError, QkvError

MAGIC = b"GGUF"
VERSIONS = (2, 3)

_LONGEST_HEADER = 1 << 26  # bytes: several times that of the largest vocabulary
_MOST_ENTRIES = 1 << 16  # metadata keys, and tensors
_MOST_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
"""The value types that are numbers, as NumPy spells them."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as the header tells of it. `shape`: the last index runs fastest, as in torch (ggml counts the other way
    round). `kind`: ggml's number for the type. `offset`: bytes from the beginning of the data."""

    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class Header:
    """What stands before the data. `metadata`: numbers, texts, lists of texts, and arrays of numbers (ndarray).
    `data_start`: the byte where the data begins."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    data_start: int


def read_header(path: Path) -> Header:
    """The header of the file. Raises NotFoundError, DamagedError naming the byte, and QkvError for other versions."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data, path).header()
    except FileNotFoundError:
        raise NotFoundError("there is no such file", where=str(path)) from None
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise DamagedError(f"the GGUF file cannot be read: {error}", where=str(path)) from None


class _Reader:
    """Takes one thing after the other."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path = data, path
        self.at, self.end = 0, min(len(data), _LONGEST_HEADER)

    def header(self) -> Header:
        if self.data[:4] != MAGIC:
            raise self.damaged("it does not begin with GGUF")
        self.at = 4
        version = self.whole(4)
        if version not in VERSIONS:
            other = "big-endian files are" if version & 0xFFFF == 0 else f"version {version} is"
            raise QkvError(f"GGUF: {other} not supported", where=str(self.path), hint="a file of version 2 or 3")
        num_tensors, num_keys = self.whole(8, most=_MOST_ENTRIES), self.whole(8, most=_MOST_ENTRIES)
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self.string()
            if key in metadata:
                raise self.damaged(f"the key {key!r:.200} stands there twice")
            metadata[key] = self.value(self.whole(4))
        tensors: dict[str, TensorInfo] = {}
        for _ in range(num_tensors):
            name = self.string()
            if name in tensors:
                raise self.damaged(f"the tensor {name!r:.200} stands there twice")
            shape = [self.whole(8) for _ in range(self.whole(4, most=_MOST_DIMENSIONS))]
            tensors[name] = TensorInfo(tuple(reversed(shape)), self.whole(4), self.whole(8))
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self.damaged(f"an alignment of {alignment!r:.80} bytes")
        return Header(metadata, tensors, -(-self.at // alignment) * alignment)

    def damaged(self, what: str) -> DamagedError:
        return DamagedError(f"the GGUF file is damaged: {what}", where=f"{self.path}: byte {self.at}")

    def take(self, size: int) -> bytes:
        """The next `size` bytes."""
        if size > self.end - self.at:
            raise self.damaged(f"{size:,} bytes more are claimed, and the header can have {self.end - self.at:,}")
        self.at += size
        return self.data[self.at - size : self.at]

    def whole(self, size: int, most: int | None = None) -> int:
        value = int.from_bytes(self.take(size), "little")
        if most is not None and value > most:
            raise self.damaged(f"{value:,} where at most {most:,} can be meant")
        return value

    def string(self) -> str:
        raw = self.take(self.whole(8))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.damaged(f"{raw[:80]!r} is not UTF-8") from None

    def numbers(self, kind: int, count: int) -> np.ndarray[Any, Any]:
        form = np.dtype(_NUMBERS[kind])
        return np.frombuffer(self.take(count * form.itemsize), form)

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind in _NUMBERS:
            return self.numbers(kind, 1)[0].item()
        if kind != _ARRAY:
            raise self.damaged(f"there is no value type {kind}")
        kind, count = self.whole(4), self.whole(8)
        if kind in _NUMBERS:
            return self.numbers(kind, count)
        if kind != _STRING:
            raise self.damaged(f"there are no arrays of value type {kind}")
        if count > (self.end - self.at) // 8:
            raise self.damaged(f"{count:,} texts are claimed")
        return [self.string() for _ in range(count)]
