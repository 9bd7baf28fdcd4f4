"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon): momentum whose updates are roughly orthogonalised.

Shapes: N matrices side by side, [P, Q] each with P <= Q.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

AT_ONCE = 1 << 23
"""Values orthogonalised side by side: so many keep a processor busy, and what is made of them needs little memory."""


class Muon(torch.optim.Muon):
    """`torch.optim.Muon`, with matrices of one shape, or its transpose, orthogonalised side by side: small products one
    by one leave the processor waiting."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            alike: dict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
            for matrix in group["params"]:
                if matrix.grad is not None:
                    alike[min(matrix.shape), max(matrix.shape)].append(matrix)
            for (short, long), matrices in alike.items():
                few = max(1, AT_ONCE // (short * long))
                for first in range(0, len(matrices), few):
                    self._update(matrices[first : first + few], group)

    def _update(self, matrices: list[nn.Parameter], group: dict[str, Any]) -> None:
        updates_NPQ = orthogonalised(
            torch.stack([_lying(self._direction(matrix, group)) for matrix in matrices]),
            group["ns_coefficients"],
            group["ns_steps"],
            group["eps"],
        )
        for matrix, update_PQ in zip(matrices, updates_NPQ.unbind(), strict=True):
            matrix.mul_(1 - group["lr"] * group["weight_decay"])
            lr = _adjusted(group["lr"], group["adjust_lr_fn"], matrix)
            matrix.add_(update_PQ if _lies(matrix) else update_PQ.T, alpha=-lr)

    def _direction(self, matrix: nn.Parameter, group: dict[str, Any]) -> Tensor:
        """The mean of past gradients and, with Nesterov's momentum, a step ahead of it; in bfloat16."""
        assert matrix.grad is not None
        state = self.state[matrix]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(matrix.grad)
        mean: Tensor = state["momentum_buffer"]
        mean.lerp_(matrix.grad, 1 - group["momentum"])
        return (matrix.grad.lerp(mean, group["momentum"]) if group["nesterov"] else mean).bfloat16()


def orthogonalised(x_NPQ: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """U V^T of each matrix's U S V^T, roughly: singular values come near 1 by Newton-Schulz iterations
    X <- a X + b (X X^T) X + c (X X^T)^2 X."""
    a, b, c = coefficients
    x_NPQ = x_NPQ / torch.linalg.vector_norm(x_NPQ, dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram_NPP = x_NPQ @ x_NPQ.mT
        x_NPQ = torch.baddbmm(x_NPQ, torch.baddbmm(gram_NPP, gram_NPP, gram_NPP, beta=b, alpha=c), x_NPQ, beta=a)
    return x_NPQ


def _lies(matrix: Tensor) -> bool:
    return matrix.shape[0] <= matrix.shape[1]


def _lying(matrix: Tensor) -> Tensor:
    """The matrix or its transpose, with no more rows than columns."""
    return matrix if _lies(matrix) else matrix.T


def _adjusted(lr: float, how: str | None, matrix: Tensor) -> float:
    """The learning rate that makes updates of all shapes alike, as Jordan et al. ("original": times
    sqrt(rows / columns) of a tall matrix), or as large as AdamW's (Liu et al. 2025, arXiv 2502.16982)."""
    rows, columns = matrix.shape
    if how == "match_rms_adamw":
        return float(lr * 0.2 * max(rows, columns) ** 0.5)
    return float(lr * max(1.0, rows / columns) ** 0.5)
