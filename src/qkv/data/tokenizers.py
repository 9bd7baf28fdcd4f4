"""The tokenizer that a configuration asks for: loaded, or trained once on the training text and kept.

    <cache_dir>/tokenizers/<key>/   what `Tokenizer.save` writes; the key is a hash of the text and the wishes

A folder appears by rename, whole or not at all; one that cannot be read is made anew.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from qkv.config.errors import ConfigError, QkvError
from qkv.config.run import Config, DataConfig
from qkv.data.documents import read_pieces
from qkv.tokenizer.text import open_file
from qkv.tokenizer.tokenizer import Tokenizer

FORMAT_VERSION = 1


@dataclass(frozen=True)
class _TrainingTexts:
    """What the model will see, read as often as wanted: some kinds learn in two passes, and none holds the corpus."""

    data: DataConfig

    def __iter__(self) -> Iterator[str]:
        return (piece.text for piece in read_pieces(self.data.train, self.data))


def tokenizer_for(config: Config, cache_dir: str | Path) -> Tokenizer:
    """The tokenizer at `tokenizer.path`, or one of `tokenizer.kind` trained on the files of `data.train`.

    Without `tokenizer.vocab_size` a trained one fills `model.vocab_size`, where that is given. It learns from the very
    pieces that training tokenises (`read_pieces`), documents that are held out for validation by a fraction included.
    Bytes need no training.

    Raises ConfigError when there is nothing to train on, and what `Tokenizer.load`, `Tokenizer.train` and `read_pieces`
    raise.
    """
    wanted = config.tokenizer
    if wanted.source is not None:
        raise ConfigError("one tokenizer per side needs parallel data", where="tokenizer.source")
    if wanted.path is not None:
        return Tokenizer.load(wanted.path)
    if wanted.kind == "byte":
        return Tokenizer.train([], kind="byte", vocab_size=wanted.vocab_size)
    if not config.data.train:
        raise ConfigError(
            "there is no text to train a tokenizer on",
            where="data.train",
            hint="data.train=[corpus.txt], or tokenizer.path=FOLDER for a tokenizer that is there",
        )
    vocab_size = wanted.vocab_size or config.model.vocab_size
    folder = Path(cache_dir) / "tokenizers" / _key(config.data, wanted.kind, vocab_size)
    if folder.is_dir():
        try:
            return Tokenizer.load(folder)
        except QkvError:  # damaged: made anew
            shutil.rmtree(folder, ignore_errors=True)
    tokenizer = Tokenizer.train(_TrainingTexts(config.data), kind=wanted.kind, vocab_size=vocab_size)
    _keep(tokenizer, folder)
    return tokenizer


def _key(data: DataConfig, kind: str, vocab_size: int | None) -> str:
    """A hash of all that decides which vocabulary is learned."""
    options = data.model_dump(mode="json", exclude={"train", "validation"})
    known = [FORMAT_VERSION, kind, vocab_size, options, _digests(data.train)]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]


def _digests(files: Sequence[str]) -> list[str]:
    digests = []
    for file in files:
        with open_file(Path(file), decompress=False) as content:
            digests.append(hashlib.file_digest(content, "sha256").hexdigest())
    return digests


def _keep(tokenizer: Tokenizer, folder: Path) -> None:
    """Save, by rename. A process that saved the same meanwhile is left alone."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", suffix=".partial", dir=folder.parent))
    try:
        tokenizer.save(partial)
        partial.rename(folder)
    except OSError as error:
        if not folder.is_dir():
            raise QkvError(f"the tokenizer cannot be kept: {error.strerror}", where=str(folder)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
