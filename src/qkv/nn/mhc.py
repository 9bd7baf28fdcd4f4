"""Manifold-constrained hyper-connections (mHC): several residual streams, mixed by a doubly stochastic matrix.

    X <- H_res X + H_post^T F(N(H_pre X))

The three H are computed from each token's own streams (Xie et al. 2025, arXiv 2512.24880, equations 7 to 9), in float32
whatever the network is cast to (a state in float64: float64), and mix in the precision of the state.

Shapes: B batch, T tokens, N streams, M model width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.config.residuals import MhcConfig
from qkv.nn.build import Dims, build
from qkv.nn.residual import ResidualStream, Site

EPS = 1e-20
"""In the norm of a token's streams."""
EXIT_EPS = 1e-6
"""What a learned exit adds to the weight of each stream (DeepSeek-V4)."""
OPEN = 40.0
"""A number whose sigmoid is 1 in every precision."""


class _Projection(nn.Module):
    """a (phi x / rms(x)) + b, where x is a token's streams side by side: groups of numbers, each with its own a."""

    undecayed = ("scale", "bias")
    float32 = ("phi", "scale", "bias")

    def __init__(self, config: MhcConfig, dims: Dims, groups: list[int]) -> None:
        super().__init__()
        self.config = config
        self.groups = groups
        self.phi = nn.Parameter(torch.empty(sum(groups), config.streams * dims.d_model))
        self.scale = nn.Parameter(torch.empty(len(groups)))
        self.bias = nn.Parameter(torch.empty(sum(groups)))

    def start(self, generator: torch.Generator | None) -> None:
        """Sigmoids of the first group, one per stream, start near 1/N: the mean is read, and the only stream as it is.
        All that tells streams apart is the drawn phi: with phi = 0 they would stay equal for ever."""
        streams = self.config.streams
        self.phi.normal_(0.0, self.config.std, generator=generator)
        self.scale.fill_(self.config.start)
        self.bias.zero_()
        self.bias[:streams] = -math.log(streams - 1) if streams > 1 else OPEN

    def project(self, state_BTNM: Tensor) -> list[Tensor]:
        """The groups: [B, T, numbers] each."""
        x_BTE = state_BTNM.flatten(2)
        x_BTE = x_BTE.to(torch.promote_types(x_BTE.dtype, torch.float32))
        seen, mean_square = _Project.apply(x_BTE, self.phi)  # type: ignore[no-untyped-call]
        seen = seen * (mean_square + EPS).rsqrt()  # the norm acts on few numbers instead of on many
        parts = zip(
            self.scale.unbind(), torch.split(seen, self.groups, -1), torch.split(self.bias, self.groups), strict=True
        )
        return [a * part + b for a, part, b in parts]


class _Project(torch.autograd.Function):
    """phi x [B, T, numbers] and the mean of x^2 [B, T, 1]. The gradient of x [B, T, E] is made in place: a state is
    large, and going through it is what costs time."""

    @staticmethod
    def forward(x_BTE: Tensor, phi: Tensor) -> tuple[Tensor, Tensor]:
        norm_BT1 = torch.linalg.vector_norm(x_BTE, dim=-1, keepdim=True)
        return F.linear(x_BTE, phi), norm_BT1.square() / x_BTE.shape[-1]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, d_seen: Tensor, d_mean_BT1: Tensor) -> tuple[Tensor, Tensor]:
        x_BTE, phi = ctx.saved_tensors
        d_x_BTE = (d_seen @ phi).addcmul_(x_BTE, d_mean_BT1, value=2 / x_BTE.shape[-1])
        return d_x_BTE, d_seen.flatten(0, 1).t() @ x_BTE.flatten(0, 1)


