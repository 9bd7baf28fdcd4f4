"""Keys and values of tokens already seen.

A cache is passed to `forward` and belongs to its caller. Every kind obeys one law: any split of a sequence into chunks
gives the logits of the full forward. Each row has its own length, so prompts of unequal length share a batch. By
`Cache.select` rows move, multiply and leave; a kind that cannot do that raises UsageError there, and so refuses beams.
Caches serve inference: use them under `torch.no_grad()`.

A layer with a window keeps no more than the window: see `RollingCache`.

Shapes: B rows, G key/value heads, S slots held, C cells of a ring, T new tokens, D head width, N rows after a
selection.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qkv.config.errors import UsageError
from qkv.nn.mask import Rule


class KeysValues:
    """What a layer holds; None before the first token."""

    def __init__(self) -> None:
        self.k_BGSD: Tensor | None = None
        self.v_BGSD: Tensor | None = None

    def select(self, rows_N: Tensor) -> None:
        """Row n becomes what row rows_N[n] was."""
        if self.k_BGSD is not None and self.v_BGSD is not None:
            self.k_BGSD, self.v_BGSD = self.k_BGSD.index_select(0, rows_N), self.v_BGSD.index_select(0, rows_N)


class LayerCache(KeysValues):
    """One layer's keys and values; memory is zero where nothing was written, never uninitialised (0 x NaN is NaN).

    `capacity` None: the buffers grow as needed, doubling, so that appending n tokens copies O(n). Otherwise they are
    fixed and returned whole, so that shapes never change.
    """

    def __init__(self, capacity: int | None) -> None:
        super().__init__()
        self.capacity = capacity

    def append(self, k_BGTD: Tensor, v_BGTD: Tensor, slots: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """Write new keys and values at `slots` ([T], or [B, T] where rows differ) and return all that is held.

        end: one past the last slot written in any row.
        """
        self.k_BGSD = self._write(self.k_BGSD, k_BGTD, slots, end)
        self.v_BGSD = self._write(self.v_BGSD, v_BGTD, slots, end)
        if self.capacity is None:
            return self.k_BGSD[:, :, :end], self.v_BGSD[:, :, :end]
        return self.k_BGSD, self.v_BGSD

    def _write(self, held: Tensor | None, new_BGTD: Tensor, slots: Tensor, end: int) -> Tensor:
        held = self._with_room(held, new_BGTD, end)
        if slots.dim() == 1:
            held.index_copy_(2, slots, new_BGTD)
        else:
            rows = torch.arange(slots.shape[0], device=slots.device)[:, None]
            held[rows, :, slots] = new_BGTD.transpose(1, 2)
        return held

    def _with_room(self, held: Tensor | None, new_BGTD: Tensor, end: int) -> Tensor:
        """The memory, with slots up to `end` at least."""
        size = self.capacity or 0
        if self.capacity is None:
            size = held.shape[2] if held is not None else 0
            if end > size:
                size = self._grown(size, end)
        if held is None or held.shape[2] < size:
            grown = new_BGTD.new_zeros(*new_BGTD.shape[:2], size, new_BGTD.shape[3])
            if held is not None:
                grown[:, :, : held.shape[2]] = held
            held = grown
        return held

    def _grown(self, size: int, end: int) -> int:
        """The next size of memory that grows."""
        return max(end, 2 * size, 16)

    def reset(self) -> None:
        """Forget everything; the memory stays and is zeroed."""
        for held in (self.k_BGSD, self.v_BGSD):
            if held is not None:
                held.zero_()


class RollingCache(LayerCache):
    """The last W tokens of each row, which are all that later ones see through a window of W: a ring of W cells, in
    which slot s is in cell s mod W.

    A single token takes the cell of the one that no later token sees. Of several, the first would miss what the last
    replaces: they are returned beside the ring, and join it when the call has succeeded (`settle`).
    """

    def __init__(self, window: int, capacity: int | None) -> None:
        super().__init__(None if capacity is None else window)
        self.window = window
        self._new: tuple[Tensor, Tensor] | None = None

    def append(self, k_BGTD: Tensor, v_BGTD: Tensor, slots: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """As of any layer; which slots the keys returned are of, `key_slots` says."""
        count = k_BGTD.shape[2]
        if count == 1:
            self._new = None
            return super().append(k_BGTD, v_BGTD, slots % self.window, min(end, self.window))
        self._new = k_BGTD, v_BGTD
        cells = self._cells(end - count)
        self.k_BGSD = self._with_room(self.k_BGSD, k_BGTD, cells)
        self.v_BGSD = self._with_room(self.v_BGSD, v_BGTD, cells)
        return torch.cat((self.k_BGSD[:, :, :cells], k_BGTD), 2), torch.cat((self.v_BGSD[:, :, :cells], v_BGTD), 2)

    def key_slots(self, lengths: Tensor | int, slots: Tensor, end: int) -> Tensor:
        """The slots of the keys that `append` returns, [S] or [B, S]; below 0 where a cell is empty.

        lengths: tokens held before, of all rows or [B, 1]; slots, end: as `append` is given.
        """
        count = slots.shape[-1]
        if count == 1:
            return self._slots_in_ring(lengths + 1, self._cells(end), slots.device)
        return torch.cat((self._slots_in_ring(lengths, self._cells(end - count), slots.device), slots), -1)

    def _cells(self, end: int) -> int:
        """How many cells are looked at where no slot from `end` on was written: all, in memory of fixed size."""
        return self.window if self.capacity is not None else min(end, self.window)

    def _slots_in_ring(self, lengths: Tensor | int, cells: int, device: torch.device) -> Tensor:
        """The slot in each of the first cells of a ring that has taken up so many tokens: the last s < lengths for
        which s mod W is the cell."""
        cell_C = torch.arange(cells, device=device)
        return lengths - 1 - (lengths - 1 - cell_C) % self.window

    def settle(self, before_B: Tensor, after_B: Tensor, end: int) -> None:
        """Take up the real ones of the tokens of the last call, with which rows of `before_B` tokens have become
        `after_B`; end: as `append` was given."""
        if self._new is None:
            return
        (k_BGTD, v_BGTD), self._new = self._new, None
        index_BC = self._slots_in_ring(after_B[:, None], self._cells(end), after_B.device) - before_B[:, None]
        self.k_BGSD = self._take_up(self.k_BGSD, k_BGTD, index_BC)
        self.v_BGSD = self._take_up(self.v_BGSD, v_BGTD, index_BC)

    def _take_up(self, held: Tensor | None, new_BGTD: Tensor, index_BC: Tensor) -> Tensor:
        """New token `index_BC` in each cell; the cell as it was where that is below 0."""
        cells, index_B1C1 = index_BC.shape[1], index_BC[:, None, :, None]
        held = self._with_room(held, new_BGTD, cells)
        new_BGCD = new_BGTD.gather(2, index_B1C1.clamp(min=0).expand(-1, new_BGTD.shape[1], -1, new_BGTD.shape[3]))
        held[:, :, :cells] = torch.where(index_B1C1 >= 0, new_BGCD, held[:, :, :cells])
        return held

    def _grown(self, size: int, end: int) -> int:
        return min(super()._grown(size, end), self.window)

    def reset(self) -> None:
        super().reset()
        self._new = None


class CrossCache(KeysValues):
    """One layer's keys and values of the source: computed once, then only read."""

    def reset(self) -> None:
        self.k_BGSD = self.v_BGSD = None


