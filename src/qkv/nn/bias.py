"""Numbers added to the scores of attention: as a mask says who may attend to whom, a bias says who would rather.

Shapes: B batch (or 1), T query slots, S key slots, H query heads.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from qkv.nn.mask import Mask


class Bias:
    """Base of the biases. A bias speaks of slots, as rules do. It is made once per forward and shared by the layers of
    a kind; it becomes a tensor once, and only when a kernel asks for one.

    weight: what its numbers are made of, [..., H]; learned or not.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self._tensor: Tensor | None = None
        self._places: Mask | None = None

    def values(self, weight: Tensor, q_BT1: Tensor, k_11S: Tensor) -> Tensor:
        """What `weight` makes of the queries at slots q and the keys at slots k, [B, H, T, S]; both int64."""
        raise TypeError(f"{type(self).__name__} does not say what it adds")

    @property
    def learning(self) -> bool:
        """Whether a gradient is wanted."""
        return self.weight.requires_grad and torch.is_grad_enabled()

    def tile(self, mask: Mask, q: slice, k: slice, weight: Tensor | None = None) -> Tensor:
        """What is added in the attention call of `mask` to a tile of its scores, [B, H, tile of T, tile of S]."""
        return self.values(self.weight if weight is None else weight, *mask.slots(q, k))

    def tensor(self, mask: Mask) -> Tensor:
        """The whole of it, [B, H, T, S]; built once for all masks of the same slots, but by each compiled block for
        itself, as `Mask.tensor` is."""
        if torch.compiler.is_compiling():
            return self.tile(mask, slice(None), slice(None))
        if self._tensor is None or self._places is None or not self._places.same_slots(mask):
            self._tensor, self._places = self.tile(mask, slice(None), slice(None)), mask
        return self._tensor

    def head(self, number: int) -> Bias:
        """The bias of one head alone."""
        alone = copy.copy(self)
        alone.weight, alone._tensor = self.weight[..., number : number + 1], None
        return alone
