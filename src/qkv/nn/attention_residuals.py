"""Attention Residuals: each sublayer reads a softmax over depth (Kimi Team 2026, arXiv 2603.15031).

The sources are the embedding and the outputs of earlier sublayers, or the sums of blocks of them; the last may still be
growing. With v_i a source and w, g a site's own vectors, of the stream's width,

    alpha = softmax over i of (g w) . v_i / rms(v_i),   x = sum of alpha_i v_i

in float32. A sublayer's output becomes a source or is added to the last one: nothing else is added up. All w start at
0, where x is the plain stream divided by the number of sources, which the norm behind it takes away.

Shapes: B batch, T tokens, M model width, I sources.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from qkv.config.residuals import AttentionResidualsConfig
from qkv.nn.build import Dims, build
from qkv.nn.residual import ResidualStream, Site


class Sources(NamedTuple):
    """The state: what can be read, [B, T, M] each, and 1 / rms of it, [B, T] each, once for all that will read it."""

    values: tuple[Tensor, ...]
    inverse_rms: tuple[Tensor, ...]


class DepthWeights(nn.Module):
    """How much a site reads of each source: [B, T, I], which sums to 1 over I."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(d_model))
        self.gain = nn.Parameter(torch.ones(d_model))

    def start(self, generator: torch.Generator | None) -> None:
        """All sources alike."""
        self.query.zero_()
        self.gain.fill_(1.0)

    def forward(self, sources: Sources) -> Tensor:
        query_M = _wide(self.query) * _wide(self.gain)
        with torch.autocast(query_M.device.type, enabled=False):
            scores = [_wide(v) @ query_M * r for v, r in zip(sources.values, sources.inverse_rms, strict=True)]
        return torch.stack(scores, -1).softmax(-1)


class ReadDepth(nn.Module):
    """The mixture of all sources."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.weights = DepthWeights(d_model)

    def forward(self, sources: Sources) -> tuple[Tensor, None]:
        """x [B, T, M] in the dtype of the sources."""
        weights_BTI: Tensor = self.weights(sources)
        x_BTM = torch.zeros((), dtype=weights_BTI.dtype, device=weights_BTI.device)
        for weight_BT1, v_BTM in zip(weights_BTI[..., None, :].unbind(-1), sources.values, strict=True):
            x_BTM = torch.addcmul(x_BTM, weight_BT1, _wide(v_BTM))
        return x_BTM.to(sources.values[0].dtype), None


class ReadEmbedding(nn.Module):
    """The first site has nothing to choose from."""

    def forward(self, sources: Sources) -> tuple[Tensor, None]:
        return sources.values[0], None


class WriteSource(nn.Module):
    """y becomes a source (`opens`), or a part of the last one."""

    def __init__(self, eps: float, opens: bool) -> None:
        super().__init__()
        self.eps = eps
        self.opens = opens

    def forward(self, sources: Sources, y_BTM: Tensor, context: None) -> Sources:
        last_BTM = sources.values[-1]
        if self.opens:
            return _with(sources, y_BTM.to(last_BTM.dtype), self.eps)
        return _with(Sources(sources.values[:-1], sources.inverse_rms[:-1]), last_BTM + y_BTM, self.eps)

    def extra_repr(self) -> str:
        return "opens a block" if self.opens else ""


class AttentionResiduals(ResidualStream):
    """The stream of all sites, and the site at its exit, which reads as any other."""

    grows = True

    def __init__(self, config: AttentionResidualsConfig, dims: Dims) -> None:
        super().__init__()
        self.config = config
        self.d_model = dims.d_model
        self.readout = ReadDepth(dims.d_model)
        self._block = -1

    def enter(self, x_BTM: Tensor) -> Sources:
        return _with(Sources((), ()), x_BTM, self.config.eps)

    def exit(self, state: Sources) -> Tensor:
        x_BTM: Tensor = self.readout(state)[0]
        return x_BTM

    def new_site(self, index: int, layer: int) -> Site:
        block = (layer if self.config.unit == "layer" else index) // (self.config.block_size or 1)
        opens = self.config.block_size is None or block != self._block
        self._block = block
        read = ReadEmbedding() if index == 0 else ReadDepth(self.d_model)
        return Site(read, WriteSource(self.config.eps, opens))


def _with(sources: Sources, v_BTM: Tensor, eps: float) -> Sources:
    """The sources and one more."""
    norm_BT = torch.linalg.vector_norm(_wide(v_BTM), dim=-1)
    inverse_BT = torch.rsqrt(norm_BT.square() / v_BTM.shape[-1] + eps)
    return Sources((*sources.values, v_BTM), (*sources.inverse_rms, inverse_BT))


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


build.register(AttentionResidualsConfig, AttentionResiduals)
