"""Folders of CTranslate2 (https://github.com/OpenNMT/CTranslate2) with a Whisper in them: `model.bin`, in float32,
float16 or int8 with a scale per row, and beside it `config.json` and a vocabulary.

The layout, little-endian: u32 version, string spec, u32 revision, u32 count; then per variable string name, u8 rank,
u32 dims, u8 type, u32 bytes, data; then u32 count of aliases, each two strings. A string is u16 length, and bytes that
end with a zero.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from qkv.checkpoint.published import Published
from qkv.checkpoint.source import Source, read_json, read_object, tokenizer_of
from qkv.checkpoint.tensors import Stored
from qkv.config.errors import DamagedError, NotFoundError, QkvError

_TYPES: dict[int, np.dtype[Any]] = {
    0: np.dtype("<f4"),
    1: np.dtype("i1"),
    2: np.dtype("<i2"),
    3: np.dtype("<i4"),
    4: np.dtype("<f2"),
}
_VERSIONS = range(4, 7)
_SPEC = "WhisperSpec"
_MULTILINGUAL = 51865  # pieces, or more: how Whisper's own code knows
_MOST_VARIABLES = 1 << 16
_MOST_DIMENSIONS = 8

_ATTENTION = {
    "self_attention": ("self_attn", ("linear_0", "linear_0", "linear_0", "linear_1")),
    "attention": ("encoder_attn", ("linear_0", "linear_1", "linear_1", "linear_2")),
}
"""What an attention is called there, and which of its stacked matrices hold q, k, v and the output, in this order."""


_SETTINGS = {
    "decoder/pre_norm": 1,
    "decoder/activation": 3,  # GELU
    "decoder/alibi": 0,
    "decoder/scale_embeddings": 0,
    "decoder/start_from_zero_embedding": 0,
}
"""What makes it a Whisper, where it is said."""


@dataclass(frozen=True)
class _Variable:
    """Numbers in the file: `at` bytes from its beginning."""

    shape: tuple[int, ...]
    kind: np.dtype[Any]
    at: int

    @property
    def count(self) -> int:
        return math.prod(self.shape)


def is_ours(path: Path) -> bool:
    """Whether the file begins as CTranslate2's do."""
    with path.open("rb") as file:
        return re.match(rb"[\x00-\xff]{4}[\x00-\xff]\x00\w+Spec\x00", file.read(64)) is not None


def read(folder: Path) -> Source:
    """The model in the folder. Raises QkvError for what is damaged, or not supported."""
    path = folder / "model.bin"
    variables = _variables(path)
    where = str(path)
    model = _Model(path, variables)
    embedding = model.variable("decoder/embeddings/weight", rank=2)
    mel = model.variable("encoder/conv1/weight", rank=3)
    heads = [model.whole(f"{side}/num_heads") for side in ("encoder", "decoder")]
    for name, value in _SETTINGS.items():
        if name in variables and model.whole(name) != value:
            raise QkvError(f"{name} = {model.whole(name)} is not supported, only {value}", where=where)
    keys: dict[str, Any] = {
        "model_type": "whisper",
        "architectures": ["WhisperForConditionalGeneration"],
        "is_encoder_decoder": True,
        "vocab_size": embedding.shape[0],
        "d_model": embedding.shape[1],
        "num_mel_bins": mel.shape[1],
        "max_source_positions": model.variable("encoder/position_encodings/encodings", rank=2).shape[0],
        "max_target_positions": model.variable("decoder/position_encodings/encodings", rank=2).shape[0],
        "activation_function": "gelu",
        "scale_embedding": False,
        "tie_word_embeddings": True,
    }
    tensors = {
        "model.encoder.conv1.weight": model.stored("encoder/conv1/weight"),
        "model.encoder.conv1.bias": model.stored("encoder/conv1/bias"),
        "model.encoder.conv2.weight": model.stored("encoder/conv2/weight"),
        "model.encoder.conv2.bias": model.stored("encoder/conv2/bias"),
        "model.decoder.embed_tokens.weight": model.stored("decoder/embeddings/weight"),
    }
    for side, number_of_heads in zip(("encoder", "decoder"), heads, strict=True):
        layers = model.layers(side)
        keys |= {
            f"{side}_layers": layers,
            f"{side}_attention_heads": number_of_heads,
            f"{side}_ffn_dim": model.variable(f"{side}/layer_0/ffn/linear_0/weight", rank=2).shape[0],
        }
        tensors[f"model.{side}.embed_positions.weight"] = model.stored(f"{side}/position_encodings/encodings")
        tensors |= model.norm(f"{side}/layer_norm", f"model.{side}.layer_norm")
        for layer in range(layers):
            tensors |= model.layer(f"{side}/layer_{layer}", f"model.{side}.layers.{layer}")
    model.refuse_the_rest()
    return Source(
        path=folder,
        config=Published(keys, where),
        generation=_generation(folder, _tokens(folder), multilingual=embedding.shape[0] >= _MULTILINGUAL),
        tensors=tensors,
        weights=path,
        tokenizer=tokenizer_of(folder),
    )


