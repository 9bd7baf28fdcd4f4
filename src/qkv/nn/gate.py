"""A gate on what a sublayer writes: closed at first, so that a new part changes nothing until it has learnt something.

Shapes: B batch, T tokens, M model width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Gate(nn.Module):
    """tanh(a) y, `a` a learned number that starts at 0 (Flamingo: Alayrac et al. 2022, arXiv 2204.14198, 3.2)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def start(self, generator: torch.Generator | None) -> None:
        """Closed; nothing is drawn."""
        self.weight.zero_()

    def forward(self, y_BTM: Tensor) -> Tensor:
        return self.weight.tanh() * y_BTM
