"""From ids, or what a stem makes of features, to the vectors that enter the stream.

Shapes: B batch, T tokens, M model width, E width of the embedding (M unless factorised), V vocabulary.
"""

from __future__ import annotations

import math

from torch import Tensor, nn

from qkv.config.parts import TokenInputConfig
from qkv.config.positions import NoPositionConfig
from qkv.config.stack import StackConfig
from qkv.nn.build import Dims, apply, build, dropout_of
from qkv.nn.stem import zero_padding


class Table(nn.Embedding):
    """Learned vectors by index. They are drawn by `init`, not here: on the meta device torch's own draw would load its
    compiler, for a second."""

    def reset_parameters(self) -> None:
        pass


class TokenInput(Table):
    """x = table[ids], table [V, E]."""

    def __init__(self, config: TokenInputConfig, dims: Dims) -> None:
        assert dims.d_out is not None
        super().__init__(dims.d_out, dims.d_model)


class Embedding(nn.Module):
    """projection(dropout(norm(input * scale + positions + segments))); absent parts are identities.

    The scale is sqrt(M) in the 2017 model, 1 in BERT, GPT-2 and LLaMA; positions here are the absolute kinds. A
    factorised embedding (ALBERT: Lan et al. 2019, arXiv 1909.11942) is narrower than the stream up to its projection.
    """

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        options = config.embedding
        width = options.width or config.d_model
        dims = Dims(width, d_out=config.vocab_size, max_seq_len=config.max_seq_len)
        self.reads = config.input
        self.scale = math.sqrt(config.d_model) if options.scale == "sqrt-d-model" else options.scale
        self.input: nn.Module = build(config.input, dims)
        self.segments = Table(options.num_segments, width) if options.num_segments else None
        self.position = build(config.position if config.position.absolute else NoPositionConfig(), dims)
        self.norm: nn.Module = build(config.norm, dims) if options.norm else nn.Identity()
        self.dropout = dropout_of(config.dropout if options.dropout is None else options.dropout)
        self.projection: nn.Module = nn.Linear(width, config.d_model) if options.width else nn.Identity()

    def forward(
        self, inputs: Tensor, positions_BT: Tensor, segments_BT: Tensor | None = None, lengths_B: Tensor | None = None
    ) -> Tensor:
        """ids [B, T], or what a stem reads (its rows on the first axis) -> [B, T, M].

        lengths_B: how many ids, features or frames of each row are real. The vectors of the others become zeros, so
        that nothing that stood there can reach a real output.
        """
        x_BTE = self.input(inputs, lengths_B) if inputs.is_floating_point() else self.input(inputs)
        if self.scale != 1.0:
            x_BTE = x_BTE * self.scale
        if self.segments is not None:
            zeros = positions_BT.new_zeros(inputs.shape[:2])
            x_BTE = x_BTE + self.segments(zeros if segments_BT is None else segments_BT)
        x_BTM = self.projection(apply(self.dropout, self.norm(self.position.add(x_BTE, positions_BT))))
        return zero_padding(x_BTM, None if lengths_B is None else self.reads.length(lengths_B))


build.register(TokenInputConfig, TokenInput)
