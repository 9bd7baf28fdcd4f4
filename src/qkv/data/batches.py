"""Batches for a run: which rows a step takes, in which order, and where an interrupted run goes on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from qkv.config.errors import ConfigError, QkvError
from qkv.config.objectives import ObjectiveConfig
from qkv.config.training import RampStageConfig
from qkv.data.prepare import Dataset
from qkv.data.rows import Batch, Rows, WindowRows, build_rows
from qkv.data.windows import Ints

if TYPE_CHECKING:
    from qkv.tokenizer.tokenizer import Tokenizer

_ORDER, _TRAINING, _VALIDATION = range(3)  # what a random stream is for
_EPOCHS, _TOKENS = 10, 2**20
"""A step holds at most so many epochs, or so many tokens where the data are small: all of it is in memory at once."""


class BatchLoader:
    """An endless iterator of steps; a step is a list of micro-batches.

    Rows of one length (causal, masked): a step takes `batch_tokens // max_seq_len` of them, at least one, and may span
    two epochs. A full row has `max_seq_len` target tokens under the causal objective; under the masked one all its
    tokens count here, chosen or not. Rows of their own lengths: a step takes rows of similar length, as many as
    `batch_tokens` target tokens hold (of texts with a label: tokens; of images and sound with a label: so many of
    them), at least one; an epoch ends with a step.
    `micro_batch_tokens` bounds the micro-batches of a step (None: the whole step at once) in the same way, but that of
    rows with two sides it counts the longer one: it is there for the memory.

    The stages of a `ramp` come first, each with its own length of rows or size of steps. A stage begins a new epoch,
    except that rows of one length go on in their order where the stage before has the same length. Steps that were
    passed over (`pass_over`) do not count in a stage.

    Each epoch visits every row once, in an order that depends on (`seed`, epoch) alone. Of every step, rank r of
    `world_size` takes the r-th share, so that the rows of a step, and the state, do not depend on the number of ranks.
    Nothing is drawn from a global generator.

    Raises QkvError when the data do not fill one row, ConfigError when the ranks cannot share a step evenly or a step
    holds the data many times over.
    """

    def __init__(
        self,
        data: Dataset,
        objective: ObjectiveConfig,
        tokenizer: Tokenizer | None,
        *,
        max_seq_len: int,
        batch_tokens: int,
        micro_batch_tokens: int | None = None,
        ramp: Sequence[RampStageConfig] = (),
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        def stage(last: int | None, length: int, tokens: int, key: str) -> _Stage:
            rows = build_rows(objective, data, tokenizer, length)
            if isinstance(rows, WindowRows):
                _check_windows(rows, data, length)
                even = _Even(rows.count, length, tokens, micro_batch_tokens, seed)
                _check_size(even.count * even.length, even.rows_per_step * even.length, key)
                _check_shares(even.rows_per_step, world_size, length)
                return _Stage(last, rows, even)
            if not rows.count:
                raise QkvError("the training data hold nothing to learn from", where="data.train", hint="more text")
            _check_size(int(rows.costs_N.sum()), tokens, key)
            return _Stage(last, rows, _Bucketed(rows, tokens, micro_batch_tokens, seed))

        whole = "train.batch_tokens"
        lasts = accumulate(one.steps for one in ramp)
        self._stages = [
            stage(
                last,
                one.max_seq_len or max_seq_len,
                one.batch_tokens or batch_tokens,
                f"train.ramp.{number}.batch_tokens" if one.batch_tokens else whole,
            )
            for number, (last, one) in enumerate(zip(lasts, ramp, strict=True))
        ]
        self._stages.append(stage(None, max_seq_len, batch_tokens, whole))
        self._stage, self._step = self._stages[0], 0
        self._seed, self._rank, self._world_size = seed, rank, world_size

    @property
    def rows_per_epoch(self) -> int:
        return self._stage.rows.count

    @property
    def one_shape(self) -> bool:
        """All micro-batches of a stage have one shape, but for a smaller one that may end a step."""
        return isinstance(self._stage.order, _Even)

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        if self._step == self._stage.last:
            self._begin_next_stage()
        self._step += 1
        rows, order = self._stage.rows, self._stage.order
        taken = order.take()
        first, last = (len(taken) * rank // self._world_size for rank in (self._rank, self._rank + 1))
        parts = order.divide(taken[first:last])
        return [
            rows.batch(
                np.array([row for _, row in part], np.int64),
                [(self._seed, _TRAINING, epoch, row) for epoch, row in part],
            )
            for part in parts
        ]

    def pass_over(self) -> None:
        """The step that was last given was not taken, and its stage has one more. The place in the data stays where it
        is, and is one to save once the next step has been given."""
        self._step -= 1

    def _begin_next_stage(self) -> None:
        before = self._stage.order
        self._stage = self._stages[self._stages.index(self._stage) + 1]
        order = self._stage.order
        if isinstance(order, _Even) and isinstance(before, _Even) and order.length == before.length:
            order.go_to(before.epoch, before.index)
        else:
            order.go_to(before.epoch + 1, 0)

    def state_dict(self) -> dict[str, int]:
        """The number of steps given and not passed over, and where the next begins: `epoch`, and `index` in its
        order."""
        return {"step": self._step, "epoch": self._stage.order.epoch, "index": self._stage.order.index}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where `state_dict` was taken. Raises QkvError for a place that this data set does not have."""
        step, epoch, index = state.get("step", 0), state.get("epoch", -1), state.get("index", -1)
        stage = next(one for one in self._stages if one.last is None or step <= one.last)
        if epoch < 0 or not stage.order.go_to(epoch, index):
            raise QkvError(
                f"the saved place in the data is {dict(state)}, an epoch has {stage.order.size}",
                hint="resume with the data and the settings that the run began with",
            )
        self._stage, self._step = stage, step


