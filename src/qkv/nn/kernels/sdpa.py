"""PyTorch's fused attention."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from qkv.nn.bias import Bias
from qkv.nn.kernels.base import Kernel, say_fallback
from qkv.nn.kernels.math import MathKernel
from qkv.nn.mask import Mask, paddings


class SdpaKernel(Kernel):
    """`scaled_dot_product_attention`: never holds the T x S scores where the device has a fused kernel.

    Its causal flag is used only for as many queries as keys (it aligns the mask top-left), and never together with a
    mask (what that means depends on the backend). Weight dropout makes it compute explicitly on a CPU. A bias goes in
    as a float mask. A soft cap, additive scores and the gradient of a learned bias it cannot do. When one token is
    read, the query heads of a group become queries of one head, so that its keys and values are read once.
    """

    def forward(
        self,
        q_BHTD: Tensor,
        k_BGSD: Tensor,
        v_BGSE: Tensor,
        mask: Mask,
        scale: float,
        dropout: float = 0.0,
        bias: Bias | None = None,
        softcap: float | None = None,
        additive_HD: Tensor | None = None,
    ) -> Tensor:
        if softcap is not None:
            lacking = "a soft cap on scores"
        elif additive_HD is not None:
            lacking = "additive scores"
        else:
            lacking = "the gradient of a learned bias" if bias is not None and bias.learning else ""
        if lacking:
            say_fallback("sdpa", lacking)
            return MathKernel().attend(q_BHTD, k_BGSD, v_BGSE, mask, scale, dropout, bias, softcap, additive_HD)[0]
        if q_BHTD.shape[2] == 1 and bias is None:
            heads_BHT = q_BHTD.shape[:3]
            q_BHTD = q_BHTD.reshape(*k_BGSD.shape[:2], -1, q_BHTD.shape[3])
            return self._attend(q_BHTD, k_BGSD, v_BGSE, mask, scale, dropout, None).reshape(*heads_BHT, -1)
        return self._attend(q_BHTD, k_BGSD, v_BGSE, mask, scale, dropout, bias)

    def _attend(
        self,
        q_BHTD: Tensor,
        k_BGSD: Tensor,
        v_BGSE: Tensor,
        mask: Mask,
        scale: float,
        dropout: float,
        bias: Bias | None,
    ) -> Tensor:
        grouped = q_BHTD.shape[1] != k_BGSD.shape[1]
        if bias is None and (mask.everything or mask.square_causal):
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
        if bias is not None:
            seen = bias.tensor(mask).to(q_BHTD.dtype).masked_fill(~seen, float("-inf"))
        out_BHTE = F.scaled_dot_product_attention(
            q_BHTD, k_BGSD, v_BGSE, attn_mask=seen, dropout_p=dropout, scale=scale, enable_gqa=grouped
        )
        return out_BHTE.masked_fill(empty, 0.0)
