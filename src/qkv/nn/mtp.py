"""Multi-token prediction: in training, further blocks predict more of the tokens to come (DeepSeek-AI 2024, arXiv
2412.19437, 2.2).

    h_k,i = Block_k(M_k [N(h_k-1,i); N'(E[t_i+k])])

From h_k,i the model's own head predicts t_i+k+1; h_0 are its hidden vectors, and E is its embedding. Published weights
have the halves of M_k the other way round.

Shapes: B batch, T tokens, M model width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.config.model import ModelConfig
from qkv.config.stack import StackConfig
from qkv.nn.arguments import IGNORE
from qkv.nn.block import Stack
from qkv.nn.build import Dims, build
from qkv.nn.mask import Rule


class MtpModule(nn.Module):
    """One depth: a block like the model's last layer, on a stream of its own, between M_k and a norm for the head."""

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        dims = Dims(config.d_model)
        self.norm_hidden: nn.Module = build(config.norm, dims)
        self.norm_embedding: nn.Module = build(config.norm, dims)
        self.projection = nn.Linear(2 * config.d_model, config.d_model, bias=False)
        last = config.model_copy(update={"num_layers": 1, "layers": config.layers[-1:]})
        self.stack = Stack(last, causal=True)

    def forward(
        self,
        h_BTM: Tensor,
        x_BTM: Tensor,
        positions_BT: Tensor | None,
        *,
        lengths_B: Tensor | None = None,
        documents_BT: Tensor | None = None,
        rule: Rule | None = None,
    ) -> Tensor:
        """h_k [B, T, M] of h_k-1 [B, T, M] and the embeddings of the tokens k slots later, [B, T, M]; the rest as of
        `Stack`."""
        both_BTE = torch.cat((self.norm_hidden(h_BTM), self.norm_embedding(x_BTM)), dim=-1)
        out: Tensor = self.stack(
            self.projection(both_BTE), positions_BT, lengths_B=lengths_B, documents_BT=documents_BT, rule=rule
        )
        return out


class Mtp(nn.Module):
    """All depths, from 1: each goes on from the hidden vectors of the one before."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.depths = nn.ModuleList(MtpModule(config) for _ in range(config.mtp.depth))

    def forward(
        self,
        h_BTM: Tensor,
        x_BTM: Tensor,
        labels_BT: Tensor,
        positions_BT: Tensor | None,
        *,
        lengths_B: Tensor | None = None,
        documents_BT: Tensor | None = None,
        rule: Rule | None = None,
    ) -> list[tuple[Tensor, Tensor]]:
        """Of each depth, what the head reads [B, T, M], and the labels [B, T] of what it then says.

        h_BTM, x_BTM: the model's hidden vectors and embeddings. labels_BT: of its own logits. The last k slots of a row
        or of a document have no token k slots later, and no label: what is computed there reaches none that has one.
        """
        ends_BT = None
        if documents_BT is not None:
            ends_BT = F.pad(documents_BT[:, 1:] != documents_BT[:, :-1], (0, 1), value=True)
        found = []
        for module in self.depths:
            x_BTM = F.pad(x_BTM[:, 1:], (0, 0, 0, 1))
            labels_BT = F.pad(labels_BT[:, 1:], (0, 1), value=IGNORE)
            if ends_BT is not None:
                labels_BT = labels_BT.masked_fill(ends_BT, IGNORE)
            h_BTM = module(h_BTM, x_BTM, positions_BT, lengths_B=lengths_B, documents_BT=documents_BT, rule=rule)
            found.append((h_BTM, labels_BT))
        return found
