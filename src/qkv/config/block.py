"""What can be said about one layer of a stack."""

from __future__ import annotations

from typing import Literal

from qkv.config.attention import Attention, StandardAttentionConfig
from qkv.config.base import Node
from qkv.config.feed_forward import DenseFeedForwardConfig, FeedForward
from qkv.config.numbers import Probability
from qkv.config.parts import Norm, RMSNormConfig
from qkv.config.positions import Position, RopeConfig
from qkv.config.residuals import PlainResidualConfig, Residual

Parallel = Literal["none", "one-norm", "two-norms"]
"""none: attention, then feed-forward. Otherwise both read the stream at once, x + Attention(N x) + FeedForward(N' x):
with one norm for both (GPT-J, Phi), or one each (GPT-NeoX)."""


class BlockConfig(Node):
    """One layer, complete. `cross_attention` is None where there is nothing to attend to, and where `layers` says null.
    `cross_gate`: its output is multiplied by tanh(a), a learned number that starts at 0, so that a new source changes
    nothing at first (Flamingo).
    """

    norm: Norm = RMSNormConfig()
    position: Position = RopeConfig()
    attention: Attention = StandardAttentionConfig()
    cross_attention: Attention | None = None
    cross_gate: bool = False
    feed_forward: FeedForward = DenseFeedForwardConfig()
    parallel: Parallel = "none"
    residual: Residual = PlainResidualConfig()
    dropout: Probability = 0.0


BLOCK_KEYS = tuple(BlockConfig.model_fields)
"""The shared keys that a layer may override."""
