"""The feed-forward part: each token by itself, through a wider layer and back.

Shapes: [..., M] model width, F feed-forward width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.config.feed_forward import DenseFeedForwardConfig
from qkv.nn.build import Dims, apply, build, dropout_of
from qkv.nn.linear import side_by_side


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU with the tanh approximation (GPT-2, Gemma, T5 v1.1)."""
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    """x sigmoid(1.702 x), an approximation of GELU (Hendrycks and Gimpel 2016, arXiv 1606.08415)."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "silu": F.silu,
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": gelu_tanh,
    "swiglu_oss": quick_gelu,
}
"""The non-linearity of each feed-forward kind; of the gated kinds, the gate's."""


def hidden_activations(kind: str, up: Tensor, gate: Tensor | None, limit: float | None = None) -> Tensor:
    """What the down projection reads, of the shape of `up`; `gate` is None for kinds without one.

    limit bounds the gate from above and `up` on both sides (DeepSeek-V4, gpt-oss). gpt-oss adds 1 to `up`.
    """
    if gate is None:
        return ACTIVATIONS[kind](up)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ACTIVATIONS[kind](gate) * (up + 1.0 if kind == "swiglu_oss" else up)


class FeedForward(nn.Module):
    """down(activation(up(x))) ("Attention Is All You Need", eq. 2), the same as two convolutions of width 1; the gated
    kinds are down(activation(gate(x)) * up(x)): SwiGLU, GEGLU (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, config: DenseFeedForwardConfig, dims: Dims) -> None:
        super().__init__()
        config = config.complete(dims.d_model)
        assert config.d_ff is not None
        self.kind, self.limit = config.kind, config.limit
        self.gate = nn.Linear(dims.d_model, config.d_ff, bias=config.bias) if config.gated else None
        self.up = nn.Linear(dims.d_model, config.d_ff, bias=config.bias)
        self.down = nn.Linear(config.d_ff, dims.d_model, bias=config.bias)
        self.dropout = dropout_of(config.dropout)
        self.output_dropout = dropout_of(config.output_dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[..., M] -> [..., M]."""
        return apply(self.output_dropout, self.down(apply(self.dropout, self.hidden(x))))

    def hidden(self, x: Tensor) -> Tensor:
        """The hidden activations, [..., F]."""
        if self.gate is None:
            return hidden_activations(self.kind, self.up(x), None, self.limit)
        gate, up = side_by_side(x, self.gate, self.up)
        return hidden_activations(self.kind, up, gate, self.limit)

    def extra_repr(self) -> str:
        return self.kind


build.register(DenseFeedForwardConfig, FeedForward)
