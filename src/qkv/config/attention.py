"""The attention kinds."""

from __future__ import annotations

from typing import Annotated, Literal

from qkv.config.base import Kinds, Part, contradiction
from qkv.config.numbers import Heads, Length, Positive, Probability, Width


class AttentionConfig(Part):
    """Base of the attention kinds."""

    num_heads: Heads = 8

    def complete(self, d_model: int) -> AttentionConfig:
        """The same with every derived value filled in."""
        return self


class StandardAttentionConfig(AttentionConfig):
    """Multi-head (`num_kv_heads` = `num_heads`), grouped-query (fewer) or multi-query (1) attention.

    `bias`: on all four projections, on q, k and v only ("qkv"), on q, v and o only ("qvo"), or on none. `scale` of the
    scores: null is head_dim^-1/2. `softcap` = c makes a score s c tanh(s/c). `dropout` acts on the attention weights.
    `window` = W: a causal query sees the W keys up to its own; a bidirectional one sees W - 1 on either side as well.
    `qk_norm` is of the layer's norm kind.

    `score`, of a query q and a key k: scaled-dot is q k / sqrt(head_dim); dot is q k; cosine is theirs, times a learned
    number per head that starts at sqrt(head_dim); additive is w tanh(q + k), w learned per head, which takes memory for
    head_dim numbers per query and key. `scale` is for scaled-dot. `value_residual` mixes
    the first layer's values into each layer's: half of each (fixed), or by two learned numbers per layer.
    """

    kind: Literal["standard"] = "standard"
    num_kv_heads: Heads | None = None
    head_dim: Width | None = None
    bias: bool | Literal["qkv", "qvo"] = False
    scale: Positive | None = None
    softcap: Positive | None = None
    score: Literal["scaled-dot", "dot", "cosine", "additive"] = "scaled-dot"
    qk_norm: Literal["none", "per-head", "full"] = "none"
    value_residual: Literal["none", "fixed", "learned"] = "none"
    window: Length | None = None
    dropout: Probability = 0.0

    def complete(self, d_model: int) -> StandardAttentionConfig:
        kv_heads = self.num_kv_heads or self.num_heads
        if self.num_heads % kv_heads:
            raise contradiction(
                "attention.num_heads",
                "attention.num_kv_heads",
                f"{self.num_heads} query heads cannot share {kv_heads} key/value heads evenly",
                "a num_kv_heads that divides num_heads",
            )
        if self.head_dim is None and d_model % self.num_heads:
            raise contradiction(
                "d_model",
                "attention.num_heads",
                f"{d_model} does not divide into {self.num_heads} heads",
                "another num_heads, or say attention.head_dim",
            )
        if self.scale is not None and self.score != "scaled-dot":
            raise contradiction(
                "attention.scale", "attention.score", f"{self.score} is scaled in its own way", "attention.scale=null"
            )
        head_dim = self.head_dim or d_model // self.num_heads
        return self.model_copy(update={"num_kv_heads": kv_heads, "head_dim": head_dim})


Attention = Annotated[AttentionConfig, Kinds(StandardAttentionConfig)]
