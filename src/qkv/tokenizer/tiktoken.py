"""tiktoken files: a line for each token, its bytes in base64 and its rank, which is its id.

They hold neither the cut of the text nor the special tokens: those come from the encoding's name.
"""

from __future__ import annotations

import binascii
import hashlib
import re
from pathlib import Path

from qkv.config.errors import QkvError, UsageError
from qkv.tokenizer.backends import (
    MAX_TOKENS,
    Source,
    add_tokens,
    byte_level,
    check_vocabulary,
    damaged,
    merges_by_rank,
    put_around,
)
from qkv.tokenizer.pieces import byte_characters
from qkv.tokenizer.splits import TIKTOKEN_ENCODINGS, Encoding

_FIRST_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")


def is_rank_file(head: bytes) -> bool:
    """Whether a file that begins so is one of these."""
    return _FIRST_LINE.match(head) is not None


def read(path: Path, encoding: str | None) -> Source:
    """The tokenizer in a rank file. encoding: its name in `TIKTOKEN_ENCODINGS`; None: told by digest or file name.

    Raises UsageError for an encoding that is not known, QkvError for a damaged file.
    """
    data = path.read_bytes()
    known = _encoding(path, data, encoding)
    vocab = _ranks(data, path)
    merges = merges_by_rank(vocab)
    taken = set(vocab.values())
    if clash := [token for token, token_id in known.special.items() if token_id in taken]:
        raise QkvError(
            f"this is not the vocabulary of that encoding: the id of {clash[0]!r} is taken",
            where=str(path),
            hint="another encoding",
        )
    backend = byte_level(vocab | known.special, merges, known.split, path)
    add_tokens(backend, known.special, path, special=True)
    roles = {"eos": known.eos} | ({"bos": known.bos} if known.bos else {})
    put_around(backend, [known.bos] if known.bos else [], [])
    return Source(backend, "bpe", roles)


def _encoding(path: Path, data: bytes, name: str | None) -> Encoding:
    names = ", ".join(TIKTOKEN_ENCODINGS)
    if name is not None:
        if name not in TIKTOKEN_ENCODINGS:
            raise UsageError(f"there is no tiktoken encoding {name!r}", hint=names)
        return TIKTOKEN_ENCODINGS[name]
    digest = hashlib.sha256(data).hexdigest()
    for known in TIKTOKEN_ENCODINGS.values():
        if digest == known.sha256:
            return known
    if path.stem in TIKTOKEN_ENCODINGS:
        return TIKTOKEN_ENCODINGS[path.stem]
    raise UsageError(
        "a tiktoken file does not say how text is cut, and this one is not a known one",
        where=str(path),
        hint=f"--encoding NAME (encoding=): {names}",
    )


def _ranks(data: bytes, path: Path) -> dict[str, int]:
    """Token -> rank, bytes spelled as characters."""
    spelled = byte_characters()
    ranks: dict[str, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line:
            continue
        encoded, _, rank = line.partition(b" ")
        try:
            token = binascii.a2b_base64(encoded, strict_mode=True).decode("latin-1").translate(spelled)
            ranks[token] = int(rank)
        except ValueError:
            raise damaged("this line is not base64 and a rank", f"{path}:{number}") from None
    check_vocabulary(list(ranks), path)
    if len(set(ranks.values())) < len(ranks) or not 0 <= min(ranks.values()) <= max(ranks.values()) < MAX_TOKENS:
        raise damaged("the ranks are not different whole numbers from 0", path)
    if missing := [byte for byte, character in spelled.items() if character not in ranks]:
        raise damaged(f"no token for the byte {missing[0]}", path)
    return ranks
