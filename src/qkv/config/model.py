"""What can be said about a Transformer.

The tree has shared keys (`d_model`, `attention`, ...) that an encoder-decoder's `encoder:` and `decoder:` sections
override, and a `layers:` pattern that overrides them per layer. Validation spells everything out: afterwards every
stack has one complete `BlockConfig` per layer, and validating the spelled-out tree again changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from qkv.config.base import Kinds, Node, Part, contradiction
from qkv.config.merge import merge

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
    """One vector per sequence (`pooling`), through tanh(W h + b) when `pooler`, to `num_classes` scores."""

    kind: Literal["classifier"] = "classifier"
    num_classes: int = Field(2, ge=2, le=MAX_VOCAB)
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

# --- blocks, stacks, the model ----------------------------------------------------------------------------------------

MAX_LAYERS = 4096
"""Far above any real model: a hostile file must not make building one take for ever."""

BLOCK_KEYS = ("norm", "position", "attention", "cross_attention", "feed_forward", "residual", "dropout")
"""The shared keys that a layer may override."""


class BlockConfig(Node):
    """One layer, complete. `cross_attention` is None where there is nothing to attend to."""

    norm: Norm = RMSNormConfig()
    position: Position = RopeConfig()
    attention: Attention = StandardAttentionConfig()
    cross_attention: Attention | None = None
    feed_forward: FeedForward = DenseFeedForwardConfig()
    residual: Residual = PlainResidualConfig()
    dropout: Probability = 0.0


class StackConfig(Node):
    """One tower. `dropout` acts on every sublayer's output before it is written, and on the embedding sum."""

    vocab_size: VocabSize | None = None
    max_seq_len: Length = 512
    d_model: Width = 256
    num_layers: int = Field(4, ge=1, le=MAX_LAYERS)
    dropout: Probability = 0.0
    input: Input = TokenInputConfig()
    embedding: EmbeddingConfig = EmbeddingConfig()
    position: Position = RopeConfig()
    norm: Norm = RMSNormConfig()
    attention: Attention = StandardAttentionConfig()
    cross_attention: Attention | None = None
    feed_forward: FeedForward = DenseFeedForwardConfig()
    residual: Residual = PlainResidualConfig()
    layers: tuple[BlockConfig, ...] = ()

    @model_validator(mode="after")
    def _complete_and_check(self) -> StackConfig:
        # frozen for everyone else: derived values are filled in once, here
        self.__dict__["attention"] = self.attention.complete(self.d_model)
        self.__dict__["feed_forward"] = self.feed_forward.complete(self.d_model)
        layers = []
        for layer in self.layers:
            cross = layer.cross_attention and layer.cross_attention.complete(self.d_model)
            update = {
                "attention": layer.attention.complete(self.d_model),
                "cross_attention": cross,
                "feed_forward": layer.feed_forward.complete(self.d_model),
            }
            layers.append(layer.model_copy(update=update))
        self.__dict__["layers"] = tuple(layers)
        self._check_positions()
        self._check_residual()
        if isinstance(self.input, FeatureInputConfig) and self.embedding.num_segments:
            raise contradiction(
                "input.kind", "embedding.num_segments", "features have no segments", "embedding.num_segments=0"
            )
        return self

    def _check_positions(self) -> None:
        if isinstance(self.position, SinusoidalConfig) and self.d_model % 2:
            raise contradiction(
                "position.kind",
                "d_model",
                f"sine and cosine come in pairs, and {self.d_model} is odd",
                "an even d_model",
            )
        for layer in self.layers:
            if layer.position.absolute and layer.position != self.position:
                raise contradiction(
                    "position.kind",
                    "layers[].position.kind",
                    "positions added to the embedding cannot differ from layer to layer",
                    "position.kind=rope or none in `layers`",
                )
            if isinstance(layer.position, RopeConfig) and isinstance(layer.attention, StandardAttentionConfig):
                assert layer.attention.head_dim is not None
                width = layer.position.rotary_width(layer.attention.head_dim)
                if width % 2 or not width:
                    raise contradiction(
                        "position.fraction",
                        "attention.head_dim",
                        f"{width} of {layer.attention.head_dim} channels would rotate, and they rotate in pairs",
                        "an even head_dim and a fraction that leaves an even number of channels",
                    )
            if isinstance(layer.cross_attention, StandardAttentionConfig) and layer.cross_attention.window:
                raise contradiction(
                    "cross_attention.window",
                    "attention.window",
                    "a window is a distance within one sequence; cross-attention joins two",
                    "cross_attention.window=null",
                )

    def _check_residual(self) -> None:
        if any(layer.residual != self.residual for layer in self.layers):
            raise contradiction(
                "residual", "layers[].residual", "the stream runs through all layers and has one kind", "one `residual`"
            )

    @property
    def final_norm(self) -> bool:
        """Whether the stack ends with a norm of its own: all placements but post leave the stream un-normalised."""
        return self.norm.placement != "post"


Family = Literal["decoder", "encoder", "encoder-decoder"]


