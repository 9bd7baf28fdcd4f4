"""Chat templates: from messages to the text a model was trained to answer.

A template is Jinja that comes with a model. It may write special tokens, and those are meant; a message that spells
one is text like any other. To tell them apart afterwards, messages are rendered with a mark, a character that is no
character of any text, wherever a special token could begin or end in them; when the text is encoded, the marks go.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from qkv.config.errors import QkvError, UsageError

if TYPE_CHECKING:
    import jinja2

Message = Mapping[str, Any]
"""{"role": "user", "content": "..."}; a template may read further keys."""

_NAMES = ("role", "type")  # of a message's keys: what templates compare, and never show as it is
_NO_CHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # Unicode keeps them for uses like this


class ChatTemplate:
    """A chat template. `tokens`: role -> special token, which templates call bos_token, eos_token, ...

    It runs in a sandbox (see `qkv.tokenizer.sandbox`): it reaches nothing, and ends in bounded time and memory.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self.source = source
        self.tokens = dict(tokens)

    def __repr__(self) -> str:
        return f"ChatTemplate({len(self.source)} characters)"

    def apply(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """The messages as one text, with the beginning of an answer after them if `add_generation_prompt`.

        variables: what the template reads beside, such as `tools` or `enable_thinking`. Raises UsageError for what are
        no messages, and QkvError for a template that fails, refuses the messages or takes too much.
        """
        given = check_messages(messages)
        return self._render(given, add_generation_prompt, _plain(variables, "a variable"))

    def apply_marked(
        self,
        messages: Sequence[Message],
        special: Collection[str],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> tuple[str, str]:
        """(the text of `apply` with marks, the mark): no token of `special` stands whole where a message spells it.

        Raises QkvError as well where the template does something else with a message because of a mark in it.
        """
        given = check_messages(messages)
        others = _plain(variables, "a variable")
        text = self._render(given, add_generation_prompt, others)
        mark = next((character for character in _NO_CHARACTERS if character not in text), None)
        if mark is None:
            raise UsageError("the messages hold all 32 characters that are none (U+FDD0 to U+FDEF)")
        for fence in (_fenced, _broken):  # some templates look at how a message begins
            fenced = _mapped(given, partial(fence, mark=mark, special=special))
            marked = self._render(fenced, add_generation_prompt, others)
            if marked.replace(mark, "") == text:
                return marked, mark
        raise QkvError("the chat template does something of its own with a special token that a message spells")

    def _render(self, messages: list[dict[str, Any]], add_generation_prompt: bool, variables: dict[str, Any]) -> str:
        from qkv.tokenizer import sandbox

        known: dict[str, Any] = {f"{role}_token": token for role, token in self.tokens.items()}
        known |= {"tools": None, "documents": None, **variables}
        known |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return sandbox.render(self._compiled, known, _characters(known))
        except Exception as error:  # a template's mistakes are of any kind
            raise _failed(error) from None

    @cached_property
    def _compiled(self) -> jinja2.Template:
        from qkv.tokenizer import sandbox

        if len(self.source) > sandbox.MAX_TEMPLATE:
            raise sandbox.LimitError(f"it has {len(self.source):,} characters, of at most {sandbox.MAX_TEMPLATE:,}")
        return sandbox.Sandbox().from_string(self.source)


def _failed(error: Exception) -> QkvError:
    """One sentence for what a template may raise."""
    what = "it is nested too deeply" if isinstance(error, RecursionError) else str(error) or type(error).__name__
    line = getattr(error, "lineno", None)
    return QkvError(f"the chat template fails: {what}", where=None if line is None else f"line {line} of the template")


# --- messages ---------------------------------------------------------------------------------------------------------


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages as plain lists and dicts. Raises UsageError for anything else."""
    hint = '[{"role": "user", "content": "..."}]'
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
        raise UsageError(f"a conversation is a list of messages, not {messages!r}", hint=hint)
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UsageError(f"message {number} is no mapping with a role", hint=hint)
    plain: list[dict[str, Any]] = _plain(messages, "a message")
    return plain


def _plain(value: Any, what: str) -> Any:
    """A copy of plain JSON types, so that a template meets no other object."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {_plain(key, what): _plain(inner, what) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_plain(inner, what) for inner in value]
    raise UsageError(f"{what} holds a {type(value).__name__}, which is not JSON")


def _characters(value: Any) -> int:
    if isinstance(value, Mapping):
        return sum(map(_characters, value)) + sum(map(_characters, value.values()))
    if isinstance(value, list):
        return sum(map(_characters, value))
    return len(value) if isinstance(value, str) else 1


def _mapped(value: Any, change: Callable[[str], str], name: Any = None) -> Any:
    """The same with every text changed but names."""
    if isinstance(value, str):
        return value if name in _NAMES else change(value)
    if isinstance(value, dict):
        return {key: _mapped(inner, change, key) for key, inner in value.items()}
    return [_mapped(inner, change) for inner in value] if isinstance(value, list) else value


def _broken(text: str, mark: str, special: Collection[str]) -> str:
    """The text with a mark inside every special token that it spells."""
    rests: dict[str, list[str]] = {}
    for token in special:
        rests.setdefault(token[0], []).append(re.escape(token[1:]))
    spelled = "|".join(f"{re.escape(first)}(?={'|'.join(some)})" for first, some in rests.items())
    return re.sub(spelled, rf"\g<0>{mark}", text) if rests else text


def _fenced(text: str, mark: str, special: Collection[str]) -> str:
    """`_broken`, with a mark at either end too: what the template writes around it adds up to no special token.

    White space stays outside, since templates strip it.
    """
    begun = text.lstrip()
    inner = begun.rstrip()
    if not inner:
        return text
    before, after = text[: len(text) - len(begun)], begun[len(inner) :]
    return f"{before}{mark}{_broken(inner, mark, special)}{mark}{after}"
