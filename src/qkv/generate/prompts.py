"""From what people type to ids. A whole text is [begin] ids [end], exactly as documents are in training; what begins a
prompt is what the tokenizer puts before a text, which in published models may be nothing."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Number
from typing import Any

from qkv.config.errors import UsageError
from qkv.data.cache import begin_id, end_id
from qkv.tokenizer.text import normalize
from qkv.tokenizer.tokenizer import Tokenizer

Prompt = str | Sequence[int]
"""A text, or ids."""

_ALLOWED = "a text, a list of ids, or a list of these"


def is_one(prompt: Any) -> bool:
    """A text or a list of ids, rather than a list of prompts (which an empty list is). UsageError for neither."""
    if isinstance(prompt, str):
        return True
    _refuse_bytes(prompt, "the prompt")
    if isinstance(prompt, Sequence):
        return len(prompt) > 0 and isinstance(prompt[0], Number)
    raise UsageError(f"a prompt is {_ALLOWED}, not {_named(prompt)}")


def listed(prompt: Any) -> Any:
    """An array or tensor as the lists it stands for; all else as it is."""
    return prompt.tolist() if hasattr(prompt, "tolist") and not isinstance(prompt, memoryview) else prompt


def read_ids(ids: Any, where: str) -> list[int]:
    """`ids` as a list. UsageError for all that is no id: a bool, a fraction, bytes, a text among ids."""
    ids = listed(ids)
    _refuse_bytes(ids, where)
    if not isinstance(ids, Sequence):
        raise UsageError(f"{where} is neither a text nor a list of ids, but {_named(ids)}")
    for place, token_id in enumerate(ids):
        if isinstance(token_id, bool) or not isinstance(token_id, Integral):
            raise UsageError(f"a token id is a whole number, not {token_id!r}", where=f"{where}, id {place}")
    return [int(token_id) for token_id in ids]


def _refuse_bytes(value: Any, where: str) -> None:
    if isinstance(value, bytes | bytearray | memoryview):
        raise UsageError(
            f"{where} is {type(value).__name__}: bytes are neither a text nor ids", hint='.decode("utf-8")'
        )


def _named(value: Any) -> str:
    return repr(value) if value is None or isinstance(value, Number) else f"a {type(value).__name__}"


def begin_of(tokenizer: Tokenizer | None) -> list[int]:
    """The id that texts begin with: BOS, or else CLS; none where there is neither."""
    if tokenizer is None:
        return []
    begin = begin_id(tokenizer)
    return [] if begin is None else [begin]


def end_of(tokenizer: Tokenizer | None) -> list[int]:
    """The id that texts end with: EOS, or else SEP; none where there is neither."""
    if tokenizer is None:
        return []
    end = end_id(tokenizer)
    return [] if end is None else [end]


def text_ids(tokenizer: Tokenizer | None, text: str, *, parse_special: bool = False) -> list[int]:
    """The ids of a text, read by the rule of `qkv.tokenizer.text`, and nothing else.

    Raises UsageError where there is no tokenizer.
    """
    if not isinstance(text, str):
        raise UsageError(f"a text is wanted, not {_named(text)}")
    if tokenizer is None:
        raise UsageError("the model has no tokenizer, so it cannot read text", hint="ids instead of text")
    return tokenizer.encode(normalize(text), parse_special=parse_special)


def prompt_ids(
    tokenizer: Tokenizer | None, prompt: Prompt, *, parse_special: bool = False, where: str = "the prompt"
) -> list[int]:
    """The ids a decoder continues: the prompt after what the tokenizer puts before a text, BOS or nothing, exactly once
    whoever wrote it. An empty one is BOS.

    Raises UsageError for an empty prompt where nothing can stand for the beginning.
    """
    if isinstance(prompt, str):
        ids = text_ids(tokenizer, prompt, parse_special=parse_special)
    else:
        ids = read_ids(prompt, where)
    ids = begun(tokenizer, ids) or begin_of(tokenizer)
    if not ids:
        raise UsageError(
            "the prompt is empty, and the tokenizer has no token for the beginning of a text", hint="a longer prompt"
        )
    return ids


def begun(tokenizer: Tokenizer | None, ids: list[int]) -> list[int]:
    """Ids after what the tokenizer puts before a text, unless they begin so already."""
    before = [] if tokenizer is None else tokenizer.around[0]
    return ids if ids[: len(before)] == before else before + ids


def whole_ids(
    tokenizer: Tokenizer | None, text: Prompt, *, parse_special: bool = False, where: str = "the source"
) -> list[int]:
    """The ids an encoder reads: `within` what stands around a text. Ids are taken as they are."""
    if not isinstance(text, str):
        return read_ids(text, where)
    return within(tokenizer, text_ids(tokenizer, text, parse_special=parse_special))


def within(tokenizer: Tokenizer | None, ids: list[int]) -> list[int]:
    """[begin] ids [end], each exactly once: what the tokenizer puts around a text, or else what begins and ends it."""
    before, after = ([], []) if tokenizer is None else tokenizer.around
    if not before and not after:
        before, after = begin_of(tokenizer), end_of(tokenizer)
    ids = ids if ids[: len(before)] == before else before + ids
    return ids if after and ids[-len(after) :] == after else ids + after
