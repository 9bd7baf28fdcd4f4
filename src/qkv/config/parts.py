"""The smaller parts a Transformer is made of, each with its kinds: norms, embedding, input, head, initialisation.
Attention, feed-forward, positions and residual streams have files of their own."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from qkv.config.base import Kinds, Node, Part, contradiction
from qkv.config.numbers import MAX_VOCAB, ImageSide, Positive, Probability, Width

# --- norms ------------------------------------------------------------------------------------------------------------


class NormConfig(Part):
    """A normalisation and where it stands.

    pre: x + F(N(x)); post: N(x + F(x)); sandwich: x + N(F(N(x))); output: x + N(F(x)). All but post end the stack with
    one more norm. Peri-LN (arXiv 2502.02732) is sandwich with `embedding.norm`.
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
    is projected to d_model, row by row, after a learned `class_token` and `num_registers` more learned vectors, which
    give attention a place to keep things (Darcet et al. 2023, arXiv 2309.16588)."""

    reads: ClassVar[str] = "images"
    mixes: ClassVar[bool] = True
    kind: Literal["patches"] = "patches"
    image_size: ImageSide | tuple[ImageSide, ImageSide] = 224
    patch_size: ImageSide = 16
    channels: int = Field(3, ge=1, le=2**10)
    class_token: bool = True
    num_registers: int = Field(0, ge=0, le=2**10)
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
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        height, width = self.image_shape
        return height // self.patch_size, width // self.patch_size

    @property
    def axes(self) -> tuple[str | int, ...]:
        return ("B", self.channels, *self.image_shape)

    @property
    def fixed_length(self) -> int:
        rows, columns = self.grid
        return self.class_token + self.num_registers + rows * columns

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


class EmbeddingHeadConfig(HeadConfig):
    """One vector per sequence (`pooling`) through a matrix to `width` numbers, by which it is compared with those of
    another model (CLIP)."""

    kind: Literal["embedding"] = "embedding"
    width: Width
    pooling: Literal["first", "mean", "last"] = "first"


class NoHeadConfig(HeadConfig):
    """The hidden states themselves; `pooler` carries BERT's tanh(W h_0 + b) along for sentence vectors."""

    kind: Literal["none"] = "none"
    pooler: bool = False


class MtpConfig(Node):
    """Multi-token prediction (DeepSeek-V3: arXiv 2412.19437, 2.2): in training, `depth` further blocks, one after the
    other, each predict one more of the tokens to come, through the model's own embedding and head. `weight` is that of
    their losses' mean. Whatever reads the trained model goes without them."""

    depth: int = Field(0, ge=0, le=2**6)
    weight: float = Field(0.3, ge=0)


Head = Annotated[
    HeadConfig,
    Kinds(
        LanguageModelHeadConfig, MaskedLanguageModelHeadConfig, ClassifierHeadConfig, EmbeddingHeadConfig, NoHeadConfig
    ),
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
