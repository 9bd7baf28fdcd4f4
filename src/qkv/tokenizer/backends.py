"""From the vocabularies in other people's files to the one form a tokenizer has here: a `tokenizers.Tokenizer`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers.decoders import Decoder

from qkv.config.errors import DamagedError, QkvError
from qkv.tokenizer.pieces import isolated
from qkv.tokenizer.splits import Split

SPACE = "▁"
"""What SentencePiece writes for a space (U+2581)."""

MAX_TOKENS = 1 << 24
"""Far beyond any vocabulary in use: a file that claims more would make somebody allocate an embedding for it."""

MAX_SPELLING = 1 << 11
"""Characters of the longest token; those in use have some hundred, and work on longer ones grows with the square."""

_LONGEST_KEY = 256  # bytes of what a character map replaces
_BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]


@dataclass(frozen=True)
class Source:
    """A tokenizer as its file describes it.

    roles: role -> special token. chat_template: Jinja, where there is one. text: the JSON that says all of `backend`,
    where it was read from such (its numbers come back exact from there only). ids: the vocabulary, where the file gives
    the pieces of `backend` other ids than it has; what is not in it is unknown.
    """

    backend: tokenizers.Tokenizer
    kind: str
    roles: dict[str, str] = field(default_factory=dict)
    chat_template: str | None = None
    text: str | None = None
    ids: Mapping[str, int] | None = None


def damaged(what: str, where: object) -> DamagedError:
    """The error for a file that is not what it claims to be."""
    return DamagedError(f"the tokenizer file is damaged: {what}", where=str(where))


def unsupported(what: str, where: object, hint: str | None = None) -> QkvError:
    """The error for what a tokenizer may be, but is not understood here."""
    return QkvError(f"{what} is not supported", where=str(where), hint=hint)


# --- byte-level BPE ---------------------------------------------------------------------------------------------------


def byte_level(
    vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], split: Split, where: object
) -> tokenizers.Tokenizer:
    """BPE on bytes that are spelled as characters. Raises QkvError for merges that the vocabulary does not hold."""
    backend = tokenizers.Tokenizer(bpe(vocab, merges, where, ignore_merges=split.whole_pieces))
    if split.normalizer is not None:
        backend.normalizer = split.normalizer
    backend.pre_tokenizer = split.pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    return backend


def bpe(vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], where: object, **options: Any) -> models.BPE:
    """The library's BPE model."""
    try:
        return models.BPE(dict(vocab), list(merges), **options)
    except Exception as error:  # the library raises nothing narrower
        raise damaged(str(error), where) from None


def merges_by_rank(ranks: Mapping[str, float]) -> list[tuple[str, str]]:
    """The merges of a vocabulary that is listed without (token -> rank): every pair of tokens that makes a third.

    The join of lower rank is made first. This is what tiktoken and SentencePiece do: they join the neighbours whose
    join ranks first, whatever these are made of.
    """
    found = []
    for token, rank in ranks.items():
        for cut in range(1, len(token)):
            left = token[:cut]
            if left in ranks and token[cut:] in ranks:
                found.append((rank, left, token[cut:]))
    found.sort(key=lambda merge: merge[0])
    return [(left, right) for _, left, right in found]


# --- SentencePiece ----------------------------------------------------------------------------------------------------


