"""What every attention kernel obeys.

Shapes: B batch, T query slots, S key slots, H query heads, G key/value heads (H a multiple of G: query head j reads
key/value head j // (H/G)), D width of queries and keys, E width of values.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor, nn

from qkv.nn.mask import Mask
from qkv.nn.score import Scoring

log = logging.getLogger("qkv")


class Kernel(nn.Module):
    """Base of the kernels. A kernel has no parameters and is a submodule, so that hooks see all it receives.

    A query that may attend to nothing gets zeros, with finite gradients. Slots that Padding declares empty reach
    nobody, whatever they hold.
    """

    def forward(
        self,
        q_BHTD: Tensor,
        k_BGSD: Tensor,
        v_BGSE: Tensor,
        mask: Mask,
        scoring: Scoring,
        dropout: float = 0.0,
    ) -> Tensor:
        """The attended values, [B, H, T, E]. dropout: the probability of dropping an attention weight."""
        raise TypeError(f"{type(self).__name__} computes nothing")

    def lacking(
        self, q_BHTD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor, mask: Mask, scoring: Scoring, dropout: float = 0.0
    ) -> str:
        """What of such a call it cannot do and hands to `math`; "" where it does all of it."""
        return ""


def say_fallback(kernel: str, feature: str) -> None:
    """Say, once per process, that `math` does what `kernel` cannot; not within a compiled graph, which it would cut."""
    if not torch.compiler.is_compiling():
        _say(kernel, feature)


@cache
def _say(kernel: str, feature: str) -> None:
    log.warning("the %s kernel cannot do %s: using math", kernel, feature)
