"""From ids (or feature vectors) to the vectors that enter the stream.

Shapes: B batch, T tokens, M model width, V vocabulary, W feature width.
"""

from __future__ import annotations

import math

from torch import Tensor, nn

from qkv.config.model import StackConfig
from qkv.config.parts import FeatureInputConfig, NoPositionConfig, TokenInputConfig
from qkv.nn.build import Dims, build


class Table(nn.Embedding):
    """Learned vectors by index. They are drawn by `init`, not here: on the meta device torch's own draw would load its
    compiler, for a second."""

    def reset_parameters(self) -> None:
        pass


class TokenInput(Table):
    """x = E[ids], E [V, M]."""

    def __init__(self, config: TokenInputConfig, dims: Dims) -> None:
        assert dims.d_out is not None
        super().__init__(dims.d_out, dims.d_model)


class FeatureInput(nn.Linear):
    """Vectors of any origin, projected to the model's width: [B, T, W] -> [B, T, M]."""

    def __init__(self, config: FeatureInputConfig, dims: Dims) -> None:
        super().__init__(config.width, dims.d_model)


class Embedding(nn.Module):
    """dropout(norm(input * scale + positions + segments)); absent parts are identities.

    The scale is sqrt(M) in the 2017 model, 1 in BERT, GPT-2 and LLaMA; positions here are the absolute kinds.
    """

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        dims = Dims(config.d_model, d_out=config.vocab_size, max_seq_len=config.max_seq_len)
        options = config.embedding
        self.scale = math.sqrt(config.d_model) if options.scale == "sqrt-d-model" else options.scale
        self.input: nn.Module = build(config.input, dims)
        self.segments = Table(options.num_segments, config.d_model) if options.num_segments else None
        self.position = build(config.position if config.position.absolute else NoPositionConfig(), dims)
        self.norm: nn.Module = build(config.norm, dims) if options.norm else nn.Identity()
        self.dropout = nn.Dropout(config.dropout if options.dropout is None else options.dropout)

    def forward(
        self, inputs: Tensor, positions_BT: Tensor, segments_BT: Tensor | None = None, real_BT: Tensor | None = None
    ) -> Tensor:
        """ids [B, T] or features [B, T, W] -> [B, T, M].

        real_BT: False where a slot is padding. Such slots become zeros, so that nothing that stood there (another
        token, NaN in a feature) can reach a real output.
        """
        if real_BT is not None and inputs.is_floating_point():
            inputs = inputs.masked_fill(~real_BT[..., None], 0.0)
        x_BTM = self.input(inputs)
        if self.scale != 1.0:
            x_BTM = x_BTM * self.scale
        if self.segments is not None:
            zeros = positions_BT.new_zeros(inputs.shape[:2])
            x_BTM = x_BTM + self.segments(zeros if segments_BT is None else segments_BT)
        x_BTM = self.dropout(self.norm(self.position.add(x_BTM, positions_BT)))
        if real_BT is not None:
            x_BTM = x_BTM.masked_fill(~real_BT[..., None], 0.0)
        return x_BTM  # type: ignore[no-any-return]


build.register(TokenInputConfig, TokenInput)
build.register(FeatureInputConfig, FeatureInput)
