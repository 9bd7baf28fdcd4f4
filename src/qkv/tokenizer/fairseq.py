"""The `sentencepiece.bpe.model` of XLM-R and mBART: SentencePiece's pieces with the ids of fairseq."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken

from qkv.tokenizer.backends import Piece, PieceType, Source, add_tokens, damaged, put_around, sentencepiece, unsupported
from qkv.tokenizer.beside import CONFIG_FILE, as_configured, config_beside, only_transformers, owner_of
from qkv.tokenizer.sentencepiece import parse

ROLES = {
    "bos": "<s>",
    "cls": "<s>",
    "eos": "</s>",
    "sep": "</s>",
    "pad": "<pad>",
    "unk": "<unk>",
    "mask": "<mask>",
}
"""The special tokens of RoBERTa and all that came after it in fairseq."""
MBART_LANGUAGES = [
    "ar_AR", "cs_CZ", "de_DE", "en_XX", "es_XX", "et_EE", "fi_FI", "fr_XX", "gu_IN", "hi_IN", "it_IT", "ja_XX",
    "kk_KZ", "ko_KR", "lt_LT", "lv_LV", "my_MM", "ne_NP", "nl_XX", "ro_RO", "ru_RU", "si_LK", "tr_TR", "vi_VN",
    "zh_CN",
]  # fmt: skip
"""The languages of mBART (Liu et al. 2020, arXiv 2001.08210) in the order of their ids."""


def read(file: Path) -> Source:
    """The `.model` of XLM-R (around a text: <s> and </s>) or mBART (after it: </s> and the language, src_lang)."""
    owner = owner_of(file) or "XLMRoberta"
    if owner not in ("XLMRoberta", "MBart"):
        raise only_transformers(file, owner)
    if owner == "XLMRoberta":
        source = _bare(file)
        put_around(source.backend, ["<s>"], ["</s>"])
        return as_configured(source, file)
    source = _bare(file, MBART_LANGUAGES)
    language = config_beside(file).get("src_lang") or "en_XX"
    if language not in MBART_LANGUAGES:
        raise unsupported(f"the language {language!r:.80}", file.with_name(CONFIG_FILE), ", ".join(MBART_LANGUAGES))
    put_around(source.backend, [], ["</s>", language])
    return as_configured(source, file)


def _bare(path: Path, languages: Sequence[str] = ()) -> Source:
    """The tokenizer in a `.model` file with the ids of fairseq. It puts nothing around a text.

    These are <s>, <pad>, </s>, <unk>, the file's pieces after its first three, `languages`, <mask>. Raises QkvError.
    """
    model = parse(path.read_bytes(), path)
    if [piece.text for piece in model.pieces[:3]] != ["<unk>", "<s>", "</s>"]:
        raise damaged("it does not begin with <unk>, <s> and </s>, as those of fairseq do", path)
    unknown, begin, end, *others = model.pieces
    pad, *last = (Piece(text, 0.0, PieceType.CONTROL) for text in ("<pad>", *languages, "<mask>"))
    pieces = [begin, pad, end, unknown, *others, *last]
    backend = sentencepiece(pieces, model.kind, model.normalization, path)
    ids = {piece.text: place for place, piece in enumerate(pieces)}
    special = [piece.text for piece in (begin, pad, end, unknown, *last[:-1])]
    add_tokens(backend, {token: ids[token] for token in special}, path, special=True)
    backend.add_tokens([AddedToken("<mask>", special=True, normalized=False, lstrip=True)])
    return Source(backend, model.kind, dict(ROLES))
