"""What each token adds to the text, as bytes.

Decoding, streaming and `token_bytes` all use this one table, so they cannot disagree. It is made from the `decoder` of
a tokenizer file; a decoder that is not known here is refused, because guessing would change spaces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from qkv.config.errors import QkvError
from qkv.tokenizer.pieces import character_bytes

Rule = Callable[[bytes, bool], bytes]
"""(what the token says so far, is it the first of its text) -> what it says."""


class TokenBytes:
    """Token id -> bytes. `tokens` are spelled as in the file; `plain` holds added tokens, spelled as they read."""

    def __init__(self, tokens: Mapping[int, str], plain: frozenset[int], decoder: Mapping[str, Any] | None) -> None:
        self._tokens = tokens
        self._plain = plain
        self._rules = _rules(decoder)
        self._cache: dict[tuple[int, bool], bytes] = {}

    def __call__(self, token_id: int, first: bool) -> bytes:
        """The bytes of a known token; `first` says that nothing stands before it."""
        key = token_id, first
        if key not in self._cache:
            text = self._tokens[token_id].encode()
            for rule in self._rules:
                if not (token_id in self._plain and rule in _SPELLINGS):
                    text = rule(text, first)
            self._cache[key] = text
        return self._cache[key]


def _byte_level(text: bytes, first: bool) -> bytes:
    known = character_bytes()
    characters = text.decode()
    return bytes(known[c] for c in characters) if all(c in known for c in characters) else text


def _byte_fallback(text: bytes, first: bool) -> bytes:
    return bytes([int(text[3:5], 16)]) if re.fullmatch(rb"<0x[0-9A-Fa-f]{2}>", text) else text


_SPELLINGS = (_byte_level, _byte_fallback)


def _joined_by_spaces(text: bytes, first: bool) -> bytes:
    return text if first else b" " + text


def _word_piece(prefix: str, cleanup: bool) -> Rule:
    def rule(text: bytes, first: bool) -> bytes:
        if not first:
            text = text.removeprefix(prefix.encode()) if text.startswith(prefix.encode()) else b" " + text
        if cleanup:
            for spaced in (" .", " ?", " !", " ,", " n't", " 'm", " 's", " 've", " 're"):
                text = text.replace(spaced.encode(), spaced[1:].encode())
        return text

    return rule


def _replace(old: str, new: str) -> Rule:
    return lambda text, first: text.replace(old.encode(), new.encode())


def _strip_first(content: str, most: int) -> Rule:
    def rule(text: bytes, first: bool) -> bytes:
        for _ in range(most if first else 0):
            text = text.removeprefix(content.encode())
        return text

    return rule


def _rules(decoder: Mapping[str, Any] | None) -> list[Rule]:
    if decoder is None:
        return [_joined_by_spaces]
    kind = decoder["type"]
    if kind == "Sequence":
        return [rule for part in decoder["decoders"] for rule in _rules(part)]
    if kind == "ByteLevel":
        return [_byte_level]
    if kind == "ByteFallback":
        return [_byte_fallback]
    if kind == "Fuse":
        return []
    if kind == "WordPiece":
        return [_word_piece(decoder["prefix"], decoder["cleanup"])]
    if kind == "Metaspace":
        # the space put before the first word goes; further ones were in the text
        written = _replace(decoder["replacement"], " ")
        return [written] if decoder["prepend_scheme"] == "never" else [written, _strip_first(" ", 1)]
    if kind == "Replace" and "String" in decoder["pattern"]:
        return [_replace(decoder["pattern"]["String"], decoder["content"])]
    if kind == "Strip" and not decoder["stop"]:
        return [_strip_first(decoder["content"], decoder["start"])]
    raise QkvError(
        f"a tokenizer with the decoder {kind} is not supported",
        hint="one with ByteLevel, ByteFallback, Metaspace, WordPiece, Replace, Strip, Fuse or none",
    )
