"""What can be said about a Transformer.

The tree has shared keys (`d_model`, `attention`, ...) that an encoder-decoder's `encoder:` and `decoder:` sections
override, and a `layers:` pattern that overrides them per layer. Validation spells everything out: afterwards every
stack has one complete `BlockConfig` per layer, and validating the spelled-out tree again changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, TypeGuard

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from qkv.config.attention import Attention, StandardAttentionConfig
from qkv.config.base import Node, contradiction
from qkv.config.feed_forward import DenseFeedForwardConfig, FeedForward
from qkv.config.merge import merge
from qkv.config.numbers import Length, Probability, VocabSize, Width
from qkv.config.parts import (
    EmbeddingConfig,
    Head,
    HeadConfig,
    Init,
    Input,
    LanguageModelHeadConfig,
    MaskedLanguageModelHeadConfig,
    MtpConfig,
    NoNormConfig,
    Norm,
    NormalInitConfig,
    PatchInputConfig,
    RMSNormConfig,
    TokenInputConfig,
)
from qkv.config.positions import NoPositionConfig, Position, RopeConfig, SinusoidalConfig
from qkv.config.residuals import (
    AttentionResidualsConfig,
    DeepNormConfig,
    NoResidualConfig,
    PlainResidualConfig,
    Residual,
)

log = logging.getLogger("qkv")

# --- blocks, stacks, the model ----------------------------------------------------------------------------------------

MAX_LAYERS = 4096
"""Far above any real model: a hostile file must not make building one take for ever."""

BLOCK_KEYS = (
    "norm",
    "position",
    "attention",
    "cross_attention",
    "cross_gate",
    "feed_forward",
    "parallel",
    "residual",
    "dropout",
)
"""The shared keys that a layer may override."""


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


class StackConfig(Node):
    """One tower. `dropout` acts on every sublayer's output before it is written, and on the embedding sum.

    `share_layers`: one layer's parameters serve all layers (ALBERT). `num_queries`, of an encoder: so many learned
    vectors run through the layers instead of the input's, attend to the input and to each other, and are the output
    (Flamingo's Perceiver resampler).
    """

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
    cross_gate: bool = False
    feed_forward: FeedForward = DenseFeedForwardConfig()
    parallel: Parallel = "none"
    residual: Residual = PlainResidualConfig()
    share_layers: bool = False
    num_queries: Length | None = None
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
        self._check_value_residual()
        self._check_blocks()
        self._check_queries()
        self._check_input()
        return self

    def _check_input(self) -> None:
        if self.embedding.num_segments and not self.input.reads_ids:
            raise contradiction(
                "input.kind",
                "embedding.num_segments",
                f"{self.input.reads} have no segments",
                "embedding.num_segments=0",
            )
        fixed = self.input.fixed_length
        if fixed is not None:
            if "max_seq_len" in self.model_fields_set and self.max_seq_len != fixed:
                raise contradiction(
                    "max_seq_len",
                    "input.kind",
                    f"{self.input.expects} become {fixed} vectors, not {self.max_seq_len}",
                    f"max_seq_len={fixed}",
                )
            self.__dict__["max_seq_len"] = fixed

    def _check_positions(self) -> None:
        key, width = ("embedding.width", self.embedding.width) if self.embedding.width else ("d_model", self.d_model)
        if isinstance(self.position, SinusoidalConfig) and width % 2:
            raise contradiction(
                "position.kind", key, f"sine and cosine come in pairs, and {width} is odd", f"an even {key}"
            )
        if isinstance(self.position, SinusoidalConfig) and self.position.layout == "tensor2tensor" and width < 4:
            raise contradiction(
                "position.layout", key, "its frequencies span two pairs of channels at least", f"{key}=4 or more"
            )
        for layer in self.layers:
            if layer.position.absolute and layer.position != self.position:
                raise contradiction(
                    "position.kind",
                    "layers[].position.kind",
                    "positions added to the embedding cannot differ from layer to layer",
                    "position.kind=rope or none in `layers`",
                )
            if self.position.absolute and not layer.position.absolute and layer.position.kind != "none":
                _say_two_positions(self.position.kind, layer.position.kind)
            if isinstance(layer.position, RopeConfig):
                layer.attention.check_rope(layer.position)
            if getattr(layer.cross_attention, "window", None):
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
        self.residual.check(self.d_model)
        for layer in self.layers:
            if isinstance(layer.norm, NoNormConfig) and isinstance(self.residual, DeepNormConfig):
                raise contradiction(
                    "residual.kind",
                    "norm.kind",
                    "deepnorm multiplies the stream by alpha in every sublayer, and only a norm makes up for it",
                    "norm.kind=layernorm or rmsnorm",
                )
            if layer.norm.placement not in self.residual.placements:
                raise contradiction(
                    "residual.kind",
                    "norm.placement",
                    f"{self.residual.kind} does not go with norms of placement {layer.norm.placement}",
                    f"norm.placement={' or '.join(self.residual.placements)}",
                )
            if isinstance(layer.norm, NoNormConfig) and self.residual.reads_through_norm:
                raise contradiction(
                    "residual.kind",
                    "norm.kind",
                    f"of {self.residual.kind}, a sublayer reads through a norm",
                    "norm.kind=rmsnorm or layernorm",
                )
        if isinstance(self.residual, AttentionResidualsConfig) and self.share_layers:
            raise contradiction(
                "residual.kind",
                "share_layers",
                "every sublayer has its own weights over the depth below it",
                "share_layers=false",
            )

    def _check_value_residual(self) -> None:
        mixed = {index: layer.attention for index, layer in enumerate(self.layers) if _mixes_values(layer.attention)}
        if any(_mixes_values(layer.cross_attention) for layer in self.layers):
            raise contradiction(
                "cross_attention.value_residual",
                "attention.value_residual",
                "the first layer's values are of the stack's own tokens, not of a source's",
                "cross_attention.value_residual=none",
            )
        if mixed and self.share_layers:
            raise contradiction(
                "attention.value_residual",
                "share_layers",
                "the first layer gives its values, and the others mix them into theirs",
                "share_layers=false",
            )
        if mixed and 0 not in mixed:
            raise contradiction(
                "layers[].attention.value_residual",
                "layers[0].attention.value_residual",
                "the first layer gives the values",
                "value_residual in the first layer too",
            )
        if len(mixed) == 1:
            _say_nothing_to_mix()
        for index, attention in mixed.items():
            shape, first = (attention.num_kv_heads, attention.head_dim), (mixed[0].num_kv_heads, mixed[0].head_dim)
            if shape != first:
                key = "num_kv_heads" if shape[0] != first[0] else "head_dim"
                raise contradiction(
                    "attention.value_residual",
                    f"layers[].attention.{key}",
                    f"values of {shape[0]} x {shape[1]} in layer {index} do not mix with the first layer's "
                    f"{first[0]} x {first[1]}",
                    "the same num_kv_heads and head_dim in all layers",
                )

    def _check_blocks(self) -> None:
        for layer in self.layers:
            if layer.parallel != "none" and layer.cross_attention is not None:
                raise contradiction(
                    "parallel", "cross_attention", "a parallel block has no place for a source", "parallel=none"
                )
            if layer.parallel == "two-norms" and layer.norm.placement in ("post", "output"):
                raise contradiction(
                    "parallel",
                    "norm.placement",
                    f"two norms stand before two functions, and {layer.norm.placement} has none there",
                    "norm.placement=pre, or parallel=one-norm",
                )
            if layer.cross_gate and layer.cross_attention and isinstance(layer.residual, NoResidualConfig):
                raise contradiction(
                    "cross_gate", "residual.kind", "a closed gate would leave nothing in the stream", "cross_gate=false"
                )
        if self.share_layers and len(set(self.layers)) > 1:
            raise contradiction(
                "share_layers", "layers", "layers that share all parameters are all alike", "share_layers=false"
            )

    def _check_queries(self) -> None:
        if self.num_queries is None:
            return
        for layer in self.layers:
            if not layer.position.absolute and not isinstance(layer.position, NoPositionConfig):
                raise contradiction(
                    "num_queries",
                    "position.kind",
                    f"learned queries have no place in the input, and {layer.position.kind} needs one",
                    "position.kind=sinusoidal, learned or none",
                )
            if getattr(layer.attention, "window", None):
                raise contradiction(
                    "num_queries", "attention.window", "learned queries read the whole input", "attention.window=null"
                )
            if layer.parallel != "none":
                raise contradiction(
                    "num_queries", "parallel", "a parallel block reads nothing but its own stream", "parallel=none"
                )

    @property
    def final_norm(self) -> bool:
        """Whether the stack ends with a norm of its own: all placements but post leave the stream un-normalised."""
        return self.norm.placement != "post"


Family = Literal["decoder", "encoder", "encoder-decoder"]


class ModelConfig(StackConfig):
    """A Transformer of any family. Of an encoder-decoder, `encoder` and `decoder` are the complete stacks; a
    decoder-only or encoder-only model is itself its one stack.

    `prefix`, of a decoder: the tokens of a text's beginning (its prompt) see each other, those after it what came
    before (a prefix-LM: Raffel et al. 2019, arXiv 1910.10683, 3.2.1). `mtp`, of a decoder: what it is trained to
    predict beyond the next token.
    """

    family: Family = "decoder"
    prefix: bool = False
    tie_embeddings: Literal["none", "head", "source-target", "all"] = "none"
    head: Head | None = None
    mtp: MtpConfig = MtpConfig()
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
            own_to_a_side = ("input", "num_queries")
            shared = {key: data[key] for key in StackConfig.model_fields if key in data and key not in own_to_a_side}
            for side in ("encoder", "decoder"):
                own = data.get(side)
                if isinstance(own, StackConfig):
                    continue
                stack = merge(shared, own or {})
                if side == "encoder":
                    stack.pop("cross_attention", None)
                    stack.pop("cross_gate", None)
                    if _reads_images(stack) and "max_seq_len" not in (own or {}):
                        stack.pop("max_seq_len", None)  # an image says itself how many vectors it becomes
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
        self._check_source()
        if self.prefix and self.family != "decoder":
            raise contradiction(
                "prefix",
                "family",
                f"a model of family {self.family} reads its source in both directions",
                "prefix=false",
            )
        self._check_tying(head)
        self._check_mtp(head)
        self._complete_deepnorm()
        return self

    def _check_mtp(self, head: HeadConfig) -> None:
        if not self.mtp.depth:
            return
        refused = (
            ("family", self.family != "decoder", f"a model of family {self.family} is not one causal stack"),
            ("prefix", self.prefix, "the tokens of a prefix would see what they are to predict"),
            ("head.kind", not head.predicts_tokens, f"a head of kind {head.kind} predicts no tokens"),
            ("max_seq_len", self.mtp.depth >= self.max_seq_len, "no token of the context is so far ahead"),
        )
        for key, breaks, why in refused:
            if breaks:
                raise contradiction("mtp.depth", key, why, "mtp.depth=0")

    def _check_source(self) -> None:
        """Which stacks may read a source, and that one does where there is a source."""
        for key, stack in (("num_queries", self), ("decoder.num_queries", self.decoder)):
            if stack is not None and stack.num_queries is not None:
                raise contradiction(
                    key, "family", "learned queries read for a decoder", "encoder.num_queries in an encoder-decoder"
                )
        if self.encoder is None or self.decoder is None:
            if any(layer.cross_gate for layer in self.layers):
                raise contradiction("family", "cross_gate", "there is no cross-attention", "family=encoder-decoder")
            return
        if any(layer.cross_attention for layer in self.encoder.layers):
            raise contradiction(
                "encoder.layers[].cross_attention", "family", "an encoder attends to no source", "decoder.layers"
            )
        if not any(layer.cross_attention for layer in self.decoder.layers):
            raise contradiction(
                "decoder.layers[].cross_attention",
                "family",
                "no layer would read what the encoder makes",
                "cross_attention in one layer at least, or family=decoder",
            )

    def _complete_deepnorm(self) -> None:
        """Fill in what DeepNorm derives from the depths. A decoder layer with cross-attention has three sublayers."""
        for side, stack in self.stacks.items():
            if not isinstance(stack.residual, DeepNormConfig):
                continue
            if self.encoder is None or self.decoder is None:
                residual = stack.residual.complete(stack.num_layers)
            elif side == "encoder":
                residual = stack.residual.complete(stack.num_layers, self.decoder.num_layers)
            else:
                cross = sum(layer.cross_attention is not None for layer in stack.layers)
                residual = stack.residual.complete(stack.num_layers + cross / 2)
            layers = tuple(layer.model_copy(update={"residual": residual}) for layer in stack.layers)
            stack.__dict__.update(residual=residual, layers=layers)

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
                ("embedding.width", self.encoder.embedding.width, self.decoder.embedding.width),
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
        factorised = (self.decoder or self).embedding.width is not None
        if tie in ("head", "all") and isinstance(head, LanguageModelHeadConfig) and factorised:
            raise contradiction(
                "tie_embeddings",
                "embedding.width",
                "the head reads vectors of d_model, which is not the embedding's width",
                "tie_embeddings=none",
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
    def context(self) -> int:
        """The longest sequence that every stack reads."""
        return min(stack.max_seq_len for stack in self.stacks.values())

    @property
    def stacks(self) -> dict[Literal["encoder", "decoder"], StackConfig]:
        """The stacks there are, by name, in the order data walks."""
        if self.encoder is not None and self.decoder is not None:
            return {"encoder": self.encoder, "decoder": self.decoder}
        return {"encoder": self} if self.family == "encoder" else {"decoder": self}


@cache
def _say_two_positions(added: str, inside: str) -> None:
    """Say, once per process, what is rarely meant."""
    log.warning(
        "`position.kind` is %s, added to the embedding, and `layers[].position.kind` %s: both act", added, inside
    )


@cache
def _say_nothing_to_mix() -> None:
    """Say, once per process, what changes nothing."""
    log.warning("`attention.value_residual` of one layer changes nothing: the layers after it mix in its values")


def _mixes_values(attention: object) -> TypeGuard[StandardAttentionConfig]:
    return isinstance(attention, StandardAttentionConfig) and attention.value_residual != "none"


def _reads_images(stack: Mapping[str, Any]) -> bool:
    given = stack.get("input")
    return isinstance(given, PatchInputConfig) or (isinstance(given, Mapping) and given.get("kind") == "patches")


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
            says = "cross_attention" in entry.model_fields_set
            pattern.append(_with_cross_attention(dict(entry)) if attends_source and not says else entry)
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
        layer = merge(shared, own)
        if attends_source and own.get("cross_attention", {}) is not None:
            layer = _with_cross_attention(layer)
        pattern.extend([layer] * min(repeat, count))
    stack["layers"] = [pattern[index % len(pattern)] for index in range(count)]
    return stack


def _with_cross_attention(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Cross-attention is shaped like the layer's self-attention unless it says otherwise, and never has a window, nor a
    value residual."""
    attention = layer.get("attention") or {}
    attention = dict(attention)
    if attention.get("window") is not None:
        attention["window"] = None
    if "value_residual" in attention:
        attention["value_residual"] = "none"
    return {**layer, "cross_attention": merge(attention, dict(layer.get("cross_attention") or {}))}
