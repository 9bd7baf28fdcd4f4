"""Batches for a run: which rows a step takes, in which order, and where an interrupted run goes on.

B rows, T slots of a row (`max_seq_len`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import numpy as np
import torch

from qkv.config.errors import ConfigError, QkvError
from qkv.config.run import ObjectiveConfig
from qkv.data.objectives import Objective, build_objective
from qkv.data.prepare import Corpus
from qkv.data.windows import Ints, Windows
from qkv.nn import IGNORE

if TYPE_CHECKING:
    from qkv.tokenizer.tokenizer import Tokenizer

_ORDER, _TRAINING, _VALIDATION = range(3)  # what a random stream is for


@dataclass(frozen=True)
class Batch:
    """What one forward pass takes; all tensors are int64.

    `inputs` [B, T]: ids. `labels` [B, T]: what the logits at the same slot should predict, -100 for nothing (they are
    shifted already). `documents` [B, T]: the document of each slot, numbered from 0 in each row; padding counts as one
    more. `positions` [B, T]: the place in that document, from 0. Both are None when every row is one document.
    `lengths` [B]: tokens per row, padding being on the right; None when no row is padded. `target_count`: labels that
    are not -100.
    """

    inputs: torch.Tensor
    labels: torch.Tensor
    documents: torch.Tensor | None
    positions: torch.Tensor | None
    lengths: torch.Tensor | None
    target_count: int

    def to(self, device: torch.device | str) -> Self:
        """The same batch on another device."""
        moved = {
            name: tensor.to(device, non_blocking=True)
            for name in ("inputs", "labels", "documents", "positions", "lengths")
            if (tensor := getattr(self, name)) is not None
        }
        return replace(self, **moved)


class BatchLoader:
    """An endless iterator of steps; a step is a list of micro-batches.

    A step takes `batch_tokens // max_seq_len` rows, at least one. A full row has `max_seq_len` target tokens under the
    causal objective; under the masked one all its tokens count here, chosen or not. A micro-batch takes
    `micro_batch_tokens // max_seq_len` rows, at least one (None: the whole step at once).

    Each epoch visits every row once, in an order that depends on (`seed`, epoch) alone; a step may span two epochs.
    Of every step, rank r of `world_size` takes the r-th share, so that the rows of a step, and the state, do not depend
    on the number of ranks. Nothing is drawn from a global generator.

    Raises QkvError when the corpus does not fill one row, ConfigError when the ranks cannot share a step evenly.
    """

    def __init__(
        self,
        corpus: Corpus,
        objective: ObjectiveConfig,
        tokenizer: Tokenizer,
        *,
        max_seq_len: int,
        batch_tokens: int,
        micro_batch_tokens: int | None = None,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._rows = _Rows(corpus, objective, tokenizer, max_seq_len)
        if self._rows.windows.slots < max_seq_len:
            documents, first = corpus.num_documents, self._rows.objective.lookahead
            needed = max_seq_len + first * max(documents, 1)
            spread = f" from {documents} documents" if documents > 1 else ""
            raise QkvError(
                f"{corpus.num_tokens} training tokens are too few: a window of {max_seq_len} takes {needed}{spread}",
                where="data.train",
                hint="more text, or a smaller model.max_seq_len",
            )
        self.rows_per_step = max(1, batch_tokens // max_seq_len)
        if self.rows_per_step % world_size:
            raise ConfigError(
                f"a step of {self.rows_per_step} rows cannot be shared by {world_size} ranks",
                where="train.batch_tokens",
                hint=f"train.batch_tokens={-(-self.rows_per_step // world_size) * world_size * max_seq_len}",
            )
        self._share = self.rows_per_step // world_size
        self._rank = rank
        self._micro_rows = max(1, micro_batch_tokens // max_seq_len) if micro_batch_tokens else self._share
        self._seed = seed
        self._epoch = self._index = 0
        self._order = self._new_order()

    @property
    def rows_per_epoch(self) -> int:
        return self._rows.windows.count

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        rows, keys = self._take(self.rows_per_step)
        first, last = self._rank * self._share, (self._rank + 1) * self._share
        cuts = range(first, last, self._micro_rows)
        stops = [min(cut + self._micro_rows, last) for cut in cuts]
        return [self._rows.batch(rows[cut:stop], keys[cut:stop]) for cut, stop in zip(cuts, stops, strict=True)]

    def state_dict(self) -> dict[str, int]:
        """Where the next step begins: `epoch`, and `index` in its order of rows."""
        return {"epoch": self._epoch, "index": self._index}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where `state_dict` was taken. Raises QkvError for a place that this corpus does not have."""
        epoch, index = state.get("epoch", -1), state.get("index", -1)
        if epoch < 0 or not 0 <= index < self.rows_per_epoch:
            raise QkvError(
                f"the saved place in the data is {dict(state)}, an epoch has {self.rows_per_epoch} rows",
                hint="resume with the data and the settings that the run began with",
            )
        self._epoch, self._index = epoch, index
        self._order = self._new_order()

    def _take(self, count: int) -> tuple[Ints, list[tuple[int, ...]]]:
        rows: list[int] = []
        keys: list[tuple[int, ...]] = []
        while len(rows) < count:
            taken = self._order[self._index : self._index + count - len(rows)].tolist()
            rows += taken
            keys += [(self._seed, _TRAINING, self._epoch, row) for row in taken]
            self._index += len(taken)
            if self._index == self.rows_per_epoch:
                self._epoch, self._index = self._epoch + 1, 0
                self._order = self._new_order()
        return np.array(rows, np.int64), keys

    def _new_order(self) -> Ints:
        return np.random.default_rng((self._seed, _ORDER, self._epoch)).permutation(self.rows_per_epoch)


