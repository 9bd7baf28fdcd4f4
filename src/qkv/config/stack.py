"""What can be said about one stack of layers, and which of it cannot be meant together."""

from __future__ import annotations

import logging
from functools import cache
from typing import TypeGuard

from pydantic import Field, model_validator

from qkv.config.attention import Attention, StandardAttentionConfig
from qkv.config.base import Node, contradiction
from qkv.config.block import BlockConfig, Parallel
from qkv.config.feed_forward import DenseFeedForwardConfig, FeedForward
from qkv.config.numbers import MAX_LAYERS, Length, Probability, VocabSize, Width
from qkv.config.parts import EmbeddingConfig, Input, NoNormConfig, Norm, RMSNormConfig, TokenInputConfig
from qkv.config.positions import NoPositionConfig, Position, RopeConfig, SinusoidalConfig
from qkv.config.residuals import (
    AttentionResidualsConfig,
    DeepNormConfig,
    NoResidualConfig,
    PlainResidualConfig,
    Residual,
)

log = logging.getLogger("qkv")


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
