"""Sliding windows over a corpus, in which no token is a target twice.

The tokens that have a successor in their document are numbered through: slot s of the corpus predicts one token. Window
w reads slots w * stride .. w * stride + window - 1; what an earlier window has predicted is context and no target.
Documents that share a window do not see each other; one that began before the window is cut there. With stride =
window these are the rows of `qkv.data.validation_batches`. With stride = window + 1 every window is a text of its own:
the token between two windows is the first of the later one, and no target.

B windows, T slots of a window, D documents.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np
import torch

from qkv.data.prepare import Corpus
from qkv.data.rows import Batch
from qkv.data.windows import Ints, Windows
from qkv.nn import IGNORE


class SlidingWindows:
    """The windows of a corpus. `count` is their number; `not_a_target` an id that may be read but is not scored."""

    def __init__(self, corpus: Corpus, window: int, stride: int, not_a_target: int | None = None) -> None:
        self._slots = Windows(corpus, window, lookahead=1)
        self.window, self.stride, self.not_a_target = window, stride, not_a_target
        beyond_first = max(self._slots.slots - max(window, stride), 0)
        self.count = 0 if self._slots.slots == 0 else 1 + -(-beyond_first // stride)

    def batches(self, batch_size: int, max_windows: int | None = None) -> Iterator[Batch]:
        """The first `max_windows` windows (None: all), `batch_size` at a time, none wider than it must be."""
        count = self.count if max_windows is None else min(self.count, max_windows)
        for first in range(0, count, batch_size):
            yield self._batch(np.arange(first, min(first + batch_size, count)))

    def first_tokens(self, special_ids: Collection[int], max_windows: int | None = None) -> list[int]:
        """The second tokens of the documents that begin in these windows with a special token."""
        slots = self._slots
        count = self.count if max_windows is None else min(self.count, max_windows)
        begun_D = slots.slots_before_D[:-1] < self.window + (count - 1) * self.stride
        address_D = slots.starts_D[begun_D]
        after_special_D = np.isin(slots.tokens[address_D], list(special_ids))
        ids: list[int] = slots.tokens[address_D[after_special_D] + 1].tolist()
        return ids

    def _batch(self, windows_B: Ints) -> Batch:
        slots = self._slots
        first_B1 = windows_B[:, None] * self.stride
        lengths_B = np.minimum(slots.slots - first_B1[:, 0], self.window)
        columns_T = np.arange(lengths_B.max())
        real_BT = columns_T < lengths_B[:, None]
        slot_BT = np.minimum(first_B1 + columns_T, slots.slots - 1)
        document_BT = np.searchsorted(slots.slots_before_D, slot_BT, side="right") - 1
        address_BT = slots.starts_D[document_BT] + slot_BT - slots.slots_before_D[document_BT]
        begin_BT = np.maximum(slots.slots_before_D[document_BT] - first_B1, 0)

        labels_BT = slots.tokens[address_BT + 1].astype(np.int64)
        # all but the first window repeat window - stride slots of the one before
        seen_B1 = np.where(windows_B > 0, self.window - self.stride, 0)[:, None]
        labels_BT[(columns_T < seen_B1) | ~real_BT] = IGNORE
        if self.not_a_target is not None:
            labels_BT[labels_BT == self.not_a_target] = IGNORE
        packed = bool((document_BT != document_BT[:, :1]).any())
        return Batch(
            inputs=torch.from_numpy(slots.tokens[address_BT].astype(np.int64)),
            labels=torch.from_numpy(labels_BT),
            documents=torch.from_numpy(document_BT - document_BT[:, :1]) if packed else None,
            positions=torch.from_numpy(columns_T - begin_BT) if packed else None,
            lengths=None if real_BT.all() else torch.from_numpy(lengths_B),
            target_count=int((labels_BT != IGNORE).sum()),
        )
