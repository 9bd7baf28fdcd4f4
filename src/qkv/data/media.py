"""Images and sound as their encoder reads them, kept on disk, and what training changes in them.

Shapes: B batch, C channels, H and W height and width, F frames, S mels; the array of an image is uint8 [C, H, W], that
of a recording float32 [F, S].
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import singledispatch
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qkv.config.data import AudioDataConfig, DataConfig, ImagesDataConfig
from qkv.config.parts import LogMelInputConfig, PatchInputConfig
from qkv.config.stack import StackConfig
from qkv.data.audio import HOP, SAMPLE_RATE, log_mel, read_audio
from qkv.data.cache import StoredFiles, flush, map_file, stored, write_file
from qkv.data.images import normalised, per_channel, read_pixels

FORMAT_VERSION = 1

Values = NDArray[Any]


class Medium(Protocol):
    """How files become what an encoder reads. `shape` and `dtype`: of a file's array. `options`: all else that decides
    what the same file becomes (plain JSON)."""

    unit: str
    shape: tuple[int, ...]
    dtype: str
    options: dict[str, Any]

    def read(self, path: str | Path) -> tuple[Values, int]:
        """The array of a file, and how many vectors the encoder would need for all of it."""

    def finished(self, values: Values) -> Tensor:
        """An array as the encoder reads it, float32."""

    def varied(self, values: Values, rng: np.random.Generator) -> Values:
        """The same changed at random, as training wants it."""


class Images:
    """Images of one size."""

    unit = "images"
    dtype = "uint8"

    def __init__(self, data: ImagesDataConfig, reads: PatchInputConfig) -> None:
        self.mean_C11, self.std_C11 = per_channel(data.mean, data.std, reads.channels)
        self.shape: tuple[int, ...] = (reads.channels, *reads.image_shape)
        self.vectors, self.shift = reads.fixed_length, data.shift
        self.fitting: dict[str, Any] = data.model_dump(include={"resample", "fit", "crop"})
        self.options: dict[str, Any] = {"vectors": self.vectors, **self.fitting}

    def read(self, path: str | Path) -> tuple[Values, int]:
        channels, *size = self.shape
        return read_pixels(path, (size[0], size[1]), channels, **self.fitting).numpy(), self.vectors

    def finished(self, values: Values) -> Tensor:
        return normalised(torch.tensor(values), self.mean_C11, self.std_C11)

    def varied(self, values: Values, rng: np.random.Generator) -> Values:
        if not self.shift:
            return values
        down, right = rng.integers(0, 2 * self.shift, 2, endpoint=True)
        _, height, width = self.shape
        border = (self.shift, self.shift)
        return np.pad(values, ((0, 0), border, border), mode="edge")[:, down : down + height, right : right + width]


class Sound:
    """Log-mel features of as much sound as a context holds, with silence after it: what `transcribe` gives a model."""

    unit = "recordings"
    dtype = "float32"

    def __init__(self, data: AudioDataConfig, reads: LogMelInputConfig, max_seq_len: int) -> None:
        self.reads = reads
        self.seconds = 2 * max_seq_len * HOP / SAMPLE_RATE
        self.shape: tuple[int, ...] = (2 * max_seq_len, reads.num_mels)
        self.options: dict[str, Any] = {"seconds": self.seconds}
        self.mask_mels, self.mask_frames = data.mask_mels, data.mask_frames

    def read(self, path: str | Path) -> tuple[Values, int]:
        wave_N = read_audio(path)
        frames = -(-len(wave_N) // HOP)
        return log_mel(wave_N, self.reads.num_mels, seconds=self.seconds).numpy(), self.reads.length(frames)

    def finished(self, values: Values) -> Tensor:
        return torch.tensor(values)

    def varied(self, values: Values, rng: np.random.Generator) -> Values:
        if not self.mask_mels and not self.mask_frames:
            return values
        values, silence = values.copy(), values.min()
        for axis, most in enumerate((self.mask_frames, self.mask_mels)):
            size = values.shape[axis]
            width = int(rng.integers(0, min(most, size), endpoint=True))
            start = int(rng.integers(0, size - width, endpoint=True))
            np.moveaxis(values, axis, 0)[start : start + width] = silence
        return values


@singledispatch
def medium_of(data: DataConfig, stack: StackConfig) -> Medium:
    """How files of this kind of data become what the stack reads. Raises UsageError for a `mean` or `std` that do not
    fit its channels."""
    raise TypeError(f"no medium is registered for {type(data).__name__}")


@medium_of.register
def _(data: ImagesDataConfig, stack: StackConfig) -> Images:
    assert isinstance(stack.input, PatchInputConfig)
    return Images(data, stack.input)


@medium_of.register
def _(data: AudioDataConfig, stack: StackConfig) -> Sound:
    assert isinstance(stack.input, LogMelInputConfig)
    return Sound(data, stack.input, stack.max_seq_len)


@dataclass(frozen=True)
class FeatureFiles(StoredFiles):
    """The arrays of one list of files."""

    @property
    def values(self) -> Values:
        """All arrays [D, ...], mapped read-only."""
        return map_file(self.folder / "values.bin", self.manifest["dtype"]).reshape(-1, *self.manifest["shape"])

    @property
    def sizes(self) -> NDArray[np.int64]:
        """How many vectors the encoder would need for all of each file [D]."""
        return map_file(self.folder / "sizes.bin", "int64")


def read_features(files: Sequence[str], medium: Medium, cache_dir: Path) -> FeatureFiles:
    """The arrays of `files`: from the cache when it holds exactly these, else read now.

    Raises what reading them raises, and QkvError for a full disk or a file that changes while it is read.
    """
    request = {
        "format_version": FORMAT_VERSION,
        "unit": medium.unit,
        "shape": list(medium.shape),
        "dtype": medium.dtype,
        "options": medium.options,
    }
    size = int(np.prod(medium.shape)) * np.dtype(medium.dtype).itemsize

    def sizes(manifest: dict[str, Any]) -> dict[str, int]:
        documents = manifest["documents"]
        return {"values.bin": documents * size, "sizes.bin": documents * 8, "hashes.bin": documents * 8}

    def write(folder: Path) -> dict[str, Any]:
        vectors, hashes = array("q"), array("Q")
        with (folder / "values.bin").open("wb") as file:
            for path in files:
                values, count = medium.read(path)
                file.write(values.astype(np.dtype(medium.dtype).newbyteorder("<")).tobytes())
                vectors.append(count)
                digest = blake2b(values.tobytes(), digest_size=8).digest()
                hashes.append(int.from_bytes(digest, "little"))
            flush(file)
        write_file(folder / "sizes.bin", np.array(vectors, "<i8").tobytes())
        write_file(folder / "hashes.bin", np.array(hashes, "<u8").tobytes())
        return {"documents": len(vectors)}

    return FeatureFiles(*stored(files, request, cache_dir, sizes=sizes, write=write, needed=len(files) * size))


@dataclass(frozen=True)
class Features:
    """D images or recordings: number d is `values[rows_D[d]]`, and `sizes` [D] says how many vectors become of it.

    in_training: they are changed at random, anew every time.
    """

    num_tokens: ClassVar[int] = 0
    """They have none."""

    medium: Medium
    values: Values
    rows_D: NDArray[np.int64]
    sizes: NDArray[np.int64]
    in_training: bool = False

    @classmethod
    def of(cls, files: FeatureFiles, medium: Medium) -> Self:
        """All that are in a cache."""
        return cls(medium, files.values, np.arange(len(files.sizes)), files.sizes)

    @property
    def unit(self) -> str:
        return self.medium.unit

    @property
    def num_documents(self) -> int:
        return len(self.rows_D)

    def document(self, index: int) -> Tensor:
        """One of them, as the encoder reads it, unchanged."""
        return self.medium.finished(self.values[self.rows_D[index]])

    def batch(self, numbers: Iterable[int], keys_B: Iterable[tuple[int, ...]]) -> Tensor:
        """Those with these numbers, as the encoder reads them: [B, C, H, W] or [B, F, S]. `keys_B` seed what is random
        about each."""
        arrays = (self.values[self.rows_D[number]] for number in numbers)
        if self.in_training:
            arrays = (
                self.medium.varied(values, np.random.default_rng(key))
                for values, key in zip(arrays, keys_B, strict=True)
            )
        return torch.stack([self.medium.finished(values) for values in arrays])

    def choose(self, chosen_D: NDArray[np.bool_]) -> Features:
        """Those that are chosen, in their order."""
        return replace(self, rows_D=self.rows_D[chosen_D], sizes=self.sizes[chosen_D])

    def for_training(self) -> Features:
        """The same, changed at random."""
        return replace(self, in_training=True)
