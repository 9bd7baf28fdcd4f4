"""Models simple enough to be a floor: what does a network know beyond counting?"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Codes = NDArray[np.int64]


class CharacterModel:
    """P(character | the `order` characters before it) by counting, smoothed by Witten and Bell's interpolation (1991):
    each order trusts its own counts by n / (n + distinct followers) and leaves the rest to the order below."""

    def __init__(self, text: str, order: int = 3) -> None:
        self.order = order
        self.alphabet, codes = np.unique(_codepoints(text), return_inverse=True)
        self.size = len(self.alphabet) + 1  # and one for every character never seen
        self.counts = [self._count(codes.astype(np.int64), length) for length in range(order + 1)]

    def _count(self, codes: Codes, length: int) -> tuple[Codes, Codes, Codes, Codes, Codes]:
        """Of contexts of `length`: sorted n-grams and their counts, sorted contexts, their totals and followers."""
        grams, counts = np.unique(self._ngrams(codes, length + 1), return_counts=True)
        contexts, first = np.unique(grams // self.size, return_index=True)
        totals = np.add.reduceat(counts, first)
        followers = np.diff(np.append(first, len(grams)))
        return grams, counts.astype(np.int64), contexts, totals.astype(np.int64), followers.astype(np.int64)

    def _ngrams(self, codes: Codes, n: int) -> Codes:
        """Each run of n characters as one number."""
        value = np.zeros(max(len(codes) - n + 1, 0), np.int64)
        for index in range(n):
            value = value * self.size + codes[index : len(codes) - n + 1 + index]
        return value

    def bits_per_byte(self, text: str) -> float:
        """The mean cost of `text` in bits per UTF-8 byte; its first `order` characters give context only."""
        points = _codepoints(text)
        place = np.minimum(np.searchsorted(self.alphabet, points), len(self.alphabet) - 1)
        known = self.alphabet[place] == points
        codes = np.where(known, place, self.size - 1).astype(np.int64)
        count = len(codes) - self.order
        probability = np.full(count, 1.0 / self.size)
        for length, (grams, counts, contexts, totals, followers) in enumerate(self.counts):
            window = codes[self.order - length :]
            own = _lookup(self._ngrams(window, length + 1), grams, counts)
            context = self._ngrams(window, length + 1) // self.size
            n, distinct = _lookup(context, contexts, totals), _lookup(context, contexts, followers)
            backed = np.where(n > 0, (own + distinct * probability) / np.maximum(n + distinct, 1), probability)
            probability = backed
        # a character never seen shares its class's probability with all of Unicode
        probability = np.where(known[self.order :], probability, probability / 0x110000)
        scored = text[self.order :].encode("utf-8", "surrogatepass")
        return float(-np.log2(probability).sum() / len(scored))


def _codepoints(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def _lookup(keys: Codes, known: Codes, values: Codes) -> Codes:
    """values[i] where known[i] is the key, else 0."""
    place = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    return np.where(known[place] == keys, values[place], 0)
