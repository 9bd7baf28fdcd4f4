"""From a configuration to ids on disk, divided into training and validation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, singledispatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qkv.config.errors import ConfigError, QkvError, nearest
from qkv.config.run import (
    ClassifyObjectiveConfig,
    Config,
    DataConfig,
    LabelledDataConfig,
    ParallelDataConfig,
    Side,
    TextDataConfig,
)
from qkv.data.cache import TokenFiles, tokenise
from qkv.data.documents import read_pieces
from qkv.data.records import Part, files_of, read_labels, read_side, read_texts
from qkv.data.split import Spans, held_out, hold_out, hold_out_ends

if TYPE_CHECKING:
    from qkv.tokenizer.tokenizer import Tokenizer

Chosen = NDArray[np.bool_]


@dataclass(frozen=True)
class Corpus:
    """D tokenised documents: the ids of document d are `tokens[starts_D[d]:ends_D[d]]`.

    `tokens` is mapped from disk and may hold ids of other documents too.
    """

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
    """Document d of `source` and document d of `target` belong together."""

    source: Corpus
    target: Corpus

    @property
    def num_documents(self) -> int:
        """The number of pairs."""
        return self.target.num_documents

    @property
    def num_tokens(self) -> int:
        """The tokens of the targets."""
        return self.target.num_tokens


@dataclass(frozen=True)
class Labelled:
    """Texts and the number of each one's class, `labels_D` [D]."""

    texts: Corpus
    labels_D: NDArray[np.int64]

    @property
    def num_documents(self) -> int:
        return self.texts.num_documents

    @property
    def num_tokens(self) -> int:
        return self.texts.num_tokens


Dataset = Corpus | Pairs | Labelled


@dataclass(frozen=True)
class Prepared:
    """Tokenised data. `files` are the caches behind it: of the training files and, when they are listed, of others.

    notes: what was left out or cut, for people. labels: the names of the classes of labelled data.
    """

    train: Dataset
    validation: Dataset | None
    files: tuple[TokenFiles, ...]
    notes: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()

    @property
    def reused(self) -> bool:
        """Nothing had to be tokenised."""
        return all(files.reused for files in self.files)

    @property
    def id_bits(self) -> int:
        """The width of a stored id: 16 or 32; of two sides the wider."""
        return max(files.tokens.dtype.itemsize for files in self.files) * 8

    @property
    def fingerprint(self) -> str:
        """Of the bytes of all files, the tokenizer and the options: a resumed run finds the data it began with."""
        known = []
        for files in self.files:
            contents = [source["sha256"] for source in files.manifest["files"]]
            known.append({**files.manifest, "files": contents})
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def prepare(
    config: Config, tokenizer: Tokenizer, cache_dir: str | Path, *, source_tokenizer: Tokenizer | None = None
) -> Prepared:
    """Tokenise `config.data` into `cache_dir`, or map what is there already (qkv.data.cache says what is stored).

    source_tokenizer: of the sources of parallel data, where they have one of their own.

    `validation` is a list of files, or a fraction held out by a hash of each document and `train.seed`; 0 is none.
    Of pairs the source decides, so that all translations of one are on the same side; of labelled data the text. Of
    fewer files than would give one whole file (`split: file`), the end of each is held out instead. The cache depends
    on neither fraction nor seed.

    Raises ConfigError when there is nothing to train on, and what `qkv.data.cache.tokenise` raises.
    """
    if not config.data.train:
        raise ConfigError("there is nothing to train on", where="data.train", hint="data.train=[corpus.txt]")
    return _prepare(config.data, config, (source_tokenizer or tokenizer, tokenizer), Path(cache_dir))


@singledispatch
def _prepare(data: DataConfig, config: Config, tokenizers: tuple[Tokenizer, Tokenizer], cache_dir: Path) -> Prepared:
    def tokenised(part: Part) -> TokenFiles:
        files = files_of(data, part)
        return tokenise(files, read_pieces(files, data), _options(data), tokenizers[1], cache_dir)

    train = tokenised("train")
    if isinstance(data.validation, float):
        kept, held = _divide(data, train, data.validation, config.train.seed)
        validation = Corpus(train.tokens, *held) if data.validation else None
        return Prepared(Corpus(train.tokens, *kept), validation, (train,))
    if not data.validation:
        return Prepared(_corpus(train), None, (train,))
    listed = tokenised("validation")
    return Prepared(_corpus(train), _corpus(listed), (train, listed))


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


def _hold_out(data: DataConfig, files: TokenFiles, config: Config) -> Chosen | None:
    """Which records of the training files a fraction holds out; None for no validation, or files of its own."""
    if not isinstance(data.validation, float) or not data.validation:
        return None
    return held_out(files.hashes, data.validation, config.train.seed)


# --- pairs ------------------------------------------------------------------------------------------------------------


