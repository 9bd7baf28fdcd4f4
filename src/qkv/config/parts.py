"""The parts a Transformer is made of, each with its kinds: norms, positions, attention, feed-forward, residual streams,
embedding, input, head, initialisation."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

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
ImageSide = Annotated[int, Field(ge=1, le=2**15)]
Positive = Annotated[float, Field(gt=0)]

# --- norms ------------------------------------------------------------------------------------------------------------


class NormConfig(Part):
    """A normalisation and where it stands.

    pre: x + F(N(x)); post: N(x + F(x)); sandwich: x + N(F(N(x))); output: x + N(F(x)). All but post end the stack with
    one more norm.
    """

    placement: Literal["pre", "post", "sandwich", "output"] = "pre"


class RMSNormConfig(NormConfig):
    """`unit_offset`: the weight is added to 1, and starts at 0 (Gemma).

    `rounding`, in half precision: to the input's dtype before the weight multiplies (LLaMA), or after (Gemma, OLMo-2).
    """

    kind: Literal["rmsnorm"] = "rmsnorm"
    eps: float = Field(1e-6, gt=0)
    unit_offset: bool = False
    rounding: Literal["before-weight", "after-weight"] = "before-weight"


class LayerNormConfig(NormConfig):
    kind: Literal["layernorm"] = "layernorm"
    eps: float = Field(1e-5, gt=0)
    bias: bool = True


class NoNormConfig(NormConfig):
    kind: Literal["none"] = "none"


Norm = Annotated[NormConfig, Kinds(RMSNormConfig, LayerNormConfig, NoNormConfig)]

# --- positions --------------------------------------------------------------------------------------------------------


class PositionConfig(Part):
    """How a token's position enters: added to its embedding (`absolute`), or inside attention.

    `by_slots`: by the distance between slots alone, whatever positions are given.
    """

    absolute: ClassVar[bool] = False
    by_slots: ClassVar[bool] = False


class RopeScalingConfig(Part):
    """How rotary positions are stretched over more tokens than the model was first trained on, which were
    `original_max_seq_len`. `factor` is how many times more.

    `attention_factor` multiplies cos and sin, and so enters the scores squared.
    """

    needs_length: ClassVar[bool] = False
    """The angles depend on how long the whole sequence is."""


Factor = Annotated[float, Field(ge=1)]


class LinearScalingConfig(RopeScalingConfig):
    """All frequencies divided by `factor`."""

    kind: Literal["linear"] = "linear"
    factor: Factor


class DynamicScalingConfig(RopeScalingConfig):
    """A larger theta, growing with the sequence, where it is longer than `original_max_seq_len` (dynamic NTK)."""

    needs_length: ClassVar[bool] = True
    kind: Literal["dynamic"] = "dynamic"
    factor: Factor
    original_max_seq_len: Length


class YarnScalingConfig(RopeScalingConfig):
    """YaRN: channels that turn more than `beta_fast` times in `original_max_seq_len` keep their frequency, those that
    turn less than `beta_slow` times have it divided by `factor`, the others lie between; `truncate` rounds the borders
    to whole channels.

    `attention_factor: null` is m(1) for m(a) = 0.1 a ln(factor) + 1, or m(mscale) / m(mscale_all_dim) where both are
    given.
    """

    kind: Literal["yarn"] = "yarn"
    factor: Factor
    original_max_seq_len: Length
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    attention_factor: Positive | None = None
    mscale: Positive | None = None
    mscale_all_dim: Positive | None = None
    truncate: bool = True


class LongRopeScalingConfig(RopeScalingConfig):
    """LongRoPE: the frequency of each pair of channels divided by its own number, of `short_factor`, or of
    `long_factor` in sequences longer than `original_max_seq_len`.

    `attention_factor: null` is sqrt(1 + ln(factor) / ln(original_max_seq_len)); `factor: null` is
    max_seq_len / original_max_seq_len.
    """

    needs_length: ClassVar[bool] = True
    kind: Literal["longrope"] = "longrope"
    short_factor: tuple[Positive, ...] = Field(min_length=1, max_length=MAX_WIDTH)
    long_factor: tuple[Positive, ...] = Field(min_length=1, max_length=MAX_WIDTH)
    original_max_seq_len: Annotated[int, Field(ge=2, le=MAX_LENGTH)]
    attention_factor: Positive | None = None
    factor: Factor | None = None


class Llama3ScalingConfig(RopeScalingConfig):
    """LLaMA 3.1: wavelengths below original_max_seq_len / `high_freq_factor` stay, those above
    original_max_seq_len / `low_freq_factor` are stretched by `factor`, the others lie between."""

    kind: Literal["llama3"] = "llama3"
    factor: Factor
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    original_max_seq_len: Length

    @model_validator(mode="after")
    def _check_band(self) -> Llama3ScalingConfig:
        if self.low_freq_factor >= self.high_freq_factor:
            raise contradiction(
                "scaling.low_freq_factor",
                "scaling.high_freq_factor",
                f"no wavelengths lie between {self.low_freq_factor:g} and {self.high_freq_factor:g}",
                "a high_freq_factor above low_freq_factor",
            )
        return self


RopeScaling = Annotated[
    RopeScalingConfig,
    Kinds(LinearScalingConfig, DynamicScalingConfig, YarnScalingConfig, LongRopeScalingConfig, Llama3ScalingConfig),
]


class RopeConfig(PositionConfig):
    """Rotary positions on the first `fraction` of each head's channels; pairs (i, i + r/2) or neighbours (2i, 2i+1).

    `scaling`: for more tokens than the model was first trained on.
    """

    kind: Literal["rope"] = "rope"
    theta: float = Field(10000.0, gt=1)
    layout: Literal["half", "interleaved"] = "half"
    fraction: float = Field(1.0, gt=0, le=1)
    scaling: RopeScaling | None = None

    def rotary_width(self, head_dim: int) -> int:
        """The number of channels that rotate."""
        return int(self.fraction * head_dim)

    def check_head(self, head_dim: int) -> None:
        """Raise an error that names both keys where heads of this width cannot rotate so."""
        width = self.rotary_width(head_dim)
        if width % 2 or not width:
            raise contradiction(
                "position.fraction",
                "attention.head_dim",
                f"{width} of {head_dim} channels would rotate, and they rotate in pairs",
                "an even head_dim and a fraction that leaves an even number of channels",
            )
        if isinstance(self.scaling, DynamicScalingConfig) and width == 2:
            raise contradiction(
                "position.scaling.kind",
                "attention.head_dim",
                "one pair of channels turns by 1 per position whatever theta is",
                "a head_dim from 4",
            )
        if isinstance(self.scaling, LongRopeScalingConfig):
            for key in ("short_factor", "long_factor"):
                count = len(getattr(self.scaling, key))
                if count != width // 2:
                    raise contradiction(
                        f"position.scaling.{key}",
                        "attention.head_dim",
                        f"{count} factors for {width // 2} pairs of channels",
                        "one factor for each pair",
                    )


class SinusoidalConfig(PositionConfig):
    """Fixed sines and cosines: interleaved (sin, cos, sin, cos, ...) as in 2017, concatenated (all sines, then all
    cosines: Marian), or tensor2tensor, which is concatenated with other frequencies (Whisper)."""

    absolute: ClassVar[bool] = True
    kind: Literal["sinusoidal"] = "sinusoidal"
    layout: Literal["interleaved", "concatenated", "tensor2tensor"] = "interleaved"


class LearnedConfig(PositionConfig):
    """One learned vector per position, `max_seq_len` of them, after `offset` rows that no position uses (BART's 2)."""

    absolute: ClassVar[bool] = True
    kind: Literal["learned"] = "learned"
    offset: int = Field(0, ge=0, le=MAX_WIDTH)


class RelativeConfig(PositionConfig):
    """T5's learned number per head for each distance from query to key, added to their score. Near distances have a
    bucket each, farther ones share it, all from `max_distance` on the last. One table for all layers of a stack."""

    by_slots: ClassVar[bool] = True
    kind: Literal["relative"] = "relative"
    num_buckets: int = Field(32, ge=4, le=MAX_WIDTH, multiple_of=2)
    max_distance: Length = 128

    @model_validator(mode="after")
    def _check_distance(self) -> RelativeConfig:
        if self.max_distance <= self.num_buckets // 2:
            raise contradiction(
                "position.max_distance",
                "position.num_buckets",
                f"{self.num_buckets // 2} distances have a bucket of their own, and {self.max_distance} is among them",
                "a larger max_distance",
            )
        return self


class NoPositionConfig(PositionConfig):
    kind: Literal["none"] = "none"


Position = Annotated[
    PositionConfig, Kinds(RopeConfig, SinusoidalConfig, LearnedConfig, RelativeConfig, NoPositionConfig)
]

# --- attention --------------------------------------------------------------------------------------------------------


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
    """

    kind: Literal["standard"] = "standard"
    num_kv_heads: Heads | None = None
    head_dim: Width | None = None
    bias: bool | Literal["qkv", "qvo"] = False
    scale: Positive | None = None
    softcap: Positive | None = None
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

    `width`: all of these are so wide, and a projection takes them to d_model (ALBERT's factorised embedding; null:
    d_model, and no projection). `dropout: null` takes the model's `dropout`.
    """

    width: Width | None = None
    scale: float | Literal["sqrt-d-model"] = 1.0
    norm: bool = False
    num_segments: int = Field(0, ge=0, le=MAX_VOCAB)
    dropout: Probability | None = None


class InputConfig(Part):
    """What a stack reads: ids, one vector each. Other kinds say in `reads`, `axes` and `length` what theirs are."""

    reads: ClassVar[str] = "ids"
    mixes: ClassVar[bool] = False
    """A vector is made of several neighbours, so no two documents may share a row."""

    @property
    def axes(self) -> tuple[str | int, ...]:
        """The axes of what is read; a letter stands for any size."""
        return ("B", "T")

    @property
    def reads_ids(self) -> bool:
        return self.reads == "ids"

    @property
    def expects(self) -> str:
        """What is read, in words: ids [B, T]."""
        return f"{self.reads} [{', '.join(map(str, self.axes))}]"

    @property
    def fixed_length(self) -> int | None:
        """The number of vectors, where it is always the same."""
        return None

    def length(self, size: Any) -> Any:
        """The number of vectors that `size` ids, features or frames become; of an int or a tensor of them."""
        return size


class TokenInputConfig(InputConfig):
    kind: Literal["tokens"] = "tokens"


class FeatureInputConfig(InputConfig):
    """Vectors of another width ([B, S, width]: sound, image, anything), projected to d_model."""

    reads: ClassVar[str] = "features"
    kind: Literal["features"] = "features"
    width: Width

    @property
    def axes(self) -> tuple[str | int, ...]:
        return ("B", "T", self.width)


class PatchInputConfig(InputConfig):
    """Images [B, channels, height, width] of `image_size` (one number: square), cut into squares of `patch_size`. Each
    is projected to d_model, row by row, after a learned `class_token`."""

    reads: ClassVar[str] = "images"
    mixes: ClassVar[bool] = True
    kind: Literal["patches"] = "patches"
    image_size: ImageSide | tuple[ImageSide, ImageSide] = 224
    patch_size: ImageSide = 16
    channels: int = Field(3, ge=1, le=2**10)
    class_token: bool = True
    bias: bool = True

    @field_validator("image_size")
    @classmethod
    def _square_is_one_number(cls, size: int | tuple[int, int]) -> int | tuple[int, int]:
        return size[0] if isinstance(size, tuple) and size[0] == size[1] else size

    @model_validator(mode="after")
    def _check_grid(self) -> PatchInputConfig:
        if any(side % self.patch_size for side in self.image_shape):
            raise contradiction(
                "input.image_size",
                "input.patch_size",
                f"{self.image_size} does not divide into patches of {self.patch_size}",
                "a patch_size that divides height and width",
            )
        return self

    @property
    def image_shape(self) -> tuple[int, int]:
        """Height and width."""
        return (self.image_size, self.image_size) if isinstance(self.image_size, int) else self.image_size

    @property
    def axes(self) -> tuple[str | int, ...]:
        return ("B", self.channels, *self.image_shape)

    @property
    def fixed_length(self) -> int:
        height, width = self.image_shape
        return (height // self.patch_size) * (width // self.patch_size) + self.class_token

    def length(self, size: Any) -> int:
        return self.fixed_length


class LogMelInputConfig(InputConfig):
    """Log-mel features of sound, [B, frames, num_mels], through Whisper's two convolutions: of three frames each, the
    second at every other frame."""

    reads: ClassVar[str] = "log-mel features"
    mixes: ClassVar[bool] = True
    kind: Literal["log-mel"] = "log-mel"
    num_mels: Width = 80

    @property
    def axes(self) -> tuple[str | int, ...]:
        return ("B", "F", self.num_mels)

    def length(self, size: Any) -> Any:
        return (size + 1) // 2


Input = Annotated[InputConfig, Kinds(TokenInputConfig, FeatureInputConfig, PatchInputConfig, LogMelInputConfig)]


class HeadConfig(Part):
    """What is made of the last stack's output."""

    predicts_tokens: ClassVar[bool] = False


class LanguageModelHeadConfig(HeadConfig):
    """Hidden vectors times `scale` through the vocabulary matrix; `softcap` = c makes a logit z c tanh(z/c)."""

    predicts_tokens: ClassVar[bool] = True
    kind: Literal["language-model"] = "language-model"
    bias: bool = False
    scale: float | Literal["rsqrt-d-model"] = 1.0
    softcap: Positive | None = None


class MaskedLanguageModelHeadConfig(HeadConfig):
    """BERT's: dense, activation, norm, vocabulary matrix and bias."""

    predicts_tokens: ClassVar[bool] = True
    kind: Literal["masked-language-model"] = "masked-language-model"
    activation: Literal["gelu", "gelu_tanh", "relu", "silu"] = "gelu"


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
    """2017: Xavier-uniform matrices, embeddings N(0, d_model^-1/2), biases 0, relative positions too."""

    kind: Literal["xavier"] = "xavier"


class GPT2InitConfig(InitConfig):
    """N(0, std), and N(0, std / sqrt(2L)) for the matrices that write to the residual stream."""

    kind: Literal["gpt2"] = "gpt2"
    std: float = Field(0.02, gt=0)


class T5InitConfig(InitConfig):
    """q N(0, (d h)^-1/2); k, v and the first feed-forward matrices d^-1/2; o (H h)^-1/2; last feed-forward matrix
    d_ff^-1/2; embeddings N(0, 1); relative positions d^-1/2."""

    kind: Literal["t5"] = "t5"


Init = Annotated[InitConfig, Kinds(NormalInitConfig, XavierInitConfig, GPT2InitConfig, T5InitConfig)]
