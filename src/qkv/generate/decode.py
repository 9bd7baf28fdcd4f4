"""From prompts to tokens, step by step: any number of sequences of unequal length, with a cache or without.

A row's tokens depend on its own prompt, source and seed only: not on its neighbours, the cache, or who listens.

Shapes: B rows of the batch, T tokens, S source tokens, W feature width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from qkv.config.errors import UsageError
from qkv.generate.arguments import check_count
from qkv.generate.sampling import MAX_SEED, Sampling, choose, refuse_non_finite
from qkv.generate.suppression import NOTHING_SUPPRESSED, Suppression
from qkv.nn.cache import Cache
from qkv.nn.transformer import Transformer

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Token:
    """A new token of one row.

    logprob: its log-probability (nats) by the model itself, of what it may write, before penalties, temperature and
    filters; None where log-probabilities were not asked for. top: the most likely (id, log-probability), best first.
    """

    row: int
    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Decoding:
    """A batch of sequences being continued. Iterating runs the model and gives the tokens, all rows of a step in order.

    prompts: ids, at least one per row (of an encoder-decoder: what the decoder starts from). seeds: one per row, 0 to
    2^64 - 1. source [B, S] ids or [B, S, W] features with source_lengths [B]: what the encoder reads, once. eos_ids end
    a row. max_new_tokens is capped by the context, the decoder's `max_seq_len`: nothing slides, a row whose prompt and
    new tokens fill it ends with "length". logprobs: how many alternatives each token brings (0: no log-probabilities).
    vocab_size: ids from there on (rows that only pad the embedding) are never chosen; nor is what `suppress` says.

    Raises UsageError before the model runs for a model that does not generate, prompts that do not fit, and arguments
    out of range; QkvError at a step whose logits are not finite. The network's training mode is put back at each step.
    """

    def __init__(
        self,
        network: Transformer,
        prompts: Sequence[Sequence[int]],
        *,
        sampling: Sampling,
        seeds: Sequence[int],
        max_new_tokens: int,
        eos_ids: Collection[int] = (),
        use_cache: bool = True,
        logprobs: int = 0,
        source: Tensor | None = None,
        source_lengths: Tensor | None = None,
        vocab_size: int | None = None,
        suppress: Suppression = NOTHING_SUPPRESSED,
    ) -> None:
        self.network = network
        self.prompts = [list(prompt) for prompt in prompts]
        self.generated: list[list[int]] = [[] for _ in prompts]
        self.finish_reasons: list[FinishReason | None] = [None] * len(self.prompts)
        """Per row, once it has ended."""
        self.eos_ids, self.logprobs = frozenset(eos_ids), logprobs
        self._seeds, self._sampling = list(seeds), sampling
        self._vocab_size, self._suppress = vocab_size, suppress
        context = check_prompts(network, self.prompts)
        suppress.check(vocab_size or network.config.vocab_size)
        check_count("max_new_tokens", max_new_tokens)
        check_count("logprobs", logprobs)
        if len(self._seeds) != len(self.prompts) or not all(0 <= seed <= MAX_SEED for seed in self._seeds):
            raise UsageError("there is one seed per prompt, each from 0 to 2^64 - 1")
        self._limits = [min(max_new_tokens, context - len(prompt)) for prompt in self.prompts]
        self._end_full_rows(range(len(self.prompts)))
        self._cached_rows = self.running
        self._source, self._source_lengths = source, source_lengths
        # those that dropout or anything else could make differ in training; asking all would cost a small model's step
        self._modules = [module for module in network.modules() if not isinstance(module, (nn.Linear, nn.Identity))]
        self._cache = network.new_cache(len(self._cached_rows)) if use_cache and self._cached_rows else None

    @property
    def running(self) -> list[int]:
        """The rows that go on."""
        return [row for row, reason in enumerate(self.finish_reasons) if reason is None]

    def stop(self, row: int) -> None:
        """Nothing further is wanted of `row`; the others do not notice."""
        self.finish_reasons[row] = "stop"

    def __iter__(self) -> Iterator[Token]:
        while running := self.running:
            yield from self._step(running)

    @torch.inference_mode()
    def _step(self, running: list[int]) -> list[Token]:
        with evaluating(self._modules):
            scores_BV = self._uncached(running) if self._cache is None else self._cached(running, self._cache)
        # on the CPU whatever the device: the same seed gives the same draw everywhere
        scores_BV = scores_BV.float().cpu()
        step = len(self.generated[running[0]])
        refuse_non_finite(scores_BV, running, step + 1)
        scores_BV = self._suppress(scores_BV, first=step == 0)
        tokens = []
        for row, scores_V in zip(running, scores_BV, strict=True):
            generated = self.generated[row]
            token_id = choose(
                scores_V[: self._vocab_size],
                self._sampling,
                seed=self._seeds[row],
                step=step,
                prompt=self.prompts[row],
                generated=generated,
            )
            generated.append(token_id)
            if token_id in self.eos_ids:
                self.finish_reasons[row] = "stop"
            tokens.append(Token(row, token_id, *ranked(scores_V, token_id, self.logprobs, self._vocab_size)))
        self._end_full_rows(running)
        return tokens

    def _end_full_rows(self, rows: Collection[int]) -> None:
        for row in rows:
            if self.finish_reasons[row] is None and len(self.generated[row]) >= self._limits[row]:
                self.finish_reasons[row] = "length"

    def _uncached(self, running: list[int]) -> Tensor:
        """Logits [B, V] of the running rows from all their tokens."""
        prompts = [self.prompts[row] for row in running]
        rows = [prompt + self.generated[row] for prompt, row in zip(prompts, running, strict=True)]
        source = source_of(self._source, self._source_lengths, running)
        return last_logits(self.network, rows, given=source | prefix_of(self.network, prompts))

    def _cached(self, running: list[int], cache: Cache) -> Tensor:
        """Logits [B, V] of the running rows from the tokens that the cache does not hold yet."""
        first = not any(self.generated)
        new = [self.prompts[row] if first else self.generated[row][-1:] for row in running]
        cache.select([self._cached_rows.index(row) for row in running])  # rows that have ended leave
        self._cached_rows = running
        if not first:
            return last_logits(self.network, new, cache)
        given = source_of(self._source, self._source_lengths, running) | prefix_of(self.network, new)
        return last_logits(self.network, new, cache, given)


def last_logits(
    network: Transformer,
    rows: Sequence[Sequence[int]],
    cache: Cache | None = None,
    given: dict[str, Tensor | None] | None = None,
) -> Tensor:
    """The logits [B, V] after each row's last token; `given`: what else is read, see `source_of` and `prefix_of`."""
    ids_BT, lengths_B = pad(rows, device_of(network))
    scores_B1V: Tensor = network(ids_BT, lengths=lengths_B, cache=cache, logits="last", **(given or {}))
    return scores_B1V[:, -1]


