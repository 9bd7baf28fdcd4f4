"""How alike a query and a key are: what kernels must know to compute scores, and what scores other than the scaled dot
product have of their own.

Shapes: B batch, H heads, T tokens, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.nn.bias import Bias


@dataclass(frozen=True, eq=False)
class Scoring:
    """How one attention call makes scores of queries and keys, cap(q k^T scale) + bias, and weights of scores.

    softcap: c makes the scaled scores s c tanh(s / c), before any bias. additive_HD: w, with which a score is
    w tanh(q + k) and not q k. sinks_H: each head's score of a key that every query sees and whose value is 0.
    """

    scale: float
    softcap: float | None = None
    bias: Bias | None = None
    additive_HD: Tensor | None = None
    sinks_H: Tensor | None = None

    def head(self, number: int) -> Scoring:
        """That of one head alone."""
        one = slice(number, number + 1)
        return replace(
            self,
            bias=None if self.bias is None else self.bias.head(number),
            additive_HD=None if self.additive_HD is None else self.additive_HD[one],
            sinks_H=None if self.sinks_H is None else self.sinks_H[one],
        )


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


class Sinks(nn.Module):
    """For each head, a learned score of a key that is always seen and whose value is 0: a head with nothing to find
    need not attend to anything (gpt-oss: Agarwal et al. 2025, arXiv 2508.10925). It starts at 0, the score of a key at
    a right angle to the query."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(heads))

    def start(self, generator: torch.Generator | None) -> None:
        """See `qkv.nn.init`."""
        self.weight.zero_()

    def forward(self) -> Tensor:
        """The score of each head's sink, [H]."""
        return self.weight
