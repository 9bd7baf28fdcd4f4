"""The vocabulary in a GGUF file: what its metadata says of tokens, as a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from qkv.tokenizer.backends import (
    SPACE,
    Normalization,
    Piece,
    PieceType,
    Source,
    add_tokens,
    byte_level,
    check_vocabulary,
    damaged,
    put_around,
    sentencepiece,
    unsupported,
    wordpiece,
)
from qkv.tokenizer.gguf_header import read_header
from qkv.tokenizer.splits import GGUF_SPLITS

_TYPES = {int(kind): kind for kind in PieceType}  # looking a number up in the enumeration is slow
_ROLE_KEYS = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "unk": "unknown_token_id",
    "pad": "padding_token_id",
    "mask": "mask_token_id",
    "cls": "cls_token_id",
    "sep": "seperator_token_id",  # as the format spells it
}
_ADD_BOS_BY_DEFAULT = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")


class _Vocabulary:
    """The keys below `tokenizer.ggml.`, each of the type it should have."""

    def __init__(self, metadata: Mapping[str, Any], where: object) -> None:
        self._metadata, self.where = metadata, where
        self.tokens: list[str] = self._list("tokens")
        check_vocabulary(self.tokens, where)
        self.types = [PieceType.NORMAL] * len(self.tokens)
        unknown = self.get("unknown_token_id", int, 0)
        for place, number in enumerate(self._numbers("token_type") or ()):
            self.types[place] = _TYPES.get(number, PieceType.NORMAL)
            if self.tokens[place] == f"[PAD{place}]" or (number == PieceType.UNKNOWN and place != unknown):
                self.types[place] = PieceType.UNUSED  # converters fill the rows of the embedding so

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """A value, or `default` where there is none."""
        value = self._metadata.get(f"tokenizer.ggml.{key}", default)
        if value is not None and type(value) is not kind:
            raise damaged(f"tokenizer.ggml.{key} is {type(value).__name__}, not {kind.__name__}", self.where)
        return value

    def _list(self, key: str) -> list[str]:
        found: list[str] = self.get(key, list)
        if found is None:
            raise damaged(f"tokenizer.ggml.{key} is missing", self.where)
        return found

    def _numbers(self, key: str) -> list[Any] | None:
        """One for each token."""
        found = self.get(key, np.ndarray)
        if found is not None and len(found) != len(self.tokens):
            raise damaged(f"tokenizer.ggml.{key} has {len(found):,} entries, not {len(self.tokens):,}", self.where)
        return None if found is None else found.tolist()

    @property
    def ids(self) -> dict[str, int]:
        """Token -> id."""
        return {token: place for place, token in enumerate(self.tokens)}

    def of_type(self, *types: PieceType) -> dict[str, int]:
        """Token -> id of those of these types."""
        return {token: place for place, token in enumerate(self.tokens) if self.types[place] in types}

    def merges(self) -> list[tuple[str, str]]:
        """Pairs of tokens; they are written with a space between."""
        split = [merge.split(" ") for merge in self._list("merges")]
        if wrong := [merge for merge in split if len(merge) != 2]:
            raise damaged(f"{' '.join(wrong[0])!r} is no merge of two tokens", self.where)
        return [(left, right) for left, right in split]

    def pieces(self, unknown: str) -> list[Piece]:
        """Tokens with their scores. User-defined ones are found in the text as it is written, like control tokens."""
        scores = self._numbers("scores")
        if scores is None:
            raise damaged("tokenizer.ggml.scores is missing", self.where)
        types = [PieceType.CONTROL if each == PieceType.USER_DEFINED else each for each in self.types]
        if unknown in self.tokens:
            types[self.tokens.index(unknown)] = PieceType.UNKNOWN
        return [Piece(*entry) for entry in zip(self.tokens, scores, types, strict=True)]

    def roles(self, usual: Mapping[str, int]) -> dict[str, str]:
        """Role -> token; `usual`: ids where the file does not say."""
        found = {}
        for role, key in _ROLE_KEYS.items():
            place = self.get(key, int)
            if place is None:
                place = usual.get(role, len(self.tokens))
            elif not 0 <= place < len(self.tokens):
                raise damaged(f"tokenizer.ggml.{key} is {place}, outside the vocabulary", self.where)
            if place < len(self.tokens):
                found[role] = self.tokens[place]
        return found

    def around(self, roles: Mapping[str, str], usual: Mapping[str, bool]) -> tuple[list[str], list[str]]:
        """What stands before and after a text; `usual`: role -> whether it does where the file does not say."""
        before, after = (
            [roles[role]] if role in roles and self.get(f"add_{role}_token", bool, usual.get(role, False)) else []
            for role in ("bos", "eos")
        )
        return before, after


_Parts = tuple[tokenizers.Tokenizer, str, dict[str, str], tuple[list[str], list[str]]]
"""(backend, kind, roles, what is put before and after a text)"""


def read(path: Path) -> Source:
    """The tokenizer in a GGUF file, see `from_metadata`."""
    return from_metadata(read_header(path).metadata, path)


def from_metadata(metadata: Mapping[str, Any], where: object) -> Source:
    """The tokenizer that a GGUF file's metadata describes.

    Raises QkvError for a kind of vocabulary or a pre-tokenizer that is not known (nothing is assumed in its place), and
    for damaged lists.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None:
        raise unsupported("a GGUF file without a tokenizer", where)
    if kind not in _READERS:
        raise unsupported(f"a GGUF vocabulary of kind {kind!r}", where, ", ".join(_READERS))
    vocabulary = _Vocabulary(metadata, where)
    backend, kind, roles, (before, after) = _READERS[kind](vocabulary)
    special = vocabulary.of_type(PieceType.CONTROL, PieceType.UNKNOWN)
    special |= {token: place for token in roles.values() if (place := backend.token_to_id(token)) is not None}
    own = {token: place for token, place in vocabulary.of_type(PieceType.USER_DEFINED).items() if token not in special}
    # of Phi-3's control tokens, all but three take the white space after them
    name = str(metadata.get("general.name", "")).lower()
    strips = set(special) - {"<unk>", "<s>", "<|endoftext|>"} if "phi-3" in name or "phi3" in name else set()
    add_tokens(backend, special, where, special=True, strips=strips)
    add_tokens(backend, own, where, strips={"</s>"} & strips)
    put_around(backend, before, after)
    template = metadata.get("tokenizer.chat_template")
    return Source(backend, kind, roles, template if isinstance(template, str) else None)


