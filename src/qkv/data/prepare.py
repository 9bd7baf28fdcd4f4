"""From a configuration to ids, images and sound on disk, divided into training and validation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, singledispatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qkv.config.data import (
    DataConfig,
    LabelledDataConfig,
    MediaDataConfig,
    ParallelDataConfig,
    Side,
    TextDataConfig,
)
from qkv.config.errors import ConfigError, QkvError, nearest
from qkv.config.objectives import ClassifyObjectiveConfig
from qkv.config.run import Config
from qkv.data.cache import StoredFiles, TokenFiles, ends_of, tokenise
from qkv.data.documents import read_pieces
from qkv.data.records import (
    Part,
    check_sides,
    files_of,
    pieces,
    read_labels,
    read_media,
    read_side,
    read_texts,
)
from qkv.data.split import Spans, held_out, hold_out, hold_out_ends

if TYPE_CHECKING:
    from qkv.data.media import Features
    from qkv.tokenizer.tokenizer import Tokenizer

Chosen = NDArray[np.bool_]
_Tokenizers = tuple["Tokenizer | None", "Tokenizer | None"]
"""Of the sources, and of the targets or all there is."""


@dataclass(frozen=True)
class Corpus:
    """D tokenised documents: the ids of document d are `tokens[starts_D[d]:ends_D[d]]`.

    `tokens` is mapped from disk and may hold ids of other documents too.
    """

    unit: ClassVar[str] = "documents"

    tokens: NDArray[np.unsignedinteger[Any]]
    starts_D: NDArray[np.int64]
    ends_D: NDArray[np.int64]

    @property
    def num_documents(self) -> int:
        return len(self.starts_D)

    @cached_property
    def num_tokens(self) -> int:
        return int(self.sizes.sum())

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """Tokens of each document [D]."""
        return self.ends_D - self.starts_D

    def document(self, index: int) -> NDArray[np.unsignedinteger[Any]]:
        """The ids [n] of one document."""
        return self.tokens[self.starts_D[index] : self.ends_D[index]]

    def choose(self, chosen_D: Chosen) -> Corpus:
        """The documents that are chosen, in their order."""
        return Corpus(self.tokens, self.starts_D[chosen_D], self.ends_D[chosen_D])


@dataclass(frozen=True)
class Pairs:
    """Document d of `source` (a text, an image or a recording) and document d of `target` belong together.

    start_ids: what targets begin with, where that is not the tokenizer's begin.
    """

    unit: ClassVar[str] = "pairs"

    source: Corpus | Features
    target: Corpus
    start_ids: tuple[int, ...] = ()

    @property
    def num_documents(self) -> int:
        """The number of pairs."""
        return self.target.num_documents

    @property
    def num_tokens(self) -> int:
        """The tokens of the targets."""
        return self.target.num_tokens

    def choose(self, chosen_D: Chosen) -> Pairs:
        """The pairs that are chosen, in their order."""
        return Pairs(self.source.choose(chosen_D), self.target.choose(chosen_D), self.start_ids)


@dataclass(frozen=True)
class Labelled:
    """Texts, images or recordings and the number of each one's class, `labels_D` [D]."""

    texts: Corpus | Features
    labels_D: NDArray[np.int64]

    @property
    def unit(self) -> str:
        return "texts" if isinstance(self.texts, Corpus) else self.texts.unit

    @property
    def num_documents(self) -> int:
        return self.texts.num_documents

    @property
    def num_tokens(self) -> int:
        return self.texts.num_tokens

    def choose(self, chosen_D: Chosen) -> Labelled:
        """Those that are chosen, in their order."""
        return Labelled(self.texts.choose(chosen_D), self.labels_D[chosen_D])


Dataset = Corpus | Pairs | Labelled


