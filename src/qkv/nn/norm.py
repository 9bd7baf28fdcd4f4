"""Normalisation of the channels of each token.

Shapes: any [..., M], M the normalised width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.config.parts import LayerNormConfig, NoNormConfig, RMSNormConfig
from qkv.nn.build import Dims, build


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * g + b with the biased variance (Ba et al. 2016, arXiv 1607.06450)."""

    def __init__(self, config: LayerNormConfig, dims: Dims) -> None:
        super().__init__()
        self.eps = config.eps
        self.weight = nn.Parameter(torch.ones(dims.d_model))
        self.bias = nn.Parameter(torch.zeros(dims.d_model)) if config.bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., M] -> [..., M]."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * g (Zhang and Sennrich 2019, arXiv 1910.07467), computed in float32.

    `before-weight` (LLaMA) rounds to the input's dtype what is then multiplied by g; `after-weight` (Gemma, OLMo-2)
    rounds the product. With `unit_offset` g is 1 + weight.
    """

    def __init__(self, config: RMSNormConfig, dims: Dims) -> None:
        super().__init__()
        self.eps = config.eps
        self.unit_offset = config.unit_offset
        self.round_last = config.rounding == "after-weight"
        self.weight = nn.Parameter((torch.zeros if config.unit_offset else torch.ones)(dims.d_model))

    def forward(self, x: Tensor) -> Tensor:
        """[..., M] -> [..., M]."""
        wide = x.double() if x.dtype == torch.float64 else x.float()
        weight = self.weight.to(wide.dtype) if self.round_last else self.weight
        if self.unit_offset:
            weight = 1.0 + weight
        if self.round_last or x.dtype == wide.dtype:
            return _rms_norm(wide, weight, self.eps).to(x.dtype)
        return weight * _rms_norm(wide, None, self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}{', 1 + weight' if self.unit_offset else ''}"


def _rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """F.rms_norm, whose gradient PyTorch has no kernel for on a CPU: its many small steps take several times as long as
    those of the formula. Compiled, they are one."""
    if x.device.type != "cpu" or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    normed: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return normed


class _RMSNorm(torch.autograd.Function):
    """n g with n = x r and r = 1 / sqrt(mean(x^2) + eps), rounded as F.rms_norm does. Of a gradient d, x gets
    r (d g - n mean(d g n)), and g the sum of d n. Results take the place of what they are made of, because new memory
    is what takes time here."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        normed = x * _inverse_rms(x, eps)
        return normed if weight is None else normed.mul_(weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor | None, float], output: Tensor) -> None:
        x, weight, ctx.eps = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        inverse = _inverse_rms(x, ctx.eps)
        normed = x * inverse
        products = d * normed
        if weight is None:
            d_x, d_weight, mean = d.clone(), None, products.mean(-1, keepdim=True)
        else:
            d_x, d_weight = d * weight, products.reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
            mean = (products @ weight.to(products.dtype)).unsqueeze(-1) / x.shape[-1]
        return d_x.addcmul_(normed, mean, value=-1).mul_(inverse), d_weight, None


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    return (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def _identity(config: NoNormConfig, dims: Dims) -> nn.Identity:
    return nn.Identity()


build.register(LayerNormConfig, LayerNorm)
build.register(RMSNormConfig, RMSNorm)
build.register(NoNormConfig, _identity)
