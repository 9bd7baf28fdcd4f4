"""Rotary positions over more tokens than a model was first trained on: other frequencies, and a factor on cos and sin.

In formulas s is the factor, L0 the original length and theta_i = theta^(-2i/R) the frequency of channel pair i.

Shapes: B batch (or 1), T tokens (or 1), R rotary width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from qkv.config.errors import UsageError
from qkv.config.positions import (
    DynamicScalingConfig,
    LinearScalingConfig,
    Llama3ScalingConfig,
    LongRopeScalingConfig,
    YarnScalingConfig,
)
from qkv.nn.build import Dims, build


def unscaled(theta: float | Tensor, exponents: Tensor) -> Tensor:
    """theta^-exponent, the angle per position of each pair (Su et al. 2021: exponent 2i/R)."""
    return 1.0 / theta**exponents


class RopeScaling(nn.Module):
    """Base of the scalings; this one changes nothing. Built for `Dims(R, max_seq_len=...)`.

    attention_factor: multiplies cos and sin. score_factor: multiplies the scores of latent attention besides.
    needs_length: frequencies depend on how long the whole sequence is.
    """

    attention_factor = 1.0
    score_factor = 1.0
    needs_length = False

    def frequencies(self, theta: float, exponents: Tensor, total_BT: Tensor | None) -> Tensor:
        """The angle per position of each pair, [R/2], or [B, T, R/2] where it depends on `total_BT`, how many tokens
        each token's whole sequence has. exponents: 2i/R, in the dtype to compute in."""
        return unscaled(theta, exponents)

    def check_growth(self, held_B: Tensor, total_BT: Tensor) -> None:
        """Raise UsageError where a cache holds tokens that were turned by other frequencies than the sequence of
        `total_BT` tokens has, which they have become."""


class LinearScaling(RopeScaling):
    """Positions divided by s (Chen et al. 2023, arXiv 2306.15595)."""

    def __init__(self, config: LinearScalingConfig, dims: Dims) -> None:
        super().__init__()
        self.factor = config.factor

    def frequencies(self, theta: float, exponents: Tensor, total_BT: Tensor | None) -> Tensor:
        return unscaled(theta, exponents) / self.factor


class DynamicScaling(RopeScaling):
    """Dynamic NTK: theta' = theta (s L / L0 - (s - 1))^(R / (R - 2)) for the L > L0 tokens of the whole sequence.

    With every token the angles of all tokens change, also in layers that have read them: nothing of a shorter sequence
    can be kept. A cache is therefore refused beyond L0 tokens; a whole forward equals the published models'.
    """

    needs_length = True

    def __init__(self, config: DynamicScalingConfig, dims: Dims) -> None:
        super().__init__()
        self.config = config
        self.power = dims.d_model / (dims.d_model - 2)

    def frequencies(self, theta: float, exponents: Tensor, total_BT: Tensor | None) -> Tensor:
        assert total_BT is not None
        factor, length = self.config.factor, self.config.original_max_seq_len
        longer_BT1 = total_BT.clamp(min=length).to(exponents.dtype).unsqueeze(-1)
        return unscaled(theta * (factor * longer_BT1 / length - (factor - 1)) ** self.power, exponents)

    def check_growth(self, held_B: Tensor, total_BT: Tensor) -> None:
        length = self.config.original_max_seq_len
        if bool(((held_B > 0)[:, None] & (total_BT > length)).any()):
            raise UsageError(
                f"with dynamic rope scaling every token beyond {length} changes what a cache holds",
                hint="the whole sequence without a cache",
            )


