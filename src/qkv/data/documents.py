"""Files -> documents, in pieces, so that one enormous document needs no more memory than a small one.

The rule for text, the same in training and serving (`normalize`): UTF-8; one byte order mark at the start is dropped;
CRLF becomes LF, a lone CR stays. Lines end at "\\n" only: U+2028, form feeds and the like are ordinary characters.
UTF-16 and UTF-32 are refused by name. Names ending in `.gz` or `.xz` are decompressed while they are read.
"""

from __future__ import annotations

import codecs
import gzip
import json
import lzma
import re
import zlib
from collections.abc import Iterable, Iterator
from functools import singledispatch
from io import BufferedIOBase
from pathlib import Path
from typing import NamedTuple

from qkv.config.errors import ConfigError, NotFoundError, QkvError, nearest
from qkv.config.run import DataConfig, JsonlDataConfig, TextDataConfig

PIECE_CHARACTERS = 1 << 18
"""The longest stretch of text that is tokenised at once."""

_BLOCK_BYTES = 1 << 20
_BYTE_ORDER_MARKS = {codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}
_DECODER_ERRORS = {"error": "strict", "replace": "replace", "drop": "ignore"}
_WORD_ENDS = " \n，。、；：！？"
_SURROGATE = re.compile("[\ud800-\udfff]")


class Piece(NamedTuple):
    """A stretch of a document, at most PIECE_CHARACTERS long; `ends` marks the last one of its document."""

    text: str
    ends: bool


def normalize(text: str) -> str:
    """The text as a model sees it in training: without a leading byte order mark, CRLF as LF."""
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def read_documents(files: Iterable[str | Path], data: DataConfig) -> Iterator[str]:
    """Whole documents, in the order of the files. Blank documents are skipped. Raises what `read_pieces` raises."""
    parts = []
    for piece in read_pieces(files, data):
        parts.append(piece.text)
        if piece.ends:
            yield "".join(parts)
            parts.clear()


def read_pieces(files: Iterable[str | Path], data: DataConfig) -> Iterator[Piece]:
    """The documents of `files` as pieces, cut before a space or a Chinese stop that follows a letter or digit, wherever
    there is one.

    Cuts depend on the document alone, not on its place in the file. A document that fits into one piece is not cut.

    Raises NotFoundError (no such file) and QkvError: bytes that are not UTF-8 (file and byte offset, under
    `bad_bytes: error`), UTF-16, a damaged archive, a JSON line that holds no text (file:line).
    """
    for path in map(Path, files):
        yield from _well_cut(split_file(data, path))


@singledispatch
def split_file(data: DataConfig, path: Path) -> Iterator[Piece]:
    """One file as pieces of any length; a kind of data registers how its files are divided into documents."""
    raise ConfigError(f"data of kind `{data.kind}` is not read as documents", where="data.kind", hint="text or jsonl")


@split_file.register
def _(data: TextDataConfig, path: Path) -> Iterator[Piece]:
    blocks = _read_blocks(path, data.bad_bytes)
    match data.split:
        case "file":
            yield from (Piece(block, False) for block in blocks)
            yield Piece("", True)
        case "lines":
            yield from _lines(blocks)
        case "blank-lines":
            yield from _paragraphs(_lines(blocks))


@split_file.register
def _(data: JsonlDataConfig, path: Path) -> Iterator[Piece]:
    number, parts = 1, []
    for text, line_ends in _lines(_read_blocks(path, data.bad_bytes)):
        parts.append(text)
        if line_ends:
            line = "".join(parts)
            parts.clear()
            if line.strip():
                yield Piece(_json_text(line, data, f"{path}:{number}"), True)
            number += 1


def _lines(blocks: Iterable[str]) -> Iterator[Piece]:
    """Lines without their "\\n"; a line that spans blocks comes in several pieces."""
    pending = False
    for block in blocks:
        *lines, rest = block.split("\n")
        for line in lines:
            yield Piece(line, True)
        if rest:
            yield Piece(rest, False)
        pending = bool(rest) or (pending and not lines)
    if pending:
        yield Piece("", True)


def _paragraphs(lines: Iterable[Piece]) -> Iterator[Piece]:
    """Runs of lines that are not blank, joined by "\\n"."""
    begun = False  # a paragraph
    inside = False  # a line that is known not to be blank
    held = ""  # the beginning of a line, as long as it may be a blank one
    for text, line_ends in lines:
        held += text
        if inside or held.strip():
            yield Piece(held if inside or not begun else "\n" + held, False)
            begun, inside, held = True, not line_ends, ""
        elif line_ends:
            if begun:
                yield Piece("", True)
            begun, held = False, ""
    if begun:
        yield Piece("", True)


