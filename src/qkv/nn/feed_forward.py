"""The feed-forward part: each token by itself, through a wider layer and back.

Shapes: [..., M] model width, F feed-forward width.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from qkv.config.feed_forward import DenseFeedForwardConfig
from qkv.nn.build import Dims, apply, build, dropout_of


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU with the tanh approximation (GPT-2, Gemma, T5 v1.1)."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "silu": F.silu,
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": gelu_tanh,
}
"""The non-linearity of each feed-forward kind; of the gated kinds, the gate's."""


class FeedForward(nn.Module):
    """down(activation(up(x))) ("Attention Is All You Need", eq. 2), the same as two convolutions of width 1; the gated
    kinds are down(activation(gate(x)) * up(x)): SwiGLU, GEGLU (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, config: DenseFeedForwardConfig, dims: Dims) -> None:
        super().__init__()
        config = config.complete(dims.d_model)
        assert config.d_ff is not None
        self.kind = config.kind
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
        up: Tensor = self.up(x)
        if self.gate is None:
            return ACTIVATIONS[self.kind](up)
        return ACTIVATIONS[self.kind](self.gate(x)) * up

    def extra_repr(self) -> str:
        return self.kind


build.register(DenseFeedForwardConfig, FeedForward)