def source_of(source: Tensor | None, lengths_B: Tensor | None, rows: list[int]) -> dict[str, Tensor | None]:
    """The network's arguments for these rows of a source; none where there is no source."""
    if source is None:
        return {}
    return {"source": source[rows], "source_lengths": None if lengths_B is None else lengths_B[rows]}


def prefix_of(network: Transformer, prompts: Sequence[Sequence[int]]) -> dict[str, Tensor | None]:
    """The network's argument for what a prefix-LM reads in both directions: the prompts; none for other models."""
    if not network.config.prefix:
        return {}
    return {"prefix_lengths": torch.tensor([len(prompt) for prompt in prompts], device=device_of(network))}


def check_prompts(network: Transformer, prompts: Sequence[Sequence[int]]) -> int:
    """The context's length. Raises UsageError where the network does not generate, or not from these ids."""
    if network.decoder is None or not network.config.head or not network.config.head.predicts_tokens:
        kind = network.config.head.kind if network.config.head else "none"
        raise UsageError(
            f"a model of family {network.config.family} with a head of kind {kind} does not generate text",
            hint={"masked-language-model": "fill-mask", "classifier": "classify"}.get(kind, "embed"),
        )
    config = network.decoder.config
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise UsageError(f"prompt {row} is empty: there is nothing to continue")
        if len(prompt) > config.max_seq_len:
            raise UsageError(
                f"prompt {row} has {len(prompt)} tokens and the model's context is {config.max_seq_len}",
                hint="a shorter prompt, or a model with a larger max_seq_len",
            )
        check_ids(prompt, config.vocab_size, f"prompt {row}")
    return config.max_seq_len


def check_ids(ids: Sequence[int], vocab_size: int | None, where: str) -> None:
    """Raises UsageError naming an id outside the vocabulary: on a GPU it would end the process."""
    bad = next((token_id for token_id in ids if not 0 <= token_id < (vocab_size or 0)), None)
    if bad is not None:
        raise UsageError(f"the id {bad} in {where} is outside the model's vocabulary of {vocab_size}")


def pad(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Ids [B, T] padded with zeros on the right, and the rows' lengths [B], None where all are equal."""
    lengths = [len(row) for row in rows]
    longest = max(lengths, default=0)
    ids_BT = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], dtype=torch.int64, device=device)
    return ids_BT, None if len(set(lengths)) <= 1 else torch.tensor(lengths, device=device)


def ranked(
    scores_V: Tensor, token_id: int, count: int, vocab_size: int | None = None
) -> tuple[float | None, tuple[tuple[int, float], ...]]:
    """A token's log-probability, and the `count` most likely tokens with theirs; nothing for 0.

    Fewer come back where no more than these can be.
    """
    if not count:
        return None, ()
    logprobs_V = scores_V.log_softmax(-1)
    values, ids = logprobs_V[:vocab_size].topk(min(count, len(logprobs_V[:vocab_size])))
    possible = values > -math.inf
    best = zip(ids[possible].tolist(), values[possible].tolist(), strict=True)
    return float(logprobs_V[token_id]), tuple(best)


def device_of(network: nn.Module) -> torch.device:
    """Where the network computes."""
    return next(network.parameters()).device


@contextmanager
def evaluating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Without dropout; every module's own mode is restored."""
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
