"""What a model can learn from: files, and which texts they hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from qkv.config.base import Kinds, Node, Part, contradiction
from qkv.config.parts import LogMelInputConfig, PatchInputConfig
from qkv.config.stack import StackConfig

Files = tuple[str, ...]
Side = Literal["source", "target"]


class SideFiles(Node):
    """Files whose lines belong together: line n of the sources to line n of the targets."""

    source: Files = ()
    target: Files = ()

    @field_validator("source", "target", mode="before")
    @classmethod
    def _one_file_is_a_list(cls, files: Any) -> Any:
        return _listed(files)

    @model_validator(mode="after")
    def _side_by_side(self) -> Self:
        hint = {"hint": "{source: [FILE], target: [FILE]}"}
        for side, files in (("source", self.source), ("target", self.target)):
            if not files:
                raise PydanticCustomError("sides", "there are no {side} files", {"side": side, **hint})
        if len(self.source) != len(self.target):
            raise PydanticCustomError("sides", "there are not as many source files as target files", hint)
        return self


def _listed(files: Any) -> Any:
    """One file is a list of one."""
    return (files,) if isinstance(files, str) else files


class DataConfig(Part):
    """Files to learn from. `validation` is a fraction of the documents held out, or files of the same kind.

    `bad_bytes`: what to do with bytes that are not UTF-8: stop with file and offset, replace by U+FFFD, or drop them.
    """

    reads: ClassVar[str] = "tokens"
    """The kind of input by which a model reads them."""

    train: Files | SideFiles = ()
    validation: float | Files | SideFiles = 0.02
    bad_bytes: Literal["error", "replace", "drop"] = "error"

    @field_validator("train", "validation", mode="before")
    @classmethod
    def _files(cls, files: Any, info: ValidationInfo) -> Any:
        """One form of files at a time, so that an error speaks of the form that was meant."""
        files = _listed(files)
        if isinstance(files, SideFiles | Mapping):
            if issubclass(cls, ListedDataConfig):
                raise contradiction(
                    "data.kind",
                    f"data.{info.field_name}",
                    "only parallel data have a source and a target",
                    "data.kind=parallel",
                )
            return SideFiles.model_validate(files)
        if isinstance(files, list | tuple) and all(isinstance(file, str) for file in files):
            return files
        if info.field_name == "train":
            raise PydanticCustomError("files", "expected a file or a list of files")
        if not isinstance(files, int | float) or isinstance(files, bool) or not 0 <= files < 1:
            raise PydanticCustomError("fraction", "expected a fraction from 0 to below 1, or files")
        return files

    def check_stack(self, stack: StackConfig, place: str) -> None:
        """Raise a contradiction where training would change more of what is read than `stack`, at `place`, reads."""


def _at_most(name: str, value: int, most: int, unit: str, key: str) -> None:
    if value > most:
        why = f"{value:,} is more than the {most:,} {unit} there are"
        raise contradiction(f"data.{name}", key, why, f"data.{name}={most}, or less")


class ListedDataConfig(DataConfig):
    """Data that are one list of files."""

    train: Files = ()
    validation: float | Files = 0.02


class TextDataConfig(ListedDataConfig):
    """Plain text: one document per file, per line, or per paragraph."""

    kind: Literal["text"] = "text"
    split: Literal["file", "lines", "blank-lines"] = "file"


class JsonlDataConfig(ListedDataConfig):
    """One JSON object per line; its `key` is the document."""

    kind: Literal["jsonl"] = "jsonl"
    key: str = "text"


class ParallelDataConfig(DataConfig):
    """Pairs of a source and a target: two lists of files, line by line, or TSV (source, tab, target) and JSONL files,
    whose keys are `source_key` and `target_key`. `reverse` exchanges the sides of every pair.

    Pairs with an empty side, or one that the model's context does not hold, are left out, and their number is said.
    """

    kind: Literal["parallel"] = "parallel"
    source_key: str = "source"
    target_key: str = "target"
    reverse: bool = False

    @model_validator(mode="after")
    def _two_keys(self) -> Self:
        if self.source_key == self.target_key:
            raise contradiction("data.source_key", "data.target_key", "they are the same key", "two keys")
        return self


class LabelledDataConfig(ListedDataConfig):
    """Texts with a label: TSV or CSV files with a header, or JSONL; `text_key` and `label_key` name their columns.

    A text longer than the model's context is cut, and the number of those is said.
    """

    kind: Literal["labelled"] = "labelled"
    text_key: str = "text"
    label_key: str = "label"

    @model_validator(mode="after")
    def _two_keys(self) -> Self:
        if self.text_key == self.label_key:
            raise contradiction("data.text_key", "data.label_key", "they are the same key", "two keys")
        return self


class MediaDataConfig(ListedDataConfig):
    """Files, each with a text to be written or a label, as the objective asks: tables of them, TSV or CSV with a header
    or JSONL, whose columns are `file_key` and `text_key` or `label_key`; files are looked for beside the table. Or
    folders with a folder for each text or label, which is its name.

    A file too long for the model's context, or with an empty text, is left out, and the number of those is said.
    """

    file_key: str
    text_key: str = "text"
    label_key: str = "label"

    @model_validator(mode="after")
    def _keys_differ(self) -> Self:
        for name in ("text_key", "label_key"):
            if getattr(self, name) == self.file_key:
                raise contradiction("data.file_key", f"data.{name}", "they are the same key", "two keys")
        return self


class ImagesDataConfig(MediaDataConfig):
    """Image files (PNG, JPEG, ...), read as one of the model's size and channels: 0 .. 1, minus `mean`, over `std`,
    each one number or one per channel. An image is resized by `resample`, with smoothing where it shrinks. `fit: cover`
    keeps its shape, and the middle is taken that has the model's: of its tighter side the share `crop`. `stretch` takes
    all of it. Training moves an image by up to `shift` pixels each way, drawn anew every time; what comes in from
    beyond its border looks like the border."""

    reads: ClassVar[str] = "patches"
    kind: Literal["images"] = "images"
    file_key: str = "image"
    mean: float | tuple[float, ...] = 0.5
    std: float | tuple[float, ...] = 0.5
    resample: Literal["nearest", "bilinear", "bicubic", "lanczos"] = "bicubic"
    fit: Literal["cover", "stretch"] = "cover"
    crop: float = Field(1.0, gt=0, le=1)
    shift: int = Field(0, ge=0, le=2**10)

    @model_validator(mode="after")
    def _stretched_whole(self) -> Self:
        if self.fit == "stretch" and self.crop != 1:
            raise contradiction(
                "data.fit", "data.crop", "all of an image is stretched", "data.crop=1, or data.fit=cover"
            )
        return self

    def check_stack(self, stack: StackConfig, place: str) -> None:
        if isinstance(stack.input, PatchInputConfig):
            _at_most("shift", self.shift, min(stack.input.image_shape), "pixels", f"{place}.input.image_size")


class AudioDataConfig(MediaDataConfig):
    """WAV files, read as log-mel features of as much sound as the model's context holds, silence after it. Training
    hides up to `mask_mels` neighbouring mels and `mask_frames` frames, drawn anew every time (SpecAugment, with one
    mask of each kind: Park et al. 2019, arXiv 1904.08779)."""

    reads: ClassVar[str] = "log-mel"
    kind: Literal["audio"] = "audio"
    file_key: str = "audio"
    mask_mels: int = Field(0, ge=0, le=2**10)
    mask_frames: int = Field(0, ge=0, le=2**20)

    def check_stack(self, stack: StackConfig, place: str) -> None:
        if isinstance(stack.input, LogMelInputConfig):
            _at_most("mask_mels", self.mask_mels, stack.input.num_mels, "mels", f"{place}.input.num_mels")
            _at_most("mask_frames", self.mask_frames, 2 * stack.max_seq_len, "frames", f"{place}.max_seq_len")


Data = Annotated[
    DataConfig,
    Kinds(TextDataConfig, JsonlDataConfig, ParallelDataConfig, LabelledDataConfig, ImagesDataConfig, AudioDataConfig),
]
