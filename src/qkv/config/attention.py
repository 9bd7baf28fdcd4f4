"""The attention kinds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import model_validator

from qkv.config.base import Kinds, Part, contradiction
from qkv.config.numbers import Heads, Length, Positive, Probability, Width
from qkv.config.positions import RopeConfig


class AttentionConfig(Part):
    """Base of the attention kinds."""

    num_heads: Heads = 8

    def complete(self, d_model: int) -> AttentionConfig:
        """The same with every derived value filled in."""
        return self

    def check_rope(self, rope: RopeConfig) -> None:
        """Raise an error that names both keys where queries and keys of this width cannot rotate so."""

    @property
    def rotary_dim(self) -> int | None:
        """The channels of each head that positions act on; None: `d_model`."""
        return None

    @property
    def cache_width(self) -> int:
        """How many numbers a cache keeps of one token (0: unknown)."""
        return 0

    def cached(self, length: int) -> int:
        """How many numbers a cache keeps of `length` tokens: of a window no more than the window."""
        return self.cache_width * min(length, getattr(self, "window", None) or length)

    @property
    def score_width(self) -> int:
        """The products of one query with one key, and of their weight with the value, in all heads (0: unknown)."""
        return 0


class StandardAttentionConfig(AttentionConfig):
    """Multi-head (`num_kv_heads` = `num_heads`), grouped-query (fewer) or multi-query (1) attention.

    `bias`: on all four projections, on q, k and v only ("qkv"), on q, v and o only ("qvo"), or on none. `scale` of the
    scores: null is head_dim^-1/2. `softcap` = c makes a score s c tanh(s/c). `dropout` acts on the attention weights.
    `window` = W: a causal query sees the W keys up to its own; a bidirectional one sees W - 1 on either side as well.
    `qk_norm` is of the layer's norm kind.

    `score`, of a query q and a key k: scaled-dot is q k / sqrt(head_dim); dot is q k; cosine is theirs, times a learned
    number per head that starts at sqrt(head_dim); additive is w tanh(q + k), w learned per head, which takes memory for
    head_dim numbers per query and key. `scale` is for scaled-dot. `sinks`: each head also attends to nothing, to a
    degree by a learned score. `value_residual` mixes the first layer's values into each layer's: half of each (fixed),
    or by two learned numbers per layer. `gate` multiplies what is found by sigmoid(x W_g): by a number for each channel
    (elementwise) or for each head.
    """

    kind: Literal["standard"] = "standard"
    num_kv_heads: Heads | None = None
    head_dim: Width | None = None
    bias: bool | Literal["qkv", "qvo"] = False
    scale: Positive | None = None
    softcap: Positive | None = None
    score: Literal["scaled-dot", "dot", "cosine", "additive"] = "scaled-dot"
    sinks: bool = False
    qk_norm: Literal["none", "per-head", "full"] = "none"
    value_residual: Literal["none", "fixed", "learned"] = "none"
    gate: Literal["none", "elementwise", "per-head"] = "none"
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

    def check_rope(self, rope: RopeConfig) -> None:
        assert self.head_dim is not None
        rope.check_head(self.head_dim)

    @property
    def rotary_dim(self) -> int | None:
        return self.head_dim

    @property
    def cache_width(self) -> int:
        assert self.num_kv_heads is not None
        assert self.head_dim is not None
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def score_width(self) -> int:
        assert self.head_dim is not None
        return 2 * self.num_heads * self.head_dim


class LatentAttentionConfig(AttentionConfig):
    """Multi-head latent attention (DeepSeek-V2 and V3): a token's keys and values in all heads are made of `kv_rank`
    numbers of it, which are what a cache keeps, and of a key of `rope_dim` channels that all heads share.

    Queries and keys have `nope_dim` channels without a position and `rope_dim` that turn by rotary positions; values
    have `value_dim`. `q_rank`: queries too are made of so many numbers; null: of the stream. Null for the others is
    nope_dim = value_dim = d_model / num_heads, rope_dim = nope_dim / 2 and kv_rank = 4 nope_dim, as in DeepSeek-V2.
    `window` and `dropout` are those of standard attention.
    """

    kind: Literal["latent"] = "latent"
    q_rank: Width | None = None
    kv_rank: Width | None = None
    nope_dim: Width | None = None
    rope_dim: Width | None = None
    value_dim: Width | None = None
    window: Length | None = None
    dropout: Probability = 0.0

    @model_validator(mode="before")
    @classmethod
    def _no_shared_heads(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("num_kv_heads") is not None:
            raise contradiction(
                "attention.kind",
                "attention.num_kv_heads",
                "in latent attention all heads read one latent vector, and there are no key/value heads to share",
                "kv_rank for its size, or attention.kind=standard",
            )
        return data

    def complete(self, d_model: int) -> LatentAttentionConfig:
        if self.nope_dim is None and d_model % self.num_heads:
            raise contradiction(
                "d_model",
                "attention.num_heads",
                f"{d_model} does not divide into {self.num_heads} heads",
                "another num_heads, or say attention.nope_dim",
            )
        nope_dim = self.nope_dim or d_model // self.num_heads
        update = {
            "nope_dim": nope_dim,
            "rope_dim": self.rope_dim or max(nope_dim // 2, 1),
            "value_dim": self.value_dim or nope_dim,
            "kv_rank": self.kv_rank or 4 * nope_dim,
        }
        return self.model_copy(update=update)

    def check_rope(self, rope: RopeConfig) -> None:
        assert self.rope_dim is not None
        if rope.fraction != 1:
            raise contradiction(
                "position.fraction",
                "attention.kind",
                "latent attention has channels of its own that rotate, and they all do",
                "position.fraction=1, and attention.rope_dim for how many",
            )
        rope.check_head(self.rope_dim, "attention.rope_dim")

    @property
    def rotary_dim(self) -> int | None:
        return self.rope_dim

    @property
    def cache_width(self) -> int:
        assert self.kv_rank is not None
        assert self.rope_dim is not None
        return self.kv_rank + self.rope_dim

    @property
    def score_width(self) -> int:
        assert self.nope_dim is not None
        assert self.rope_dim is not None
        assert self.value_dim is not None
        return self.num_heads * (self.nope_dim + self.rope_dim + self.value_dim)


class DifferentialAttentionConfig(StandardAttentionConfig):
    """The difference of two attentions: query heads j and j + num_heads/2 see the same values, those of two key/value
    heads, and what the second finds, times a learned number, is taken from what the first finds. Both numbers of heads
    are even. The other keys are those of `standard`; `gate: per-head` is a number for half of what a pair gives.
    """

    kind: Literal["differential"] = "differential"  # type: ignore[assignment]

    def complete(self, d_model: int) -> DifferentialAttentionConfig:
        whole = super().complete(d_model)
        assert isinstance(whole, DifferentialAttentionConfig)
        assert whole.num_kv_heads is not None
        if whole.num_kv_heads % 2:
            raise contradiction(
                "attention.kind",
                "attention.num_kv_heads",
                f"differential attention has pairs of key/value heads, not {whole.num_kv_heads}",
                "an even num_kv_heads",
            )
        return whole

    @property
    def score_width(self) -> int:
        assert self.head_dim is not None
        return 3 * self.num_heads * self.head_dim  # values are twice as wide


Attention = Annotated[
    AttentionConfig, Kinds(StandardAttentionConfig, LatentAttentionConfig, DifferentialAttentionConfig)
]
