"""Text from files and documents, in chunks that fit memory.

The stated rule for bytes: UTF-8, always. A leading byte order mark is dropped; line ends stay as they are (`\\r\\n` is
two characters, in training and in use alike); UTF-16 is refused. `.gz` and `.xz` are read as they are.
"""

from __future__ import annotations

import codecs
import gzip
import lzma
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Literal, cast

from qkv.config.errors import NotFoundError, QkvError, UsageError

BadBytes = Literal["error", "replace", "drop"]
TextSource = str | os.PathLike[str]
"""A `str` is a text, a `Path` is a file."""

_BLOCK = 1 << 20
_CHUNK = 1 << 16
_BLANKS = " \n\t\r"
_STOPS = "。，、；：！？"


def read_blocks(path: str | os.PathLike[str], bad_bytes: BadBytes = "error") -> Iterator[str]:
    """The text of a file in blocks of at most 1 MiB (unpacked), as it stands but for a leading byte order mark.

    `bad_bytes` says what becomes of bytes that are not UTF-8: QkvError with file and byte offset, U+FFFD, or nothing.
    Raises NotFoundError, and QkvError for damaged archives and UTF-16.
    """
    path = Path(path)
    note = " of the unpacked text" if path.suffix in (".gz", ".xz") else ""
    with _open(path) as file:
        try:
            yield from read_stream(file, str(path), bad_bytes, note)
        except (gzip.BadGzipFile, lzma.LZMAError, zlib.error, EOFError) as error:
            raise QkvError(f"the file is damaged: {error}", where=str(path)) from None


def read_stream(file: BinaryIO, name: str, bad_bytes: BadBytes = "error", note: str = "") -> Iterator[str]:
    """`read_blocks` of an open file; errors speak of `name`."""
    errors = {"error": "strict", "replace": "replace", "drop": "ignore"}.get(bad_bytes)
    if errors is None:
        raise UsageError(f"bad_bytes is error, replace or drop, not {bad_bytes!r}")
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    block = file.read(_BLOCK)
    if block.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise QkvError("this text is UTF-16", where=name, hint="converting it to UTF-8 first")
    offset = len(codecs.BOM_UTF8) if block.startswith(codecs.BOM_UTF8) else 0
    block = block[offset:]
    while True:
        waiting = len(decoder.getstate()[0])  # bytes of a character that the last block cut
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            wrong = error.object[error.start : error.end].hex(" ")
            raise QkvError(
                f"bytes that are not UTF-8: {wrong}",
                where=f"{name}: byte {offset - waiting + error.start}{note}",
                hint="bad_bytes=replace or drop (--bad-bytes), or converting the text to UTF-8",
            ) from None
        if text:
            yield text
        if not block:
            return
        offset += len(block)
        block = file.read(_BLOCK)


def _open(path: Path) -> BinaryIO:
    try:
        if path.suffix == ".gz":
            return cast(BinaryIO, gzip.open(path, "rb"))
        if path.suffix == ".xz":
            return cast(BinaryIO, lzma.open(path, "rb"))
        return path.open("rb")
    except FileNotFoundError:
        raise NotFoundError("there is no such file", where=str(path)) from None
    except OSError as error:
        raise QkvError(f"the file cannot be read: {error.strerror}", where=str(path)) from None


def chunks(blocks: Iterable[str], size: int = _CHUNK, *, cut_runs: bool = True) -> Iterator[str]:
    """The same text in chunks of about `size` characters, cut where no piece of text is ever cut anyway.

    That is before white space, or between a letter and a Chinese full stop, comma and the like. An unbroken run longer
    than `size` is cut in the middle, or kept whole without `cut_runs`.
    """
    rest = ""
    for block in blocks:
        text, start = rest + block, 0
        while len(text) - start > size:
            end = _last_break(text, start, start + size)
            if end is None:
                end = start + size if cut_runs else _next_break(text, start + size)
            yield text[start:end]
            start = end
        rest = text[start:]
    if rest:
        yield rest


def _last_break(text: str, start: int, end: int) -> int | None:
    place = max(text.rfind(blank, start + 1, end) for blank in _BLANKS)
    while place > start and text[place - 1] in _BLANKS:
        place -= 1
    if place > start:
        return place
    place = max(text.rfind(stop, start + 1, end) for stop in _STOPS)
    return place if place > start and text[place - 1].isalnum() else None


def _next_break(text: str, start: int) -> int:
    found = [place for blank in _BLANKS if (place := text.find(blank, start)) > 0 and text[place - 1] not in _BLANKS]
    return min(found, default=len(text))


def check_text(text: str) -> None:
    """Raises UsageError for a lone surrogate: half a UTF-16 character, which no encoding can write."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"the text holds a lone surrogate (U+{ord(text[error.start]):04X}), which is no character",
            where=f"character {error.start} of the text",
            hint="reading the text with errors='replace' where it came from",
        ) from None


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):  # no name of a file: too long, a zero byte
        return False


class Corpus:
    """Texts and files as chunks. Files are streamed, as often as wanted. No text at all is a UsageError."""

    def __init__(self, source: TextSource | Iterable[TextSource], bad_bytes: BadBytes = "error") -> None:
        self._source = [source] if isinstance(source, str | os.PathLike) else source
        first = self._source[0] if isinstance(self._source, list | tuple) and self._source else None
        if isinstance(first, str) and _is_file(first):
            raise UsageError(f"{first!r} is a str, hence a text, but a file has this name", hint=f"Path({first!r})")
        self._bad_bytes = bad_bytes

    def __iter__(self) -> Iterator[str]:
        empty = True
        for item in self._source:
            if isinstance(item, str):
                check_text(item)
            blocks = [item] if isinstance(item, str) else read_blocks(item, self._bad_bytes)
            for chunk in chunks(blocks):
                empty = False
                yield chunk
        if empty:
            raise UsageError("there is no text: it is empty")

    def again(self) -> Corpus:
        """This corpus, able to be read several times: what an iterator gives is held in memory."""
        if isinstance(self._source, Iterator):
            self._source = list(self._source)
        return self