class Cache:
    """The caches of all layers, the number of tokens held in each row, and what is known of the source.

    windows: of each layer, None where it has none. A layer's cache is rolling where its window is less than `capacity`.

    `lengths_B` counts real tokens. Right-padded slots of a ragged prompt are overwritten by the next tokens; until then
    no real query can see them, since they lie in its future.
    """

    def __init__(
        self, batch: int, windows: Sequence[int | None], *, capacity: int | None, cross: bool, device: torch.device
    ) -> None:
        self.batch = batch
        self.capacity = capacity
        self.layers = [
            LayerCache(capacity)
            if window is None or (capacity is not None and capacity <= window)
            else RollingCache(window, capacity)
            for window in windows
        ]
        self.cross: Sequence[CrossCache | None] = [CrossCache() if cross else None for _ in windows]
        self.lengths_B = torch.zeros(batch, dtype=torch.int64, device=device)
        self.longest = 0
        """The largest of `lengths_B`, known without asking the device."""
        self.even = True
        """All rows have the same length."""
        self.source_rule: Rule | None = None
        self.has_source = False
        self.rows_per_source = 1
        """So many rows next to each other share a source, whose keys and values are held once."""

    def slots(self, count: int) -> Tensor:
        """The slots of the next `count` tokens: [T] where all rows agree and may grow, else [B, T]."""
        new = torch.arange(count, device=self.lengths_B.device)
        if self.even and self.capacity is None:
            return new + self.longest
        return self.lengths_B[:, None] + new

    def key_slots(self, layer: int, count: int) -> Tensor | None:
        """The slots of the keys that a layer returns with the next `count` tokens: [S], or [B, S] where rows differ;
        None where they are slots 0 .. S-1."""
        held = self.layers[layer]
        if not isinstance(held, RollingCache):
            return None
        slots = self.slots(count)
        lengths = self.longest if slots.dim() == 1 else self.lengths_B[:, None]
        return held.key_slots(lengths, slots, self.longest + count)

    def room_for(self, count: int) -> int:
        """One past the last slot that `count` more tokens need. Raises UsageError when they do not fit."""
        end = self.longest + count
        if self.capacity is not None and end > self.capacity:
            raise UsageError(
                f"the cache holds {self.capacity} tokens, and {self.longest} + {count} = {end} are needed",
                hint="new_cache(length=...) with room for the prompt and all new tokens",
            )
        return end

    def advance(self, count: int, lengths_B: Tensor | None) -> None:
        """Note that `count` tokens were written, of which only the first `lengths_B` of each row are real."""
        after_B = self.lengths_B + (count if lengths_B is None else lengths_B)
        for layer in self.layers:
            if isinstance(layer, RollingCache):
                layer.settle(self.lengths_B, after_B, self.longest + count)
        self.lengths_B = after_B
        if lengths_B is None:
            self.longest += count
        else:
            self._measure()

    def select(self, rows: Sequence[int], rows_per_source: int = 1) -> None:
        """Row n becomes what row rows[n] was: rows may move, be repeated and be left out.

        Where there is a source, each `rows_per_source` rows next to each other share one from now on, as the beams of a
        search do: what is held of it is not repeated, nor copied while the sources stay as they are. Raises UsageError
        where such rows had different sources.
        """
        if self.has_source:
            self._select_sources([row // self.rows_per_source for row in rows], rows_per_source)
        if list(rows) != list(range(self.batch)):
            rows_N = torch.tensor(rows, device=self.lengths_B.device)
            for layer in self.layers:
                layer.select(rows_N)
            self.lengths_B = self.lengths_B[rows_N]
            if not self.even:
                self._measure()
        self.batch = len(rows)

    def _select_sources(self, source_of_row: list[int], rows_per_source: int) -> None:
        kept = source_of_row[::rows_per_source]
        if source_of_row != [source for source in kept for _ in range(rows_per_source)]:
            raise UsageError(
                f"rows that share a source are {rows_per_source} by {rows_per_source} of one, not {source_of_row}"
            )
        if kept != list(range(self.batch // self.rows_per_source)):
            rows_N = torch.tensor(kept, device=self.lengths_B.device)
            for cross in self.cross:
                if cross is not None:
                    cross.select(rows_N)
            if self.source_rule is not None:
                self.source_rule = self.source_rule.select(rows_N)
        self.rows_per_source = rows_per_source

    def _measure(self) -> None:
        self.longest = int(self.lengths_B.max())
        self.even = bool((self.lengths_B == self.longest).all())

    def reset(self) -> None:
        """Empty the cache for another sequence; what was held leaves no trace."""
        for layer in self.layers:
            layer.reset()
        for cross in self.cross:
            if cross is not None:
                cross.reset()
        self.lengths_B = torch.zeros_like(self.lengths_B)
        self.longest, self.even = 0, True
        self.source_rule, self.has_source, self.rows_per_source = None, False, 1