class _Model:
    """The variables by name, and which of them have been asked for."""

    def __init__(self, path: Path, variables: Mapping[str, _Variable]) -> None:
        self.path, self.variables = path, variables
        self.used: set[str] = set()

    def variable(self, name: str, rank: int | None = None) -> _Variable:
        if name not in self.variables:
            raise DamagedError(f"the weights do not belong together; missing: {name}", where=str(self.path))
        found = self.variables[name]
        if rank is not None and len(found.shape) != rank:
            raise DamagedError(f"{name} has shape {list(found.shape)}, not of {rank} dimensions", where=str(self.path))
        self.used.add(name)
        return found

    def numbers(self, name: str) -> Tensor:
        """A variable as it stands in the file."""
        found = self.variable(name)
        values = np.fromfile(self.path, found.kind, found.count, offset=found.at)
        return torch.from_numpy(values).view(found.shape)

    def whole(self, name: str) -> int:
        """A single whole number."""
        if self.variable(name, rank=0).kind.kind != "i":
            raise DamagedError(f"{name} is no whole number", where=str(self.path))
        return int(self.numbers(name).item())

    def stored(self, name: str, part: int = 0, parts: int = 1) -> Stored:
        """A matrix or vector, or a part of its rows. Of int8, the numbers are those in the file by the row's scale."""
        found = self.variable(name)
        scales = f"{name}_scale"
        scaled = scales in self.variables
        if scaled and (shape := self.variable(scales).shape) != found.shape[:1]:
            raise DamagedError(
                f"{name} has shape {list(found.shape)}, and its scales {list(shape)}", where=str(self.path)
            )
        if found.kind.kind != "f" and not (scaled and found.kind == np.int8):
            raise QkvError(
                f"{name} is held as {found.kind.name}, which is not supported",
                where=str(self.path),
                hint="float32, float16, or int8 with scales",
            )
        if not found.shape or found.shape[0] % parts:
            raise DamagedError(f"{name} has shape {list(found.shape)}", where=str(self.path))
        rows = found.shape[0] // parts

        def read(dtype: torch.dtype | None) -> Tensor:
            values = self.numbers(name)[part * rows : (part + 1) * rows]
            if scaled:
                scales_R = self.numbers(scales)[part * rows : (part + 1) * rows]
                values = values.float() / scales_R.view(-1, *[1] * (values.dim() - 1))
            return values if dtype is None else values.to(dtype)

        own = torch.float16 if found.kind == np.float16 else torch.float32
        return Stored((rows, *found.shape[1:]), own, read)

    def layers(self, side: str) -> int:
        """How many there are."""
        numbers = {int(match[1]) for name in self.variables if (match := re.match(rf"{side}/layer_(\d{{1,4}})/", name))}
        if numbers != set(range(len(numbers))) or not numbers:
            raise DamagedError(f"the {side}'s layers are not numbered 0, 1, ...", where=str(self.path))
        return len(numbers)

    def norm(self, ours: str, theirs: str) -> dict[str, Stored]:
        return {f"{theirs}.weight": self.stored(f"{ours}/gamma"), f"{theirs}.bias": self.stored(f"{ours}/beta")}

    def layer(self, ours: str, theirs: str) -> dict[str, Stored]:
        found: dict[str, Stored] = {}
        for kind, (called, linears) in _ATTENTION.items():
            if f"{ours}/{kind}/linear_0/weight" in self.variables:
                found |= self.attention(f"{ours}/{kind}", f"{theirs}.{called}", linears)
                found |= self.norm(f"{ours}/{kind}/layer_norm", f"{theirs}.{called}_layer_norm")
        for number in (0, 1):
            for last in ("weight", "bias"):
                found[f"{theirs}.fc{number + 1}.{last}"] = self.stored(f"{ours}/ffn/linear_{number}/{last}")
        return found | self.norm(f"{ours}/ffn/layer_norm", f"{theirs}.final_layer_norm")

    def attention(self, ours: str, theirs: str, linears: tuple[str, ...]) -> dict[str, Stored]:
        found: dict[str, Stored] = {}
        for index, (name, linear) in enumerate(zip(("q", "k", "v", "out"), linears, strict=True)):
            part, parts = linears[:index].count(linear), linears.count(linear)
            for last in ("weight", "bias"):
                stored = self.stored(f"{ours}/{linear}/{last}", part, parts)
                if (name, last) != ("k", "bias"):
                    found[f"{theirs}.{name}_proj.{last}"] = stored
                elif stored.read(None).any():
                    raise DamagedError(f"{ours} has a bias on its keys, and Whisper has none", where=str(self.path))
        return found

    def refuse_the_rest(self) -> None:
        """Refuse matrices that belong nowhere; single numbers are settings."""
        rest = [name for name in self.variables.keys() - self.used if self.variables[name].shape]
        if rest:
            raise DamagedError(
                f"the weights do not belong together; unexpected: {', '.join(sorted(rest)[:100]):.2000}",
                where=str(self.path),
            )