@dataclass(frozen=True)
class Prepared:
    """Data in the form that rows are made of. `files` are the caches behind it: of the training files and, when they
    are listed, of others.

    notes: what was left out or cut, for people. labels: the names of the classes of labelled data.
    """

    train: Dataset
    validation: Dataset | None
    files: tuple[StoredFiles, ...]
    notes: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()

    @property
    def reused(self) -> bool:
        """Nothing had to be read again."""
        return all(files.reused for files in self.files)

    @property
    def id_bits(self) -> int:
        """The width of a stored id: 16 or 32; of two sides the wider; 0 where there are none."""
        widths = [files.tokens.dtype.itemsize for files in self.files if isinstance(files, TokenFiles)]
        return max(widths, default=0) * 8

    @property
    def fingerprint(self) -> str:
        """Of the bytes of all files, the tokenizer and the options: a resumed run finds the data it began with."""
        known = []
        for files in self.files:
            contents = [source["sha256"] for source in files.manifest["files"]]
            known.append({**files.manifest, "files": contents})
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def prepare(
    config: Config, tokenizer: Tokenizer | None, cache_dir: str | Path, *, source_tokenizer: Tokenizer | None = None
) -> Prepared:
    """Read `config.data` into `cache_dir`, or map what is there already (qkv.data.cache says what is stored).

    tokenizer: of texts; None where there are none. source_tokenizer: of the sources of parallel data, where they have
    one of their own.

    `validation` is a list of files, or a fraction held out by a hash of each document and `train.seed`; 0 is none.
    Of pairs the source decides, so that all translations of one are on the same side; of labelled data the text; of
    images and sound what is in the file. Of
    fewer files than would give one whole file (`split: file`), the end of each is held out instead. The cache depends
    on neither fraction nor seed.

    Raises ConfigError when there is nothing to train on, QkvError for pairs and texts none of which can be used and for
    an unknown label, and what `qkv.data.cache.tokenise` raises.
    """
    if not config.data.train:
        raise ConfigError("there is nothing to train on", where="data.train", hint="data.train=[corpus.txt]")
    return _prepare(config.data, config, (source_tokenizer or tokenizer, tokenizer), Path(cache_dir))


@singledispatch
def _prepare(data: DataConfig, config: Config, tokenizers: _Tokenizers, cache_dir: Path) -> Prepared:
    def tokenised(part: Part) -> TokenFiles:
        files = files_of(data, part)
        return tokenise(files, read_pieces(files, data), _options(data), _there(tokenizers[1]), cache_dir)

    train = tokenised("train")
    if isinstance(data.validation, float):
        kept, held = _divide(data, train, data.validation, config.train.seed)
        validation = Corpus(train.tokens, *held) if data.validation else None
        return Prepared(Corpus(train.tokens, *kept), validation, (train,))
    if not data.validation:
        return Prepared(_corpus(train), None, (train,))
    listed = tokenised("validation")
    return Prepared(_corpus(train), _corpus(listed), (train, listed))


def _there(tokenizer: Tokenizer | None) -> Tokenizer:
    assert tokenizer is not None  # there is one wherever there are texts
    return tokenizer


def _options(data: DataConfig) -> dict[str, Any]:
    return data.model_dump(mode="json", exclude={"train", "validation"})


def _corpus(files: TokenFiles) -> Corpus:
    return Corpus(files.tokens, files.offsets[:-1], files.offsets[1:])


def _divide(data: DataConfig, files: TokenFiles, fraction: float, seed: int) -> tuple[Spans, Spans]:
    spans = files.offsets[:-1], files.offsets[1:]
    if fraction == 0:
        return spans, (np.empty(0, np.int64), np.empty(0, np.int64))
    if isinstance(data, TextDataConfig) and data.split == "file" and fraction * len(data.train) < 1:
        return hold_out_ends(*spans, fraction)
    return hold_out(*spans, files.hashes, fraction, seed)


# --- records: pairs, and texts with labels ----------------------------------------------------------------------------


