"""Which documents are held out for validation.

The choice depends on a document's content and the seed alone: files in another order, or more of them, move no document
from one side to the other, and copies of a document are all on the same side.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

Spans = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Begins and ends [D] of documents, as places in the stored ids."""


class ContentHash:
    """A 64-bit hash of a text that arrives in pieces."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=8)

    def update(self, text: str) -> None:
        self._hash.update(text.encode())

    def value(self) -> int:
        return int.from_bytes(self._hash.digest(), "little")


def hold_out(
    starts_D: NDArray[np.int64], ends_D: NDArray[np.int64], hashes_D: NDArray[np.uint64], fraction: float, seed: int
) -> tuple[Spans, Spans]:
    """Training and validation spans: each document is held out with probability `fraction`.

    With two documents or more, at least one is on either side. A single document loses its end (`hold_out_ends`).
    """
    if len(starts_D) < 2:
        return hold_out_ends(starts_D, ends_D, fraction)
    held_D = held_out(hashes_D, fraction, seed)
    return (starts_D[~held_D], ends_D[~held_D]), (starts_D[held_D], ends_D[held_D])


def held_out(hashes_D: NDArray[np.uint64], fraction: float, seed: int) -> NDArray[np.bool_]:
    """Which of D documents are held out [D]: each with probability `fraction`, but of two that differ one at least."""
    scores_D = _scores(hashes_D, seed)
    held_D = scores_D < np.uint64(fraction * 2**64)
    if not held_D.any() and len(held_D):
        held_D = scores_D == scores_D.min()
    if held_D.all() and len(held_D):
        held_D = scores_D < scores_D.max()
    return held_D


def hold_out_ends(starts_D: NDArray[np.int64], ends_D: NDArray[np.int64], fraction: float) -> tuple[Spans, Spans]:
    """Training and validation spans: the last `fraction` of each document's ids is held out, two ids at least.

    Two are the fewest that give a next token to predict. A document of fewer than four ids stays whole.
    """
    sizes_D = ends_D - starts_D
    held_D = np.maximum(2, np.round(fraction * sizes_D).astype(np.int64))
    cuts_D = np.where(sizes_D < 4, ends_D, ends_D - held_D)
    some_D = cuts_D < ends_D
    return (starts_D, cuts_D), (cuts_D[some_D], ends_D[some_D])


def _scores(hashes_D: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """Hashes mixed with the seed by the finaliser of SplitMix64: uniform over 64 bits, the same on every machine."""
    key = int.from_bytes(blake2b(str(seed).encode(), digest_size=8).digest(), "little")
    mixed_D = hashes_D ^ np.uint64(key)
    mixed_D = (mixed_D ^ (mixed_D >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed_D = (mixed_D ^ (mixed_D >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed_D ^ (mixed_D >> np.uint64(31))
