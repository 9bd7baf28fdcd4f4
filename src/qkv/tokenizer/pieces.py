"""The pieces that text is cut into before tokens are looked for; no token crosses them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import tokenizers
from tokenizers import Regex, models, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

KINDS = ("bpe", "unigram", "wordpiece", "word", "char", "byte")

GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""GPT-2's pieces: contractions, words, numbers and signs with the space before them, other white space."""

_CHINESE_SIGNS = "[\n\u3000-\u303f\uff00-\uffef]"
_WORDS = (
    r" ?\p{Han}"
    r"| ?[[\p{L}\p{M}\p{N}]&&[^\p{Han}]]+(?:['’][[\p{L}\p{M}\p{N}]&&[^\p{Han}]]+)*"
    r"| ?[^\s\p{L}\p{M}\p{N}]"
    r"|\s"
)
"""Words and signs with the space before them, one Chinese character each, white space one by one: nothing is lost."""


def guard(special: Iterable[str], *, whole: bool = False) -> PreTokenizer:
    """Splits after the first character of what spells a special token, so that no piece of plain text can be one.

    whole: only of pieces that are one, where a model takes no part of a piece for a token.
    """
    begin, end = (r"\A", r"\z") if whole else ("", "")
    heads = [f"{begin}{re.escape(token[0])}(?={re.escape(token[1:])}{end})" for token in special if len(token) > 1]
    return pre_tokenizers.Split(Regex("|".join(heads) or r"(?!)"), "isolated")


def splits_as_trained(found: Mapping[str, Any] | None, kind: str, roles: Mapping[str, str]) -> bool:
    """Whether a pre-tokenizer (as JSON says it) cuts as in a tokenizer trained here, so that `text.chunks` knows where
    none is ever cut."""
    if kind not in KINDS:
        return False
    expected = tokenizers.Tokenizer(models.BPE())
    if (cut := splitter(kind, list(dict.fromkeys(roles.values())))) is not None:
        expected.pre_tokenizer = cut
    return bool(found == json.loads(expected.to_str())["pre_tokenizer"])


def splitter(kind: str, special: list[str]) -> PreTokenizer | None:
    """What cuts text into the pieces that tokens never cross."""
    if kind == "bpe":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if kind == "byte":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if kind == "unigram":
        spaces = pre_tokenizers.Metaspace(prepend_scheme="never")
        return pre_tokenizers.Sequence([spaces, isolated(_CHINESE_SIGNS), guard(special)])
    if kind == "wordpiece":
        return pre_tokenizers.Sequence([pre_tokenizers.BertPreTokenizer(), isolated(r"\p{Han}")])
    if kind == "word":
        return pre_tokenizers.Sequence([isolated(_WORDS), guard(special)])
    return None


def isolated(pattern: str) -> PreTokenizer:
    """Makes each match of `pattern` a piece of its own."""
    return pre_tokenizers.Split(Regex(pattern), "isolated")


# --- bytes spelled as characters --------------------------------------------------------------------------------------


@cache
def byte_characters() -> dict[int, str]:
    """A printable character for each byte, as GPT-2 files spell them: itself where printable, else U+0100 and up."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


@cache
def character_bytes() -> dict[str, int]:
    """The byte behind each printable character; the inverse of `byte_characters`."""
    return {character: byte for byte, character in byte_characters().items()}


def byte_alphabet() -> list[bytes]:
    """The 256 single bytes in the order of their printable characters: the first ids of a byte-level vocabulary."""
    return [bytes([byte]) for _, byte in sorted(character_bytes().items())]


@cache
def _splitter() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(GPT2_SPLIT), "isolated")


def split(text: str) -> list[bytes]:
    """The pieces of `text`, in UTF-8, that merges never cross."""
    return [piece.encode() for piece, _ in _splitter().pre_tokenize_str(text)]
