"""Where a token stands: added to its embedding (sinusoidal, learned), or turned into its queries and keys (rope).

Shapes: B batch (or 1 where all rows agree), T tokens, M model width, H heads, D head width, R rotary width. Positions
are int64; phases are computed in float32 (float64 in a float64 model) however the model is cast, because positions
above 256 collide in bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.config.parts import LearnedConfig, NoPositionConfig, RopeConfig, SinusoidalConfig
from qkv.nn.build import Dims, build


class Phases:
    """What a position kind does to the queries and keys of one forward; this base does nothing.

    Made once per forward and shared by all layers of a kind.
    """

    def rotate(self, x_BHTD: Tensor) -> Tensor:
        """Queries or keys with their positions, [B, H, T, D]."""
        return x_BHTD


@dataclass
class RotaryPhases(Phases):
    """cos and sin of every angle, each [B, 1, T, R/2]."""

    cos: Tensor
    sin: Tensor
    layout: Literal["half", "interleaved"]

    def rotate(self, x_BHTD: Tensor) -> Tensor:
        cos, sin = self.cos.to(x_BHTD.dtype), self.sin.to(x_BHTD.dtype)
        width = 2 * cos.shape[-1]
        turning, still = x_BHTD[..., :width], x_BHTD[..., width:]
        if self.layout == "half":
            a, b = turning.chunk(2, dim=-1)
            turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        else:
            a, b = turning[..., 0::2], turning[..., 1::2]
            turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        return torch.cat((turned, still), dim=-1) if still.shape[-1] else turned


NO_PHASES = Phases()


class Position(nn.Module):
    """Base of the position kinds: each overrides the one place where it acts."""

    def add(self, x_BTM: Tensor, positions_BT: Tensor) -> Tensor:
        """The embeddings with their positions, [B, T, M]."""
        return x_BTM

    def phases(self, positions_BT: Tensor, dtype: torch.dtype) -> Phases:
        """What these positions do to queries and keys; angles in float32, or float64 where `dtype` is."""
        return NO_PHASES


class NoPosition(Position):
    """No position signal: attention without a mask then treats its input as a set."""

    def __init__(self, config: NoPositionConfig, dims: Dims) -> None:
        super().__init__()


class Sinusoidal(Position):
    """PE[p, 2i] = sin(p / 10000^(2i/M)), PE[p, 2i+1] = cos of the same ("Attention Is All You Need", 3.5).

    For any k there is one linear map that takes PE[p] to PE[p + k] for every p: a rotation of each (sin, cos) pair.
    """

    def __init__(self, config: SinusoidalConfig, dims: Dims) -> None:
        super().__init__()
        self.width = dims.d_model

    def table(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The signal at `positions` [...], as [..., M]."""
        angles = angles_of(positions, self.width, 10000.0, dtype)
        return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)

    def add(self, x_BTM: Tensor, positions_BT: Tensor) -> Tensor:
        return x_BTM + self.table(positions_BT, _phase_dtype(x_BTM.dtype)).to(x_BTM.dtype)

    def extra_repr(self) -> str:
        return str(self.width)


class Learned(Position):
    """One learned vector per position (Gehring et al. 2017; BERT, GPT-2)."""

    def __init__(self, config: LearnedConfig, dims: Dims) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dims.max_seq_len, dims.d_model))

    def add(self, x_BTM: Tensor, positions_BT: Tensor) -> Tensor:
        return x_BTM + F.embedding(positions_BT, self.weight)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, {self.weight.shape[1]}"


class Rope(Position):
    """Rotary positions (Su et al. 2021, arXiv 2104.09864): channel pair i of a query or key at position p turns by
    p * theta^(-2i/R), so that scores depend on the difference of positions only.

    Pairs are (i, i + R/2) in the `half` layout (LLaMA of Hugging Face), (2i, 2i + 1) in `interleaved` (RoFormer, Meta's
    LLaMA); channels beyond R do not turn.
    """

    def __init__(self, config: RopeConfig, dims: Dims) -> None:
        super().__init__()
        self.config = config
        self.width = config.rotary_width(dims.d_model)

    def phases(self, positions_BT: Tensor, dtype: torch.dtype) -> Phases:
        angles_B1TR = angles_of(positions_BT, self.width, self.config.theta, _phase_dtype(dtype)).unsqueeze(1)
        return RotaryPhases(angles_B1TR.cos(), angles_B1TR.sin(), self.config.layout)

    def extra_repr(self) -> str:
        return f"{self.width} channels, theta={self.config.theta:g}, {self.config.layout}"


def angles_of(positions: Tensor, width: int, theta: float, dtype: torch.dtype) -> Tensor:
    """p * theta^(-2i/width) for every position p [...] and pair i, as [..., width/2]."""
    pair = torch.arange(0, width, 2, device=positions.device, dtype=dtype)
    return positions.unsqueeze(-1).to(dtype) * theta ** (-pair / width)


def _phase_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


build.register(NoPositionConfig, NoPosition)
build.register(SinusoidalConfig, Sinusoidal)
build.register(LearnedConfig, Learned)
build.register(RopeConfig, Rope)
