"""Files -> documents, in pieces, so that one enormous document needs no more memory than a small one.

Text is read by the rule of `qkv.tokenizer.text`. Lines end at "\\n" only: U+2028, form feeds and the like are ordinary
characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import singledispatch
from pathlib import Path
from typing import NamedTuple

from qkv.config.data import DataConfig, JsonlDataConfig, TextDataConfig
from qkv.config.errors import ConfigError, QkvError, nearest
from qkv.tokenizer.text import BadBytes, chunks, normalize, read_blocks

PIECE_CHARACTERS = 1 << 18
"""The longest stretch of text that is tokenised at once."""

_BAD_BYTES = "data.bad_bytes"
_SURROGATE = re.compile("[\ud800-\udfff]")


class Piece(NamedTuple):
    """A stretch of a document, at most PIECE_CHARACTERS long; `ends` marks the last one of its document."""

    text: str
    ends: bool


def read_documents(files: Iterable[str | Path], data: DataConfig) -> Iterator[str]:
    """Whole documents, in the order of the files. Blank documents are skipped. Raises what `read_pieces` raises."""
    return whole(read_pieces(files, data))


def whole(pieces: Iterable[Piece]) -> Iterator[str]:
    """The documents that pieces make up."""
    parts = []
    for piece in pieces:
        parts.append(piece.text)
        if piece.ends:
            yield "".join(parts)
            parts.clear()


def read_pieces(files: Iterable[str | Path], data: DataConfig) -> Iterator[Piece]:
    """The documents of `files` as pieces, cut as `chunks` cuts.

    Cuts depend on the document alone, not on its place in the file. A document that fits into one piece is not cut.

    Raises what `read_blocks` raises, and QkvError for a JSON line that holds no text (file:line).
    """
    for path in map(Path, files):
        yield from _well_cut(split_file(data, path))


@singledispatch
def split_file(data: DataConfig, path: Path) -> Iterator[Piece]:
    """One file as pieces of any length; a kind of data registers how its files are divided into documents."""
    raise ConfigError(f"data of kind `{data.kind}` is not read as documents", where="data.kind", hint="text or jsonl")


@split_file.register
def _(data: TextDataConfig, path: Path) -> Iterator[Piece]:
    blocks = read_blocks(path, data.bad_bytes, option=_BAD_BYTES)
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
    for number, line in enumerate(lines_of(path, data.bad_bytes), 1):
        if line.strip():
            where = f"{path}:{number}"
            text = json_record(line, {"data.key": data.key}, where)[data.key]
            if not isinstance(text, str):
                raise QkvError(f"`{data.key}` is not a string but {type(text).__name__}", where=where)
            yield Piece(normalize(valid_text(text, data.key, data.bad_bytes, where)), True)


def lines_of(path: Path, bad_bytes: BadBytes) -> Iterator[str]:
    """The lines of a file, blank ones included, without their "\\n"."""
    return lines_in(read_blocks(path, bad_bytes, option=_BAD_BYTES))


def lines_in(blocks: Iterable[str]) -> Iterator[str]:
    """The lines of a text that comes in blocks, blank ones included, without their "\\n"."""
    return whole(_lines(blocks))


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
    pieces = iter(pieces)
    for piece in pieces:
        parts = chunks(_document(piece, pieces), PIECE_CHARACTERS)
        text, cut = next(parts, ""), False
        for following in parts:
            yield Piece(text, False)
            text, cut = following, True
        if cut or text.strip():
            yield Piece(text, True)


def _document(piece: Piece, following: Iterator[Piece]) -> Iterator[str]:
    """The texts of `piece` and of those after it, to the end of the document."""
    yield piece.text
    while not piece.ends:
        piece = next(following)
        yield piece.text


def json_record(line: str, keys: Mapping[str, str], where: str) -> dict[str, object]:
    """The JSON object on a line. Raises QkvError unless it has all of `keys`: the option that names it -> the key."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = f": {error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise QkvError(f"the line is not JSON{reason}", where=where, hint="one JSON object per line") from error
    if not isinstance(record, dict):
        example = ", ".join(f'"{key}": "..."' for key in keys.values())
        raise QkvError(f"expected a JSON object, got {type(record).__name__}", where=where, hint=f"{{{example}}}")
    for option, key in keys.items():
        if key not in record:
            others = [name for name in record if name not in keys.values()]
            guess = nearest(key, others) or next(iter(others), None)
            hint = f"{option}={guess}" if guess else None
            raise QkvError(f"the object has no key `{key}`", where=where, hint=hint)
    return record


def valid_text(text: str, key: str, bad_bytes: BadBytes, where: str) -> str:
    """`text` by the rule for bad bytes: half of an escaped surrogate pair has no UTF-8."""
    if not _SURROGATE.search(text):
        return text
    if bad_bytes == "error":
        hint = f"{_BAD_BYTES}=replace or {_BAD_BYTES}=drop"
        raise QkvError(f"`{key}` holds half of a surrogate pair", where=where, hint=hint)
    return _SURROGATE.sub("\ufffd" if bad_bytes == "replace" else "", text)
