"""Byte-level BPE as GPT-2 keeps it, and RoBERTa and BART: a merges.txt beside a vocab.json."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken

from qkv.tokenizer.backends import Source, add_tokens, byte_level, damaged, put_around
from qkv.tokenizer.beside import as_configured, config_beside, only_transformers, owner_of, read_ids, read_text
from qkv.tokenizer.fairseq import ROLES as ROBERTA_ROLES
from qkv.tokenizer.splits import Split

_GPT2_ROLES = dict.fromkeys(("bos", "eos", "unk"), "<|endoftext|>")


def read(file: Path) -> Source:
    """The tokenizer of a merges.txt. Raises QkvError.

    Those of RoBERTa and BART put <s> and </s> around a text, and their mask takes the space before it, as they were
    trained.
    """
    vocab = read_ids(file.with_name("vocab.json"))
    owner = owner_of(file) or ("Roberta" if "<s>" in vocab else "GPT2")
    if owner not in ("GPT2", "Roberta", "Bart"):
        raise only_transformers(file, owner)
    lines = read_text(file).removesuffix("\n").split("\n")
    merges = [line.removesuffix("\r").split(" ") for line in lines[lines[0].startswith("#version") :]]
    if wrong := [merge for merge in merges if len(merge) != 2]:
        raise damaged(f"{' '.join(wrong[0])!r:.80} is no pair of tokens", file)
    split = Split(prefix_space=config_beside(file).get("add_prefix_space") is True)
    backend = byte_level(vocab, [(left, right) for left, right in merges], split, file)
    usual = _GPT2_ROLES if owner == "GPT2" else ROBERTA_ROLES
    roles = {role: token for role, token in usual.items() if token in vocab}
    add_tokens(backend, {token: vocab[token] for role, token in roles.items() if role != "mask"}, file, special=True)
    if "mask" in roles:
        backend.add_tokens([AddedToken(roles["mask"], special=True, normalized=False, lstrip=True)])
    if owner != "GPT2":
        if not {"cls", "sep"} <= roles.keys():
            raise damaged("its vocabulary has no <s>, or no </s>", file.with_name("vocab.json"))
        put_around(backend, [roles["cls"]], [roles["sep"]])
    return as_configured(Source(backend, "bpe", roles), file)
