"""The positions: where a token stands, and rotary positions stretched over more tokens."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from qkv.config.base import Kinds, Part, contradiction
from qkv.config.numbers import MAX_LENGTH, MAX_WIDTH, Length, Positive


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
    given. Latent attention multiplies its scores by m(mscale_all_dim)^2 besides (DeepSeek); for standard attention that
    is said by `attention.scale`.
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

    `scaling`: for more tokens than the model was first trained on. (NTK-aware scaling by s is none of these kinds but
    another theta: theta s^(r/(r-2)).)
    """

    kind: Literal["rope"] = "rope"
    theta: float = Field(10000.0, gt=1)
    layout: Literal["half", "interleaved"] = "half"
    fraction: float = Field(1.0, gt=0, le=1)
    scaling: RopeScaling | None = None

    def rotary_width(self, head_dim: int) -> int:
        """The number of channels that rotate."""
        return int(self.fraction * head_dim)

    def check_head(self, head_dim: int, key: str = "attention.head_dim") -> None:
        """Raise an error that names both keys where heads of this width, said by `key`, cannot rotate so."""
        width = self.rotary_width(head_dim)
        if width % 2 or not width:
            raise contradiction(
                "position.fraction",
                key,
                f"{width} of {head_dim} channels would rotate, and they rotate in pairs",
                f"an even {key} and a fraction that leaves an even number of channels",
            )
        if isinstance(self.scaling, DynamicScalingConfig) and width == 2:
            raise contradiction(
                "position.scaling.kind",
                key,
                "one pair of channels turns by 1 per position whatever theta is",
                f"{key}=4 or more",
            )
        if isinstance(self.scaling, LongRopeScalingConfig):
            for factors in ("short_factor", "long_factor"):
                count = len(getattr(self.scaling, factors))
                if count != width // 2:
                    raise contradiction(
                        f"position.scaling.{factors}",
                        key,
                        f"{count} factors for {width // 2} pairs of channels",
                        "one factor for each pair",
                    )


class SinusoidalConfig(PositionConfig):
    """Fixed sines and cosines: interleaved (sin, cos, sin, cos, ...) as in 2017, concatenated (all sines, then all
    cosines: Marian), or tensor2tensor, which is concatenated with other frequencies (Whisper). The first token stands
    at `offset` (M2M-100: 2)."""

    absolute: ClassVar[bool] = True
    kind: Literal["sinusoidal"] = "sinusoidal"
    layout: Literal["interleaved", "concatenated", "tensor2tensor"] = "interleaved"
    offset: int = Field(0, ge=0, le=MAX_WIDTH)


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


class AlibiConfig(PositionConfig):
    """A penalty per head for each token of distance, m |q - k| taken from their score; m falls from head to head."""

    by_slots: ClassVar[bool] = True
    kind: Literal["alibi"] = "alibi"


class NoPositionConfig(PositionConfig):
    kind: Literal["none"] = "none"


Position = Annotated[
    PositionConfig, Kinds(RopeConfig, SinusoidalConfig, LearnedConfig, RelativeConfig, AlibiConfig, NoPositionConfig)
]