def _well_cut(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The same documents in pieces of at most PIECE_CHARACTERS; blank documents are skipped."""
    held, begun = "", False
    for text, ends in pieces:
        held = held + text if held else text
        start = 0
        while len(held) - start > PIECE_CHARACTERS:
            stop = _cut(held, start)
            yield Piece(held[start:stop], False)
            start, begun = stop, True
        held = held[start:] if start else held
        if ends:
            if begun or held.strip():
                yield Piece(held, True)
            held, begun = "", False


def _cut(text: str, start: int) -> int:
    """Where the piece that begins at `start` ends.

    A space or a stop after a letter or digit begins a new word for every pre-tokenizer in use, so no id changes.
    """
    stop = start + PIECE_CHARACTERS
    for place in range(stop, start, -1):
        if text[place] in _WORD_ENDS and text[place - 1].isalnum():
            return place
    return stop


def _read_blocks(path: Path, bad_bytes: str) -> Iterator[str]:
    """The decoded file in blocks, without a byte order mark and with CRLF as LF."""
    decoder = codecs.getincrementaldecoder("utf-8")(_DECODER_ERRORS[bad_bytes])
    with open_file(path) as file:
        block = _read(file, path)
        _refuse_utf16(block, path)
        offset = len(codecs.BOM_UTF8) if block.startswith(codecs.BOM_UTF8) else 0
        block = block[offset:]
        carriage_return = ""
        while True:
            undecoded = len(decoder.getstate()[0])  # bytes of a character that began in the last block
            try:
                text = carriage_return + decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise _bad_byte(path, offset - undecoded + error.start, error.object[error.start]) from error
            offset += len(block)
            carriage_return = "\r" if block and text.endswith("\r") else ""  # its "\n" may begin the next block
            yield text.removesuffix(carriage_return).replace("\r\n", "\n")
            if not block:
                return
            block = _read(file, path)


def existing_file(path: Path) -> Path:
    """The path itself. Raises NotFoundError, which names the nearest file there is."""
    if path.is_dir():
        raise QkvError("a folder stands where a file is expected", where=str(path))
    if not path.exists():
        beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        guess = nearest(path.name, beside)
        hint = str(path.with_name(guess)) if guess else "a path relative to the folder you are in"
        raise NotFoundError("there is no such file", where=str(path), hint=hint)
    return path


def open_file(path: Path, *, decompress: bool = True) -> BufferedIOBase:
    """A file as bytes, of a compressed one the content. Raises NotFoundError and QkvError."""
    try:
        match existing_file(path).suffix if decompress else "":
            case ".gz":
                return gzip.open(path)
            case ".xz":
                return lzma.open(path)
            case _:
                return path.open("rb")
    except OSError as error:
        raise QkvError(f"cannot read the file: {error.strerror}", where=str(path)) from error


def _read(file: BufferedIOBase, path: Path) -> bytes:
    try:
        return file.read(_BLOCK_BYTES)
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise QkvError(f"the archive is damaged or cut off: {error}", where=str(path)) from error


def _refuse_utf16(head: bytes, path: Path) -> None:
    encoding = next((name for mark, name in _BYTE_ORDER_MARKS.items() if head.startswith(mark)), None)
    if encoding is None:
        # Latin text in UTF-16 has a zero in every other byte, and is valid UTF-8 too.
        zeros = sorted(head[side:4096:2].count(0) for side in (0, 1))
        if zeros[1] > 0 and zeros[1] >= 0.4 * len(head[:4096:2]) and zeros[0] == 0:
            encoding = "UTF-16"
    if encoding:
        hint = f"iconv -f {encoding} -t UTF-8 {path.name} > utf8-{path.name}"
        raise QkvError(f"the file is {encoding}, and text is read as UTF-8", where=str(path), hint=hint)


def _bad_byte(path: Path, offset: int, value: int) -> QkvError:
    unpacked = " of the decompressed text" if path.suffix in (".gz", ".xz") else ""
    return QkvError(
        f"byte 0x{value:02x} is not UTF-8",
        where=f"{path}, byte {offset}{unpacked}",
        hint="data.bad_bytes=replace or data.bad_bytes=drop",
    )


def _json_text(line: str, data: JsonlDataConfig, where: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = f": {error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise QkvError(f"the line is not JSON{reason}", where=where, hint="one JSON object per line") from error
    if not isinstance(record, dict):
        raise QkvError(
            f"expected a JSON object, got {type(record).__name__}", where=where, hint=f'{{"{data.key}": "..."}}'
        )
    if data.key not in record:
        guess = nearest(data.key, record) or next(iter(record), None)
        hint = f"data.key={guess}" if guess else None
        raise QkvError(f"the object has no key `{data.key}`", where=where, hint=hint)
    text = record[data.key]
    if not isinstance(text, str):
        raise QkvError(f"`{data.key}` is not a string but {type(text).__name__}", where=where)
    if _SURROGATE.search(text):  # half of an escaped pair: no UTF-8 for it
        if data.bad_bytes == "error":
            hint = "data.bad_bytes=replace or data.bad_bytes=drop"
            raise QkvError(f"`{data.key}` holds half of a surrogate pair", where=where, hint=hint)
        text = _SURROGATE.sub("\ufffd" if data.bad_bytes == "replace" else "", text)
    return normalize(text)