@_prepare.register(ParallelDataConfig)
def _(data: ParallelDataConfig, config: Config, tokenizers: tuple[Tokenizer, Tokenizer], cache_dir: Path) -> Prepared:
    def tokenised(part: Part) -> tuple[TokenFiles, TokenFiles]:
        sides: tuple[Side, Side] = ("source", "target")
        source, target = (
            tokenise(
                files_of(data, part, side),
                read_side(data, part, side),
                {**_options(data), "side": side},
                tokenizer,
                cache_dir,
            )
            for side, tokenizer in zip(sides, tokenizers, strict=True)
        )
        return source, target

    assert config.model.encoder is not None
    assert config.model.decoder is not None
    context = config.model.encoder.max_seq_len, config.model.decoder.max_seq_len
    train = tokenised("train")
    held_D = _hold_out(data, train[0], config)
    pairs, fits_D, notes = _fitting(train, context, "training")
    if held_D is not None:
        held = _choose(pairs, fits_D & held_D)
        return Prepared(_choose(pairs, fits_D & ~held_D), held, train, notes)
    if not data.validation:
        return Prepared(_choose(pairs, fits_D), None, train, notes)
    listed = tokenised("validation")
    held, held_fits_D, more = _fitting(listed, context, "validation")
    return Prepared(_choose(pairs, fits_D), _choose(held, held_fits_D), (*train, *listed), (*notes, *more))


def _choose(pairs: Pairs, chosen_D: Chosen) -> Pairs:
    return Pairs(pairs.source.choose(chosen_D), pairs.target.choose(chosen_D))


def _fitting(
    files: tuple[TokenFiles, TokenFiles], context: tuple[int, int], what: str
) -> tuple[Pairs, Chosen, tuple[str, ...]]:
    """All pairs, which of them can be learnt from, and what is to be said about the others."""
    source, target = map(_corpus, files)
    empty_D = np.zeros(source.num_documents, np.bool_)
    for corpus, made in ((source, files[0]), (target, files[1])):
        empty_D |= corpus.sizes <= sum(made.manifest[key] is not None for key in ("begin_id", "end_id"))
    # the decoder reads the target without its last token
    long_D = ~empty_D & ((source.sizes > context[0]) | (target.sizes - 1 > context[1]))
    notes = []
    if long_D.any():
        notes.append(
            f"{long_D.sum():,} of {len(long_D):,} {what} pairs are left out: they have more than {context[0]} source "
            f"or {context[1]} target tokens"
        )
    if empty_D.any():
        notes.append(f"{empty_D.sum():,} of {len(empty_D):,} {what} pairs are left out: a side is empty")
    return Pairs(source, target), ~(empty_D | long_D), tuple(notes)


# --- texts with labels ------------------------------------------------------------------------------------------------


@_prepare.register(LabelledDataConfig)
def _(data: LabelledDataConfig, config: Config, tokenizers: tuple[Tokenizer, Tokenizer], cache_dir: Path) -> Prepared:
    def tokenised(part: Part) -> TokenFiles:
        return tokenise(files_of(data, part), read_texts(data, part), _options(data), tokenizers[1], cache_dir)

    train = tokenised("train")
    told = list(read_labels(data, "train"))
    objective = config.objective
    labels = objective.labels if isinstance(objective, ClassifyObjectiveConfig) else None
    if labels is None:
        labels = tuple(sorted({label for label, _ in told}))
        if len(labels) < 2:
            raise QkvError(
                f"the training data have one label only: {', '.join(labels)}", where=files_of(data, "train")[0]
            )
    texts, numbers_D = _corpus(train), _numbers(told, labels)
    context = config.model.max_seq_len
    notes = _cut(texts, context, "training")
    held_D = _hold_out(data, train, config)
    if held_D is not None:
        kept, held = (Labelled(texts.choose(chosen_D), numbers_D[chosen_D]) for chosen_D in (~held_D, held_D))
        return Prepared(kept, held, (train,), notes, labels)
    if not data.validation:
        return Prepared(Labelled(texts, numbers_D), None, (train,), notes, labels)
    listed = tokenised("validation")
    held_texts = _corpus(listed)
    held = Labelled(held_texts, _numbers(list(read_labels(data, "validation")), labels))
    notes = (*notes, *_cut(held_texts, context, "validation"))
    return Prepared(Labelled(texts, numbers_D), held, (train, listed), notes, labels)


def _numbers(told: Sequence[tuple[str, str]], labels: Sequence[str]) -> NDArray[np.int64]:
    """The number of each label. Raises QkvError for one that is not among `labels` (file:line)."""
    number = {label: index for index, label in enumerate(labels)}
    for label, where in told:
        if label not in number:
            guess = nearest(label, labels)
            raise QkvError(
                f"the label `{label}` is not one of the model's: {', '.join(labels[:10])}",
                where=where,
                hint=f"`{guess}`" if guess else None,
            )
    return np.array([number[label] for label, _ in told], np.int64)


def _cut(texts: Corpus, context: int, what: str) -> tuple[str, ...]:
    """What is to be said about texts that the context does not hold."""
    count = int((texts.sizes > context).sum())
    if not count:
        return ()
    return (f"{count:,} of {texts.num_documents:,} {what} texts are cut: they have more than {context} tokens",)
