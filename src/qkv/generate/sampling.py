"""From logits to the next token.

The order: penalties (repetition, then frequency and presence), temperature, top-k, top-p, min-p, the draw. Each filter
sees the probabilities that the steps before it left, renormalised, as in Hugging Face's generation.

Shapes: V vocabulary, K tokens of it, R rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qkv.config.errors import QkvError, UsageError
from qkv.generate.arguments import check_count, check_number

MAX_SEED = 2**64 - 1
MAX_PENALTY = 100
"""Far beyond any use. Without a bound a penalty is infinite in float32, and infinity times no occurrence is NaN."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. The defaults draw from the model's own distribution.

    temperature divides the logits; 0 is greedy: always the most likely token. top_k keeps the k most likely tokens (0:
    all; more than the vocabulary: all). top_p keeps the fewest most likely tokens that together reach this probability
    (Holtzman et al. 2019, arXiv 1904.09751; 1: all). min_p drops tokens less likely than this share of the most likely
    one (Nguyen et al. 2024, arXiv 2407.01082; 0: none). Ties go to the smaller id.

    repetition_penalty divides positive and multiplies negative logits of tokens that occur in the prompt or were
    generated (Keskar et al. 2019, arXiv 1909.05858; 1 changes nothing; the source of an encoder-decoder is no prompt).
    frequency_penalty is subtracted once per earlier occurrence and presence_penalty once if there is any; both count
    generated tokens only, as in OpenAI's API. Their size is at most 100, and repetition_penalty is from 1/100 to 100.

    Raises UsageError for values that mean nothing, NaN and a bool included.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "top_k", check_count("top_k", self.top_k))
        bounded = f"from -{MAX_PENALTY} to {MAX_PENALTY}; 0 is off"
        ranges: tuple[tuple[str, str, Callable[[float], bool]], ...] = (
            ("temperature", "a number from 0 (greedy)", lambda value: 0 <= value < math.inf),
            ("top_p", "above 0 and at most 1 (off)", lambda value: 0 < value <= 1),
            ("min_p", "from 0 (off) to 1", lambda value: 0 <= value <= 1),
            (
                "repetition_penalty",
                f"from {1 / MAX_PENALTY} to {MAX_PENALTY}; 1 is off",
                lambda value: 1 / MAX_PENALTY <= value <= MAX_PENALTY,
            ),
            ("frequency_penalty", bounded, lambda value: abs(value) <= MAX_PENALTY),
            ("presence_penalty", bounded, lambda value: abs(value) <= MAX_PENALTY),
        )
        for name, allowed, holds in ranges:
            given = getattr(self, name)
            value = check_number(name, given, allowed)
            if not holds(value):
                raise UsageError(f"{name} is {allowed}, not {given!r}")
            object.__setattr__(self, name, value)


def penalise(logits_V: Tensor, sampling: Sampling, prompt: Sequence[int], generated: Sequence[int]) -> Tensor:
    """Logits after the three penalties, for the ids that stand before (see `Sampling`); finite where they were."""
    given_V = logits_V
    if sampling.repetition_penalty != 1:
        # a prompt may hold ids that only pad the embedding, which have no logit here
        seen_ids = sorted(token_id for token_id in {*prompt, *generated} if token_id < len(logits_V))
        seen = torch.tensor(seen_ids, dtype=torch.long)
        values = logits_V[seen]
        factor = sampling.repetition_penalty
        logits_V = logits_V.index_copy(0, seen, torch.where(values > 0, values / factor, values * factor))
    if (sampling.frequency_penalty or sampling.presence_penalty) and generated:
        count_V = torch.bincount(torch.tensor(generated), minlength=len(logits_V))
        logits_V = logits_V - sampling.frequency_penalty * count_V - sampling.presence_penalty * (count_V > 0)
    if logits_V is given_V:
        return logits_V
    largest = torch.finfo(logits_V.dtype).max
    return logits_V.clamp(-largest, largest).masked_fill(given_V == -math.inf, -math.inf)


def heat(logits_V: Tensor, temperature: float) -> Tensor:
    """Log-probabilities up to a constant, (logits - max) / temperature: at most 0, so nothing overflows upwards."""
    limits = torch.finfo(logits_V.dtype)
    return (logits_V - logits_V.max()) / min(max(temperature, limits.tiny), limits.max)


