"""SentencePiece `.model` files: a protocol buffer with the pieces, and how text is normalised before they are sought.

The messages and field numbers are those of sentencepiece_model.proto.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import AddedToken

from qkv.tokenizer.backends import (
    Normalization,
    Piece,
    PieceType,
    Source,
    add_tokens,
    damaged,
    sentencepiece,
    unsupported,
)
from qkv.tokenizer.beside import CONFIG_FILE, as_configured, class_of, config_beside, only_transformers
from qkv.tokenizer.protobuf import Value, WireError, fields

_MODEL_PIECES, _MODEL_TRAINER, _MODEL_NORMALIZER, _MODEL_DENORMALIZER = 1, 2, 3, 5
_PIECE_TEXT, _PIECE_SCORE, _PIECE_TYPE = 1, 2, 3
_TRAINER_KIND, _TRAINER_SUFFIX = 3, 24
_TRAINER_ROLE_IDS = {"unk": 40, "bos": 41, "eos": 42, "pad": 43}
_DEFAULT_ROLE_IDS = {"unk": 0, "bos": 1, "eos": 2, "pad": -1}
_NORMALIZER_MAP, _NORMALIZER_PREFIX, _NORMALIZER_COLLAPSE, _NORMALIZER_ESCAPE = 2, 3, 4, 5
_KINDS = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}


@dataclass
class Model:
    """What a file says."""

    kind: str = "unigram"
    pieces: list[Piece] = field(default_factory=list)
    roles: dict[str, str] = field(default_factory=dict)
    normalization: Normalization = field(default_factory=lambda: Normalization(collapse_spaces=True))


def read(file: Path) -> Source:
    """A `.model`; its folder says whose it is, and with that what stands around a text (on its own: <s> before)."""
    source = bare(file)
    config = config_beside(file)
    owner = class_of(config)
    if owner not in ("", "Llama", "CodeLlama", "Gemma", "T5"):
        raise only_transformers(file, owner)
    if owner == "T5":
        count = config.get("extra_ids", 100)
        if not isinstance(count, int) or not 0 <= count <= 1000:
            raise damaged(f"extra_ids is {count!r}", file.with_name(CONFIG_FILE))
        extra = [AddedToken(f"<extra_id_{n}>", special=True, normalized=False) for n in reversed(range(count))]
        source.backend.add_tokens(extra)
    usual = {"eos": True} if owner == "T5" else {"bos": True}
    return as_configured(source, file, usual)


def bare(path: Path) -> Source:
    """The tokenizer in a `.model` file. It puts nothing around a text: what does is said elsewhere.

    Raises QkvError: a damaged file, or a model that is neither BPE nor unigram.
    """
    model = parse(path.read_bytes(), path)
    backend = sentencepiece(model.pieces, model.kind, model.normalization, path)
    control = (PieceType.CONTROL, PieceType.UNKNOWN)
    ids = {piece.text: place for place, piece in enumerate(model.pieces) if piece.type in control}
    add_tokens(backend, ids, path, special=True)
    return Source(backend, model.kind, model.roles)


def parse(data: bytes, where: object) -> Model:
    """The parts of a `.model` file that tokenizing needs. Raises QkvError."""
    try:
        return _model(data, where)
    except WireError as error:
        raise damaged(str(error), where) from None
    except (UnicodeDecodeError, ValueError, TypeError) as error:
        raise damaged(f"a field is not what it should be: {error}", where) from None


def _model(data: bytes, where: object) -> Model:
    model = Model()
    trainer: dict[int, Value] = {}
    for number, value in fields(data):
        if number == _MODEL_PIECES:
            model.pieces.append(_piece(_message(value)))
        elif number == _MODEL_TRAINER:
            trainer = dict(fields(_message(value)))
        elif number == _MODEL_NORMALIZER:
            model.normalization = _normalization(dict(fields(_message(value))), where)
        elif number == _MODEL_DENORMALIZER and dict(fields(_message(value))).get(_NORMALIZER_MAP):
            raise unsupported("a SentencePiece model that changes text while decoding", where)
    kind = _whole(trainer.get(_TRAINER_KIND, 1))
    model.kind = _KINDS.get(kind, f"number {kind}")
    if model.kind not in ("bpe", "unigram"):
        raise unsupported(f"a SentencePiece model of kind {model.kind}", where, "one of kind bpe or unigram")
    if trainer.get(_TRAINER_SUFFIX):
        raise unsupported("a SentencePiece model with spaces after words", where)
    for role, number in _TRAINER_ROLE_IDS.items():
        place = _whole(trainer.get(number, _DEFAULT_ROLE_IDS[role]))
        if 0 <= place < len(model.pieces) and model.pieces[place].type in (PieceType.CONTROL, PieceType.UNKNOWN):
            model.roles[role] = model.pieces[place].text
    return model


def _piece(message: bytes) -> Piece:
    found = dict(fields(message))
    text, score = found.get(_PIECE_TEXT, b""), found.get(_PIECE_SCORE, 0.0)
    return Piece(_message(text).decode(), float(score), PieceType(_whole(found.get(_PIECE_TYPE, 1))))


def _normalization(found: dict[int, Value], where: object) -> Normalization:
    if not found.get(_NORMALIZER_ESCAPE, 1):
        raise unsupported("a SentencePiece model that keeps spaces as they are", where)
    return Normalization(
        _message(found.get(_NORMALIZER_MAP, b"")),
        dummy_prefix=bool(found.get(_NORMALIZER_PREFIX, 1)),
        collapse_spaces=bool(found.get(_NORMALIZER_COLLAPSE, 1)),
    )


def _message(value: Value) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError(f"{value!r} where bytes are expected")
    return value


def _whole(value: Value) -> int:
    """An int32, which is stored as 64 bits without a sign."""
    if not isinstance(value, int):
        raise TypeError(f"{value!r} where a whole number is expected")
    return value - (1 << 64) if value >> 63 else value
