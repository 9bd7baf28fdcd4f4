"""Documents laid end to end and cut into rows of a fixed length: arithmetic instead of an index of windows.

B rows, T slots of a row, D documents.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qkv.data.prepare import Corpus

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Window:
    """Rows of tokens as they lie in the corpus, before an objective makes inputs and labels of them.

    `next_BT` holds the token after each in the same document. Slots that are not `real_BT` are padding: they repeat the
    last token of the corpus, and count as one more document. `addresses_B`: where in the corpus each row begins.
    """

    tokens_BT: Ints
    next_BT: Ints
    documents_BT: Ints
    positions_BT: Ints
    real_BT: NDArray[np.bool_]
    addresses_B: Ints


class Windows:
    """A corpus as `count` rows of `length` slots; the last one may be filled in part.

    A slot holds one token that has `lookahead` more tokens after it in its document: with a lookahead of 1 every token
    is the *next* token of one slot, except the first token of each document. Rows are filled to the end: a document
    that does not fit continues in the next row, there a document of its own (ids and positions begin at 0).
    """

    def __init__(self, corpus: Corpus, length: int, lookahead: int) -> None:
        sizes_D = np.maximum(corpus.ends_D - corpus.starts_D - lookahead, 0)
        some_D = sizes_D > 0
        self.tokens = corpus.tokens
        self.length, self.lookahead = length, lookahead
        self.starts_D = corpus.starts_D[some_D]
        self.slots_before_D = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes_D[some_D])])
        self.slots = int(self.slots_before_D[-1])
        self.count = -(-self.slots // length)

    def __getitem__(self, rows_B: Ints) -> Window:
        """The rows with these numbers, in this order."""
        columns_T = np.arange(self.length)
        first_slot_B1 = rows_B[:, None] * self.length
        slot_BT = first_slot_B1 + columns_T
        real_BT = slot_BT < self.slots
        slot_BT = np.minimum(slot_BT, self.slots - 1)
        document_BT = np.searchsorted(self.slots_before_D, slot_BT, side="right") - 1
        before_BT = self.slots_before_D[document_BT]
        address_BT = self.starts_D[document_BT] + slot_BT - before_BT
        begin_BT = np.where(real_BT, np.maximum(before_BT - first_slot_B1, 0), real_BT.sum(axis=1, keepdims=True))
        return Window(
            tokens_BT=self.tokens[address_BT].astype(np.int64),
            next_BT=self.tokens[address_BT + self.lookahead].astype(np.int64),
            documents_BT=document_BT - document_BT[:, :1] + ~real_BT,
            positions_BT=columns_T - begin_BT,
            real_BT=real_BT,
            addresses_B=address_BT[:, 0],
        )
