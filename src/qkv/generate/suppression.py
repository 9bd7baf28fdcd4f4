"""What is never written, though the model may find it likely.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from qkv.config.errors import UsageError


class Suppression:
    """Ids that are never written, and further ones that are never written first: their probability is 0."""

    def __init__(self, ids: Iterable[int] = (), first: Iterable[int] = ()) -> None:
        self.ids = frozenset(ids)
        self.first = self.ids | frozenset(first)
        self._later = torch.tensor(sorted(self.ids), dtype=torch.int64)
        self._at_first = torch.tensor(sorted(self.first), dtype=torch.int64)

    def __call__(self, logits_RV: Tensor, *, first: bool) -> Tensor:
        """The logits, -inf for ids that may not be written; `first`: nothing was written yet."""
        ids = self._at_first if first else self._later
        if not len(ids):
            return logits_RV
        return logits_RV.index_fill(1, ids[ids < logits_RV.shape[1]].to(logits_RV.device), -math.inf)

    def check(self, vocab_size: int | None) -> None:
        """Raises UsageError where nothing of a vocabulary is left to be written."""
        if vocab_size is not None and len(self.first) >= vocab_size and self.first.issuperset(range(vocab_size)):
            raise UsageError(
                f"all {vocab_size} ids of the vocabulary are suppressed: nothing can be written",
                where="generation.suppress_ids, generation.begin_suppress_ids",
            )


NOTHING_SUPPRESSED = Suppression()
