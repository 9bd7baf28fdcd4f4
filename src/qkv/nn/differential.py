"""Differential attention: the difference of two attentions, in which what both see by chance cancels (Ye et al. 2024,
arXiv 2410.05258).

    O = (A_1 - lambda A_2) V,  lambda = exp(q_1 k_1) - exp(q_2 k_2) + lambda_0

Head j of the first half of the heads makes A_1 with head j + H/2, which makes A_2. As in DiffLlama, so do key/value
heads: V of the pair is the values of both, side by side. lambda_0 = 0.8 - 0.6 exp(-0.3 l) in layer l = 0, 1, ...; the
vectors q_i and k_i of a layer are learned.

Shapes: B batch, T queries, S keys, H query heads, G key/value heads, D head width, E = 2 D.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.config.attention import DifferentialAttentionConfig
from qkv.nn.attention import Attention
from qkv.nn.build import Dims, build
from qkv.nn.mask import Mask
from qkv.nn.score import Scoring


class DifferentialAttention(Attention):
    """Attention whose heads work in pairs. What a pair finds is divided by its root mean square and multiplied by
    1 - lambda_0, with which gradients are as large as those of plain attention (section 2.1)."""

    def __init__(self, config: DifferentialAttentionConfig, dims: Dims) -> None:
        super().__init__(config, dims)
        self.eps = getattr(dims.norm, "eps", 1e-5)
        self.lambda_q1 = nn.Parameter(0.1 * torch.randn(self.head_dim))
        self.lambda_k1 = nn.Parameter(0.1 * torch.randn(self.head_dim))
        self.lambda_q2 = nn.Parameter(0.1 * torch.randn(self.head_dim))
        self.lambda_k2 = nn.Parameter(0.1 * torch.randn(self.head_dim))
        # a number would make each layer another graph; on the CPU, a tensor of one meets tensors of any device
        self.first_lambda = torch.tensor(0.8 - 0.6 * math.exp(-0.3 * dims.layer), dtype=torch.float32, device="cpu")

    def start(self, generator: torch.Generator | None) -> None:
        """See `qkv.nn.init`; N(0, 0.1)."""
        for vector in (self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2):
            vector.normal_(0.0, 0.1, generator=generator)

    def attend(self, q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, mask: Mask, scoring: Scoring) -> Tensor:
        """What the pairs find, [B, H/2, T, E]."""
        v_BGSE = torch.cat(v_BGSD.chunk(2, dim=1), dim=-1).repeat(1, 2, 1, 1)
        first_BPTE, second_BPTE = super().attend(q_BHTD, k_BGSD, v_BGSE, mask, scoring).chunk(2, dim=1)
        difference_BPTE = first_BPTE - self.factor() * second_BPTE
        wide = difference_BPTE.to(torch.promote_types(difference_BPTE.dtype, torch.float32))
        normed_BPTE = F.rms_norm(wide, wide.shape[-1:], eps=self.eps).to(difference_BPTE.dtype)
        return (1 - self.first_lambda) * normed_BPTE

    def factor(self) -> Tensor:
        """lambda, a number in float32 at least."""
        dtype = torch.promote_types(self.lambda_q1.dtype, torch.float32)
        first, second = (
            (q_D * k_D).sum(dtype=dtype).exp()
            for q_D, k_D in ((self.lambda_q1, self.lambda_k1), (self.lambda_q2, self.lambda_k2))
        )
        return first - second + self.first_lambda


build.register(DifferentialAttentionConfig, DifferentialAttention)
