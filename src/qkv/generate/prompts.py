"""From what people type to ids. A whole text is [begin] ids [end], exactly as documents are in training."""

from __future__ import annotations

from collections.abc import Sequence

from qkv.config.errors import UsageError
from qkv.tokenizer.text import normalize
from qkv.tokenizer.tokenizer import Tokenizer

Prompt = str | Sequence[int]
"""A text, or ids."""


def begin_of(tokenizer: Tokenizer | None) -> list[int]:
    """The id that texts begin with: BOS, or else CLS; none where there is neither."""
    if tokenizer is None:
        return []
    begin = tokenizer.cls_id if tokenizer.bos_id is None else tokenizer.bos_id
    return [] if begin is None else [begin]


def end_of(tokenizer: Tokenizer | None) -> list[int]:
    """The id that texts end with: EOS, or else SEP; none where there is neither."""
    if tokenizer is None:
        return []
    end = tokenizer.sep_id if tokenizer.eos_id is None else tokenizer.eos_id
    return [] if end is None else [end]


def text_ids(tokenizer: Tokenizer | None, text: str, *, parse_special: bool = False) -> list[int]:
    """The ids of a text, read by the rule of `qkv.tokenizer.text`, and nothing else.

    Raises UsageError where there is no tokenizer.
    """
    if tokenizer is None:
        raise UsageError("the model has no tokenizer, so it cannot read text", hint="ids instead of text")
    return tokenizer.encode(normalize(text), parse_special=parse_special)


def prompt_ids(tokenizer: Tokenizer | None, prompt: Prompt, *, parse_special: bool = False) -> list[int]:
    """The ids a decoder continues: [begin] prompt, with exactly one `begin`, whoever wrote it.

    Raises UsageError for an empty prompt where nothing can stand for the beginning.
    """
    ids = (
        text_ids(tokenizer, prompt, parse_special=parse_special) if isinstance(prompt, str) else list(map(int, prompt))
    )
    ids = begun(tokenizer, ids)
    if not ids:
        raise UsageError(
            "the prompt is empty, and the tokenizer has no token for the beginning of a text", hint="a longer prompt"
        )
    return ids


def begun(tokenizer: Tokenizer | None, ids: list[int]) -> list[int]:
    """[begin] ids, unless they begin so already."""
    begin = begin_of(tokenizer)
    return ids if ids[:1] == begin else begin + ids


def whole_ids(tokenizer: Tokenizer | None, text: Prompt, *, parse_special: bool = False) -> list[int]:
    """The ids an encoder reads: [begin] text [end], each exactly once. Ids are taken as they are."""
    if not isinstance(text, str):
        return list(map(int, text))
    ids = begun(tokenizer, text_ids(tokenizer, text, parse_special=parse_special))
    end = end_of(tokenizer)
    return ids if end and ids[-1:] == end else ids + end