def validation_batches(
    corpus: Corpus, objective: ObjectiveConfig, tokenizer: Tokenizer, *, max_seq_len: int, batch_tokens: int
) -> Iterator[Batch]:
    """The whole corpus once, in its order, in batches of `batch_tokens // max_seq_len` rows (at least one).

    Causal: every token is a target exactly once, except the first of each document. Masked: every token is an input
    exactly once, and the masks are the same in every call and for every seed of a run.

    Raises QkvError at once when there is no target at all.
    """
    rows = _Rows(corpus, objective, tokenizer, max_seq_len)
    if rows.windows.slots == 0:
        raise QkvError(
            f"{corpus.num_tokens} tokens held out for validation hold no target, at least 2 are needed",
            where="data.validation",
            hint="a larger fraction, files, or 0 for no validation",
        )
    size = max(1, batch_tokens // max_seq_len)
    chunks = (np.arange(first, min(first + size, rows.windows.count)) for first in range(0, rows.windows.count, size))
    return (rows.batch(chunk, [(_VALIDATION, row) for row in chunk.tolist()]) for chunk in chunks)


class _Rows:
    """Rows of a corpus as batches."""

    def __init__(self, corpus: Corpus, objective: ObjectiveConfig, tokenizer: Tokenizer, max_seq_len: int) -> None:
        self.objective: Objective = build_objective(objective, tokenizer)
        self.windows = Windows(corpus, max_seq_len, self.objective.lookahead)
        self.padding_id = 0 if tokenizer.pad_id is None else tokenizer.pad_id

    def batch(self, rows_B: Ints, keys_B: list[tuple[int, ...]]) -> Batch:
        window = self.windows[rows_B]
        inputs_BT, labels_BT = self.objective.targets(window, keys_B)
        lengths_B = None
        if not window.real_BT.all():
            inputs_BT = np.where(window.real_BT, inputs_BT, self.padding_id)
            labels_BT = np.where(window.real_BT, labels_BT, IGNORE)
            lengths_B = torch.from_numpy(window.real_BT.sum(axis=1))
        packed = bool((window.documents_BT * window.real_BT).any())
        return Batch(
            inputs=torch.from_numpy(inputs_BT),
            labels=torch.from_numpy(labels_BT),
            documents=torch.from_numpy(window.documents_BT) if packed else None,
            positions=torch.from_numpy(window.positions_BT) if packed else None,
            lengths=lengths_B,
            target_count=int((labels_BT != IGNORE).sum()),
        )
