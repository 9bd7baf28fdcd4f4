"""How alike a query and a key are, where it is not their scaled dot product: what cosine and additive scores need of
their own. (Kernels compute the scores.)

Shapes: B batch, H heads, T tokens, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class UnitLength(nn.Module):
    """x / |x|, so that the dot product of two is the cosine of their angle; for queries times a learned number of each
    head.

    In Swin v2 (Liu et al. 2021, arXiv 2111.09883, 3.3) that number is 1 / tau and starts at 10; here it starts at
    sqrt(D), at which scores are the scaled dot products of queries and keys of length sqrt(D).
    """

    def __init__(self, head_dim: int, heads: int | None = None) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.weight = nn.Parameter(torch.full((heads,), head_dim**0.5)) if heads is not None else None

    def start(self, generator: torch.Generator | None) -> None:
        """See `qkv.nn.init`."""
        if self.weight is not None:
            self.weight.fill_(self.head_dim**0.5)

    def forward(self, x_BHTD: Tensor) -> Tensor:
        """[B, H, T, D] -> [B, H, T, D]."""
        wide = x_BHTD.to(torch.promote_types(x_BHTD.dtype, torch.float32))
        unit_BHTD = F.normalize(wide, dim=-1, eps=1e-6)
        if self.weight is not None:
            unit_BHTD = unit_BHTD * self.weight[:, None, None]
        return unit_BHTD.to(x_BHTD.dtype)


class AdditiveWeight(nn.Module):
    """w of the scores w tanh(q + k), one for each head. It starts at N(0, 1 / sqrt(D)), at which few scores are beyond
    +-1, whatever q and k are. Kept as one vector: to weight decay and Muon it is no matrix."""

    def __init__(self, head_dim: int, heads: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.weight = nn.Parameter(torch.randn(heads * head_dim) * head_dim**-0.5)

    def start(self, generator: torch.Generator | None) -> None:
        """See `qkv.nn.init`."""
        self.weight.normal_(0.0, self.head_dim**-0.5, generator=generator)

    def forward(self) -> Tensor:
        """w of each head, [H, D]."""
        return self.weight.view(-1, self.head_dim)
