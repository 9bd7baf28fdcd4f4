"""PyTorch's flexible attention (Dong et al. 2024, arXiv 2412.05496): a compiler makes one fused kernel of the rule, the
cap, the bias and the sinks, and whole blocks of slots that the rule hides are skipped.

Shapes: see base.py; t and s index queries and keys, q and k are their slots.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, reduce, singledispatch
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional as F

from qkv.nn.kernels.base import Kernel, say_fallback
from qkv.nn.kernels.math import MathKernel
from qkv.nn.mask import And, Causal, Documents, Mask, Or, Padding, Prefix, Rule, Window
from qkv.nn.score import Scoring

Allows = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Whether in row b the query at slot q may attend to the key at slot k; each is one number."""

NARROWEST = 16
"""The fewest channels of a head on a GPU."""


class FlexKernel(Kernel):
    """`flex_attention`: for inference anywhere, for training on a GPU. There it is compiled; on a CPU it is not, and
    holds all scores. It is no part of a graph compiled around it.

    A sink is one more slot, whose key and value are 0. Dropout on weights, additive scores, the gradients of a learned
    bias and of sinks, on a CPU all gradients, on a GPU heads of less than 16 channels, and rules that are not those of
    `qkv.nn.mask` it cannot do.
    """

    def __init__(self) -> None:
        super().__init__()
        self._outside_graphs = torch.compiler.disable(_attend)  # type: ignore[no-untyped-call]

    def forward(
        self, q_BHTD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor, mask: Mask, scoring: Scoring, dropout: float = 0.0
    ) -> Tensor:
        lacking = self.lacking(q_BHTD, k_BGSD, v_BGSE, mask, scoring, dropout)
        if lacking:
            say_fallback("flex", lacking)
            return MathKernel()(q_BHTD, k_BGSD, v_BGSE, mask, scoring, dropout)  # type: ignore[no-any-return]
        k_BGSD, v_BGSE = mask.without_padding(k_BGSD, v_BGSE)
        out: Tensor = self._outside_graphs(q_BHTD, k_BGSD, v_BGSE, mask, scoring)
        return out

    def lacking(
        self, q_BHTD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor, mask: Mask, scoring: Scoring, dropout: float = 0.0
    ) -> str:
        learning = torch.is_grad_enabled()
        if mask.rule is not None and not _knows(mask.rule):
            return "a rule of another's making"
        if dropout:
            return "dropout on attention weights"
        if scoring.additive_HD is not None:
            return "additive scores"
        if scoring.bias is not None and scoring.bias.learning:
            return "the gradient of a learned bias"
        if scoring.sinks_H is not None and scoring.sinks_H.requires_grad and learning:
            return "the gradient of sinks"
        if q_BHTD.device.type == "cpu":
            some = any(tensor.requires_grad for tensor in (q_BHTD, k_BGSD, v_BGSE))
            return "gradients on a CPU" if some and learning else ""
        narrow = min(q_BHTD.shape[3], v_BGSE.shape[3]) < NARROWEST
        return f"heads of less than {NARROWEST} channels on a GPU" if narrow else ""


def _attend(q_BHTD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor, mask: Mask, scoring: Scoring) -> Tensor:
    if scoring.sinks_H is not None:
        k_BGSD, v_BGSE = F.pad(k_BGSD, (0, 0, 0, 1)), F.pad(v_BGSE, (0, 0, 0, 1))
    out: Tensor = _flex_attention(q_BHTD.device.type)(
        q_BHTD,
        k_BGSD,
        v_BGSE,
        score_mod=_score_mod(scoring, mask, q_BHTD.shape[0]),
        block_mask=_block_mask(mask, q_BHTD.shape[0], sinks=scoring.sinks_H is not None),
        scale=scoring.scale,
        enable_gqa=q_BHTD.shape[1] != k_BGSD.shape[1],
    )
    return out


@cache
def _flex_attention(device: str) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention  # loads the compiler, for a second

    # that it holds all scores there is known, and the class says so
    warnings.filterwarnings("ignore", "flex_attention called without torch.compile", UserWarning)
    attend: Any = flex_attention
    return attend if device == "cpu" else torch.compile(attend)


