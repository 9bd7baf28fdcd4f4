"""The parts a Transformer is made of, each with its kinds: norms, positions, attention, feed-forward, residual streams,
embedding, input, head, initialisation."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from qkv.config.base import Kinds, Node, Part, contradiction

Probability = Annotated[float, Field(ge=0.0, lt=1.0)]

# far above any real model: a slip of the keyboard or a hostile file is refused here, not by an allocator
MAX_WIDTH = 2**20
MAX_VOCAB = 2**24
MAX_LENGTH = 2**31
Width = Annotated[int, Field(ge=1, le=MAX_WIDTH)]
HiddenWidth = Annotated[int, Field(ge=1, le=4 * MAX_WIDTH)]
Heads = Annotated[int, Field(ge=1, le=2**16)]
VocabSize = Annotated[int, Field(ge=1, le=MAX_VOCAB)]
Length = Annotated[int, Field(ge=1, le=MAX_LENGTH)]

# --- norms ------------------------------------------------------------------------------------------------------------


class NormConfig(Part):
    """A normalisation and where it stands.

    pre: x + F(N(x)); post: N(x + F(x)); sandwich: x + N(F(N(x))); output: x + N(F(x)). All but post end the stack with
    one more norm.
    """

    placement: Literal["pre", "post", "sandwich", "output"] = "pre"


class RMSNormConfig(NormConfig):
    kind: Literal["rmsnorm"] = "rmsnorm"
    eps: float = Field(1e-6, gt=0)


class LayerNormConfig(NormConfig):
    kind: Literal["layernorm"] = "layernorm"
    eps: float = Field(1e-5, gt=0)
    bias: bool = True


class NoNormConfig(NormConfig):
    kind: Literal["none"] = "none"


Norm = Annotated[NormConfig, Kinds(RMSNormConfig, LayerNormConfig, NoNormConfig)]

# --- positions --------------------------------------------------------------------------------------------------------


class PositionConfig(Part):
    """How a token's position enters: added to its embedding (`absolute`), or inside attention."""

    absolute: ClassVar[bool] = False


class RopeConfig(PositionConfig):
    """Rotary positions on the first `fraction` of each head's channels; pairs (i, i + r/2) or neighbours (2i, 2i+1)."""

    kind: Literal["rope"] = "rope"
    theta: float = Field(10000.0, gt=1)
    layout: Literal["half", "interleaved"] = "half"
    fraction: float = Field(1.0, gt=0, le=1)

    def rotary_width(self, head_dim: int) -> int:
        """The number of channels that rotate."""
        return int(self.fraction * head_dim)


class SinusoidalConfig(PositionConfig):
    """The fixed sines and cosines of 2017, interleaved (sin, cos, sin, cos, ...)."""

    absolute: ClassVar[bool] = True
    kind: Literal["sinusoidal"] = "sinusoidal"


class LearnedConfig(PositionConfig):
    """One learned vector per position, `max_seq_len` of them."""

    absolute: ClassVar[bool] = True
    kind: Literal["learned"] = "learned"


class NoPositionConfig(PositionConfig):
    kind: Literal["none"] = "none"


Position = Annotated[PositionConfig, Kinds(RopeConfig, SinusoidalConfig, LearnedConfig, NoPositionConfig)]

# --- attention --------------------------------------------------------------------------------------------------------


class AttentionConfig(Part):
    """Base of the attention kinds."""

    num_heads: Heads = 8

    def complete(self, d_model: int) -> AttentionConfig:
        """The same with every derived value filled in."""
        return self


class StandardAttentionConfig(AttentionConfig):
    """Multi-head (`num_kv_heads` = `num_heads`), grouped-query (fewer) or multi-query (1) attention.

    `bias`: on all four projections, on q, k and v only ("qkv"), or on none. `dropout` acts on the attention weights.
    `window` = W: a causal query sees the W keys up to its own; a bidirectional one sees W - 1 on either side as well.
    `qk_norm` is of the layer's norm kind.
    """

    kind: Literal["standard"] = "standard"
    num_kv_heads: Heads | None = None
    head_dim: Width | None = None
    bias: bool | Literal["qkv"] = False
    qk_norm: Literal["none", "per-head", "full"] = "none"
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
        head_dim = self.head_dim or d_model // self.num_heads
        return self.model_copy(update={"num_kv_heads": kv_heads, "head_dim": head_dim})


Attention = Annotated[AttentionConfig, Kinds(StandardAttentionConfig)]

# --- feed-forward -----------------------------------------------------------------------------------------------------


class FeedForwardConfig(Part):
    """Base of the feed-forward kinds."""

    def complete(self, d_model: int) -> FeedForwardConfig:
        """The same with every derived value filled in."""
        return self