def _gpt2(vocabulary: _Vocabulary) -> _Parts:
    name = vocabulary.get("pre", str)
    if name not in GGUF_SPLITS:
        what = "no pre-tokenizer" if name is None else f"the pre-tokenizer {name!r}"
        raise unsupported(f"a GGUF vocabulary with {what}", vocabulary.where, ", ".join(GGUF_SPLITS))
    backend = byte_level(vocabulary.ids, vocabulary.merges(), GGUF_SPLITS[name], vocabulary.where)
    roles = vocabulary.roles({})
    return backend, "bpe", roles, vocabulary.around(roles, {"bos": name in _ADD_BOS_BY_DEFAULT})


def _llama(vocabulary: _Vocabulary) -> _Parts:
    roles = vocabulary.roles({"bos": 1, "eos": 2, "unk": 0})
    return _sentencepiece(vocabulary, "bpe", roles), "bpe", roles, vocabulary.around(roles, {"bos": True})


def _t5(vocabulary: _Vocabulary) -> _Parts:
    roles = vocabulary.roles({"eos": 1, "unk": 2, "pad": 0})
    return _sentencepiece(vocabulary, "unigram", roles), "unigram", roles, vocabulary.around(roles, {"eos": True})


def _sentencepiece(vocabulary: _Vocabulary, kind: str, roles: Mapping[str, str]) -> tokenizers.Tokenizer:
    charsmap = vocabulary.get("precompiled_charsmap", np.ndarray)
    normalization = Normalization(
        b"" if charsmap is None else charsmap.tobytes(),
        dummy_prefix=vocabulary.get("add_space_prefix", bool, True),
        collapse_spaces=vocabulary.get("remove_extra_whitespaces", bool, False),
    )
    return sentencepiece(vocabulary.pieces(roles.get("unk", "")), kind, normalization, vocabulary.where)


def _bert(vocabulary: _Vocabulary) -> _Parts:
    """BERT's pieces. In these files a word begins with U+2581, and what goes on with a word has no mark."""
    vocab: dict[str, int] = {}
    for token, place in vocabulary.ids.items():
        bracketed = token.startswith("[") and token.endswith("]")
        vocab[token if bracketed else token[1:] if token.startswith(SPACE) else f"##{token}"] = place
    if len(vocab) < len(vocabulary.tokens):
        raise damaged("two of its tokens are the same piece", vocabulary.where)
    roles = vocabulary.roles({"unk": 100, "cls": 101, "sep": 102, "mask": 103, "pad": 0})
    lowercase = vocabulary.get("normalizer.lowercase", bool, True)
    backend = wordpiece(
        vocab,
        roles.get("unk", "[UNK]"),
        lowercase=lowercase,
        strip_accents=vocabulary.get("normalizer.strip_accents", bool, lowercase),
        where=vocabulary.where,
    )
    before, after = ([roles[role]] if role in roles else [] for role in ("cls", "sep"))
    return backend, "wordpiece", roles, (before, after)


_READERS: dict[str, Callable[[_Vocabulary], _Parts]] = {"gpt2": _gpt2, "llama": _llama, "t5": _t5, "bert": _bert}
