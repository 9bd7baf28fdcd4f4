"""BERT's vocab.txt: a piece on each line."""

from __future__ import annotations

from pathlib import Path

from qkv.tokenizer.backends import Source, check_vocabulary, damaged, put_around, unsupported, wordpiece
from qkv.tokenizer.beside import CONFIG_FILE, as_configured, class_of, config_beside, read_text


def read(file: Path) -> Source:
    """The tokenizer of a vocab.txt. Where nothing beside it says so, text is lower-cased if no piece has a capital.

    Raises QkvError.
    """
    tokens = [line.removesuffix("\r") for line in read_text(file).removesuffix("\n").split("\n")]
    check_vocabulary(tokens, file)
    config = config_beside(file)
    if class_of(config) not in ("", "Bert", "DistilBert", "Electra"):
        raise unsupported(f"vocab.txt of a {class_of(config)} tokenizer", file)
    words = [token for token in tokens if not token.startswith("[")]
    strip_accents = config.get("strip_accents")
    if strip_accents not in (None, True, False):
        raise damaged(f"strip_accents is {strip_accents!r}", file.with_name(CONFIG_FILE))
    source = Source(
        wordpiece(
            {token: place for place, token in enumerate(tokens)},
            "[UNK]",
            lowercase=bool(config.get("do_lower_case", all(word == word.lower() for word in words))),
            strip_accents=strip_accents,
            chinese=bool(config.get("tokenize_chinese_chars", True)),
            where=file,
        ),
        "wordpiece",
        {role: f"[{role.upper()}]" for role in ("pad", "unk", "cls", "sep", "mask") if f"[{role.upper()}]" in tokens},
    )
    source.backend.add_special_tokens(sorted(source.roles.values(), key=tokens.index))
    put_around(source.backend, *([source.roles[role]] if role in source.roles else [] for role in ("cls", "sep")))
    return as_configured(source, file)
