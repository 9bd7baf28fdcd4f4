"""Who may attend to whom: rules, not tensors. True means "may attend".

A rule speaks of slots, the index of a token in its row or cache, never of positions (these restart in packed
documents). Rules are small frozen objects that hold tensors as data and combine with & and |. `Mask` is a rule together
with the slots of one attention call; it becomes a tensor once, and only when a kernel asks for one.

Shapes: B batch (or 1), T query slots, S key slots.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Rule:
    """Base of the rules."""

    def allow(self, q_BT1: Tensor, k_1S: Tensor) -> Tensor:
        """Whether the query at slot q may attend to the key at slot k: bool, broadcastable to [B, T, S].

        q_BT1: [B or 1, T, 1]; k_1S: [1, 1, S], or [B, 1, S] where rows differ; both int64.
        """
        raise TypeError(f"{type(self).__name__} does not say what it allows")

    def select(self, rows_N: Tensor) -> Rule:
        """The rule for other rows: row n is treated as row rows_N[n] was. Tensors of a rule have rows as first axis."""
        return replace(self, **{field.name: _select(getattr(self, field.name), rows_N) for field in fields(self)})

    def __and__(self, other: Rule) -> Rule:
        return And((self, other))

    def __or__(self, other: Rule) -> Rule:
        return Or((self, other))


@dataclass(frozen=True, eq=False)
class Causal(Rule):
    """k <= q: the past and the token itself."""

    def allow(self, q_BT1: Tensor, k_1S: Tensor) -> Tensor:
        return k_1S <= q_BT1


@dataclass(frozen=True, eq=False)
class Window(Rule):
    """|q - k| < size. With Causal: the `size` keys up to the query's own; alone: `size` - 1 on either side as well."""

    size: int

    def allow(self, q_BT1: Tensor, k_1S: Tensor) -> Tensor:
        return (q_BT1 - k_1S).abs() < self.size


@dataclass(frozen=True, eq=False)
class Prefix(Rule):
    """Both within the row's first `lengths_B` slots. With Causal as `Causal() | Prefix(n)`: a prefix-LM."""

    lengths_B: Tensor

    def allow(self, q_BT1: Tensor, k_1S: Tensor) -> Tensor:
        length_B11 = self.lengths_B[:, None, None]
        return (q_BT1 < length_B11) & (k_1S < length_B11)


@dataclass(frozen=True, eq=False)
class Documents(Rule):
    """Only within one document: the ids of query and key are equal. Slots index the ids' second axis."""

    query_BT: Tensor
    key_BS: Tensor

    def allow(self, q_BT1: Tensor, k_1S: Tensor) -> Tensor:
        slots_BT = q_BT1.squeeze(-1)
        rows = max(self.query_BT.shape[0], slots_BT.shape[0])
        q_BT = self.query_BT.expand(rows, -1).gather(1, slots_BT.expand(rows, -1))
        k_BS = self.key_BS[:, k_1S.flatten()]
        return q_BT.unsqueeze(2) == k_BS.unsqueeze(1)


@dataclass(frozen=True, eq=False)
class Padding(Rule):
    """k < the row's length. Slots beyond it hold nothing, and whatever stands there, NaN included, reaches nobody."""

    lengths_B: Tensor

    def allow(self, q_BT1: Tensor, k_1S: Tensor) -> Tensor:
        return k_1S < self.lengths_B[:, None, None]


@dataclass(frozen=True, eq=False)
class And(Rule):
    """Allowed by every rule."""

    rules: tuple[Rule, ...]

    def allow(self, q_BT1: Tensor, k_1S: Tensor) -> Tensor:
        allowed = self.rules[0].allow(q_BT1, k_1S)
        for rule in self.rules[1:]:
            allowed = allowed & rule.allow(q_BT1, k_1S)
        return allowed


@dataclass(frozen=True, eq=False)
class Or(Rule):
    """Allowed by at least one rule."""

    rules: tuple[Rule, ...]

    def allow(self, q_BT1: Tensor, k_1S: Tensor) -> Tensor:
        allowed = self.rules[0].allow(q_BT1, k_1S)
        for rule in self.rules[1:]:
            allowed = allowed | rule.allow(q_BT1, k_1S)
        return allowed


def _select(value: Any, rows_N: Tensor) -> Any:
    if isinstance(value, Tensor):
        return value[rows_N]
    return tuple(rule.select(rows_N) for rule in value) if isinstance(value, tuple) else value


