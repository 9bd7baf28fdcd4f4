"""Hyper-Connections: several residual streams, which learned weights read, mix and write (Zhu et al. 2024, arXiv
2409.19606), and their fractions (Frac-Connections: Zhu et al. 2025, arXiv 2503.14125).

Shapes: B batch, T tokens, M model width, n streams, m fractions of each, N = n m parts of D = M / m channels, stream by
stream.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from qkv.config.parts import LayerNormConfig
from qkv.config.residuals import HyperConnectionsConfig
from qkv.nn.build import Dims, build
from qkv.nn.norm import LayerNorm
from qkv.nn.residual import ResidualStream, Site


class Connections(NamedTuple):
    """The weights of one site, for each token. Rows are the parts as they were.

    read_BTNm: what the sublayer's m input parts are made of. keep_BTNN: what the parts are made of afterwards.
    write_BTN: how much of the sublayer's output each part takes up.
    """

    read_BTNm: Tensor
    keep_BTNN: Tensor
    write_BTN: Tensor


class HyperConnections(ResidualStream):
    """The embedding enters as n equal streams; their sum leaves. The state is [B, T, N, D].

    A network starts as the plain one with norms of placement pre: site k reads stream k mod n, which breaks the
    symmetry of the streams, and writes to all alike.
    """

    def __init__(self, config: HyperConnectionsConfig, dims: Dims) -> None:
        super().__init__()
        self.config, self.d_model = config, dims.d_model

    def enter(self, x_BTM: Tensor) -> Tensor:
        return x_BTM.reshape(*x_BTM.shape[:2], self.config.fractions, -1).repeat(1, 1, self.config.streams, 1)

    def exit(self, state: Tensor) -> Tensor:
        rows, tokens, _, width = state.shape
        return state.view(rows, tokens, self.config.streams, -1, width).sum(2).flatten(2)

    def new_site(self, index: int, layer: int) -> Site:
        weights = HyperConnectionWeights(self.config, self.d_model, index)
        return Site(HyperConnectionRead(weights), HyperConnectionWrite(self.config))


class HyperConnectionWeights(nn.Module):
    """`alpha` [N, m + N] and `beta` [N], learned; `dynamic`: plus s tanh(LayerNorm(H) W), which each token's parts add
    to their own rows, s one number for alpha and one for beta (arXiv 2409.19606)."""

    undecayed = ("alpha", "beta")

    def __init__(self, config: HyperConnectionsConfig, d_model: int, index: int) -> None:
        super().__init__()
        self.fractions = config.fractions
        self.first_stream = index % config.streams
        parts, width = config.streams * config.fractions, d_model // config.fractions
        self.alpha = nn.Parameter(torch.empty(parts, config.fractions + parts))
        self.beta = nn.Parameter(torch.empty(parts))
        self.norm: nn.Module | None = None
        if config.dynamic:
            self.norm = LayerNorm(LayerNormConfig(), Dims(width))
            self.weight = nn.Parameter(torch.empty(config.fractions + parts + 1, width))
            self.scale = nn.Parameter(torch.empty(2))
        with torch.no_grad():
            self.start(None)

    def start(self, generator: torch.Generator | None) -> None:
        """alpha = [e | I] with e the columns of stream k mod n, beta = 1, W = 0, s = 0.01."""
        m = self.fractions
        self.alpha.zero_()
        self.alpha[self.first_stream * m : (self.first_stream + 1) * m, :m].fill_diagonal_(1.0)
        self.alpha[:, m:].fill_diagonal_(1.0)
        self.beta.fill_(1.0)
        if self.norm is not None:
            self.weight.zero_()
            self.scale.fill_(0.01)

    def forward(self, state_BTND: Tensor) -> Connections:
        """[B, T, N, D] -> the weights of each token, in the state's precision."""
        m = self.fractions
        alpha, beta = self.alpha.expand(*state_BTND.shape[:2], -1, -1), self.beta.expand(*state_BTND.shape[:2], -1)
        if self.norm is not None:
            moves = torch.tanh(self.norm(state_BTND.to(self.weight.dtype)) @ self.weight.T)
            alpha = alpha + self.scale[0] * moves[..., :-1]
            beta = beta + self.scale[1] * moves[..., -1]
        # slices of rows would be multiplied token by token on a CPU, at several times the cost
        read_BTNm, keep_BTNN = alpha[..., :m].contiguous(), alpha[..., m:].contiguous()
        return Connections(*(weight.to(state_BTND.dtype) for weight in (read_BTNm, keep_BTNN, beta)))


class HyperConnectionRead(nn.Module):
    """x = A_m^T H; what is kept and written is for `HyperConnectionWrite`."""

    def __init__(self, weights: HyperConnectionWeights) -> None:
        super().__init__()
        self.weights = weights

    def forward(self, state_BTND: Tensor) -> tuple[Tensor, Connections]:
        """[B, T, N, D] -> [B, T, M] and the site's weights."""
        with torch.autocast(state_BTND.device.type, enabled=False):  # the streams stay as wide as they are
            connections: Connections = self.weights(state_BTND)
            return (connections.read_BTNm.mT @ state_BTND).flatten(2), connections


class HyperConnectionWrite(nn.Module):
    """A_r^T H + beta y, each fraction of y to the parts that are that fraction of their stream."""

    def __init__(self, config: HyperConnectionsConfig) -> None:
        super().__init__()
        self.sizes = config.streams, config.fractions

    def forward(self, state_BTND: Tensor, y_BTM: Tensor, connections: Connections) -> Tensor:
        """[B, T, N, D] and [B, T, M] -> [B, T, N, D]."""
        with torch.autocast(state_BTND.device.type, enabled=False):
            rows, tokens, _, width = state_BTND.shape
            kept_BTnmD = (connections.keep_BTNN.mT @ state_BTND).view(rows, tokens, *self.sizes, width)
            written_BTnm1 = connections.write_BTN.reshape(rows, tokens, *self.sizes, 1)
            y_BT1mD = y_BTM.reshape(rows, tokens, 1, -1, width)
            return torch.addcmul(kept_BTnmD, written_BTnm1, y_BT1mD).flatten(2, 3)


build.register(HyperConnectionsConfig, HyperConnections)
