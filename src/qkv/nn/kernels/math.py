"""The reference: scores, softmax and sum, written out."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from qkv.nn.kernels.base import Kernel
from qkv.nn.mask import Mask
from qkv.nn.score import Scoring


class MathKernel(Kernel):
    """Explicit attention ("Attention Is All You Need", eq. 1). Memory grows with T x S, of additive scores with
    T x S x D; does everything."""

    def forward(
        self,
        q_BHTD: Tensor,
        k_BGSD: Tensor,
        v_BGSE: Tensor,
        mask: Mask,
        scoring: Scoring,
        dropout: float = 0.0,
    ) -> Tensor:
        return self.attend(q_BHTD, k_BGSD, v_BGSE, mask, scoring, dropout)[0]

    def attend(
        self,
        q_BHTD: Tensor,
        k_BGSD: Tensor,
        v_BGSE: Tensor,
        mask: Mask,
        scoring: Scoring,
        dropout: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """The attended values [B, H, T, E] and the weights [B, H, T, S] (before dropout) that made them."""
        k_BGSD, v_BGSE = mask.without_padding(k_BGSD, v_BGSE)
        q_BGRTD = grouped(q_BHTD, k_BGSD.shape[1])
        if scoring.additive_HD is None:
            scores_BGRTS = q_BGRTD @ k_BGSD.unsqueeze(2).transpose(-1, -2)
        else:
            w_1GRD = grouped(scoring.additive_HD.to(q_BHTD.dtype)[None], k_BGSD.shape[1])
            scores_BGRTS = additive(q_BGRTD, k_BGSD.unsqueeze(2), w_1GRD)
        scores_BHTS = scores_BGRTS.flatten(1, 2) * scoring.scale
        if scoring.softcap is not None:
            scores_BHTS = capped(scores_BHTS, scoring.softcap)
        if scoring.bias is not None:
            scores_BHTS = scores_BHTS + scoring.bias.tensor(mask).to(scores_BHTS.dtype)
        allowed = None if mask.everything else mask.tensor()
        if scoring.sinks_H is None:
            weights_BHTS = masked_softmax(scores_BHTS, allowed)
        else:
            weights_BHTS = softmax_with_sinks(scores_BHTS, allowed, scoring.sinks_H)
        dropped_BHTS = F.dropout(weights_BHTS, dropout) if dropout else weights_BHTS
        out_BGRTE = grouped(dropped_BHTS, v_BGSE.shape[1]) @ v_BGSE.unsqueeze(2)
        return out_BGRTE.flatten(1, 2), weights_BHTS


def additive(q_BGRTD: Tensor, k_BG1SD: Tensor, w_1GRD: Tensor) -> Tensor:
    """w tanh(q + k) of every query and key, [B, G, R, T, S], for R = H/G query heads per key/value head and a w of each
    (Bahdanau et al. 2015, arXiv 1409.0473, appendix A.1.2)."""
    hidden_BGRTSD = torch.tanh(q_BGRTD.unsqueeze(-2) + k_BG1SD.unsqueeze(-3))
    return (hidden_BGRTSD @ w_1GRD[..., None, :, None]).squeeze(-1)


def capped(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap): x where it is small, never beyond +-cap (Bello et al. 2016; Gemma 2)."""
    return cap * torch.tanh(x / cap)


def grouped(x_BHTD: Tensor, kv_heads: int) -> Tensor:
    """Query heads by the key/value head they share: [B, H, ...] -> [B, G, H/G, ...]."""
    batch, heads, *rest = x_BHTD.shape
    return x_BHTD.reshape(batch, kv_heads, heads // kv_heads, *rest)


def masked_softmax(scores: Tensor, allowed: Tensor | None) -> Tensor:
    """Softmax over the last axis of the allowed scores, in float32 at least; a row that allows nothing is all zeros.

    The empty row is made finite before the softmax: zeroing its NaN afterwards would leave NaN gradients.
    """
    dtype = torch.promote_types(scores.dtype, torch.float32)
    if allowed is None:
        return scores.softmax(-1, dtype=dtype).to(scores.dtype)
    some = allowed.any(-1, keepdim=True)
    scores = scores.masked_fill(~allowed, float("-inf")).masked_fill(~some, 0.0)
    return scores.softmax(-1, dtype=dtype).to(scores.dtype).masked_fill(~allowed, 0.0)


def softmax_with_sinks(scores_BHTS: Tensor, allowed: Tensor | None, sinks_H: Tensor) -> Tensor:
    """Softmax over the allowed scores and each head's sink, without what falls to the sink: rows sum to less than 1."""
    dtype = torch.promote_types(scores_BHTS.dtype, torch.float32)
    if allowed is not None:
        scores_BHTS = scores_BHTS.masked_fill(~allowed, float("-inf"))
    sinks_BHT1 = sinks_H.to(scores_BHTS.dtype)[:, None, None].expand(*scores_BHTS.shape[:-1], 1)
    weights = torch.cat((scores_BHTS, sinks_BHT1), dim=-1).softmax(-1, dtype=dtype)
    return weights[..., :-1].to(scores_BHTS.dtype)
