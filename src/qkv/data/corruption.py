"""What denoising objectives make of a text: a damaged source, and the target that repairs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class Corruption(Protocol):
    """Makes (source, target) of n >= 2 ids, both without begin and end. The target's size depends on n alone, the
    source is never longer than n."""

    def __call__(self, ids: Ints, rng: np.random.Generator) -> tuple[Ints, Ints]: ...

    def target_sizes(self, sizes: Ints) -> Ints:
        """The target's size for each size of a text."""


class Infilling:
    """BART's text infilling (Lewis et al. 2019, arXiv 1910.13461, section 2.2).

    `rate` of the ids, rounded, are hidden in spans of Poisson(`mean_span`) ids; each span becomes one mask, one of no
    ids too: there the model learns that nothing is missing. The target is the text.
    """

    def __init__(self, rate: float, mean_span: float, mask_id: int) -> None:
        self.rate, self.mean_span, self.mask_id = rate, mean_span, mask_id

    def __call__(self, ids: Ints, rng: np.random.Generator) -> tuple[Ints, Ints]:
        hidden = min(max(round(self.rate * len(ids)), 1), len(ids) - 1)
        spans: list[int] = []
        while sum(spans) < hidden and len(spans) < hidden:  # never more masks than ids they stand for
            spans.append(min(int(rng.poisson(self.mean_span)), hidden - sum(spans)))
        left = len(ids) - sum(spans)
        cuts = np.sort(rng.integers(0, left + 1, len(spans)))  # how many of the ids that stay come before each span
        source: list[int] = []
        place = 0
        for span, kept in zip(spans, np.diff(cuts, prepend=0), strict=True):
            source += [*ids[place : place + kept].tolist(), self.mask_id]
            place += kept + span
        return np.array([*source, *ids[place:].tolist()], np.int64), ids

    def target_sizes(self, sizes: Ints) -> Ints:
        return sizes


class SpanCorruption:
    """T5's span corruption (Raffel et al. 2019, arXiv 1910.10683, section 3.1.4).

    `rate` of the ids, rounded, are noise, in so many spans that they have `mean_span` ids on average; spans and the
    text between them are cut at random, and none is empty. Source: each span replaced by a sentinel of its own, in
    order. Target: each sentinel and its span, and one more sentinel that ends them.
    """

    def __init__(self, rate: float, mean_span: float, sentinel_ids: Sequence[int]) -> None:
        self.rate, self.mean_span, self.sentinel_ids = rate, mean_span, tuple(sentinel_ids)

    def __call__(self, ids: Ints, rng: np.random.Generator) -> tuple[Ints, Ints]:
        noise, spans = (int(count) for count in self._counts(np.array(len(ids))))
        kept_sizes, noise_sizes = _cut_at_random(len(ids) - noise, spans, rng), _cut_at_random(noise, spans, rng)
        source: list[int] = []
        target: list[int] = []
        place = 0
        for sentinel, kept, span in zip(self.sentinel_ids, kept_sizes, noise_sizes, strict=False):
            source += [*ids[place : place + kept].tolist(), sentinel]
            target += [sentinel, *ids[place + kept : place + kept + span].tolist()]
            place += kept + span
        return np.array(source, np.int64), np.array([*target, self.sentinel_ids[spans]], np.int64)

    def target_sizes(self, sizes: Ints) -> Ints:
        noise, spans = self._counts(sizes)
        return noise + spans + 1

    def _counts(self, sizes: Ints) -> tuple[Ints, Ints]:
        """Ids that are noise, and the spans they form."""
        noise = np.clip(np.rint(self.rate * sizes).astype(np.int64), 1, sizes - 1)
        most = np.minimum(np.minimum(noise, sizes - noise), len(self.sentinel_ids) - 1)
        return noise, np.clip(np.rint(noise / self.mean_span).astype(np.int64), 1, most)


def _cut_at_random(total: int, parts: int, rng: np.random.Generator) -> Ints:
    """Sizes of `parts` parts of `total`, none empty, every way of cutting being equally likely."""
    cuts = np.sort(rng.choice(total - 1, parts - 1, replace=False)) + 1
    return np.diff(cuts, prepend=0, append=total)