def paddings(rule: Rule | None) -> list[Padding]:
    """The Padding rules that hold whatever else does: slots beyond them are empty."""
    if isinstance(rule, Padding):
        return [rule]
    if isinstance(rule, And):
        return [padding for part in rule.rules for padding in paddings(part)]
    return []


class Mask:
    """A rule and the slots it is asked about, for one attention call shared by many layers.

    rule: None allows everything. q_slots: [T], or [B, T] where rows differ. num_keys: S; keys are slots 0 .. S-1,
    unless k_slots, [S] or [B, S], says which they are, below 0 where there is no key (a rolling cache). aligned: the
    caller knows that q_slots are S-T .. S-1 in every row (a plain forward, or the end of a cache).
    """

    def __init__(
        self, rule: Rule | None, q_slots: Tensor, num_keys: int, *, aligned: bool, k_slots: Tensor | None = None
    ) -> None:
        self.rule = rule
        self.q_slots = q_slots
        self.num_keys = num_keys if k_slots is None else k_slots.shape[-1]
        self.k_slots = k_slots
        self.aligned = aligned and k_slots is None
        self._tensor: Tensor | None = None

    @classmethod
    def square(cls, rule: Rule | None, length: int, device: torch.device) -> Mask:
        """`length` tokens attending to each other."""
        return cls(rule, torch.arange(length, device=device), length, aligned=True)

    @property
    def num_queries(self) -> int:
        return self.q_slots.shape[-1]

    @property
    def everything(self) -> bool:
        """Nothing is hidden: no rule, or the last token of a cache under Causal, which may see every slot."""
        return self.rule is None or (isinstance(self.rule, Causal) and self.aligned and self.num_queries == 1)

    @property
    def square_causal(self) -> bool:
        """The one case in which kernels' causal flags are right: as many queries as keys (flags align top-left)."""
        return isinstance(self.rule, Causal) and self.aligned and self.num_queries == self.num_keys

    def slots(self, q: slice, k: slice) -> tuple[Tensor, Tensor]:
        """The slots of these queries, [B or 1, tile of T, 1], and of these keys, [B or 1, 1, tile of S]."""
        queries, keys = self.q_slots[..., q], self._key_slots()[..., k]
        queries = queries if queries.dim() == 2 else queries.unsqueeze(0)
        return queries.unsqueeze(2), (keys if keys.dim() == 2 else keys.unsqueeze(0)).unsqueeze(1)

    def _key_slots(self) -> Tensor:
        """[S] or [B, S]."""
        return torch.arange(self.num_keys, device=self.q_slots.device) if self.k_slots is None else self.k_slots

    def same_slots(self, other: Mask) -> bool:
        """Whether the other is asked about the very same slots."""
        same = self.q_slots is other.q_slots and self.k_slots is other.k_slots
        return same and self.num_keys == other.num_keys

    def tile(self, q: slice, k: slice) -> Tensor:
        """allow[..., q, k] as bool [B or 1, tile of T, tile of S], without building the rest."""
        q_BT1, k_11S = self.slots(q, k)
        shape = q_BT1.shape[1], k_11S.shape[2]
        if self.rule is None:
            return torch.ones(1, *shape, dtype=torch.bool, device=k_11S.device)
        allowed = self.rule.allow(q_BT1, k_11S)
        if self.k_slots is not None:
            allowed = allowed & (k_11S >= 0)
        return allowed.expand(allowed.shape[0], *shape)

    def tensor(self) -> Tensor:
        """The whole rule as bool [B or 1, 1, T, S], built once. Each compiled block builds its own: that the first one
        finds none and the others do would make it another graph."""
        if torch.compiler.is_compiling():
            return self.tile(slice(None), slice(None)).unsqueeze(1)
        if self._tensor is None:
            self._tensor = self.tile(slice(None), slice(None)).unsqueeze(1)
        return self._tensor

    def without_padding(self, *tensors_BGSD: Tensor) -> tuple[Tensor, ...]:
        """Keys and values with zeros in the slots that Padding declares empty: 0 x NaN would be NaN."""
        for padding in paddings(self.rule):
            empty_B1S1 = (self._key_slots() >= padding.lengths_B[:, None])[:, None, :, None]
            tensors_BGSD = tuple(tensor.masked_fill(empty_B1S1, 0.0) for tensor in tensors_BGSD)
        return tensors_BGSD
