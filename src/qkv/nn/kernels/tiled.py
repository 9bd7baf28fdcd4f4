"""FlashAttention, written to be read (Dao et al. 2022, arXiv 2205.14135; Dao 2023, arXiv 2307.08691).

The T x S matrix of scores is never held. It is walked in tiles, and per query three numbers are carried along: the
largest score m so far, the normaliser z = sum exp(score - m), and the output o = sum exp(score - m) v. When a new tile
raises m to m', what was summed so far is worth exp(m - m') of what it was:

    m' = max(m, max of the tile);  c = exp(m - m');  z' = c z + sum exp(S - m');  o' = c o + exp(S - m') V

At the end the answer is o / z: exact, not an approximation. Forward keeps the answer and lse = m + ln z, [B, H, T];
backward computes each tile's probabilities again as exp(S - lse). Memory therefore grows with T, not with T x S.

A sink is a key that has been seen before the first tile, with a value of 0: m starts at its score, z at 1.

Shapes: see base.py; R = H/G query heads per key/value head, t and s a tile's share of T and S.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from qkv.nn.bias import Bias
from qkv.nn.kernels.base import Kernel, say_fallback
from qkv.nn.kernels.math import MathKernel, grouped
from qkv.nn.mask import Causal, Mask
from qkv.nn.score import Scoring


class TiledKernel(Kernel):
    """The online-softmax algorithm in plain PyTorch, forward and backward; `tile` is the side of a tile in slots. It
    drops no weights, caps no scores and knows no additive ones."""

    def __init__(self, tile: int = 256) -> None:
        super().__init__()
        self.tile = tile
        # a compiler would unroll the loops over tiles; asking for this at import would load the compiler, for a second
        self._outside_graphs = torch.compiler.disable(_tiled_attention)  # type: ignore[no-untyped-call]

    def forward(
        self, q_BHTD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor, mask: Mask, scoring: Scoring, dropout: float = 0.0
    ) -> Tensor:
        lacking = self.lacking(q_BHTD, k_BGSD, v_BGSE, mask, scoring, dropout)
        if lacking:
            say_fallback("tiled", lacking)
            return MathKernel()(q_BHTD, k_BGSD, v_BGSE, mask, scoring, dropout)  # type: ignore[no-any-return]
        k_BGSD, v_BGSE = mask.without_padding(k_BGSD, v_BGSE)
        # [B, G, R, T, D] against [B, G, 1, S, D]: query heads of a group share its keys and values
        q_BGRTD = grouped(q_BHTD, k_BGSD.shape[1])
        out_BGRTE: Tensor = self._outside_graphs(
            q_BGRTD, k_BGSD.unsqueeze(2), v_BGSE.unsqueeze(2), mask, scoring, self.tile
        )
        return out_BGRTE.flatten(1, 2)

    def lacking(
        self, q_BHTD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor, mask: Mask, scoring: Scoring, dropout: float = 0.0
    ) -> str:
        if dropout:
            return "dropout on attention weights"
        if scoring.softcap is not None:
            return "a soft cap on scores"
        return "additive scores" if scoring.additive_HD is not None else ""


def _tiles(mask: Mask, tile: int) -> Iterator[tuple[slice, list[tuple[slice, Tensor | None]]]]:
    """Each tile of queries with the tiles of keys it must visit, and what is allowed in each (None: everything).

    Under Causal, tiles wholly in the future are skipped and tiles wholly in the past need no mask.
    """
    causal = isinstance(mask.rule, Causal) and mask.aligned
    offset = mask.num_keys - mask.num_queries
    for start in range(0, mask.num_queries, tile):
        queries = slice(start, min(start + tile, mask.num_queries))
        visits: list[tuple[slice, Tensor | None]] = []
        for first in range(0, mask.num_keys, tile):
            keys = slice(first, min(first + tile, mask.num_keys))
            if causal and keys.start > queries.stop - 1 + offset:
                break
            if mask.everything or (causal and keys.stop - 1 <= queries.start + offset):
                visits.append((keys, None))
            else:
                # [B or 1, t, s] -> [B or 1, 1, 1, t, s]
                visits.append((keys, mask.tile(queries, keys)[:, None, None]))
        yield queries, visits


def _scores(q_tD: Tensor, k_sD: Tensor, scale: float, bias_ts: Tensor | None, allowed: Tensor | None) -> Tensor:
    scores_ts = (q_tD @ k_sD.transpose(-1, -2)).float() if q_tD.dtype.itemsize < 4 else q_tD @ k_sD.transpose(-1, -2)
    scores_ts = scores_ts * scale
    if bias_ts is not None:
        scores_ts = scores_ts + bias_ts.to(scores_ts.dtype)
    return scores_ts if allowed is None else scores_ts.masked_fill(~allowed, float("-inf"))


def _bias(bias: Bias | None, weight: Tensor | None, mask: Mask, q: slice, k: slice, groups: int) -> Tensor | None:
    """A tile of the bias, [B or 1, G, R, t, s]."""
    return None if bias is None else grouped(bias.tile(mask, q, k, weight), groups)


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        weight: Tensor | None,
        sinks: Tensor | None,
        bias: Bias | None,
        mask: Mask,
        scale: float,
        tile: int,
    ) -> Tensor:
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        sum_dtype = torch.promote_types(q.dtype, torch.float32)
        lse = torch.empty(q.shape[:-1], dtype=sum_dtype, device=q.device)
        for queries, visits in _tiles(mask, tile):
            q_tD = q[..., queries, :]
            m = torch.full(q_tD.shape[:-1], float("-inf"), dtype=sum_dtype, device=q.device).unsqueeze(-1)
            z = torch.zeros_like(m)
            if sinks is not None:
                m, z = sinks.to(sum_dtype)[..., None, None].expand_as(m), torch.ones_like(z)
            o = torch.zeros(*q_tD.shape[:-1], v.shape[-1], dtype=sum_dtype, device=q.device)
            for keys, allowed in visits:
                b = _bias(bias, weight, mask, queries, keys, groups=k.shape[1])
                s = _scores(q_tD, k[..., keys, :], scale, b, allowed)
                m_new = torch.maximum(m, s.amax(-1, keepdim=True))
                # no key seen yet: m' is -inf, and exp(-inf - -inf) would be NaN; subtracting 0 gives exp(-inf) = 0
                m_safe = m_new.masked_fill(m_new == float("-inf"), 0.0)
                c, p = (m - m_safe).exp(), (s - m_safe).exp()
                z = c * z + p.sum(-1, keepdim=True)
                o = c * o + (p.to(v.dtype) @ v[..., keys, :]).to(sum_dtype)
                m = m_new
            empty = z == 0.0
            out[..., queries, :] = (o / z.masked_fill(empty, 1.0)).to(q.dtype)
            # an empty row gets lse = +inf, so that backward finds the probability exp(S - inf) = 0 everywhere
            lse[..., queries] = (m + z.log()).masked_fill(empty, float("inf")).squeeze(-1)
        ctx.save_for_backward(q, k, v, out, lse, weight, sinks)
        ctx.bias, ctx.mask, ctx.scale, ctx.tile = bias, mask, scale, tile
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, weight, sinks = ctx.saved_tensors
        bias, mask, d_out = ctx.bias, ctx.mask, grads[0]
        learned = ctx.needs_input_grad[3]
        dw = torch.zeros_like(weight) if learned else None
        weight = weight.detach().requires_grad_() if learned else weight
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        # rowsum(dP * P) = rowsum(dO * O): the softmax's own term, from what is at hand (FlashAttention, appendix B)
        delta = (d_out * out).sum(-1, keepdim=True)
        d_sinks = None
        if sinks is not None:  # as ds below, with a value of 0
            p_sink = (sinks[..., None] - lse).exp().to(q.dtype)
            d_sinks = -(p_sink * delta.squeeze(-1)).sum((0, -1)).to(sinks.dtype)
        for queries, visits in _tiles(mask, ctx.tile):
            q_tD, d_tE, lse_t = q[..., queries, :], d_out[..., queries, :], lse[..., queries].unsqueeze(-1)
            for keys, allowed in visits:
                k_sD, v_sE = k[..., keys, :], v[..., keys, :]
                with torch.set_grad_enabled(learned):
                    b = _bias(bias, weight, mask, queries, keys, groups=k.shape[1])
                p = (_scores(q_tD, k_sD, ctx.scale, b, allowed) - lse_t).exp().to(q.dtype)
                dp = d_tE @ v_sE.transpose(-1, -2)
                ds = p * (dp - delta[..., queries, :])
                if dw is not None and b is not None:
                    dw += torch.autograd.grad(b, weight, ds.sum_to_size(b.shape).to(b.dtype))[0]
                ds = ds * ctx.scale
                dq[..., queries, :] += ds @ k_sD
                # the R query heads of a group share one key/value head: their gradients add up
                dk[..., keys, :] += (ds.transpose(-1, -2) @ q_tD).sum(2, keepdim=True)
                dv[..., keys, :] += (p.transpose(-1, -2) @ d_tE).sum(2, keepdim=True)
        return dq, dk, dv, dw, d_sinks, None, None, None, None


def _tiled_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scoring: Scoring, tile: int) -> Tensor:
    bias, sinks = scoring.bias, scoring.sinks_H
    weight = None if bias is None else bias.weight
    sinks_GR = None if sinks is None else sinks.view(q.shape[1:3])
    out: Tensor = _TiledAttention.apply(q, k, v, weight, sinks_GR, bias, mask, scoring.scale, tile)  # type: ignore[no-untyped-call]
    return out
