"""Learned queries that read an input of any length into a fixed number of vectors: the Perceiver resampler of Flamingo
(Alayrac et al. 2022, arXiv 2204.14198, 3.1).

In every layer the queries attend to the input and to each other at once, the keys and values being those of
[queries; input]:

    q = q + Attention(N(q), [N(q); N'(y)]);  q = q + FeedForward(N''(q))

Shapes: B batch, Q learned queries, S vectors of the input, K = Q + S keys, M model width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qkv.config.parts import NormConfig
from qkv.config.stack import StackConfig
from qkv.nn.block import Block, BlockInputs, SelfAttentionSublayer, Stack
from qkv.nn.build import Dims, apply, build
from qkv.nn.embedding import Table
from qkv.nn.mask import Mask, Padding
from qkv.nn.residual import Site


class ReadingSublayer(SelfAttentionSublayer):
    """Queries from the stream, keys and values from the stream and the input, which norm_input normalises."""

    def __init__(self, norm: NormConfig, dims: Dims, site: Site, dropout: float, **functions: Any) -> None:
        super().__init__(norm, dims, site, dropout, **functions)
        self.norm_input = build(norm, dims) if self.norm_in is not None else None

    def call(self, x_BTM: Tensor, inputs: BlockInputs) -> Tensor:
        assert inputs.memory_BSN is not None
        q_BQM = apply(self.norm_in, x_BTM)
        y_BKM = torch.cat((q_BQM, apply(self.norm_input, inputs.memory_BSN)), dim=1)
        out: Tensor = self.function(q_BQM, y_BKM, mask=inputs.memory_mask, first_values=inputs.first_values)
        return out


class ReadingBlock(Block):
    """Attention of the queries, then feed-forward."""

    self_attention_class = ReadingSublayer


class Resampler(Stack):
    """A stack whose state is `queries` [Q, M] instead of its input, which every layer reads as it came."""

    block_class = ReadingBlock

    def __init__(self, config: StackConfig) -> None:
        super().__init__(config, causal=False)
        assert config.num_queries is not None
        self.queries = Table(config.num_queries, config.d_model)

    def forward(
        self,
        x_BTM: Tensor,
        positions_BT: Tensor | None = None,
        *,
        lengths_B: Tensor | None = None,
        **unused: Any,
    ) -> Tensor:
        """Embeddings [B, S, M], of which the first lengths_B [B] are real, to hidden vectors [B, Q, M].

        Positions are in the embeddings already. Queries come first among the keys, so that padding is at the end.
        """
        q_QM, device = self.queries.weight, x_BTM.device
        keys = len(q_QM) + x_BTM.shape[1]
        rule = None if lengths_B is None else Padding(lengths_B + len(q_QM))
        mask = Mask(rule, torch.arange(len(q_QM), device=device), keys, aligned=False)
        inputs = BlockInputs(memory_BSN=x_BTM, memory_mask=mask)
        state = self.residual.enter(q_QM.expand(len(x_BTM), -1, -1))
        for block in self.layers:
            state = block(state, inputs)
        hidden: Tensor = self.final_norm(self.residual.exit(state))
        return hidden