class PieceType(IntEnum):
    """What a piece of a SentencePiece vocabulary is; the numbers are those of its files, and of GGUF."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Piece(NamedTuple):
    """One entry of a SentencePiece vocabulary; its place is its id."""

    text: str
    score: float
    type: PieceType


@dataclass(frozen=True)
class Normalization:
    """What SentencePiece does to a text before it looks for pieces.

    charsmap: compiled replacements of characters (NFKC and the like); empty: none. dummy_prefix: a space before the
    text. collapse_spaces: those at the ends go, and of several one stays.
    """

    charsmap: bytes = b""
    dummy_prefix: bool = True
    collapse_spaces: bool = False

    def normalizer(self) -> normalizers.Normalizer:
        """These steps, in SentencePiece's order.

        SentencePiece replaces the longest run of characters that `charsmap` knows; the library replaces single ones,
        and short graphemes. What runs are for is composition, so NFC goes before where the map composes; that leaves
        half-width kana with voicing marks, which stay apart.
        """
        steps: list[normalizers.Normalizer] = []
        if self.charsmap:
            replaced = normalizers.Precompiled(self.charsmap)
            steps += [normalizers.NFC()] if replaced.normalize_str("e\u0301") == "é" else []
            steps.append(replaced)
        if self.collapse_spaces:
            steps.append(normalizers.Replace(Regex(rf"\A +|[ {SPACE}]+\z"), ""))
            steps.append(normalizers.Replace(Regex(" {2,}"), " "))
        if self.dummy_prefix:
            steps.append(normalizers.Prepend(SPACE))
        return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])

    def decoder(self, *, byte_pieces: bool) -> Decoder:
        """What turns pieces into text."""
        steps: list[Decoder] = [decoders.Replace(SPACE, " ")]
        if byte_pieces:
            steps.append(decoders.ByteFallback())
        steps.append(decoders.Fuse())
        if self.dummy_prefix:
            steps.append(decoders.Strip(" ", 1, 0))
        return decoders.Sequence(steps)


def sentencepiece(
    pieces: Sequence[Piece], kind: str, normalization: Normalization, where: object
) -> tokenizers.Tokenizer:
    """The tokenizer of a SentencePiece vocabulary; kind: bpe or unigram.

    User-defined pieces are cut out of the normalised text whatever stands around them, as SentencePiece does it.
    Control pieces are left to the caller. Raises QkvError for a vocabulary without an unknown piece, or damaged.
    """
    texts = [piece.text for piece in pieces]
    unknown = [place for place, piece in enumerate(pieces) if piece.type == PieceType.UNKNOWN]
    check_vocabulary(texts, where)
    if not unknown:
        raise damaged("no piece stands for what is unknown", where)
    if wrong := [piece.text for piece in pieces if not math.isfinite(piece.score)]:
        raise damaged(f"the score of {wrong[0]!r} is not a number", where)
    check_charsmap(normalization.charsmap, where)
    byte_pieces = set(_BYTE_PIECES) <= {piece.text for piece in pieces if piece.type == PieceType.BYTE}
    own = [piece.text for piece in pieces if piece.type == PieceType.USER_DEFINED]
    if kind == "unigram":
        backend = tokenizers.Tokenizer(_unigram(pieces, unknown[0], byte_pieces, where))
    else:
        model = _sentencepiece_bpe(pieces, unknown[0], byte_pieces, where)
        if own:
            _take_whole(model, pieces, where)
        backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalization.normalizer()
    cuts = ["|".join(map(re.escape, sorted(own, key=len, reverse=True)))] if own else []
    if byte_pieces and kind == "unigram":  # which looks for every piece in the text
        cuts.append("<(?=0x[0-9A-F]{2}>)")
    if cuts:
        backend.pre_tokenizer = pre_tokenizers.Sequence([isolated(cut) for cut in cuts])
    backend.decoder = normalization.decoder(byte_pieces=byte_pieces)
    return backend


def _unigram(pieces: Sequence[Piece], unknown: int, byte_pieces: bool, where: object) -> models.Model:
    # every piece of the model is looked for in a text: an unused one needs a spelling that no text has
    spelled = [f"\0{piece.text}" if piece.type == PieceType.UNUSED else piece.text for piece in pieces]
    scores = [piece.score for piece in pieces]
    try:
        return models.Unigram(list(zip(spelled, scores, strict=True)), unknown, byte_pieces)
    except Exception as error:
        raise damaged(str(error), where) from None


def _sentencepiece_bpe(pieces: Sequence[Piece], unknown: int, byte_pieces: bool, where: object) -> models.BPE:
    ranks = _ranks(pieces)
    return bpe(
        {piece.text: place for place, piece in enumerate(pieces)},
        merges_by_rank(ranks),
        where,
        unk_token=pieces[unknown].text,
        fuse_unk=True,
        byte_fallback=byte_pieces,
    )


def _ranks(pieces: Sequence[Piece]) -> dict[str, float]:
    return {piece.text: -piece.score for piece in pieces if piece.type == PieceType.NORMAL}


def _take_whole(model: models.BPE, pieces: Sequence[Piece], where: object) -> None:
    """Have user-defined pieces, which no merges make, taken as they are; of all others merging has to make the same."""
    if any(model.tokenize(text)[0].value != text for text in _ranks(pieces)):
        raise unsupported("a BPE vocabulary with user-defined pieces and with some out of reach", where)
    model.ignore_merges = True


def check_charsmap(charsmap: bytes, where: object) -> None:
    """Raises QkvError for a map that leads outside itself, which would end in the middle of a text.

    It is a Darts double array (32-bit units, found by XOR with a unit's offset and the byte that follows) and the
    replacements, each ended by a zero.
    """
    if not charsmap:
        return
    size = int.from_bytes(charsmap[:4], "little")
    if len(charsmap) < 8 or size % 4 or not 4 <= size <= len(charsmap) - 4:
        raise damaged("the character map is cut off", where)
    units = np.frombuffer(charsmap, "<u4", size // 4, 4).astype(np.int64)
    replacements = charsmap[4 + size :]
    places = np.arange(len(units))
    bases = places ^ ((units >> 10) << ((units & 0x200) >> 6))  # of a unit: what a byte is XORed with to find the next
    parents = places ^ (units & 0xFF)  # the base that a unit belongs to, if it is in use
    labelled = units < 0x8000_0000
    reached = places == 0
    nodes = np.flatnonzero(reached)
    starts: list[int] = []
    for _ in range(_LONGEST_KEY):
        if len(nodes) and (bases[nodes] | 0xFF).max() >= len(units):
            raise damaged("the character map leads outside itself", where)
        starts += (units[bases[nodes[(units[nodes] & 0x100) != 0]]] & 0x7FFF_FFFF).tolist()
        following = np.zeros(len(units), dtype=bool)
        following[bases[nodes]] = True
        nodes = np.flatnonzero(following[np.minimum(parents, len(units) - 1)] & labelled & ~reached)
        reached[nodes] = True
    if len(nodes):
        raise damaged("the character map has keys of absurd length", where)
    try:
        replacements.decode()
    except UnicodeDecodeError:
        raise damaged("the character map is not UTF-8", where) from None
    if any(start >= len(replacements) or replacements[start] & 0xC0 == 0x80 for start in starts):
        raise damaged("the character map leads outside its replacements", where)


# --- WordPiece --------------------------------------------------------------------------------------------------------


def wordpiece(
    vocab: Mapping[str, int],
    unk: str,
    *,
    lowercase: bool,
    where: object,
    strip_accents: bool | None = None,
    chinese: bool = True,
) -> tokenizers.Tokenizer:
    """BERT's tokenizer: words and signs apart, then the longest pieces. strip_accents None: as `lowercase`."""
    if unk not in vocab:
        raise damaged(f"no piece {unk!r} stands for what is unknown", where)
    backend = tokenizers.Tokenizer(models.WordPiece(dict(vocab), unk_token=unk, max_input_chars_per_word=100))
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=chinese, strip_accents=strip_accents, lowercase=lowercase
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    return backend


# --- what all have ----------------------------------------------------------------------------------------------------


def check_vocabulary(tokens: Sequence[str], where: object) -> None:
    """Raises QkvError for no tokens, an empty one, one of absurd length, or one that is there twice."""
    if not tokens:
        raise damaged("it holds no tokens", where)
    if len(tokens) > MAX_TOKENS:
        raise damaged(f"it claims {len(tokens):,} tokens", where)
    known: dict[str, int] = {}
    for place, token in enumerate(tokens):
        if not token:
            raise damaged(f"token {place} is empty", where)
        if len(token) > MAX_SPELLING:
            raise damaged(f"token {place} has {len(token):,} characters", where)
        if (first := known.setdefault(token, place)) != place:
            raise damaged(f"{token!r} is both token {first} and token {place}", where)


def add_tokens(
    backend: tokenizers.Tokenizer,
    tokens: Mapping[str, int],
    where: object,
    *,
    special: bool = False,
    strips: Collection[str] = (),
) -> None:
    """Make `tokens` (token -> id) tokens that are found before the text is cut: those of the vocabulary, or new ones.

    strips: those that take the white space after them.
    """
    ordered = sorted(tokens, key=lambda token: tokens[token])
    backend.add_tokens(
        [AddedToken(token, special=special, normalized=False, rstrip=token in strips) for token in ordered]
    )
    for token in ordered:
        if backend.token_to_id(token) != tokens[token]:
            raise damaged(f"the token {token!r} cannot have the id {tokens[token]}", where)


def put_around(backend: tokenizers.Tokenizer, before: Sequence[str], after: Sequence[str]) -> None:
    """Have these special tokens put before and after each text, where special tokens are asked for."""
    if not before and not after:
        return
    names = dict.fromkeys([*before, *after])

    def part(token: str | None, segment: int) -> dict[str, Any]:
        if token is None:
            return {"Sequence": {"id": "AB"[segment], "type_id": segment}}
        return {"SpecialToken": {"id": token, "type_id": segment}}

    first = [*(part(token, 0) for token in before), part(None, 0), *(part(token, 0) for token in after)]
    second = [part(None, 1), *(part(token, 1) for token in after)]
    written = json.loads(tokenizers.Tokenizer(models.BPE()).to_str())
    written["post_processor"] = {  # in JSON, since the constructor reads a colon in a token as something else
        "type": "TemplateProcessing",
        "single": first,
        "pair": first + second,
        "special_tokens": {
            token: {"id": token, "ids": [backend.token_to_id(token)], "tokens": [token]} for token in names
        },
    }
    backend.post_processor = tokenizers.Tokenizer.from_str(json.dumps(written)).post_processor


def twin(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Another tokenizer with the same parts and added tokens, to be changed; the model, which is large, is shared."""
    copy = tokenizers.Tokenizer(backend.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if getattr(backend, part) is not None:
            setattr(copy, part, getattr(backend, part))
    added = backend.get_added_tokens_decoder()
    copy.add_tokens([added[token_id] for token_id in sorted(added)])
    return copy


def raw(token: AddedToken) -> AddedToken:
    """The same token, found in the text as it is written."""
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        special=token.special,
        normalized=False,
    )


def parts(backend: tokenizers.Tokenizer) -> dict[str, Any]:
    """The parts of a tokenizer around its model, as JSON says them."""
    empty = tokenizers.Tokenizer(models.BPE())
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        if getattr(backend, part) is not None:
            setattr(empty, part, getattr(backend, part))
    return dict(json.loads(empty.to_str()))