Taken = list[tuple[int, int]]
"""(epoch, row) of the rows of a step."""


class _Even:
    """Rows of one length, in a new random order every epoch; `index` counts rows."""

    def __init__(self, count: int, length: int, batch_tokens: int, micro_batch_tokens: int | None, seed: int) -> None:
        self.count, self.length, self.seed = count, length, seed
        self.rows_per_step = max(1, batch_tokens // length)
        self._micro_rows = max(1, micro_batch_tokens // length) if micro_batch_tokens else self.rows_per_step
        self.go_to(0, 0)

    @property
    def size(self) -> str:
        return f"{self.count} rows"

    def go_to(self, epoch: int, index: int) -> bool:
        """Whether there is such a place; then it is where the next step begins."""
        if not 0 <= index < self.count:
            return False
        self.epoch, self.index = epoch, index
        self._order = np.random.default_rng((self.seed, _ORDER, epoch)).permutation(self.count)
        return True

    def take(self) -> Taken:
        taken: Taken = []
        while len(taken) < self.rows_per_step:
            rows = self._order[self.index : self.index + self.rows_per_step - len(taken)].tolist()
            taken += [(self.epoch, row) for row in rows]
            self.index += len(rows)
            if self.index == self.count:
                self.go_to(self.epoch + 1, 0)
        return taken

    def divide(self, taken: Taken) -> list[Taken]:
        return [taken[first : first + self._micro_rows] for first in range(0, len(taken), self._micro_rows)]


class _Bucketed:
    """Rows of their own lengths: sorted, cut into steps, and the steps in a new random order every epoch.

    Rows of equal lengths are in a random order, so that the steps differ between epochs. `index` counts steps.
    """

    def __init__(self, rows: Rows, batch_tokens: int, micro_batch_tokens: int | None, seed: int) -> None:
        self._rows, self.seed = rows, seed
        self._batch_tokens, self._micro_batch_tokens = batch_tokens, micro_batch_tokens
        self.go_to(0, 0)

    @property
    def size(self) -> str:
        return f"{len(self._steps)} steps"

    def go_to(self, epoch: int, index: int) -> bool:
        """Whether there is such a place; then it is where the next step begins."""
        rng = np.random.default_rng((self.seed, _ORDER, epoch))
        order = rng.permutation(self._rows.count)
        order = order[np.argsort(self._rows.order_N[order], kind="stable")]
        steps = cut_by_cost(order, self._rows.costs_N, self._batch_tokens)
        if not 0 <= index < len(steps):
            return False
        self.epoch, self.index = epoch, index
        self._steps = [steps[number] for number in rng.permutation(len(steps))]
        return True

    def take(self) -> Taken:
        taken = [(self.epoch, row) for row in self._steps[self.index].tolist()]
        self.index += 1
        if self.index == len(self._steps):
            self.go_to(self.epoch + 1, 0)
        return taken

    def divide(self, taken: Taken) -> list[Taken]:
        if self._micro_batch_tokens is None or not taken:
            return [taken] if taken else []
        (epoch, _), rows = taken[0], np.array([row for _, row in taken], np.int64)
        parts = cut_by_cost(rows, self._rows.sizes_N, self._micro_batch_tokens)
        return [[(epoch, row) for row in part.tolist()] for part in parts]


@dataclass(frozen=True, eq=False)
class _Stage:
    """Steps that are alike; `last` is the number of the last one, None where there is none."""

    last: int | None
    rows: WindowRows | Rows
    order: _Even | _Bucketed


def cut_by_cost(rows: Ints, costs_N: Ints, most: int) -> list[Ints]:
    """Stretches of `rows`, each as long as its costs add up to at most `most`, at least one row and, but for the last
    one, a multiple of `ROWS_ALIKE` where it is longer."""
    parts, first, costs = [], 0, costs_N[rows].tolist()
    while first < len(costs):
        stop, total = first + 1, costs[first]
        while stop < len(costs) and total + costs[stop] <= most:
            total += costs[stop]
            stop += 1
        if stop < len(costs):
            eighth = max((stop - first) // 8, 1)
            stop -= (stop - first) % (1 << (eighth.bit_length() - 1))
        parts.append(rows[first:stop])
        first = stop
    return parts


def _check_windows(rows: WindowRows, data: Dataset, max_seq_len: int) -> None:
    if rows.windows.slots >= max_seq_len:
        return
    documents = data.num_documents
    needed = max_seq_len + rows.objective.lookahead * max(documents, 1)
    spread = f" from {documents} documents" if documents > 1 else ""
    raise QkvError(
        f"{data.num_tokens} training tokens are too few: a window of {max_seq_len} takes {needed}{spread}",
        where="data.train",
        hint="more text, or a smaller model.max_seq_len",
    )


def _check_size(epoch: int, step: int, key: str) -> None:
    if step > max(_EPOCHS * epoch, _TOKENS):
        raise ConfigError(
            f"a step of {step:,} tokens would hold the {epoch:,} to train on {step // epoch:,} times over",
            where=key,
            hint=f"{epoch:,}, which is all of them once, or fewer",
        )


def _check_shares(rows: int, world_size: int, max_seq_len: int) -> None:
    if rows % world_size:
        raise ConfigError(
            f"a step of {rows} rows cannot be shared by {world_size} ranks",
            where="train.batch_tokens",
            hint=f"train.batch_tokens={-(-rows // world_size) * world_size * max_seq_len}",
        )


def validation_batches(
    data: Dataset, objective: ObjectiveConfig, tokenizer: Tokenizer | None, *, max_seq_len: int, batch_tokens: int
) -> Iterator[Batch]:
    """The whole data set once, in batches as training takes them: of `batch_tokens // max_seq_len` rows (at least one)
    in their order, or of rows of similar length.

    Causal: every token is a target exactly once, except the first of each document. Masked: every token is an input
    exactly once. What is random about a row is the same in every call and for every seed of a run.

    Raises QkvError at once when there is no target at all.
    """
    rows = build_rows(objective.without_noise, data, tokenizer, max_seq_len)
    if rows.count == 0:
        raise QkvError(
            f"{data.num_tokens} tokens held out for validation hold no target, at least 2 are needed",
            where="data.validation",
            hint="a larger fraction, files, or 0 for no validation",
        )
    if isinstance(rows, WindowRows):
        size = max(1, batch_tokens // max_seq_len)
        parts = [np.arange(first, min(first + size, rows.count)) for first in range(0, rows.count, size)]
    else:
        parts = cut_by_cost(np.argsort(rows.order_N, kind="stable"), rows.costs_N, batch_tokens)
    return (rows.batch(part, [(_VALIDATION, row) for row in part.tolist()]) for part in parts)
