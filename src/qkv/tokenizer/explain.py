"""How a text becomes tokens, step by step, and how well a tokenizer fits a text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import tokenizers

from qkv.tokenizer.bpe import ByteBPE, Step
from qkv.tokenizer.decoding import TokenBytes
from qkv.tokenizer.pieces import character_bytes

TOY_TEXT = """\
The lower shelf holds the newer books. A newer book lies lower, an older book lies higher.
Winter is colder and the river is lower. Summer is warmer and the water is higher.
The newest tower is the lowest; the widest river is the slowest.
She knows the way. He slows down and shows her the new road.
"""
"""Enough for a toy tokenizer that shows what is shared: lower, newer and older end in one token."""


@dataclass(frozen=True, slots=True)
class PieceExplanation:
    """One piece of the text: its tokens, their ids, and for byte-level BPE the merges that made them, in order."""

    text: str
    tokens: tuple[str, ...]
    ids: tuple[int, ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `Tokenizer.explain` found. `str()` is for people, `to_dict` for machines."""

    kind: str
    pieces: tuple[PieceExplanation, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and strings; bytes that are no whole character are written like <E4BD>."""
        return {
            "kind": self.kind,
            "pieces": [
                {
                    "text": piece.text,
                    "tokens": list(piece.tokens),
                    "ids": list(piece.ids),
                    "steps": [
                        {
                            "rank": step.rank,
                            "left": readable(step.left),
                            "right": readable(step.right),
                            "tokens": [readable(token) for token in step.tokens],
                        }
                        for step in piece.steps
                    ],
                }
                for piece in self.pieces
            ],
        }

    def __str__(self) -> str:
        lines: list[str] = []
        for piece in self.pieces:
            lines.append(repr(piece.text))
            for step in piece.steps:
                joined = f"{visible(step.left)} + {visible(step.right)}"
                tokens = " | ".join(visible(token) for token in step.tokens)
                lines.append(f"  merge {step.rank + 1:<6} {joined:<18} {tokens}")
            pairs = zip(piece.tokens, piece.ids, strict=True)
            shown = "  ".join(f"{token.replace(' ', '␣')} = {token_id}" for token, token_id in pairs)
            lines.append(f"  tokens       {shown}")
        return "\n".join(lines)


def readable(token: bytes) -> str:
    """The token as text, or its bytes in hexadecimal when they are no whole characters."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return f"<{token.hex().upper()}>"


def visible(token: bytes) -> str:
    """`readable`, with spaces that can be seen."""
    return readable(token).replace(" ", "␣")


def byte_bpe(backend: tokenizers.Tokenizer) -> ByteBPE | None:
    """The readable twin of a byte-level BPE tokenizer; None for every other."""
    tree = json.loads(backend.to_str())
    model, known = tree["model"], character_bytes()
    if model["type"] != "BPE" or '"ByteLevel"' not in json.dumps(tree["pre_tokenizer"]):
        return None

    def spelled(token: str) -> bytes:
        return bytes(known[character] for character in token)

    vocab = {spelled(token): n for token, n in model["vocab"].items() if all(character in known for character in token)}
    return ByteBPE(vocab, [(spelled(left), spelled(right)) for left, right in model["merges"]])


def explain_text(
    backend: tokenizers.Tokenizer,
    kind: str,
    text: str,
    token_bytes: TokenBytes,
    twin: ByteBPE | None,
    number: Callable[[str, int], int],
) -> Explanation:
    """The pieces of `text` with their tokens, and the merges where `twin` makes the same tokens.

    number: (a token, its id in `backend`) -> its id.
    """
    normal = backend.normalizer.normalize_str(text) if backend.normalizer else text
    pieces = [(normal, (0, len(normal)))]
    if backend.pre_tokenizer:
        pieces = backend.pre_tokenizer.pre_tokenize_str(normal)
    explained = []
    for spelled, (start, end) in pieces:
        ids = tuple(number(token.value, token.id) for token in backend.model.tokenize(spelled))
        parts = [token_bytes(token_id, True) for token_id in ids]
        whole = b"".join(parts)
        steps = tuple(twin.steps(whole)) if twin and twin.encode_piece(whole) == [*ids] else ()
        explained.append(PieceExplanation(normal[start:end], tuple(map(readable, parts)), ids, steps))
    return Explanation(kind, tuple(explained))


# --- statistics -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a text in one script. A token over both scripts counts by its share of characters."""

    characters: int
    bytes: int
    tokens: float

    @property
    def tokens_per_character(self) -> float | None:
        """Fewer is better; None without characters."""
        return self.tokens / self.characters if self.characters else None

    @property
    def bytes_per_token(self) -> float | None:
        """UTF-8 bytes; more is better; None without tokens."""
        return self.bytes / self.tokens if self.tokens else None

    def to_dict(self) -> dict[str, float | None]:
        """All five figures."""
        whole = {"tokens": int(self.tokens)} if self.tokens == int(self.tokens) else {}  # a token may be shared
        return (
            asdict(self)
            | whole
            | {
                "tokens_per_character": self.tokens_per_character,
                "bytes_per_token": self.bytes_per_token,
            }
        )

    def __add__(self, other: Share) -> Share:
        return Share(self.characters + other.characters, self.bytes + other.bytes, self.tokens + other.tokens)


@dataclass(frozen=True, slots=True)
class TextStats:
    """How a tokenizer does on a text: Chinese characters (and their signs) and all others. `unknown` counts <unk>."""

    chinese: Share
    other: Share
    unknown: int

    @property
    def all(self) -> Share:
        """The whole text."""
        return self.chinese + self.other

    def to_dict(self) -> dict[str, Any]:
        """The figures of the whole, with those of each part under its name."""
        return {
            **self.all.to_dict(),
            "unknown": self.unknown,
            "chinese": self.chinese.to_dict(),
            "other": self.other.to_dict(),
        }


_CHINESE_RANGES = (
    (0x3000, 0x303F),
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0xFF00, 0xFFEF),
    (0x20000, 0x3FFFF),
)


def text_stats(
    backend: tokenizers.Tokenizer,
    chunks: Iterable[str],
    unk_id: int | None,
    ids_of: Callable[[tokenizers.Encoding], Sequence[int]],
) -> TextStats:
    """Statistics of a text that comes in chunks, special tokens left out. ids_of: the ids of what was encoded."""
    chinese = other = Share(0, 0, 0.0)
    unknown = 0
    for chunk in chunks:
        codes = np.frombuffer(chunk.encode("utf-32-le"), dtype="<u4")
        is_chinese = np.zeros(len(codes), dtype=bool)
        for first, last in _CHINESE_RANGES:
            is_chinese |= (codes >= first) & (codes <= last)
        widths = 1 + (codes > 0x7F) + (codes > 0x7FF) + (codes > 0xFFFF)
        encoding = backend.encode(chunk, add_special_tokens=False)
        spans = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        before = np.concatenate([[0], np.cumsum(is_chinese)])
        shares = (before[spans[:, 1]] - before[spans[:, 0]]) / np.maximum(spans[:, 1] - spans[:, 0], 1)
        tokens = float(shares.sum())
        chinese += Share(int(is_chinese.sum()), int(widths[is_chinese].sum()), tokens)
        other += Share(int((~is_chinese).sum()), int(widths[~is_chinese].sum()), len(spans) - tokens)
        unknown += sum(token_id == unk_id for token_id in ids_of(encoding))
    return TextStats(chinese, other, unknown)
