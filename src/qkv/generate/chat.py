"""Conversations: the ids a model answers to, and what is left out of them when they outgrow its context."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from qkv.config.errors import UsageError
from qkv.tokenizer.chat import ChatTemplate, Message, check_messages
from qkv.tokenizer.text import normalize
from qkv.tokenizer.tokenizer import Tokenizer

MAX_NEW_TOKENS = 512
"""Of an answer, where nothing else is said."""


def chat_ids(
    tokenizer: Tokenizer | None,
    messages: Sequence[Message],
    template: ChatTemplate | None = None,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """The ids of a conversation and of the beginning of an answer, texts read by the rule of `qkv.tokenizer.text`.

    template: None is the tokenizer's own. variables: what it reads beside the messages. Raises UsageError for what is
    no conversation and where there is no tokenizer or no template, QkvError for a template that fails.
    """
    if tokenizer is None:
        raise UsageError("the model has no tokenizer, so it cannot read messages", hint="generate, with ids")
    if template is None and tokenizer.chat_template is None:
        raise UsageError(
            "the model has no chat template: it was hardly made for conversations",
            hint="--template FILE (template=), or `qkv generate`",
        )
    read = [
        {key: normalize(value) if isinstance(value, str) else value for key, value in message.items()}
        for message in check_messages(messages)
    ]
    return tokenizer.encode_chat(read, template=template, **(variables or {}))


def within_context(
    messages: Sequence[Message], encode: Callable[[Sequence[Message]], list[int]], room: int
) -> tuple[list[Message], int]:
    """(the messages that fit in `room` tokens, how many were left out): the oldest turns go first.

    A turn is a user's message and the answers to it; what stands before the first one (the system's message) and the
    last turn stay. Raises UsageError, with both numbers, where these alone are too long.
    """
    kept = list(messages)
    while (count := len(encode(kept))) > room:
        turns = [number for number, message in enumerate(kept) if message["role"] == "user"]
        if len(turns) < 2:
            raise UsageError(
                f"the message has {count} tokens, and the model's context room for {room}", hint="a shorter message"
            )
        del kept[turns[0] : turns[1]]
    return kept, len(messages) - len(kept)
