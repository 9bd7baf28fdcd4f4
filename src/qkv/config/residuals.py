"""The residual streams: how sublayers read from and write to what flows through a stack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from qkv.config.base import Kinds, Part, contradiction
from qkv.config.numbers import Positive


class ResidualConfig(Part):
    """How sublayers read from and write to the stream."""

    placements: ClassVar[tuple[str, ...]] = ("pre", "post", "sandwich", "output")
    """The placements of norms that it goes with."""
    reads_through_norm: ClassVar[bool] = False
    """What a sublayer reads may be of any length, so it needs a norm."""

    def check(self, d_model: int) -> None:
        """Raise an error that names both keys where a stream of this width cannot be so."""

    def mixing_flops(self, d_model: int, sublayers: Sequence[int]) -> int:
        """Multiplications and additions per token of reading, mixing and writing, beyond the plain sum; `sublayers` are
        those of each layer."""
        return 0


class PlainResidualConfig(ResidualConfig):
    """x + F(x)."""

    kind: Literal["plain"] = "plain"


class NoResidualConfig(ResidualConfig):
    """F(x): no skip connection, to see what it was for."""

    kind: Literal["none"] = "none"


class ReZeroConfig(ResidualConfig):
    """x + a F(x), a learned number per sublayer that starts at 0."""

    kind: Literal["rezero"] = "rezero"


class LayerScaleConfig(ResidualConfig):
    """x + diag(a) F(x), a learned number per channel that starts at `start`."""

    kind: Literal["layerscale"] = "layerscale"
    start: Positive = 1e-4


class DeepNormConfig(ResidualConfig):
    """N(alpha x + F(x)); values, attention outputs and feed-forward matrices start `beta` times as large.

    null: what the paper derives from the number of layers. Goes with norms of placement post.
    """

    placements: ClassVar[tuple[str, ...]] = ("post",)
    kind: Literal["deepnorm"] = "deepnorm"
    alpha: Positive | None = None
    beta: Positive | None = None

    def complete(self, layers: float, decoder_layers: int | None = None) -> DeepNormConfig:
        """The same with what the paper derives from the depth: of a stack with `layers` layers of two sublayers, or of
        an encoder below a decoder of `decoder_layers` (Wang et al. 2022, arXiv 2203.00555, table 1)."""
        if decoder_layers is None:
            alpha, beta = (2 * layers) ** 0.25, (8 * layers) ** -0.25
        else:
            depth = (layers**4 * decoder_layers) ** (1 / 16)
            alpha, beta = 0.81 * depth, 0.87 / depth
        return self.model_copy(update={"alpha": self.alpha or alpha, "beta": self.beta or beta})


class _SeveralStreams(ResidualConfig):
    """Residual kinds that mix several states into what a sublayer reads."""

    placements: ClassVar[tuple[str, ...]] = ("pre", "sandwich")
    reads_through_norm: ClassVar[bool] = True


MAX_STREAMS = 64
Streams = Annotated[int, Field(ge=1, le=MAX_STREAMS)]


class HyperConnectionsConfig(_SeveralStreams):
    """`streams` copies of the stream, from which a sublayer reads, to which it writes, and which it mixes by learned
    weights; `dynamic`: plus weights computed from each token's own streams. `fractions` = m cuts each stream into m
    parts that are mixed as streams are (Frac-Connections: streams = 1). The copies are summed at the end.
    """

    kind: Literal["hyper-connections"] = "hyper-connections"
    streams: Streams = 4
    fractions: Streams = 1
    dynamic: bool = True

    def check(self, d_model: int) -> None:
        if d_model % self.fractions:
            raise contradiction(
                "d_model",
                "residual.fractions",
                f"{d_model} does not divide into {self.fractions} parts",
                "fractions that divide d_model",
            )
        if self.streams * self.fractions > MAX_STREAMS:
            parts = self.streams * self.fractions
            raise contradiction(
                "residual.streams",
                "residual.fractions",
                f"each token's {parts} parts would be mixed by {parts} x {parts} numbers",
                f"{MAX_STREAMS} parts at most",
            )

    def mixing_flops(self, d_model: int, sublayers: Sequence[int]) -> int:
        weights = self.fractions + self.streams * self.fractions + 1  # of a part: to read, to keep, to write
        return sum(sublayers) * 2 * weights * self.streams * d_model * (2 if self.dynamic else 1)


class MhcConfig(_SeveralStreams):
    """Manifold-constrained hyper-connections: `streams` copies, mixed by a matrix whose rows and columns sum to 1 after
    `iterations` of Sinkhorn's algorithm, read by sigmoids and written to by twice sigmoids.

    `start` multiplies what is computed from a token's streams, by weights drawn from N(0, `std`). `exit`: what becomes
    of the copies at the end: their mean or sum, or a sum weighted by learned sigmoids of them.
    """

    kind: Literal["mhc"] = "mhc"
    streams: Streams = 4
    iterations: int = Field(20, ge=1, le=1000)
    start: float = Field(0.01, ge=0)
    std: float = Field(0.02, ge=0)
    exit: Literal["mean", "sum", "learned"] = "mean"

    def mixing_flops(self, d_model: int, sublayers: Sequence[int]) -> int:
        weights = self.streams * (self.streams + 2)
        return sum(sublayers) * 2 * weights * (self.streams + 1) * d_model


class AttentionResidualsConfig(_SeveralStreams):
    """A sublayer reads a mixture of the embedding and all earlier sublayers' outputs, by a learned softmax over depth;
    nothing else is added up. `block_size`: outputs of so many `unit`s are summed and enter as one; null: each enters by
    itself. A sublayer is attention, cross-attention or feed-forward; a layer is all of them.
    """

    kind: Literal["attention-residuals"] = "attention-residuals"
    block_size: int | None = Field(None, ge=1, le=2**16)
    unit: Literal["layer", "sublayer"] = "layer"
    eps: Positive = 1e-6

    def mixing_flops(self, d_model: int, sublayers: Sequence[int]) -> int:
        read, sources, last = 0, 1, None
        places = [layer for layer, count in enumerate(sublayers) for _ in range(count)]
        for site, layer in enumerate(places):
            read += sources if site else 0  # the first has nothing to choose from
            block = (layer if self.unit == "layer" else site) // (self.block_size or 1)
            if self.block_size is None or block != last:
                sources, last = sources + 1, block
        return 4 * d_model * (read + sources)


Residual = Annotated[
    ResidualConfig,
    Kinds(
        PlainResidualConfig,
        NoResidualConfig,
        ReZeroConfig,
        LayerScaleConfig,
        DeepNormConfig,
        HyperConnectionsConfig,
        MhcConfig,
        AttentionResidualsConfig,
    ),
]