class YarnScaling(RopeScaling):
    """YaRN (Peng et al. 2023, arXiv 2309.00071).

    Pair d(n) = R ln(L0 / (2 pi n)) / (2 ln theta) turns n times in L0 tokens. From pair d(beta_fast) to d(beta_slow)
    the frequency falls, in a straight line over the pairs, from its own to 1/s of it. Its factors are made of
    m(a) = 0.1 a ln(s) + 1.
    """

    def __init__(self, config: YarnScalingConfig, dims: Dims) -> None:
        super().__init__()
        self.config = config
        own = self._magnitude(config.mscale_all_dim or 0.0)
        factor = self._magnitude(config.mscale) / own if config.mscale and config.mscale_all_dim else None
        self.attention_factor = config.attention_factor or factor or self._magnitude(1.0)
        self.score_factor = own**2

    def _magnitude(self, a: float) -> float:
        return 0.1 * a * math.log(self.config.factor) + 1.0

    def frequencies(self, theta: float, exponents: Tensor, total_BT: Tensor | None) -> Tensor:
        config, pairs = self.config, exponents.shape[0]

        def pair_turning(times: float) -> float:
            return 2 * pairs * math.log(config.original_max_seq_len / (2 * math.pi * times)) / (2 * math.log(theta))

        low, high = pair_turning(config.beta_fast), pair_turning(config.beta_slow)
        if config.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * pairs - 1)
        if low == high:
            high += 0.001
        pair = torch.arange(pairs, device=exponents.device, dtype=exponents.dtype)
        ramp = ((pair - low) / (high - low)).clamp(0, 1)
        own = unscaled(theta, exponents)
        return own / config.factor * ramp + own * (1 - ramp)


class LongRopeScaling(RopeScaling):
    """LongRoPE (Ding et al. 2024, arXiv 2402.13753; Phi-3): the frequency of pair i divided by short_i, or by long_i
    where the whole sequence has more than L0 tokens; one choice for all its tokens.

    A cache that was filled with L0 tokens or fewer is refused more: its keys were turned by the other choice. One that
    is given more than L0 at once may go on.
    """

    needs_length = True

    def __init__(self, config: LongRopeScalingConfig, dims: Dims) -> None:
        super().__init__()
        self.config = config
        factor = config.factor or dims.max_seq_len / config.original_max_seq_len
        growth = math.log(factor) / math.log(config.original_max_seq_len) if factor > 1 else 0.0
        self.attention_factor = config.attention_factor or math.sqrt(1 + growth)

    def frequencies(self, theta: float, exponents: Tensor, total_BT: Tensor | None) -> Tensor:
        assert total_BT is not None
        short, long = (exponents.new_tensor(part) for part in (self.config.short_factor, self.config.long_factor))
        is_long_BT1 = (total_BT > self.config.original_max_seq_len).unsqueeze(-1)
        return 1.0 / (torch.where(is_long_BT1, long, short) * theta**exponents)

    def check_growth(self, held_B: Tensor, total_BT: Tensor) -> None:
        length = self.config.original_max_seq_len
        if bool((((held_B > 0) & (held_B <= length))[:, None] & (total_BT > length)).any()):
            raise UsageError(
                f"with longrope scaling a sequence of more than {length} tokens has other keys than a cache of at most "
                f"{length} holds",
                hint="the whole sequence at once, with an empty cache",
            )


class Llama3Scaling(RopeScaling):
    """LLaMA 3.1 (Dubey et al. 2024, arXiv 2407.21783): a pair that turns at least `high` times in L0 tokens keeps its
    frequency, one that turns at most `low` times has 1/s of it, and t in [0, 1] between them gives
    (1 - t) / s + t of it."""

    def __init__(self, config: Llama3ScalingConfig, dims: Dims) -> None:
        super().__init__()
        self.config = config

    def frequencies(self, theta: float, exponents: Tensor, total_BT: Tensor | None) -> Tensor:
        config = self.config
        own = unscaled(theta, exponents)
        turns = own * config.original_max_seq_len / (2 * math.pi)
        t = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
        t = t.clamp(0, 1)
        return (1 - t) * own / config.factor + t * own


build.register(LinearScalingConfig, LinearScaling)
build.register(DynamicScalingConfig, DynamicScaling)
build.register(YarnScalingConfig, YarnScaling)
build.register(LongRopeScalingConfig, LongRopeScaling)
build.register(Llama3ScalingConfig, Llama3Scaling)
