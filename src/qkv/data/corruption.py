"""What denoising objectives make of a text: a damaged source, and the target that repairs it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np


class Corruption(Protocol):
    """Makes (source, target) of n >= 2 ids, all without begin and end. The source is never longer than the n ids, the
    target by one at most."""

    def __call__(self, ids: list[int], rng: np.random.Generator) -> tuple[list[int], list[int]]: ...

    def target_size(self, size: int) -> int:
        """How long the target of n ids is."""


class Infilling:
    """BART's text infilling (Lewis et al. 2019, arXiv 1910.13461, section 2.2).

    `rate` of the ids, rounded, are hidden in spans of Poisson(`mean_span`) ids; each span becomes one mask, one of no
    ids too: there the model learns that nothing is missing. The target is the text.
    """

    def __init__(self, rate: float, mean_span: float, mask_id: int) -> None:
        self.rate, self.mean_span, self.mask_id = rate, mean_span, mask_id

    def __call__(self, ids: list[int], rng: np.random.Generator) -> tuple[list[int], list[int]]:
        hidden = _noise(self.rate, len(ids))
        spans = self._spans(hidden, rng)
        # how many of the ids that stay come before each span
        cuts = sorted(rng.integers(0, len(ids) - hidden + 1, len(spans)).tolist())
        source: list[int] = []
        place = 0
        for (before, cut), span in zip(pairwise([0, *cuts]), spans, strict=True):
            kept = cut - before
            source += [*ids[place : place + kept], self.mask_id]
            place += kept + span
        return source + ids[place:], ids

    def _spans(self, hidden: int, rng: np.random.Generator) -> list[int]:
        """Sizes that add up to `hidden`, as many as that at most: never more masks than ids they stand for."""
        spans: list[int] = []
        for size in rng.poisson(self.mean_span, hidden).tolist():
            spans.append(min(size, hidden))
            hidden -= spans[-1]
            if not hidden:
                break
        spans[-1] += hidden
        return spans

    def target_size(self, size: int) -> int:
        return size


class SpanCorruption:
    """T5's span corruption (Raffel et al. 2019, arXiv 1910.10683, section 3.1.4).

    `rate` of the ids, rounded, are noise, in so many spans that they have `mean_span` ids on average; spans and the
    text between them are cut at random, and none is empty. Source: each span replaced by a sentinel of its own, in
    order. Target: each sentinel and its span, and one more sentinel that ends them.
    """

    def __init__(self, rate: float, mean_span: float, sentinel_ids: Sequence[int]) -> None:
        self.rate, self.mean_span, self.sentinel_ids = rate, mean_span, tuple(sentinel_ids)

    def __call__(self, ids: list[int], rng: np.random.Generator) -> tuple[list[int], list[int]]:
        noise, count = self._counts(len(ids))
        kept_sizes, spans = _cut_at_random(len(ids) - noise, count, rng), _cut_at_random(noise, count, rng)
        source: list[int] = []
        target: list[int] = []
        place = 0
        for sentinel, kept, span in zip(self.sentinel_ids[:count], kept_sizes, spans, strict=True):
            source += [*ids[place : place + kept], sentinel]
            target += [sentinel, *ids[place + kept : place + kept + span]]
            place += kept + span
        return source, [*target, self.sentinel_ids[count]]

    def target_size(self, size: int) -> int:
        noise, count = self._counts(size)
        return noise + count + 1

    def _counts(self, size: int) -> tuple[int, int]:
        """Ids that are noise, and the spans they form."""
        noise = _noise(self.rate, size)
        most = min(noise, size - noise, len(self.sentinel_ids) - 1)
        return noise, min(max(round(noise / self.mean_span), 1), most)


def _noise(rate: float, size: int) -> int:
    """`rate` of so many ids, at least one, and not all."""
    return min(max(round(rate * size), 1), size - 1)


def _cut_at_random(total: int, parts: int, rng: np.random.Generator) -> list[int]:
    """Sizes of `parts` parts of `total`, none empty, every way of cutting being equally likely."""
    cuts = sorted(rng.permutation(total - 1)[: parts - 1].tolist())
    return [end - begin for begin, end in pairwise([0, *(cut + 1 for cut in cuts), total])]