class ModelConfig(StackConfig):
    """A Transformer of any family. Of an encoder-decoder, `encoder` and `decoder` are the complete stacks; a
    decoder-only or encoder-only model is itself its one stack."""

    family: Family = "decoder"
    tie_embeddings: Literal["none", "head", "source-target", "all"] = "none"
    head: Head | None = None
    init: Init = NormalInitConfig()
    encoder: StackConfig | None = None
    decoder: StackConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _spell_out(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        data = dict(data)
        family = data.get("family", "decoder")
        if family == "encoder-decoder":
            shared = {key: data[key] for key in StackConfig.model_fields if key in data and key != "input"}
            for side in ("encoder", "decoder"):
                own = data.get(side)
                if isinstance(own, StackConfig):
                    continue
                stack = merge(shared, own or {})
                if side == "encoder":
                    stack.pop("cross_attention", None)
                data[side] = _spell_stack(stack, attends_source=side == "decoder")
            data.pop("layers", None)
        else:
            for side in ("encoder", "decoder"):
                if data.get(side) is not None:
                    raise contradiction(
                        "family", side, f"a model of family {family} is one stack", "its keys directly under `model`"
                    )
            data = _spell_stack(data, attends_source=False)
        if data.get("head") is None:
            data["head"] = {"kind": "masked-language-model" if family == "encoder" else "language-model"}
        return data

    @model_validator(mode="after")
    def _check_family(self) -> ModelConfig:
        head = self.head
        assert head is not None
        if self.family == "encoder" and isinstance(head, LanguageModelHeadConfig):
            raise contradiction(
                "family", "head.kind", "an encoder sees the words it would predict", "head.kind=masked-language-model"
            )
        if self.family != "encoder" and isinstance(head, MaskedLanguageModelHeadConfig):
            raise contradiction("family", "head.kind", "masked words need an encoder", "head.kind=language-model")
        if self.family != "encoder" and not isinstance((self.decoder or self).input, TokenInputConfig):
            raise contradiction("family", "input.kind", "a decoder reads tokens", "encoder.input in an encoder-decoder")
        if self.decoder is None and any(layer.cross_attention for layer in self.layers):
            raise contradiction(
                "family", "cross_attention", "there is no source to attend to", "family=encoder-decoder"
            )
        self._check_tying(head)
        return self

    def _check_tying(self, head: HeadConfig) -> None:
        tie = self.tie_embeddings
        if tie in ("source-target", "all"):
            if self.encoder is None or self.decoder is None:
                raise contradiction(
                    "family", "tie_embeddings", f"{tie} joins two embeddings, and there is one", "tie_embeddings=head"
                )
            for key, encoder, decoder in (
                ("vocab_size", self.encoder.vocab_size, self.decoder.vocab_size),
                ("d_model", self.encoder.d_model, self.decoder.d_model),
                ("input.kind", self.encoder.input.kind, "tokens"),
            ):
                if encoder != decoder:
                    raise contradiction(
                        "tie_embeddings",
                        f"encoder.{key}",
                        f"one matrix cannot serve {encoder} and {decoder}",
                        "tie_embeddings=head or none",
                    )
        if tie in ("head", "all") and not head.predicts_tokens:
            raise contradiction(
                "tie_embeddings",
                "head.kind",
                f"a head of kind {head.kind} has no vocabulary matrix",
                "tie_embeddings=none",
            )
        if tie in ("head", "all") and not isinstance((self.decoder or self).input, TokenInputConfig):
            raise contradiction(
                "tie_embeddings", "input.kind", "features have no embedding to share", "tie_embeddings=none"
            )

    def with_vocab_size(self, size: int, source: int | None = None) -> ModelConfig:
        """The same with `size` ids where no vocabulary size was given; `source`: of an encoder's own tokenizer."""
        update: dict[str, Any] = {"vocab_size": self.vocab_size or size}
        for side, wanted in (("encoder", source or size), ("decoder", size)):
            stack: StackConfig | None = getattr(self, side)
            if stack is not None:
                update[side] = stack.model_copy(update={"vocab_size": stack.vocab_size or wanted})
        return self.model_copy(update=update)

    @property
    def stacks(self) -> dict[Literal["encoder", "decoder"], StackConfig]:
        """The stacks there are, by name, in the order data walks."""
        if self.encoder is not None and self.decoder is not None:
            return {"encoder": self.encoder, "decoder": self.decoder}
        return {"encoder": self} if self.family == "encoder" else {"decoder": self}


def _spell_stack(stack: Mapping[str, Any], *, attends_source: bool) -> dict[str, Any]:
    """One complete mapping per layer: the shared keys, overridden by the pattern, tiled and cut to num_layers."""
    stack = dict(stack)
    count = stack.get("num_layers", StackConfig.model_fields["num_layers"].default)
    if not isinstance(count, int) or not 1 <= count <= MAX_LAYERS:
        return stack  # the field's own validation has the better message
    shared = {key: stack[key] for key in BLOCK_KEYS if key in stack}
    pattern: list[Any] = []
    entries: list[Any] = list(stack.get("layers") or [{}])
    for entry in entries:
        if isinstance(entry, BlockConfig):
            pattern.append(entry)
            continue
        if not isinstance(entry, Mapping):
            raise PydanticCustomError(
                "layers", "an entry of `layers` is a mapping, got {entry}", {"entry": repr(entry)}
            )
        own = dict(entry)
        repeat = own.pop("repeat", 1)
        if not isinstance(repeat, int) or isinstance(repeat, bool) or repeat < 1:
            raise PydanticCustomError(
                "repeat", "`layers[].repeat` is a whole number from 1, got {repeat}", {"repeat": repr(repeat)}
            )
        pattern.extend([merge(shared, own)] * min(repeat, count))
    if attends_source:
        pattern = [_with_cross_attention(layer) for layer in pattern]
    stack["layers"] = [pattern[index % len(pattern)] for index in range(count)]
    return stack


def _with_cross_attention(layer: Any) -> Any:
    """Cross-attention is shaped like the layer's self-attention unless it says otherwise, and never has a window."""
    if isinstance(layer, BlockConfig):
        if layer.cross_attention is not None:
            return layer
        layer = dict(layer)
    attention = layer.get("attention") or {}
    attention = dict(attention)
    if attention.get("window") is not None:
        attention["window"] = None
    return {**layer, "cross_attention": merge(attention, dict(layer.get("cross_attention") or {}))}
