"""From a configuration to ids on disk, divided into training and validation."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qkv.config.errors import ConfigError
from qkv.config.run import Config, DataConfig, TextDataConfig
from qkv.data.cache import TokenFiles, tokenise
from qkv.data.split import Spans, hold_out, hold_out_ends

if TYPE_CHECKING:
    from qkv.tokenizer.tokenizer import Tokenizer


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
        return int((self.ends_D - self.starts_D).sum())

    def document(self, index: int) -> NDArray[np.unsignedinteger[Any]]:
        """The ids [n] of one document."""
        return self.tokens[self.starts_D[index] : self.ends_D[index]]


@dataclass(frozen=True)
class Prepared:
    """Tokenised data. `files` are the caches behind it: of the training files and, when they are listed, of others."""

    train: Corpus
    validation: Corpus | None
    files: tuple[TokenFiles, ...]

    @property
    def reused(self) -> bool:
        """Nothing had to be tokenised."""
        return all(files.reused for files in self.files)

    @property
    def id_bits(self) -> int:
        """The width of a stored id: 16 or 32."""
        return self.train.tokens.dtype.itemsize * 8

    @property
    def fingerprint(self) -> str:
        """Of the bytes of all files, the tokenizer and the options: a resumed run finds the data it began with."""
        known = []
        for files in self.files:
            contents = [source["sha256"] for source in files.manifest["files"]]
            known.append({**files.manifest, "files": contents})
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def prepare(config: Config, tokenizer: Tokenizer, cache_dir: str | Path) -> Prepared:
    """Tokenise `config.data` into `cache_dir`, or map what is there already (qkv.data.cache says what is stored).

    `validation` is a list of files, or a fraction held out by a hash of each document and `train.seed`; 0 is none.
    Of fewer files than would give one whole file (`split: file`), the end of each is held out instead. The cache
    depends on neither fraction nor seed.

    Raises ConfigError when there is nothing to train on, and what `qkv.data.cache.tokenise` raises.
    """
    data = config.data
    if not data.train:
        raise ConfigError("there is nothing to train on", where="data.train", hint="data.train=[corpus.txt]")
    train = tokenise(data.train, data, tokenizer, Path(cache_dir))
    if isinstance(data.validation, float):
        kept, held = _divide(data, train, data.validation, config.train.seed)
        validation = Corpus(train.tokens, *held) if data.validation else None
        return Prepared(Corpus(train.tokens, *kept), validation, (train,))
    if not data.validation:
        return Prepared(Corpus(train.tokens, *_all(train)), None, (train,))
    held_out = tokenise(data.validation, data, tokenizer, Path(cache_dir))
    return Prepared(Corpus(train.tokens, *_all(train)), Corpus(held_out.tokens, *_all(held_out)), (train, held_out))


def _all(files: TokenFiles) -> Spans:
    return files.offsets[:-1], files.offsets[1:]


def _divide(data: DataConfig, files: TokenFiles, fraction: float, seed: int) -> tuple[Spans, Spans]:
    if fraction == 0:
        return _all(files), (np.empty(0, np.int64), np.empty(0, np.int64))
    if isinstance(data, TextDataConfig) and data.split == "file" and fraction * len(data.train) < 1:
        return hold_out_ends(*_all(files), fraction)
    return hold_out(*_all(files), files.hashes, fraction, seed)