class DenseFeedForwardConfig(FeedForwardConfig):
    """relu, gelu (erf), gelu_tanh: two matrices, d_ff = 4 d_model. geglu, swiglu: three, d_ff = 8/3 d_model rounded up
    to a multiple of 64. `dropout` acts on the hidden activations, `output_dropout` on the result."""

    kind: Literal["swiglu", "geglu", "relu", "gelu", "gelu_tanh"] = "swiglu"
    d_ff: HiddenWidth | None = None
    bias: bool = False
    dropout: Probability = 0.0
    output_dropout: Probability = 0.0

    @property
    def gated(self) -> bool:
        return self.kind in ("swiglu", "geglu")

    def complete(self, d_model: int) -> DenseFeedForwardConfig:
        default = math.ceil(8 * d_model / 3 / 64) * 64 if self.gated else 4 * d_model
        return self.model_copy(update={"d_ff": self.d_ff or default})


FeedForward = Annotated[FeedForwardConfig, Kinds(DenseFeedForwardConfig)]

# --- residual streams -------------------------------------------------------------------------------------------------


class ResidualConfig(Part):
    """How sublayers read from and write to the stream."""


class PlainResidualConfig(ResidualConfig):
    """x + F(x)."""

    kind: Literal["plain"] = "plain"


class NoResidualConfig(ResidualConfig):
    """F(x): no skip connection, to see what it was for."""

    kind: Literal["none"] = "none"


Residual = Annotated[ResidualConfig, Kinds(PlainResidualConfig, NoResidualConfig)]

# --- embedding, input, head, initialisation ---------------------------------------------------------------------------


class EmbeddingConfig(Node):
    """Token embedding times `scale`, plus positions and `num_segments` segment vectors, `norm`, dropout.

    `dropout: null` takes the model's `dropout`.
    """

    scale: float | Literal["sqrt-d-model"] = 1.0
    norm: bool = False
    num_segments: int = Field(0, ge=0, le=MAX_VOCAB)
    dropout: Probability | None = None


class InputConfig(Part):
    """What a stack reads."""


class TokenInputConfig(InputConfig):
    kind: Literal["tokens"] = "tokens"


class FeatureInputConfig(InputConfig):
    """Vectors of another width ([B, S, width]: sound, image, anything), projected to d_model."""

    kind: Literal["features"] = "features"
    width: Width


Input = Annotated[InputConfig, Kinds(TokenInputConfig, FeatureInputConfig)]


class HeadConfig(Part):
    """What is made of the last stack's output."""

    predicts_tokens: ClassVar[bool] = False


class LanguageModelHeadConfig(HeadConfig):
    predicts_tokens: ClassVar[bool] = True
    kind: Literal["language-model"] = "language-model"
    bias: bool = False


class MaskedLanguageModelHeadConfig(HeadConfig):
    """BERT's: dense, activation, norm, vocabulary matrix and bias."""

    predicts_tokens: ClassVar[bool] = True
    kind: Literal["masked-language-model"] = "masked-language-model"
    activation: Literal["gelu", "gelu_tanh", "relu"] = "gelu"


class ClassifierHeadConfig(HeadConfig):
    """One vector per sequence (`pooling`), through tanh(W h + b) when `pooler`, to `num_classes` scores (null: as many
    as the objective has labels)."""

    kind: Literal["classifier"] = "classifier"
    num_classes: int | None = Field(None, ge=2, le=MAX_VOCAB)
    pooling: Literal["first", "mean", "last"] = "first"
    pooler: bool = True
    dropout: Probability = 0.0


class NoHeadConfig(HeadConfig):
    """The hidden states themselves; `pooler` carries BERT's tanh(W h_0 + b) along for sentence vectors."""

    kind: Literal["none"] = "none"
    pooler: bool = False


Head = Annotated[
    HeadConfig, Kinds(LanguageModelHeadConfig, MaskedLanguageModelHeadConfig, ClassifierHeadConfig, NoHeadConfig)
]


class InitConfig(Part):
    """How weights start."""


class NormalInitConfig(InitConfig):
    """Matrices and embeddings N(0, std), biases 0."""

    kind: Literal["normal"] = "normal"
    std: float = Field(0.02, gt=0)


class XavierInitConfig(InitConfig):
    """2017: Xavier-uniform matrices, embeddings N(0, d_model^-1/2), biases 0."""

    kind: Literal["xavier"] = "xavier"


class GPT2InitConfig(InitConfig):
    """N(0, std), and N(0, std / sqrt(2L)) for the matrices that write to the residual stream."""

    kind: Literal["gpt2"] = "gpt2"
    std: float = Field(0.02, gt=0)


class T5InitConfig(InitConfig):
    """q N(0, (d h)^-1/2); k, v and the first feed-forward matrices d^-1/2; o (H h)^-1/2; last feed-forward matrix
    d_ff^-1/2; embeddings N(0, 1)."""

    kind: Literal["t5"] = "t5"


Init = Annotated[InitConfig, Kinds(NormalInitConfig, XavierInitConfig, GPT2InitConfig, T5InitConfig)]