class Mixing(_Projection):
    """A site's H_pre [B, T, N], H_post [B, T, N] and H_res [B, T, N, N] (to, from) for a state."""

    def __init__(self, config: MhcConfig, dims: Dims) -> None:
        super().__init__(config, dims, [config.streams, config.streams, config.streams**2])

    def forward(self, state_BTNM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        pre_BTN, post_BTN, res = self.project(state_BTNM)
        streams = self.config.streams
        res_BTNN = sinkhorn(res.reshape(*res.shape[:2], streams, streams), self.config.iterations)
        return torch.sigmoid(pre_BTN), 2 * torch.sigmoid(post_BTN), res_BTNN


@torch.library.custom_op("qkv::sinkhorn", mutates_args=())
def sinkhorn(logits_BTNN: Tensor, iterations: int) -> Tensor:
    """exp(logits) with its columns, then its rows divided by their sums, `iterations` times: rows sum to 1, columns the
    closer the more iterations and the smaller the logits (Sinkhorn and Knopp 1967). Logarithms hold any logits.

    An operator of its own, because torch.compile makes slow code of so many small sums.
    """
    return _normalisations(logits_BTNN, iterations)[-1].exp().permute(2, 3, 0, 1).contiguous()


@torch.library.custom_op("qkv::sinkhorn_backward", mutates_args=())
def _sinkhorn_backward(d_BTNN: Tensor, logits_BTNN: Tensor, iterations: int) -> Tensor:
    """The logarithms are computed again: kept, they would be 2 * iterations times as large as H_res."""
    steps = _normalisations(logits_BTNN, iterations)
    d_NNBT = d_BTNN.permute(2, 3, 0, 1) * steps[-1].exp()
    for step, log_NNBT in reversed(list(enumerate(steps))):
        d_NNBT = torch.ops.aten._log_softmax_backward_data(d_NNBT, log_NNBT, step % 2, log_NNBT.dtype)
    return d_NNBT.permute(2, 3, 0, 1).contiguous()


def _normalisations(logits_BTNN: Tensor, iterations: int) -> list[Tensor]:
    """The logarithms [N, N, B, T] after each step. Tokens are last: sums over a few neighbouring numbers are slow."""
    log_NNBT = logits_BTNN.permute(2, 3, 0, 1).contiguous()
    steps = []
    for step in range(2 * iterations):
        log_NNBT = log_NNBT.log_softmax(step % 2)
        steps.append(log_NNBT)
    return steps


def _keep_logits(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    logits_BTNN, ctx.iterations = inputs
    ctx.save_for_backward(logits_BTNN)


def _backward(ctx: Any, d_BTNN: Tensor) -> tuple[Tensor, None]:
    return _sinkhorn_backward(d_BTNN, *ctx.saved_tensors, ctx.iterations), None


sinkhorn.register_fake(
    lambda logits_BTNN, iterations: torch.empty_like(logits_BTNN, memory_format=torch.contiguous_format)
)
_sinkhorn_backward.register_fake(
    lambda d_BTNN, logits_BTNN, iterations: torch.empty_like(d_BTNN, memory_format=torch.contiguous_format)
)
sinkhorn.register_autograd(_backward, setup_context=_keep_logits)


class MhcRead(nn.Module):
    """x = H_pre X; the context is H_post and H_res."""

    def __init__(self, config: MhcConfig, dims: Dims) -> None:
        super().__init__()
        self.mixing = Mixing(config, dims)

    def forward(self, state_BTNM: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        with torch.autocast(state_BTNM.device.type, enabled=False):
            pre_BTN, post_BTN, res_BTNN = (h.to(state_BTNM.dtype) for h in self.mixing(state_BTNM))
            return _weighted(pre_BTN, state_BTNM), (post_BTN, res_BTNN)


class MhcWrite(nn.Module):
    """H_res X + H_post^T y."""

    def forward(self, state_BTNM: Tensor, y_BTM: Tensor, context: tuple[Tensor, Tensor]) -> Tensor:
        post_BTN, res_BTNN = context
        with torch.autocast(state_BTNM.device.type, enabled=False):
            y_BTM = y_BTM.to(state_BTNM.dtype)
            out: Tensor = _Write.apply(state_BTNM, y_BTM, post_BTN, res_BTNN)  # type: ignore[no-untyped-call]
            return out


class _Write(torch.autograd.Function):
    """The backward pass as four products: autograd's own would hold [B, T, N, M] three times more."""

    @staticmethod
    def forward(state_BTNM: Tensor, y_BTM: Tensor, post_BTN: Tensor, res_BTNN: Tensor) -> Tensor:
        return (res_BTNN @ state_BTNM).addcmul_(post_BTN.unsqueeze(3), y_BTM.unsqueeze(2))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, d_BTNM: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        state_BTNM, y_BTM, post_BTN, res_BTNN = ctx.saved_tensors
        d_post_BTN = _weighted(y_BTM, d_BTNM.mT)
        return res_BTNN.mT @ d_BTNM, _weighted(post_BTN, d_BTNM), d_post_BTN, d_BTNM @ state_BTNM.mT


def _weighted(weights_BTN: Tensor, rows_BTNM: Tensor) -> Tensor:
    """The weighted sum [B, T, M] of each token's N rows."""
    return (weights_BTN.unsqueeze(2) @ rows_BTNM).squeeze(2)


class ExitWeights(_Projection):
    """sigmoid + 1e-6: how much of each stream [B, T, N] a learned exit takes (DeepSeek-V4's head)."""

    def __init__(self, config: MhcConfig, dims: Dims) -> None:
        super().__init__(config, dims, [config.streams])

    def forward(self, state_BTNM: Tensor) -> Tensor:
        return torch.sigmoid(self.project(state_BTNM)[0]) + EXIT_EPS


class Mhc(ResidualStream):
    """The state is N streams [B, T, N, M], at first all the embedding."""

    def __init__(self, config: MhcConfig, dims: Dims) -> None:
        super().__init__()
        self.config = config
        self.dims = dims
        self.exit_weights = ExitWeights(config, dims) if config.exit == "learned" else None

    def enter(self, x_BTM: Tensor) -> Tensor:
        return x_BTM.unsqueeze(2).repeat(1, 1, self.config.streams, 1)

    def exit(self, state: Tensor) -> Tensor:
        """The streams' mean or sum, or their sum by learned weights."""
        if self.exit_weights is not None:
            with torch.autocast(state.device.type, enabled=False):
                return _weighted(self.exit_weights(state).to(state.dtype), state)
        return state.mean(2) if self.config.exit == "mean" else state.sum(2)

    def new_site(self, index: int, layer: int) -> Site:
        return Site(MhcRead(self.config, self.dims), MhcWrite())


build.register(MhcConfig, Mhc)