# --- the file ---------------------------------------------------------------------------------------------------------


def _variables(path: Path) -> dict[str, _Variable]:
    """What stands in the file and where; nothing is read that is large."""
    with path.open("rb") as file:
        reader = _Reader(file, path)
        version = reader.number("I")
        spec = reader.string()
        if spec != _SPEC or version not in _VERSIONS:
            raise QkvError(
                f"CTranslate2: a {spec!r:.80} of version {version} is not supported",
                where=str(path),
                hint=f"supported: {_SPEC} of versions {_VERSIONS.start} to {_VERSIONS.stop - 1}",
            )
        reader.number("I")  # the revision of the spec
        variables: dict[str, _Variable] = {}
        for _ in range(reader.number("I", most=_MOST_VARIABLES)):
            name = reader.string()
            if name in variables:
                raise reader.damaged(f"{name!r:.200} stands there twice")
            shape = tuple(reader.number("I") for _ in range(reader.number("B", most=_MOST_DIMENSIONS)))
            number = reader.number("B")
            if number not in _TYPES:
                raise reader.damaged(f"{name!r:.200} has a type that there is not ({number})")
            size = reader.number("I")
            if size != math.prod(shape) * _TYPES[number].itemsize:
                raise reader.damaged(f"{name!r:.200} of shape {list(shape)} has {size:,} bytes")
            variables[name] = _Variable(shape, _TYPES[number], file.tell())
            reader.skip(size)
        for _ in range(reader.number("I", most=_MOST_VARIABLES)):
            alias, name = reader.string(), reader.string()
            if alias != "decoder/projection/weight" or name != "decoder/embeddings/weight":
                raise reader.damaged(f"{alias!r:.200} is said to be {name!r:.200}")
    return variables


class _Reader:
    """Takes one thing after the other from the file."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.file, self.path = file, path
        self.size = path.stat().st_size

    def damaged(self, what: str) -> DamagedError:
        return DamagedError(f"model.bin is damaged: {what}", where=f"{self.path}: byte {self.file.tell()}")

    def take(self, count: int) -> bytes:
        found = self.file.read(count)
        if len(found) != count:
            raise self.damaged("it is cut off")
        return found

    def skip(self, count: int) -> None:
        if count > self.size - self.file.tell():
            raise self.damaged("it is cut off")
        self.file.seek(count, 1)

    def number(self, kind: str, most: int | None = None) -> int:
        value: int
        (value,) = struct.unpack(f"<{kind}", self.take(struct.calcsize(kind)))
        if most is not None and value > most:
            raise self.damaged(f"{value:,} where at most {most:,} can be meant")
        return value

    def string(self) -> str:
        raw = self.take(self.number("H"))
        return raw.rstrip(b"\0").decode("utf-8", "replace")


# --- what is said beside the weights ----------------------------------------------------------------------------------


def _tokens(folder: Path) -> dict[str, int]:
    """Special tokens and their ids, by the vocabulary: a token a line, or a list."""
    listed, lines = folder / "vocabulary.json", folder / "vocabulary.txt"
    if listed.is_file():
        tokens = read_json(listed)
    elif lines.is_file():
        tokens = lines.read_text(encoding="utf-8", errors="replace").split("\n")
    else:
        raise NotFoundError("the vocabulary is missing: neither vocabulary.json nor vocabulary.txt", where=str(folder))
    if not isinstance(tokens, list):
        raise DamagedError("the vocabulary is damaged: it is no list", where=str(listed))
    return {token: index for index, token in enumerate(tokens) if isinstance(token, str) and token.startswith("<|")}


def _generation(folder: Path, tokens: Mapping[str, int], *, multilingual: bool) -> Published:
    """A generation_config.json of what `config.json` and the vocabulary say."""
    path = folder / "config.json"
    told = read_object(path) if path.is_file() else Published({}, str(path))
    languages = {token: index for token, index in tokens.items() if index in told.list("lang_ids", [])}
    keys = {
        "decoder_start_token_id": tokens.get("<|startoftranscript|>"),
        "eos_token_id": tokens.get("<|endoftext|>"),
        "no_timestamps_token_id": tokens.get("<|notimestamps|>"),
        "is_multilingual": multilingual,
        "lang_to_id": languages,
        "task_to_id": {task: tokens[f"<|{task}|>"] for task in ("transcribe", "translate") if f"<|{task}|>" in tokens},
        "suppress_tokens": told.list("suppress_ids", []),
        "begin_suppress_tokens": told.list("suppress_ids_begin", []),
    }
    return Published({key: value for key, value in keys.items() if value is not None}, str(path))
