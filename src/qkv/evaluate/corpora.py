"""Texts to score: a file, or what a run held out for validation."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from qkv.config.data import DataConfig, JsonlDataConfig, TextDataConfig
from qkv.config.errors import QkvError, UsageError
from qkv.config.run import Config
from qkv.data.documents import read_pieces
from qkv.data.prepare import Corpus, Dataset, prepare
from qkv.generate.prompts import begin_of, end_of

if TYPE_CHECKING:
    from qkv.tokenizer.tokenizer import Tokenizer


def text_corpus(
    file: str | Path, tokenizer: Tokenizer, data: DataConfig | None = None, *, ends: bool = False
) -> Corpus:
    """The documents of a file, each after what the tokenizer puts before a text.

    With `ends` each is [begin] ids [end], as in training; without, the text is scored as it stands. A `.jsonl` file
    (`.gz` and `.xz` too) has a document per line, any other is plain text; how it is divided, and what becomes of bad
    bytes, `data` says where it is of that kind.

    Raises what `qkv.data.read_pieces` raises, and QkvError for a file without text.
    """
    path = Path(file)
    kind = _kind_of(path, data)
    begin, end = (begin_of(tokenizer), end_of(tokenizer)) if ends else (tokenizer.around[0], [])
    ids, starts, inside = array("q"), [], False
    for piece in read_pieces([path], kind):
        if not inside:
            starts.append(len(ids))
            ids.extend(begin)
        ids.extend(tokenizer.encode(piece.text))
        inside = not piece.ends
        ids.extend(end if piece.ends else [])
    if not starts:
        raise QkvError("the file holds no text", where=str(path))
    edges = np.array([*starts, len(ids)], np.int64)
    return Corpus(np.array(ids, np.uint32), edges[:-1], edges[1:])


def _kind_of(path: Path, data: DataConfig | None) -> DataConfig:
    wanted = JsonlDataConfig if ".jsonl" in path.suffixes[-2:] else TextDataConfig
    if isinstance(data, wanted):
        return data
    return wanted(bad_bytes=data.bad_bytes) if data is not None else wanted()


def validation_corpus(config: Config, tokenizer: Tokenizer, cache_dir: str | Path) -> Corpus:
    """What training with `config` holds out, tokenised into `cache_dir` or mapped from there.

    Raises UsageError where nothing is held out, and what `qkv.data.prepare` raises.
    """
    data = config.data
    if data.validation and not isinstance(data.validation, float):
        alone = data.model_copy(update={"train": data.validation, "validation": 0.0})
        corpus: Dataset | None = prepare(config.model_copy(update={"data": alone}), tokenizer, cache_dir).train
    elif not data.validation or not data.train:
        raise UsageError("the model's configuration names no validation data", hint="--data FILE")
    else:
        corpus = prepare(config, tokenizer, cache_dir).validation
    assert isinstance(corpus, Corpus)  # the fraction is not 0, and the model reads plain text
    return corpus
