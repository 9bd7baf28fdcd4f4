"""One weight, two names: how a network's parameters correspond to the tensors of a published checkpoint.

A family (see `families`) says it as a table of rules, from our module paths to theirs, `*` standing for the number of
a layer. A rule works both ways: `load` makes our tensors of theirs, `save` theirs of ours.

Shapes: H heads, D head width, M model width.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]


class View(Protocol):
    """The same numbers, arranged as we hold them and as they are published."""

    def load(self, theirs: Tensors) -> Tensors:
        """Published tensors as ours."""

    def save(self, ours: Tensors) -> Tensors:
        """Our tensors as published; the inverse of `load`."""


class Same:
    """As they are."""

    def load(self, theirs: Tensors) -> Tensors:
        return theirs

    def save(self, ours: Tensors) -> Tensors:
        return ours


class Transposed:
    """Matrices, or stacks of them, published as [in, out] (GPT-2's Conv1D); vectors stay."""

    def load(self, theirs: Tensors) -> Tensors:
        return tuple(tensor.mT if tensor.dim() > 1 else tensor for tensor in theirs)

    save = load


@dataclass(frozen=True)
class Rows:
    """Several of ours published as one, their rows one after the other: [q; k; v]. `sizes`: rows of each."""

    sizes: tuple[int, ...]

    def load(self, theirs: Tensors) -> Tensors:
        (stacked,) = theirs
        return torch.split(stacked, list(self.sizes))

    def save(self, ours: Tensors) -> Tensors:
        return (torch.cat(ours),)


@dataclass(frozen=True)
class HeadRows:
    """Several of ours published as one, head by head: [q; k; v] of the first, then of the next (GPT-NeoX, BLOOM).
    `sizes`: rows of each in one head."""

    num_heads: int
    sizes: tuple[int, ...]

    def load(self, theirs: Tensors) -> Tensors:
        (stacked,) = theirs
        heads = stacked.view(self.num_heads, -1, *stacked.shape[1:])
        return tuple(part.flatten(0, 1) for part in torch.split(heads, list(self.sizes), dim=1))

    def save(self, ours: Tensors) -> Tensors:
        split = [tensor.reshape(self.num_heads, -1, *tensor.shape[1:]) for tensor in ours]
        return (torch.cat(split, dim=1).flatten(0, 1),)


class Alternating:
    """Two of ours, of all experts, published as one: along the second dimension the first's and the second's take
    turns."""

    def load(self, theirs: Tensors) -> Tensors:
        (mixed,) = theirs
        return mixed[:, 0::2], mixed[:, 1::2]

    def save(self, ours: Tensors) -> Tensors:
        return (torch.stack(ours, dim=2).flatten(1, 2),)


@dataclass(frozen=True)
class Reshaped:
    """Published with another shape, such as [1, V] for [V]."""

    ours: tuple[int, ...]
    theirs: tuple[int, ...]

    def load(self, theirs: Tensors) -> Tensors:
        return tuple(tensor.reshape(self.ours) for tensor in theirs)

    def save(self, ours: Tensors) -> Tensors:
        return tuple(tensor.reshape(self.theirs) for tensor in ours)


class Stacked:
    """One of ours published piece by piece, each without the first dimension: experts, each by itself."""

    def load(self, theirs: Tensors) -> Tensors:
        return (torch.stack(theirs),)

    def save(self, ours: Tensors) -> Tensors:
        (stacked,) = ours
        return stacked.unbind()


class Twice:
    """One of ours published under two names, of which only the first is in use."""

    def load(self, theirs: Tensors) -> Tensors:
        return theirs[:1]

    def save(self, ours: Tensors) -> Tensors:
        return (*ours, *(tensor.clone() for tensor in ours))  # a file shares no memory between its tensors


@dataclass(frozen=True)
class Chain:
    """One view after another, from theirs to ours."""

    views: tuple[View, ...]

    def load(self, theirs: Tensors) -> Tensors:
        for view in self.views:
            theirs = view.load(theirs)
        return theirs

    def save(self, ours: Tensors) -> Tensors:
        for view in reversed(self.views):
            ours = view.save(ours)
        return ours


@dataclass(frozen=True)
class Rule:
    """Module paths of ours and theirs, `*` for a layer's number; their `.weight` and `.bias` go together. A path that
    ends with a parameter's own name is meant exactly. `view` None: as they are."""

    ours: str | tuple[str, ...]
    theirs: str | tuple[str, ...]
    view: View = field(default_factory=Same)


@dataclass(frozen=True)
class Fixed:
    """A published tensor that is no parameter here, because its value is known (a table of sines). It is compared on
    loading and written on saving."""

    theirs: str
    value: Callable[[], Tensor]


@dataclass(frozen=True)
class Bond:
    """Parameters that are together the same numbers as published tensors."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    view: View


def bonds(rules: Iterable[Rule], parameters: Sequence[str]) -> list[Bond]:
    """The rules spelled out for a network with these parameter names.

    Raises LookupError where a parameter is met by no rule or by two: a family's table is wrong then.
    """
    found: list[Bond] = []
    left = dict.fromkeys(parameters)
    for rule in rules:
        first, *others = (rule.ours,) if isinstance(rule.ours, str) else rule.ours
        theirs = (rule.theirs,) if isinstance(rule.theirs, str) else rule.theirs
        pattern = re.compile(re.escape(first).replace(r"\*", r"(\d+)") + r"(\.weight|\.bias|)")
        for name in parameters:
            match = pattern.fullmatch(name)
            if match is None:
                continue
            *layer, suffix = match.groups()
            number = layer[0] if layer else ""
            ours = (name, *(other.replace("*", number) + suffix for other in others))
            for one in ours:
                if one not in left:
                    raise LookupError(f"{one} is met by two rules, or no parameter")
                del left[one]
            found.append(Bond(ours, tuple(path.replace("*", number) + suffix for path in theirs), rule.view))
    if left:
        raise LookupError(f"met by no rule: {', '.join(left)}")
    return found


def published(found: Iterable[Bond], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our parameters as published tensors."""
    tensors: dict[str, Tensor] = {}
    for bond in found:
        told = bond.view.save(tuple(parameters[name].detach() for name in bond.ours))
        tensors.update(zip(bond.theirs, told, strict=True))
    return tensors