class _Records(NamedTuple):
    """All records of one part of the data, which of them can be used, and what is to be said about the others."""

    examples: Pairs | Labelled
    usable_D: Chosen
    files: tuple[StoredFiles, ...]
    notes: tuple[str, ...]


def _divide_records(data: DataConfig, seed: int, read: Callable[[Part], _Records]) -> Prepared:
    """A fraction holds out records by the first of their files: pairs by the source, so that all its translations are
    on one side."""
    train = read("train")
    held_D = np.zeros_like(train.usable_D)
    if isinstance(data.validation, float) and data.validation:
        held_D = held_out(train.files[0].hashes, data.validation, seed)
    kept = train.examples.choose(train.usable_D & ~held_D)
    if not kept.num_documents:
        what = "; ".join(["the training data hold nothing to learn from", *train.notes])
        raise QkvError(what, where=", ".join(files_of(data, "train")))
    if not data.validation:
        return Prepared(kept, None, train.files, train.notes)
    if isinstance(data.validation, float):
        return Prepared(kept, train.examples.choose(train.usable_D & held_D), train.files, train.notes)
    held = read("validation")
    files, notes = (*train.files, *held.files), (*train.notes, *held.notes)
    return Prepared(kept, held.examples.choose(held.usable_D), files, notes)


@_prepare.register(ParallelDataConfig)
def _(data: ParallelDataConfig, config: Config, tokenizers: _Tokenizers, cache_dir: Path) -> Prepared:
    stacks = list(config.model.stacks.values())
    most_source, most_target = stacks[0].max_seq_len, stacks[-1].max_seq_len
    start_ids = config.generation.start_ids or ()

    def tokenised(part: Part, side: Side, tokenizer: Tokenizer | None, start_ids: tuple[int, ...] = ()) -> TokenFiles:
        files, texts = files_of(data, part, side), read_side(data, part, side)
        return tokenise(files, texts, {**_options(data), "side": side}, _there(tokenizer), cache_dir, start_ids)

    def read(part: Part) -> _Records:
        check_sides(data, part)
        files = tokenised(part, "source", tokenizers[0]), tokenised(part, "target", tokenizers[1], start_ids)
        pairs = Pairs(_corpus(files[0]), _corpus(files[1]), start_ids)
        empty_D = _empty(files[0]) | _empty(files[1])
        # the decoder reads the target without its last token
        long_D = ~empty_D & ((pairs.source.sizes > most_source) | (pairs.target.sizes - 1 > most_target))
        notes = _notes(
            f"{_PARTS[part]} pairs are left out: ",
            (long_D, f"they have more than {most_source} source or {most_target} target tokens"),
            (empty_D, "a side is empty"),
        )
        return _Records(pairs, ~(empty_D | long_D), files, notes)

    return _divide_records(data, config.train.seed, read)


@_prepare.register(LabelledDataConfig)
def _(data: LabelledDataConfig, config: Config, tokenizers: _Tokenizers, cache_dir: Path) -> Prepared:
    context = config.model.context
    labels = _labels(config, (label for label, _ in read_labels(data, "train")))

    def read(part: Part) -> _Records:
        texts, tokenizer = read_texts(data, part), _there(tokenizers[1])
        files = tokenise(files_of(data, part), texts, _options(data), tokenizer, cache_dir)
        examples = Labelled(_corpus(files), label_numbers(read_labels(data, part), labels))
        empty_D = _empty(files)
        notes = _notes(
            f"{_PARTS[part]} texts are ",
            (examples.texts.sizes > context, f"cut: they have more than {context} tokens"),
            (empty_D, "left out: they are empty"),
        )
        return _Records(examples, ~empty_D, (files,), notes)

    return replace(_divide_records(data, config.train.seed, read), labels=labels)


