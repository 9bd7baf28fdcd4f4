"""How likely given tokens are.

Shapes: T tokens, S source tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qkv.config.errors import UsageError
from qkv.generate.decode import check_prompts, device_of, evaluating, pad, prefix_of, ranked
from qkv.generate.prompts import begin_of, text_ids
from qkv.generate.sampling import refuse_non_finite
from qkv.generate.suppression import NOTHING_SUPPRESSED, Suppression
from qkv.generate.text import TokenLogprob, describe
from qkv.nn.transformer import Transformer
from qkv.tokenizer.tokenizer import Tokenizer

CHUNK = 256
"""Tokens whose logits are held at a time."""

Ranked = tuple[float, tuple[tuple[int, float], ...]]


@torch.inference_mode()
def log_probabilities(
    network: Transformer,
    ids: Sequence[int],
    start: int,
    *,
    top: int = 1,
    source: Tensor | None = None,
    suppress: Suppression = NOTHING_SUPPRESSED,
) -> list[Ranked]:
    """For each of ids[start:] (start from 1) its log-probability in nats given all ids before it, and the `top` best.

    Of a prefix-LM, ids[:start] are the prefix. source [1, S]: what an encoder-decoder reads. suppress: what cannot be,
    ids[start] being the first. len(ids) may be one more than the context, since the last id is not read. Raises what
    `check_prompts` raises, and QkvError for logits that are not finite.
    """
    if start >= len(ids):
        return []
    check_prompts(network, [ids[:-1]])
    device, cache = device_of(network), network.new_cache(1)
    given = prefix_of(network, [ids[:start]]) | ({} if source is None else {"source": source})
    result: list[Ranked] = []
    with evaluating(network.modules()):
        first, last = 0, start
        while first < last:
            read_1T = pad([ids[first:last]], device)[0]
            scores_TV = network(read_1T, cache=cache, logits="all" if first else "last", **given)[0].float().cpu()
            given = {}
            for place, scores_V in enumerate(scores_TV, last + 1 - len(scores_TV)):
                refuse_non_finite(scores_V[None], [0], place)
                scores_V = suppress(scores_V[None], first=place == start)[0]
                logprob, best = ranked(scores_V, ids[place], top)
                assert logprob is not None
                result.append((logprob, best))
            first, last = last, min(last + CHUNK, len(ids) - 1)
    return result


def prompt_logprobs(
    network: Transformer, tokenizer: Tokenizer | None, ids: Sequence[int], top: int
) -> list[TokenLogprob]:
    """How likely each token of a prompt but the first is, and the `top` most likely ones in its place."""
    found = log_probabilities(network, ids, 1, top=top)
    return [
        describe(token_id, logprob, best, tokenizer) for token_id, (logprob, best) in zip(ids[1:], found, strict=True)
    ]


class Score(float):
    """The log-probability of a continuation in nats: a number, and what it is the sum of.

    token_ids: the scored tokens; logprobs: of each of them. truncated: how many of the prompt's first tokens the
    context had no room for.
    """

    token_ids: list[int]
    logprobs: list[float]
    truncated: int

    def __new__(cls, token_ids: list[int], logprobs: list[float], truncated: int = 0) -> Score:
        score = super().__new__(cls, sum(logprobs))
        score.token_ids, score.logprobs, score.truncated = token_ids, logprobs, truncated
        return score


def score(
    network: Transformer,
    tokenizer: Tokenizer | None,
    prompt: str,
    continuation: str,
    *,
    source: Tensor | None = None,
    start_ids: Sequence[int] | None = None,
    suppress: Suppression = NOTHING_SUPPRESSED,
) -> Score:
    """log p(continuation | prompt), after `start_ids` (None: what the tokenizer puts before a text, at least BOS where
    the prompt is empty).

    Prompt and continuation are encoded together, as they would be in use. Scored are the tokens after those that the
    prompt alone has too: a token that spans the join counts. Of a text longer than the context the first tokens of the
    prompt are left out (BOS stays). What `suppress` rules out is scored -inf. Raises UsageError where the first scored
    token would have nothing before it, where there is no token to score, and for a continuation that fills the context
    by itself.
    """
    if not isinstance(continuation, str):
        raise UsageError(f"the continuation is a text, not a {type(continuation).__name__}")
    alone, ids = text_ids(tokenizer, prompt), text_ids(tokenizer, prompt + continuation)
    shared = next((n for n, (a, b) in enumerate(zip(alone, ids, strict=False)) if a != b), min(len(alone), len(ids)))
    scored = ids[shared:]
    if not scored:
        raise UsageError("the continuation adds no token, so there is nothing to score")
    if start_ids is None:
        start_ids = [] if tokenizer is None else tokenizer.around[0]
        if not start_ids and not shared:
            start_ids = begin_of(tokenizer)
    begin = [] if ids[: len(start_ids)] == list(start_ids) else list(start_ids)
    if not begin + ids[:shared]:
        raise UsageError(
            "the first scored token has nothing before it: its probability is not defined", hint="a prompt"
        )
    context = check_prompts(network, [])
    room = context + 1 - len(begin) - len(scored)  # for the prompt; the last scored token is not read
    truncated = max(0, shared - room)
    before = begin + ids[truncated:shared]
    if room < 0 or not before:
        raise UsageError(f"the continuation's {len(scored)} tokens do not fit the model's context of {context}")
    found = log_probabilities(network, before + scored, len(before), source=source, suppress=suppress)
    return Score(scored, [logprob for logprob, _ in found], truncated)