def _score_mod(scoring: Scoring, mask: Mask, batch: int) -> Callable[..., Tensor] | None:
    """What becomes of the scaled product of query t and key s."""
    cap, sinks_H, num_keys = scoring.softcap, scoring.sinks_H, mask.num_keys
    bias_BHTS = None
    if scoring.bias is not None:
        bias_BHTS = F.pad(scoring.bias.tensor(mask), (0, 1)).expand(batch, -1, -1, -1)
    if cap is None and bias_BHTS is None and sinks_H is None:
        return None

    def score_mod(score: Tensor, b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        if bias_BHTS is not None:
            score = score + bias_BHTS[b, h, t, s].to(score.dtype)
        if sinks_H is not None:
            score = torch.where(s == num_keys, sinks_H[h].to(score.dtype), score)
        return score

    return score_mod


_block_masks: WeakKeyDictionary[Mask, dict[bool, Any]] = WeakKeyDictionary()
"""What has been made of a mask, without and with a slot for sinks: one for all layers of a forward."""


def _block_mask(mask: Mask, batch: int, *, sinks: bool) -> Any:
    """The mask as `flex_attention` reads it; None hides nothing."""
    if mask.everything:
        return None
    made = _block_masks.setdefault(mask, {})
    if sinks not in made:
        from torch.nn.attention.flex_attention import create_block_mask

        keys = mask.num_keys + sinks
        made[sinks] = create_block_mask(
            _mask_mod(mask, batch, sinks), batch, None, mask.num_queries, keys, device=mask.q_slots.device
        )
    return made[sinks]


def _mask_mod(mask: Mask, batch: int, sinks: bool) -> Callable[..., Tensor]:
    """Whether query t sees key s. It holds what the mask holds, and not the mask, which could never be forgotten."""
    assert mask.rule is not None
    allows, num_keys = _allows(mask.rule, batch), mask.num_keys
    q_BT1, k_B1S = mask.slots(slice(None), slice(None))
    q_BT, k_BS = q_BT1.squeeze(2).expand(batch, -1), F.pad(k_B1S.squeeze(1), (0, 1)).expand(batch, -1)

    def mask_mod(b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        k = k_BS[b, s]
        seen = allows(b, q_BT[b, t], k) & (k >= 0)
        return (s == num_keys) | seen if sinks else seen

    return mask_mod


@singledispatch
def _allows(rule: Rule, batch: int) -> Allows:
    raise TypeError(f"the flex kernel knows no rule {type(rule).__name__}")


def _knows(rule: Rule) -> bool:
    if isinstance(rule, And | Or):
        return all(_knows(part) for part in rule.rules)
    return _allows.dispatch(type(rule)) is not _allows.dispatch(object)


@_allows.register
def _causal(rule: Causal, batch: int) -> Allows:
    return lambda b, q, k: k <= q


@_allows.register
def _window(rule: Window, batch: int) -> Allows:
    size = rule.size
    return lambda b, q, k: (q - k).abs() < size


@_allows.register
def _prefix(rule: Prefix, batch: int) -> Allows:
    lengths_B = rule.lengths_B.expand(batch)
    return lambda b, q, k: (q < lengths_B[b]) & (k < lengths_B[b])


@_allows.register
def _documents(rule: Documents, batch: int) -> Allows:
    query_BT, key_BS = rule.query_BT.expand(batch, -1), rule.key_BS.expand(batch, -1)
    return lambda b, q, k: query_BT[b, q] == key_BS[b, k.clamp(min=0)]


@_allows.register
def _padding(rule: Padding, batch: int) -> Allows:
    lengths_B = rule.lengths_B.expand(batch)
    return lambda b, q, k: k < lengths_B[b]


@_allows.register
def _and(rule: And, batch: int) -> Allows:
    def both(one: Allows, two: Allows) -> Allows:
        return lambda b, q, k: one(b, q, k) & two(b, q, k)

    return reduce(both, [_allows(part, batch) for part in rule.rules])


@_allows.register
def _or(rule: Or, batch: int) -> Allows:
    def either(one: Allows, two: Allows) -> Allows:
        return lambda b, q, k: one(b, q, k) | two(b, q, k)

    return reduce(either, [_allows(part, batch) for part in rule.rules])
