"""The feed-forward kinds."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from qkv.config.base import Kinds, Part
from qkv.config.numbers import HiddenWidth, Probability


class FeedForwardConfig(Part):
    """Base of the feed-forward kinds."""

    def complete(self, d_model: int) -> FeedForwardConfig:
        """The same with every derived value filled in."""
        return self


class DenseFeedForwardConfig(FeedForwardConfig):
    """relu, gelu (erf), gelu_tanh, silu: two matrices, d_ff = 4 d_model. swiglu, geglu, geglu_tanh: three, d_ff =
    8/3 d_model rounded up to a multiple of 64. `dropout` acts on the hidden activations, `output_dropout` on the
    result."""

    kind: Literal["swiglu", "geglu", "geglu_tanh", "relu", "gelu", "gelu_tanh", "silu"] = "swiglu"
    d_ff: HiddenWidth | None = None
    bias: bool = False
    dropout: Probability = 0.0
    output_dropout: Probability = 0.0

    @property
    def gated(self) -> bool:
        return self.kind in ("swiglu", "geglu", "geglu_tanh")

    def complete(self, d_model: int) -> DenseFeedForwardConfig:
        default = math.ceil(8 * d_model / 3 / 64) * 64 if self.gated else 4 * d_model
        return self.model_copy(update={"d_ff": self.d_ff or default})


FeedForward = Annotated[FeedForwardConfig, Kinds(DenseFeedForwardConfig)]
