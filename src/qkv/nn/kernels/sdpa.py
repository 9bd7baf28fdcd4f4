"""PyTorch's fused attention."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from qkv.nn.kernels.base import Kernel, say_fallback
from qkv.nn.kernels.math import MathKernel
from qkv.nn.mask import Mask, paddings
from qkv.nn.score import Scoring


class SdpaKernel(Kernel):
    """`scaled_dot_product_attention`: never holds the T x S scores where the device has a fused kernel.

    Its causal flag is used only for as many queries as keys (it aligns the mask top-left), and never together with a
    mask (what that means depends on the backend). Weight dropout makes it compute explicitly on a CPU. A bias goes in
    as a float mask, and sinks as one more slot of it, whose key and value are 0. A soft cap, additive scores and the
    gradients of a learned bias and of sinks it cannot do. When one token is read, the query heads of a group become
    queries of one head, so that its keys and values are read once.
    """

    def forward(
        self, q_BHTD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor, mask: Mask, scoring: Scoring, dropout: float = 0.0
    ) -> Tensor:
        lacking = self.lacking(q_BHTD, k_BGSD, v_BGSE, mask, scoring, dropout)
        if lacking:
            say_fallback("sdpa", lacking)
            return MathKernel()(q_BHTD, k_BGSD, v_BGSE, mask, scoring, dropout)  # type: ignore[no-any-return]
        if q_BHTD.shape[2] == 1 and scoring.bias is None and scoring.sinks_H is None:
            heads_BHT = q_BHTD.shape[:3]
            q_BHTD = q_BHTD.reshape(*k_BGSD.shape[:2], -1, q_BHTD.shape[3])
            return _attend(q_BHTD, k_BGSD, v_BGSE, mask, scoring, dropout).reshape(*heads_BHT, -1)
        return _attend(q_BHTD, k_BGSD, v_BGSE, mask, scoring, dropout)

    def lacking(
        self, q_BHTD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor, mask: Mask, scoring: Scoring, dropout: float = 0.0
    ) -> str:
        if scoring.softcap is not None:
            return "a soft cap on scores"
        if scoring.additive_HD is not None:
            return "additive scores"
        if scoring.bias is not None and scoring.bias.learning:
            return "the gradient of a learned bias"
        if scoring.sinks_H is not None and scoring.sinks_H.requires_grad and torch.is_grad_enabled():
            return "the gradient of sinks"
        return ""


def _attend(q_BHTD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor, mask: Mask, scoring: Scoring, dropout: float) -> Tensor:
    bias, sinks_H, scale = scoring.bias, scoring.sinks_H, scoring.scale
    grouped = q_BHTD.shape[1] != k_BGSD.shape[1]
    if bias is None and sinks_H is None and (mask.everything or mask.square_causal):
        return F.scaled_dot_product_attention(
            q_BHTD,
            k_BGSD,
            v_BGSE,
            dropout_p=dropout,
            is_causal=not mask.everything,
            scale=scale,
            enable_gqa=grouped,
        )
    if paddings(mask.rule):
        k_BGSD, v_BGSE = mask.without_padding(k_BGSD, v_BGSE)
    allowed = mask.tensor()
    # an empty row may attend to everything and is zeroed afterwards: backends disagree on what it would give
    empty = ~allowed.any(-1, keepdim=True)
    seen = allowed | empty
    if bias is not None or sinks_H is not None:
        added = q_BHTD.new_zeros(seen.shape) if bias is None else bias.tensor(mask).to(q_BHTD.dtype)
        seen = added.masked_fill(~seen, float("-inf"))
    if sinks_H is not None:
        seen = seen.expand(-1, q_BHTD.shape[1], -1, -1)
        sinks_1HT1 = sinks_H.to(seen.dtype)[:, None, None].expand(*seen.shape[:-1], 1)
        seen = torch.cat((seen, sinks_1HT1), dim=-1)
        k_BGSD, v_BGSE = F.pad(k_BGSD, (0, 0, 0, 1)), F.pad(v_BGSE, (0, 0, 0, 1))
    out_BHTE = F.scaled_dot_product_attention(
        q_BHTD, k_BGSD, v_BGSE, attn_mask=seen, dropout_p=dropout, scale=scale, enable_gqa=grouped
    )
    return out_BHTE.masked_fill(empty, 0.0)
