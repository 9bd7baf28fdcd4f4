"""Value residual: later layers attend to the first layer's values as well (Zhou et al. 2024, arXiv 2410.17897).

    V_l' = a V_l + b V_1

with a = b = 1/2, or both learned in each layer. The first layer's own values stay as they are. A token's mixed values
are what a cache holds, so nothing else of V_1 outlives the forward.

Shapes: B batch, G key/value heads, T tokens, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qkv.config.errors import UsageError


class FirstValues:
    """V_1 of the tokens of one forward: left here by a stack's first layer, read by those after it."""

    def __init__(self) -> None:
        self.v_BGTD: Tensor | None = None


class GiveValues(nn.Module):
    """What the first layer does with its values."""

    def forward(self, v_BGTD: Tensor, first: FirstValues) -> Tensor:
        """[B, G, T, D], unchanged."""
        first.v_BGTD = v_BGTD
        return v_BGTD


class MixValues(nn.Module):
    """(V_l + V_1) / 2."""

    def forward(self, v_BGTD: Tensor, first: FirstValues) -> Tensor:
        """[B, G, T, D] -> the same."""
        return 0.5 * v_BGTD + 0.5 * _given(first)


class LearnedMixValues(nn.Module):
    """a V_l + b V_1; `weights` holds a and b."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.full((2,), 0.5))

    def start(self, generator: torch.Generator | None) -> None:
        """Half of each."""
        self.weights.fill_(0.5)

    def forward(self, v_BGTD: Tensor, first: FirstValues) -> Tensor:
        """[B, G, T, D] -> the same."""
        own, given = self.weights.to(v_BGTD.dtype).unbind()
        return own * v_BGTD + given * _given(first)


def _given(first: FirstValues) -> Tensor:
    if first.v_BGTD is None:
        raise UsageError("this layer mixes the first layer's values into its own, and has none", hint="a whole Stack")
    return first.v_BGTD