@_prepare.register(MediaDataConfig)
def _(data: MediaDataConfig, config: Config, tokenizers: _Tokenizers, cache_dir: Path) -> Prepared:
    from qkv.data.media import Features, medium_of, read_features

    stacks = list(config.model.stacks.values())
    medium, most_source, most_target = medium_of(data, stacks[0]), stacks[0].max_seq_len, stacks[-1].max_seq_len
    labelled, start_ids = isinstance(config.objective, ClassifyObjectiveConfig), config.generation.start_ids or ()
    labels: tuple[str, ...] = ()
    if labelled:
        labels = _labels(config, (record.text for record in read_media(data, "train", labelled=True)))

    def read(part: Part) -> _Records:
        records = list(read_media(data, part, labelled=labelled))
        features = read_features([record.file for record in records], medium, cache_dir)
        source, kind = Features.of(features, medium), f"{_PARTS[part]} {medium.unit} are left out: "
        long_D, too_long = source.sizes > most_source, f"they become more than {most_source} vectors"
        if labelled:
            numbers_D = label_numbers(((record.text, record.where) for record in records), labels)
            return _Records(Labelled(source, numbers_D), ~long_D, (features,), _notes(kind, (long_D, too_long)))
        told = tokenise(
            list(dict.fromkeys(record.origin for record in records)),
            pieces(record.text for record in records),
            {**_options(data), "side": "target"},
            _there(tokenizers[1]),
            cache_dir,
            start_ids,
        )
        pairs, empty_D = Pairs(source, _corpus(told), start_ids), _empty(told)
        long_text_D = pairs.target.sizes - 1 > most_target
        notes = _notes(
            kind,
            (long_D, too_long),
            (long_text_D, f"their texts have more than {most_target} tokens"),
            (empty_D, "their texts are empty"),
        )
        return _Records(pairs, ~(long_D | long_text_D | empty_D), (features, told), notes)

    prepared = replace(_divide_records(data, config.train.seed, read), labels=labels)
    train = prepared.train
    if isinstance(train, Labelled) and isinstance(train.texts, Features):
        return replace(prepared, train=replace(train, texts=train.texts.for_training()))
    assert isinstance(train, Pairs)
    assert isinstance(train.source, Features)
    return replace(prepared, train=replace(train, source=train.source.for_training()))


def _labels(config: Config, told: Iterable[str]) -> tuple[str, ...]:
    """The names of the classes: those of the objective, or else all that the training data tell, sorted."""
    objective = config.objective
    if isinstance(objective, ClassifyObjectiveConfig) and objective.labels is not None:
        return objective.labels
    labels = tuple(sorted(set(told)))
    if len(labels) < 2:
        found = f"have one label only: {labels[0]}" if labels else "hold no example with a label"
        raise QkvError(
            f"the training data {found}",
            where=", ".join(files_of(config.data, "train")),
            hint="data.label_key=NAME for another column",
        )
    return labels


_PARTS: dict[Part, str] = {"train": "training", "validation": "validation"}


def _empty(files: TokenFiles) -> Chosen:
    """Which documents have no token between their begin and end [D]."""
    return np.diff(files.offsets) <= sum(map(len, ends_of(files.manifest)))


def _notes(what: str, *reasons: tuple[Chosen, str]) -> tuple[str, ...]:
    """What is to be said about the records that each reason is true of [D]."""
    return tuple(f"{true_D.sum():,} of {len(true_D):,} {what}{why}" for true_D, why in reasons if true_D.any())


def label_numbers(told: Iterable[tuple[str, str]], labels: Sequence[str]) -> NDArray[np.int64]:
    """The number of each label, given as (label, where). Raises QkvError for one that is not among `labels`."""
    known = {label: number for number, label in enumerate(labels)}

    def numbers() -> Iterator[int]:
        for label, where in told:
            if label not in known:
                guess = nearest(label, labels)
                raise QkvError(
                    f"the label `{label}` is not one of the model's: {', '.join(labels[:10])}",
                    where=where,
                    hint=f"`{guess}`" if guess else None,
                )
            yield known[label]

    return np.fromiter(numbers(), np.int64)
