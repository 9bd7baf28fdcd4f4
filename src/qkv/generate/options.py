"""What can be said of how a text is written: the keyword options of `Model`'s methods, with their defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from qkv.tokenizer.chat import ChatTemplate


class Options(TypedDict, total=False):
    """How to generate; what is left out has the default given here.

    max_new_tokens: at most so many (128); the context ends a text earlier. temperature (1.0), top_k (0), top_p (1.0),
    min_p (0.0), repetition_penalty (1.0), frequency_penalty (0.0), presence_penalty (0.0): see
    `qkv.generate.Sampling`. stop: a string or several, before which the text ends. seed: one, or one per prompt; by
    default fresh. use_cache (True): False reads the whole text again for every token, with the same result.
    logprobs (0): so many alternatives per token, with log-probabilities. parse_special (False): special tokens spelled
    in the prompt are meant.
    """

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    stop: str | Sequence[str]
    seed: int | Sequence[int] | None
    use_cache: bool
    logprobs: int
    parse_special: bool


class ChatOptions(Options, total=False):
    """How to answer: `Options`, but for `parse_special`; max_new_tokens is 512 where it is left out.

    template: a `ChatTemplate` in place of the tokenizer's own. variables: what it reads beside the messages, such as
    {"tools": [...]} or {"enable_thinking": False}.
    """

    template: ChatTemplate | None
    variables: Mapping[str, Any] | None


class TranslationOptions(TypedDict, total=False):
    """How to translate; what is left out has the default given here.

    beam_size (4), n_best (1), length_penalty (0.6), length_penalty_kind ("gnmt"): see `qkv.generate.Beams`. batch_size
    (32): so many sources are decoded at once. max_new_tokens: by default twice the source's tokens and 16 more; the
    context may end a text earlier.
    """

    beam_size: int
    n_best: int
    length_penalty: float
    length_penalty_kind: Literal["gnmt", "power"]
    batch_size: int
    max_new_tokens: int | None


class SpeechOptions(TypedDict, total=False):
    """How to transcribe; what is left out has the default given here.

    language: its code, such as "en" (None: the likeliest for the first window), and task: "transcribe", or "translate"
    into English, for models that know several. beam_size: 1. batch_size (4): so many windows are decoded at once.
    max_new_tokens: of a window (None: half of what the decoder can hold).
    """

    language: str | None
    task: Literal["transcribe", "translate"]
    beam_size: int
    batch_size: int
    max_new_tokens: int | None
