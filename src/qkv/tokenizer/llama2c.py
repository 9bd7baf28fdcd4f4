"""The tokenizer files of llama2.c: a SentencePiece BPE vocabulary without all else.

Layout, little endian: int32 length of the longest token; then for each token float32 score, int32 length, bytes. The
order is SentencePiece's: <unk>, <s>, </s>, 256 bytes, pieces. Spaces are written as they read.
"""

from __future__ import annotations

import struct
from pathlib import Path

from qkv.tokenizer.backends import (
    SPACE,
    Normalization,
    Piece,
    PieceType,
    Source,
    add_tokens,
    damaged,
    put_around,
    sentencepiece,
)

_SPECIAL = {"<unk>": 0, "<s>": 1, "</s>": 2}
_FIRST_PIECE = 3 + 256
_LONGEST = 1 << 12


def read(path: Path) -> Source:
    """The tokenizer in such a file; texts begin with <s>, as llama2.c runs its models. Raises QkvError."""
    pieces = _pieces(path.read_bytes(), path)
    backend = sentencepiece(pieces, "bpe", Normalization(), path)
    add_tokens(backend, _SPECIAL, path, special=True)
    put_around(backend, ["<s>"], [])
    return Source(backend, "bpe", {"unk": "<unk>", "bos": "<s>", "eos": "</s>"})


def _pieces(data: bytes, path: Path) -> list[Piece]:
    longest = int.from_bytes(data[:4], "little")
    if len(data) < 4 or not 0 < longest <= _LONGEST:
        raise damaged("it does not begin as a tokenizer of llama2.c", path)
    pieces: list[Piece] = []
    place = 4
    while place < len(data):
        start, number = place, len(pieces)
        score, length = struct.unpack_from("<fi", data, place) if place + 8 <= len(data) else (0.0, -1)
        place += 8 + length
        if not 0 < length <= longest or place > len(data):
            raise damaged(f"token {number} at byte {start} is cut off, or not of 1 to {longest} bytes", path)
        try:
            text = data[place - length : place].decode()
        except UnicodeDecodeError:
            raise damaged(f"token {number} at byte {start} is not UTF-8", path) from None
        pieces.append(_piece(number, text, score))
    if [piece.text for piece in pieces[:3]] != list(_SPECIAL):
        raise damaged("it does not begin with <unk>, <s> and </s>", path)
    return pieces


def _piece(number: int, text: str, score: float) -> Piece:
    if number < 3:  # written with line ends around, to be seen in its samples
        return Piece(text.strip("\n"), score, PieceType.UNKNOWN if number == 0 else PieceType.CONTROL)
    if number < _FIRST_PIECE:
        return Piece(text, score, PieceType.BYTE)
    return Piece(text.replace(" ", SPACE), score, PieceType.NORMAL)