def keep_top_k(logits_V: Tensor, top_k: int) -> Tensor:
    """All but the `top_k` largest logits set to -inf; 0 keeps all."""
    if not 0 < top_k < len(logits_V):
        return logits_V
    last = logits_V.topk(top_k).values[-1]
    keep_V = logits_V > last
    ties = (logits_V == last).nonzero().squeeze(1)
    keep_V[ties[: top_k - int(keep_V.sum())]] = True
    return logits_V.masked_fill(~keep_V, -math.inf)


def keep_top_p(logits_V: Tensor, top_p: float) -> Tensor:
    """-inf for all but the fewest most likely tokens whose probabilities reach `top_p`; 1 keeps all."""
    if top_p >= 1:
        return logits_V
    p_V = logits_V.double().softmax(-1)
    # all tokens below this bound have less than 1 - top_p together: they are out without being sorted
    likely = (p_V >= (1 - top_p) / len(p_V)).nonzero().squeeze(1)
    p_K, order = p_V[likely].sort(descending=True, stable=True)
    before_K = p_K.cumsum(-1) - p_K
    before_K[0] = 0.0  # exactly: the most likely token always stays
    kept = likely[order[before_K < top_p]]
    return torch.full_like(logits_V, -math.inf).index_copy(0, kept, logits_V[kept])


def keep_min_p(logits_V: Tensor, min_p: float) -> Tensor:
    """-inf for tokens less likely than `min_p` times the most likely one; 0 keeps all."""
    if min_p <= 0:
        return logits_V
    return logits_V.masked_fill(logits_V < logits_V.max() + math.log(min_p), -math.inf)


def distribution(
    logits_V: Tensor, sampling: Sampling, prompt: Sequence[int] = (), generated: Sequence[int] = ()
) -> Tensor:
    """Log-probabilities, up to a constant, that the next token is drawn from [V]; -inf where it cannot fall.

    At temperature 0 only the penalties have been applied: the largest is taken.
    """
    logits_V = penalise(logits_V, sampling, prompt, generated)
    if sampling.temperature == 0:
        return logits_V
    logits_V = keep_top_k(heat(logits_V, sampling.temperature), sampling.top_k)
    return keep_min_p(keep_top_p(logits_V, sampling.top_p), sampling.min_p)


def uniforms(seed: int, step: int, size: int) -> Tensor:
    """Numbers from [0, 1), float64 [size]: a function of the arguments, whatever else was drawn anywhere.

    Philox (Salmon et al. 2011) is a counter-based generator: `seed` is its key, `step` counts.
    """
    return torch.from_numpy(np.random.Generator(np.random.Philox(key=seed, counter=step << 128)).random(size))


def choose(
    logits_V: Tensor,
    sampling: Sampling,
    *,
    seed: int,
    step: int,
    prompt: Sequence[int] = (),
    generated: Sequence[int] = (),
) -> int:
    """The next token's id.

    A draw is the largest of logits plus Gumbel noise (Gumbel 1954; Maddison et al. 2014, arXiv 1411.0030): it has the
    softmax's probabilities, and the last digit of a logit, which differs between a batch and a row alone, moves it only
    where two tokens are as good as equal. The noise depends on `seed` and `step` (tokens generated before) only.
    """
    logits_V = distribution(logits_V, sampling, prompt, generated)
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    kept = (logits_V > -math.inf).nonzero().squeeze(1)
    gumbel_K = -torch.log(-torch.log1p(-uniforms(seed, step, len(logits_V))[kept]))
    return int(kept[(logits_V[kept] + gumbel_K).argmax()])


def refuse_non_finite(logits_RV: Tensor, rows: Sequence[int], step: int) -> None:
    """Raises QkvError, naming the step (from 1) and the rows, where a logit is NaN or infinite."""
    if logits_RV.sum().isfinite():  # then all are, and this was a tenth of the work
        return
    fine = logits_RV.isfinite().all(-1).tolist()
    bad = dict.fromkeys(row for row, finite in zip(rows, fine, strict=True) if not finite)
    if bad:
        raise QkvError(
            f"the model gave logits that are not finite at step {step} (prompt {', '.join(map(str, bad))})",
            hint="checking the weights, or --dtype fp32",
        )
