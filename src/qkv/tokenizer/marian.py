"""The tokenizers of Marian: a SentencePiece model for each side, whose pieces have the ids of a vocab.json."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from tokenizers import AddedToken

from qkv.tokenizer.backends import Source, damaged, put_around
from qkv.tokenizer.beside import read_ids
from qkv.tokenizer.sentencepiece import bare


def read(file: Path) -> Source:
    """One side's `.spm` of a Marian folder: its pieces have the ids that vocab.json gives them (target_vocab.json, if
    the translations have their own), what is in none is unknown; after a text stands </s>.

    The punctuation of a text stays as it is; `transformers` first has it normalised, where sacremoses is installed.
    """
    own = file.with_name("target_vocab.json")
    ids = read_ids(own if file.name == "target.spm" and own.is_file() else file.with_name("vocab.json"))
    source = bare(file)
    roles = {role: token for role, token in (("pad", "<pad>"), ("eos", "</s>"), ("unk", "<unk>")) if token in ids}
    if not {"eos", "unk"} <= roles.keys():
        raise damaged("its vocabulary has no </s>, or no <unk>", file.with_name("vocab.json"))
    source.backend.add_special_tokens([AddedToken(token, normalized=False) for token in roles.values()])
    languages = [token for token in ids if re.fullmatch(">>.+<<", token)]
    source.backend.add_tokens([AddedToken(token, normalized=False) for token in languages])
    put_around(source.backend, [], ["</s>"])
    return replace(source, roles=roles, ids=ids)
