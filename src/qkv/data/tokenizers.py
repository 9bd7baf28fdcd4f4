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
from itertools import chain
from pathlib import Path

from qkv.config.data import DataConfig, LabelledDataConfig, MediaDataConfig, ParallelDataConfig, Side
from qkv.config.errors import ConfigError, QkvError
from qkv.config.objectives import ClassifyObjectiveConfig, SpanObjectiveConfig
from qkv.config.run import Config
from qkv.data.documents import Piece, read_pieces
from qkv.data.records import check_sides, files_of, pieces, read_media, read_side, read_texts
from qkv.tokenizer.text import open_file
from qkv.tokenizer.tokenizer import Tokenizer

FORMAT_VERSION = 1

SENTINELS = 100
"""As many as T5 has: <extra_id_0> to <extra_id_99>."""


@dataclass(frozen=True)
class _TrainingTexts:
    """What the model will see, read as often as wanted: some kinds learn in two passes, and none holds the corpus.

    side: of parallel data only this one; None: both.
    """

    data: DataConfig
    side: Side | None

    def __iter__(self) -> Iterator[str]:
        return (piece.text for piece in self._pieces() if piece.text)

    def _pieces(self) -> Iterator[Piece]:
        match self.data:
            case ParallelDataConfig():
                sides: tuple[Side, ...] = ("source", "target") if self.side is None else (self.side,)
                return chain.from_iterable(read_side(self.data, "train", side) for side in sides)
            case LabelledDataConfig():
                return read_texts(self.data, "train")
            case MediaDataConfig():
                return pieces(record.text for record in read_media(self.data, "train", labelled=False))
        return read_pieces(files_of(self.data, "train"), self.data)

    @property
    def files(self) -> tuple[str, ...]:
        return files_of(self.data, "train", self.side)

    @property
    def digests(self) -> list[str]:
        """Hashes of what there is to learn from."""
        if isinstance(self.data, MediaDataConfig):  # a text may be the name of a folder
            return [hashlib.sha256(json.dumps(list(self)).encode()).hexdigest()]
        return _digests(self.files)


def has_texts(config: Config) -> bool:
    """Whether anything is read or written; of images and sound with a label nothing is."""
    return not (isinstance(config.data, MediaDataConfig) and isinstance(config.objective, ClassifyObjectiveConfig))


def tokenizers_for(config: Config, cache_dir: str | Path) -> tuple[Tokenizer | None, Tokenizer | None]:
    """The tokenizer, where there are texts, and that of the sources, where they have their own: see `tokenizer_for`."""
    return (
        tokenizer_for(config, cache_dir) if has_texts(config) else None,
        tokenizer_for(config, cache_dir, "source") if config.tokenizer.source else None,
    )


def tokenizer_for(config: Config, cache_dir: str | Path, side: Side | None = None) -> Tokenizer:
    """The tokenizer at `tokenizer.path`, or one of `tokenizer.kind` trained on the files of `data.train`.

    side: which of the two, where `tokenizer` has a `source` and a `target`; None is the target's. One tokenizer for
    both sides of parallel data learns from both.

    Without `tokenizer.vocab_size` a trained one fills the model's vocabulary, where that is given. It learns from the
    very pieces that training tokenises (`read_pieces`), documents that are held out for validation by a fraction
    included. For the objective `span` it also gets sentinels. Bytes need no training.

    Raises ConfigError when there is nothing to train on, QkvError where the files hold no text, and what
    `Tokenizer.load`, `Tokenizer.train` and `read_pieces` raise.
    """
    wanted, texts, vocab_size = config.tokenizer, _TrainingTexts(config.data, None), config.model.vocab_size
    if wanted.source is not None and wanted.target is not None:
        side = side or "target"
        wanted = wanted.source if side == "source" else wanted.target
        texts = _TrainingTexts(config.data, side)
        stack = config.model.encoder if side == "source" else config.model.decoder
        vocab_size = stack.vocab_size if stack is not None else None
    if wanted.path is not None:
        return Tokenizer.load(wanted.path)
    sentinels = SENTINELS if isinstance(config.objective, SpanObjectiveConfig) else 0
    if wanted.kind == "byte":
        return Tokenizer.train([], kind="byte", vocab_size=wanted.vocab_size, sentinels=sentinels)
    if not texts.files:
        raise ConfigError(
            "there is no text to train a tokenizer on",
            where="data.train",
            hint="data.train=[corpus.txt], or tokenizer.path=FOLDER for a tokenizer that is there",
        )
    vocab_size = wanted.vocab_size or vocab_size
    folder = Path(cache_dir) / "tokenizers" / _key(texts, wanted.kind, vocab_size, sentinels)
    if folder.is_dir():
        try:
            return Tokenizer.load(folder)
        except QkvError:  # damaged: made anew
            shutil.rmtree(folder, ignore_errors=True)
    if isinstance(config.data, ParallelDataConfig):
        check_sides(config.data, "train")  # before anything is learnt
    if next(iter(texts), None) is None:  # of the first text no more than its beginning is read
        raise QkvError("the training data hold no text to train a tokenizer on", where=", ".join(texts.files))
    tokenizer = Tokenizer.train(texts, kind=wanted.kind, vocab_size=vocab_size, sentinels=sentinels)
    _keep(tokenizer, folder)
    return tokenizer


def _key(texts: _TrainingTexts, kind: str, vocab_size: int | None, sentinels: int) -> str:
    """A hash of all that decides which vocabulary is learned."""
    options = texts.data.model_dump(mode="json", exclude={"train", "validation"})
    known = [FORMAT_VERSION, kind, vocab_size, sentinels, options, texts.side, texts.digests]
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
