"""Tokenizer files: which there are, and what reads each. Ours or other people's, they all become a `Source`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from qkv.config.errors import NotFoundError, QkvError, UsageError
from qkv.tokenizer import bert, fairseq, gguf, gpt2, llama2c, marian, sentencepiece, tiktoken, tokenizer_json
from qkv.tokenizer.backends import Source
from qkv.tokenizer.beside import SUPPORTED, TOKENIZER_FILE, as_configured, check_size

_IN_FOLDERS = (
    TOKENIZER_FILE,
    f"tokenizer/{TOKENIZER_FILE}",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "source.spm",
    "*.tiktoken",
    "vocab.txt",
    "merges.txt",
    "tokenizer.bin",
)
_BY_NAME: dict[str, Callable[[Path], Source]] = {"sentencepiece.bpe.model": fairseq.read, "merges.txt": gpt2.read}
_BY_SUFFIX: dict[str, Callable[[Path], Source]] = {
    ".json": tokenizer_json.read,
    ".gguf": gguf.read,
    ".model": sentencepiece.read,
    ".spm": marian.read,
    ".txt": bert.read,
    ".bin": llama2c.read,
}
"""What reads a file, unless its name says more."""


def read(path: str | os.PathLike[str], encoding: str | None = None) -> Source:
    """The tokenizer in a folder or file. `encoding` names that of a tiktoken file which is not a known one.

    Raises NotFoundError, UsageError, and QkvError that tells "not supported" from "damaged".
    """
    file = _find(Path(path))
    try:
        reader = _reader(file)
        if reader is tiktoken.read:
            return as_configured(tiktoken.read(file, encoding), file)
        if encoding is not None:
            raise UsageError("only tiktoken files need to be told their encoding", where=str(file))
        return reader(file)
    except OSError as error:
        raise QkvError(f"the tokenizer file cannot be read: {error.strerror}", where=str(file)) from None


def _find(path: Path) -> Path:
    if not path.exists():
        raise NotFoundError("there is no such tokenizer", where=str(path), hint=SUPPORTED)
    if not path.is_dir():
        return path
    for name in _IN_FOLDERS:
        if found := sorted(file for file in path.glob(name) if file.is_file()):
            return found[0]
    raise NotFoundError(f"there is no {TOKENIZER_FILE} in this folder", where=str(path), hint=SUPPORTED)


def _reader(file: Path) -> Callable[..., Source]:
    with file.open("rb") as opened:
        head = opened.read(4096)
    if file.suffix in (".model", ".tiktoken") and tiktoken.is_rank_file(head):
        return tiktoken.read
    reader = _BY_NAME.get(file.name) or _BY_SUFFIX.get(file.suffix)
    if reader is None:
        name = file.suffix or file.name
        raise QkvError(f"{name} files are not supported as tokenizers", where=str(file), hint=SUPPORTED)
    if file.suffix != ".gguf":  # which holds a model too
        check_size(file)
    return reader
