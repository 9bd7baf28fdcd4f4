"""Beam search: the likeliest whole texts, where greedy decoding takes the likeliest next token.

At each step every open hypothesis of an input is continued by every token. Of the `beam_size` likeliest candidates,
those that end are finished; the `beam_size` likeliest that do not end are open at the next step. Finished hypotheses
take no place away from open ones.

Shapes: I inputs still searched, K open hypotheses of each, R = I K rows of the network, C candidates, V vocabulary,
N tokens generated.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor

from qkv.config.errors import UsageError
from qkv.generate.arguments import check_count, check_number
from qkv.generate.decode import FinishReason, check_prompts, evaluating, last_logits, prefix_of, source_of
from qkv.generate.sampling import Sampling, refuse_non_finite
from qkv.generate.suppression import NOTHING_SUPPRESSED, Suppression
from qkv.nn.transformer import Transformer

MAX_LENGTH_PENALTY = 10
"""Far beyond any use: without a bound a penalty overflows."""
MAX_BEAM_SIZE = 1000
"""Far beyond any use too: every hypothesis is a row of the network, and without a bound a slip takes all memory."""


@dataclass(frozen=True)
class Hypothesis:
    """A text that was found. token_ids: all that was generated, a final EOS included.

    logprob: log p(token_ids) in nats. score: logprob over the length penalty. finish_reason: "stop" (EOS) or "length".
    """

    token_ids: list[int]
    score: float
    logprob: float
    finish_reason: FinishReason


@dataclass(frozen=True)
class Beams:
    """How to search.

    beam_size: open hypotheses per input, at most 1,000; 1 is greedy: it ends with its first EOS. n_best: how many of
    the finished ones are wanted; it never changes which is the first. Hypotheses are ranked by log-probability over the
    length penalty of their n tokens, EOS counted and the prompt not: with a = length_penalty, kind "gnmt" is
    ((5 + n) / 6)^a (Wu et al. 2016, arXiv 1609.08144, eq. 14) and "power" is n^a. 0 ranks by log-probability alone, 10
    is the most.

    Raises UsageError for values that mean nothing, NaN and a bool included.
    """

    beam_size: int = 4
    n_best: int = 1
    length_penalty: float = 0.6
    length_penalty_kind: Literal["gnmt", "power"] = "gnmt"

    def __post_init__(self) -> None:
        object.__setattr__(self, "beam_size", check_count("beam_size", self.beam_size, least=1))
        if self.beam_size > MAX_BEAM_SIZE:
            raise UsageError(f"beam_size is at most {MAX_BEAM_SIZE:,}, not {self.beam_size!s:.80}")
        object.__setattr__(self, "n_best", check_count("n_best", self.n_best, least=1))
        if self.n_best > self.beam_size:
            raise UsageError(
                f"n_best={self.n_best} is more than the search holds, beam_size={self.beam_size}",
                hint=f"beam_size={self.n_best}",
            )
        allowed = f"a number from 0 (none) to {MAX_LENGTH_PENALTY}"
        penalty = check_number("length_penalty", self.length_penalty, allowed)
        if not 0 <= penalty <= MAX_LENGTH_PENALTY:
            raise UsageError(f"length_penalty is {allowed}, not {self.length_penalty!r}")
        object.__setattr__(self, "length_penalty", penalty)
        if self.length_penalty_kind not in ("gnmt", "power"):
            raise UsageError(f"length_penalty_kind is gnmt or power, not {self.length_penalty_kind!r}")

    def score(self, logprob: float, length: int) -> float:
        """What a hypothesis of `length` tokens is ranked by."""
        base = (5 + length) / 6 if self.length_penalty_kind == "gnmt" else length
        return logprob / math.pow(base, self.length_penalty)


@torch.inference_mode()
def beam_search(
    network: Transformer,
    prompts: Sequence[Sequence[int]],
    beams: Beams,
    *,
    max_new_tokens: int | Sequence[int],
    eos_ids: Collection[int] = (),
    use_cache: bool = True,
    source: Tensor | None = None,
    source_lengths: Tensor | None = None,
    vocab_size: int | None = None,
    suppress: Suppression = NOTHING_SUPPRESSED,
) -> list[list[Hypothesis]]:
    """For each prompt its `n_best` hypotheses, best first; what it gets does not depend on the other prompts.

    An input ends when no open hypothesis can still beat the last of its n_best, whatever it goes on to say: the result
    is that of searching to the end. max_new_tokens: one number, or one per prompt; capped by the context. What is open
    at the limit competes with what ended, with the reason "length". Equal scores go to what was finished first; equal
    candidates to the better hypothesis, then to the smaller id. Fewer than n_best come back only where there are no
    more. The other arguments, and what is raised, are those of `Decoding`.
    """
    search = _Search(
        network, prompts, beams, max_new_tokens, eos_ids, use_cache, source, source_lengths, vocab_size, suppress
    )
    with evaluating(network.modules()):
        while search.inputs:
            search.step()
    return search.found


_NEUTRAL = {field.name: field.default for field in fields(Sampling)} | {"num_samples": 1, "logprobs": 0, "stop": ()}


def check_beside_beams(options: Mapping[str, Any]) -> None:
    """Raises UsageError for an option of sampling, or of single tokens, that a beam search would have to ignore."""
    for name, neutral in _NEUTRAL.items():
        given = options.get(name, neutral)
        if given != neutral and not (name == "temperature" and given == 0):
            raise UsageError(
                f"{name}={given!r} does not go together with beams: a search draws nothing, and knows its text only at "
                "the end",
                hint=f"beam_size=1, or leaving {name} out",
            )


class _Search:
    """The open hypotheses of the inputs still searched, and what was found for each."""

    def __init__(
        self,
        network: Transformer,
        prompts: Sequence[Sequence[int]],
        beams: Beams,
        max_new_tokens: int | Sequence[int],
        eos_ids: Collection[int],
        use_cache: bool,
        source: Tensor | None,
        source_lengths: Tensor | None,
        vocab_size: int | None,
        suppress: Suppression,
    ) -> None:
        context = check_prompts(network, prompts)
        suppress.check(vocab_size or network.config.vocab_size)
        wanted = max_new_tokens if isinstance(max_new_tokens, Sequence) else [max_new_tokens] * len(prompts)
        self.limits = [
            min(check_count("max_new_tokens", count), context - len(prompt))
            for count, prompt in zip(wanted, prompts, strict=True)
        ]
        self.network, self.prompts, self.beams = network, prompts, beams
        self.source, self.source_lengths = source, source_lengths
        self.vocab_size, self.suppress = vocab_size, suppress
        self.eos = torch.tensor(sorted(eos_ids), dtype=torch.int64)
        self.found = [[] if limit else [Hypothesis([], 0.0, 0.0, "length")] for limit in self.limits]
        self.inputs = [number for number, limit in enumerate(self.limits) if limit]
        self.cache = network.new_cache(len(self.inputs)) if use_cache and self.inputs else None
        # the empty hypothesis; the others are impossible, and keep the places of those to come
        self.tokens_IKN = torch.zeros(len(self.inputs), beams.beam_size, 0, dtype=torch.int64)
        self.logprobs_IK = torch.full((len(self.inputs), beams.beam_size), -torch.inf, dtype=torch.float64)
        self.logprobs_IK[:, 0] = 0.0

    def step(self) -> None:
        """Make all open hypotheses a token longer."""
        size, length = self.beams.beam_size, self.tokens_IKN.shape[2] + 1
        logprobs_IC, parents_IC, ids_IC = self._candidates(length)
        ended_IC = torch.isin(ids_IC, self.eos)
        full_I = torch.tensor([self.limits[number] == length for number in self.inputs])
        finished_IK = ((ended_IC | full_I[:, None]) & logprobs_IC.isfinite())[:, :size]
        for place, rank in finished_IK.nonzero().tolist():
            before = self.tokens_IKN[place, parents_IC[place, rank]].tolist()
            reason: FinishReason = "stop" if ended_IC[place, rank] else "length"
            self._finish(place, [*before, int(ids_IC[place, rank])], float(logprobs_IC[place, rank]), reason)
        open_IK = ended_IC.sort(stable=True).indices[:, :size]  # those that have not ended come first
        parents_IK = parents_IC.gather(1, open_IK)
        before_IKN = self.tokens_IKN.gather(1, parents_IK[..., None].expand(-1, -1, length - 1))
        self.tokens_IKN = torch.cat([before_IKN, ids_IC.gather(1, open_IK)[..., None]], 2)
        self.logprobs_IK = logprobs_IC.masked_fill(ended_IC, -torch.inf).gather(1, open_IK)
        self._move(parents_IK, [place for place in range(len(self.inputs)) if self._goes_on(place)])

    def _candidates(self, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Continuations, likeliest first: log-probability, place of the hypothesis continued, id; [I, C] each.

        Of each hypothesis there are so many that `beam_size` do not end.
        """
        size = self.beams.beam_size
        logits_RV = self._logits().float()
        refuse_non_finite(logits_RV, [number for number in self.inputs for _ in range(size)], length)
        logits_RV = self.suppress(logits_RV, first=length == 1)
        ids_RC = likeliest(logits_RV[:, : self.vocab_size], size + len(self.eos))
        logprobs_RC = logits_RV.log_softmax(-1).gather(1, ids_RC)
        # added up in float64 and on the CPU, whatever the device
        logprobs_IC = (self.logprobs_IK.view(-1, 1) + logprobs_RC.cpu().double()).view(len(self.inputs), -1)
        logprobs_IC, order_IC = logprobs_IC.sort(descending=True, stable=True)
        ids_IC = ids_RC.cpu().reshape(logprobs_IC.shape).gather(1, order_IC)
        return logprobs_IC, order_IC // ids_RC.shape[1], ids_IC

    def _logits(self) -> Tensor:
        """What the network says after each open hypothesis, [R, V]."""
        size, length = self.tokens_IKN.shape[1:]
        prompts = [self.prompts[number] for number in self.inputs]
        if not length:
            given = source_of(self.source, self.source_lengths, self.inputs) | prefix_of(self.network, prompts)
            logits_IV = last_logits(self.network, prompts, self.cache, given)
            if self.cache is not None:
                self.cache.select([place for place in range(len(prompts)) for _ in range(size)], size)
            return logits_IV.repeat_interleave(size, 0)
        new = self.tokens_IKN.tolist()
        if self.cache is not None:
            return last_logits(self.network, [ids[-1:] for hypotheses in new for ids in hypotheses], self.cache)
        rows = [[*prompt, *ids] for prompt, hypotheses in zip(prompts, new, strict=True) for ids in hypotheses]
        numbers = [number for number in self.inputs for _ in range(size)]
        given = source_of(self.source, self.source_lengths, numbers)
        given |= prefix_of(self.network, [self.prompts[number] for number in numbers])
        return last_logits(self.network, rows, given=given)

    def _finish(self, place: int, ids: list[int], logprob: float, reason: FinishReason) -> None:
        found = self.found[self.inputs[place]]
        insort(found, Hypothesis(ids, self.beams.score(logprob, len(ids)), logprob, reason), key=lambda one: -one.score)
        del found[self.beams.n_best :]

    def _goes_on(self, place: int) -> bool:
        """An open hypothesis may still beat what was found: log-probabilities only fall, but penalties grow."""
        number, length, best = self.inputs[place], self.tokens_IKN.shape[2], float(self.logprobs_IK[place, 0])
        found, limit = self.found[number], self.limits[number]
        if length == limit or best == -torch.inf or (self.beams.beam_size == 1 and found):
            return False
        return len(found) < self.beams.n_best or self.beams.score(best, limit) > found[-1].score

    def _move(self, parents_IK: Tensor, places: list[int]) -> None:
        """Bring what the cache holds of the parents to their continuations; inputs not in `places` leave."""
        inputs, size = parents_IK.shape
        if self.cache is not None and places:
            rows_IK = parents_IK + size * torch.arange(inputs)[:, None]
            self.cache.select(rows_IK[places].flatten().tolist(), size)
        self.inputs = [self.inputs[place] for place in places]
        self.tokens_IKN, self.logprobs_IK = self.tokens_IKN[places], self.logprobs_IK[places]


def likeliest(logits_RV: Tensor, count: int) -> Tensor:
    """The ids of each row's `count` largest logits [R, C], largest first; the smaller id first where they are equal.

    C is the whole vocabulary where that is smaller.
    """
    values_RC, ids_RC = logits_RV.topk(min(count + 1, logits_RV.shape[1]))
    tied_R = (values_RC[:, 1:] == values_RC[:, :-1]).any(1)  # topk keeps no order among equals
    if tied_R.any():
        ids_RC[tied_R] = logits_RV[tied_R].sort(descending=True, stable=True).indices[:, : ids_RC.shape[1]]
    return ids_RC[:, :count]
