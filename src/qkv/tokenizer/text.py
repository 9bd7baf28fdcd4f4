"""Text from outside, in chunks that fit memory.

The rule, for files, standard input and prompts, in training and serving alike: UTF-8, always; one leading byte order
mark is dropped; CRLF becomes LF, a lone CR stays. UTF-16 and UTF-32 are refused by name. Files named `.gz` or `.xz` are
decompressed while they are read. Bytes that are not UTF-8 are an error, or become U+FFFD, or are dropped.

A `str` given to a `Tokenizer` is taken as it stands: `encode` and `decode` change no byte.
"""

from __future__ import annotations

import codecs
import gzip
import lzma
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from io import BufferedIOBase
from pathlib import Path
from typing import BinaryIO, Literal, NoReturn

from qkv.config.errors import NotFoundError, QkvError, UsageError, nearest

BadBytes = Literal["error", "replace", "drop"]

TextSource = str | os.PathLike[str]
"""A `str` is a text, a `Path` is a file."""

_BLOCK = 1 << 20
_CHUNK = 1 << 16
_DECODER_ERRORS = {"error": "strict", "replace": "replace", "drop": "ignore"}
_BYTE_ORDER_MARKS = {  # that of UTF-32 begins with that of UTF-16
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
_OTHER_FILES = {
    b"\x89PNG\r\n": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"GIF8": "a GIF image",
    b"RIFF....WEBP": "a WebP image",
    b"RIFF....WAVE": "a WAV recording",
    b"fLaC": "a FLAC recording",
    b"OggS": "an Ogg recording",
    b"ID3": "an MP3 recording",
    b"%PDF-": "a PDF",
    b"PK\x03\x04": "a zip archive",
    b"\x1f\x8b": "a gzip archive",
    b"\xfd7zXZ": "an xz archive",
    b"PAR1": "a Parquet table",
    b"GGUF": "a GGUF model",
}
"""What other files begin with; a dot is any byte."""
_WORD_END = r"[^\W_](?=[ \n，。、；：！？])"
_NEXT_WORD_END = re.compile(_WORD_END)
_LAST_WORD_END = re.compile(f".*{_WORD_END}", re.DOTALL)


class NotTextError(QkvError):
    """A file that is no text at all: an image, a recording, an archive."""


# --- reading ----------------------------------------------------------------------------------------------------------


def normalize(text: str) -> str:
    """The text as a model sees it in training: without a leading byte order mark, CRLF as LF."""
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def read_blocks(
    path: str | os.PathLike[str], bad_bytes: BadBytes = "error", *, option: str = "bad_bytes"
) -> Iterator[str]:
    """The text of a file, by the rule above, in blocks of at most 1 MiB.

    `option`: what `bad_bytes` is called where people set it. Raises NotFoundError, NotTextError for bytes that are not
    UTF-8 in a file of another kind, and QkvError: other bytes that are not UTF-8 (file and byte offset), UTF-16 and
    UTF-32, a damaged archive.
    """
    with open_file(Path(path)) as file:
        yield from read_stream(file, str(path), bad_bytes, option=option)


def read_stream(
    file: BinaryIO | BufferedIOBase, name: str, bad_bytes: BadBytes = "error", *, option: str = "bad_bytes"
) -> Iterator[str]:
    """`read_blocks` of an open file; errors speak of `name`."""
    if bad_bytes not in _DECODER_ERRORS:
        raise UsageError(f"bad_bytes is error, replace or drop, not {bad_bytes!r}")
    decoder = codecs.getincrementaldecoder("utf-8")(_DECODER_ERRORS[bad_bytes])
    block = _read(file, name)
    if encoding := _wide_encoding(block[:4096]):
        raise QkvError(
            f"the text is {encoding}, and text is read as UTF-8",
            where=name,
            hint=f"iconv -f {encoding} -t UTF-8 OLD > NEW",
        )
    head = block[:16]
    offset, begun, carriage_return = 0, False, ""
    while True:
        undecoded = len(decoder.getstate()[0])  # bytes of a character that began in the last block
        try:
            text = carriage_return + decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            if kind := _other_kind(head):
                raise NotTextError(f"the file is {kind}, not a text", where=name) from error
            wrong = " ".join(f"0x{byte:02x}" for byte in error.object[error.start : error.end])
            unpacked = " of the decompressed text" if isinstance(file, gzip.GzipFile | lzma.LZMAFile) else ""
            raise QkvError(
                f"bytes that are not UTF-8: {wrong}",
                where=f"{name}: byte {offset - undecoded + error.start}{unpacked}",
                hint=f"{option}=replace or {option}=drop",
            ) from error
        if not begun and text:
            text, begun = text.removeprefix("\ufeff"), True
        carriage_return = "\r" if block and text.endswith("\r") else ""  # its "\n" may begin the next block
        if text := text.removesuffix(carriage_return).replace("\r\n", "\n"):
            yield text
        if not block:
            return
        offset += len(block)
        block = _read(file, name)


def existing_file(path: Path) -> Path:
    """The path itself. Raises QkvError for a folder, and NotFoundError, which names the nearest file there is."""
    if path.is_dir():
        raise QkvError("a folder stands where a file is expected", where=str(path))
    if not path.exists():
        beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        guess = nearest_file(path.name, beside)
        hint = str(path.with_name(guess)) if guess else "a path relative to the folder you are in"
        raise NotFoundError("there is no such file", where=str(path), hint=hint)
    return path


def nearest_file(name: str, known: Iterable[str]) -> str | None:
    """The known file that `name` most likely meant, or None; a suffix in common is not enough."""
    return nearest(name, [each for each in known if nearest(Path(name).stem, [Path(each).stem])])


def open_file(path: Path, *, decompress: bool = True) -> BufferedIOBase:
    """A file as bytes, of an archive the content. Raises what `existing_file` raises, and QkvError."""
    existing_file(path)
    try:
        match path.suffix if decompress else "":
            case ".gz":
                if path.stat().st_size == 0:  # for gzip no error but an empty text
                    raise QkvError("the archive is damaged or cut off: it has no content", where=str(path))
                return gzip.open(path)
            case ".xz":
                return lzma.open(path)
            case _:
                return path.open("rb")
    except OSError as error:
        raise QkvError(f"the file cannot be read: {error.strerror}", where=str(path)) from error


def _read(file: BinaryIO | BufferedIOBase, name: str) -> bytes:
    try:
        return file.read(_BLOCK)
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise QkvError(f"the archive is damaged or cut off: {error}", where=name) from error
    except OSError as error:
        raise QkvError(f"the file cannot be read: {error.strerror}", where=name) from error


def _other_kind(head: bytes) -> str | None:
    """What a file that begins so is, where that is known."""
    return next((kind for start, kind in _OTHER_FILES.items() if re.match(start, head, re.DOTALL)), None)


def _wide_encoding(head: bytes) -> str | None:
    """UTF-16 or UTF-32 if a text that begins so is in it, with a byte order mark or without."""
    for mark, name in _BYTE_ORDER_MARKS.items():
        if head.startswith(mark):
            return name
    for encoding in ("utf-32-le", "utf-32-be"):  # has a zero in four bytes, which hardly another text is valid with
        with suppress(UnicodeDecodeError):
            text = head.decode(encoding)
            if len(text) > 1 and "\0" not in text:
                return "UTF-32"
    # Latin text in UTF-16 has a zero in every other byte, and is valid UTF-8 too: a few bytes or zeros prove nothing
    if len(head) < 8 or len(head) % 2:
        return None
    few, many = sorted(head[side::2].count(0) for side in (0, 1))
    return "UTF-16" if few == 0 and many >= 0.3 * len(head) else None


# --- cutting ----------------------------------------------------------------------------------------------------------


def chunks(blocks: Iterable[str], size: int = _CHUNK, *, cut_runs: bool = True) -> Iterator[str]:
    """The same text in chunks of at most `size` characters; the cuts depend on the text alone, not on the blocks.

    They are before a space, a line end or a Chinese stop that follows a letter or digit: there a word begins for every
    pre-tokenizer in use, so no id changes. A run that offers no such place is cut in the middle, or kept whole without
    `cut_runs`.
    """
    held = ""
    for block in blocks:
        held += block
        start = 0
        while len(held) - start > size:
            found = _LAST_WORD_END.match(held, start, start + size + 1)
            if found is None and not cut_runs:
                found = _NEXT_WORD_END.search(held, start + size)
                if found is None:
                    break
            stop = found.end() if found else start + size
            yield held[start:stop]
            start = stop
        held = held[start:]
    if held:
        yield held


def check_text(text: str) -> None:
    """Raises UsageError for what is no `str`, and for a lone surrogate: half a character, which nothing can write."""
    if not isinstance(text, str):
        hint = '.decode("utf-8")' if isinstance(text, bytes | bytearray) else None
        raise UsageError(f"a text is a str, not {type(text).__name__}", hint=hint)
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


def _refuse_source(source: object) -> NoReturn:
    raise UsageError(
        f"a text is a str and a file a Path, not {type(source).__name__}",
        hint='.decode("utf-8")' if isinstance(source, bytes | bytearray) else None,
    )


class Corpus:
    """Texts and files as chunks. Files are streamed, as often as wanted. No text at all is a QkvError."""

    def __init__(self, source: TextSource | Iterable[TextSource], bad_bytes: BadBytes = "error") -> None:
        if isinstance(source, bytes | bytearray) or not isinstance(source, str | os.PathLike | Iterable):
            _refuse_source(source)
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
            elif not isinstance(item, os.PathLike):
                _refuse_source(item)
            blocks = [item] if isinstance(item, str) else read_blocks(item, self._bad_bytes)
            for chunk in chunks(blocks):
                empty = False
                yield chunk
        if empty:
            raise QkvError("there is no text: it is empty")  # of what was read, not of how the command was written

    def again(self) -> Corpus:
        """This corpus, able to be read several times: what an iterator gives is held in memory."""
        if isinstance(self._source, Iterator):
            self._source = list(self._source)
        return self
