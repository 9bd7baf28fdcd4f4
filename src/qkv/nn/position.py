"""Where a token stands: added to its embedding (sinusoidal, learned), turned into its queries and keys (rope), or added
to their scores (relative, alibi).

Shapes: B batch (or 1 where all rows agree), T tokens, S key slots, M model width, H heads, D head width, R rotary
width. Positions are int64; phases are computed in float32 (float64 in a float64 model) however the model is cast,
because positions above 256 collide in bfloat16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.config.positions import (
    AlibiConfig,
    LearnedConfig,
    NoPositionConfig,
    RelativeConfig,
    RopeConfig,
    SinusoidalConfig,
)
from qkv.nn.bias import Bias
from qkv.nn.build import Dims, build
from qkv.nn.embedding import Table
from qkv.nn.rope_scaling import RopeScaling, unscaled


class Phases:
    """What a position kind does in the attention of one forward: turns queries and keys, or adds a bias to their
    scores; this base does neither. Made once per forward and shared by all layers of a kind.
    """

    bias: Bias | None = None
    score_factor = 1.0
    """What latent attention multiplies its scores by besides."""

    def rotate(self, x_BHTD: Tensor) -> Tensor:
        """Queries or keys with their positions, [B, H, T, D]."""
        return x_BHTD


class BiasPhases(Phases):
    """A bias on the scores."""

    def __init__(self, bias: Bias) -> None:
        self.bias = bias


@dataclass
class RotaryPhases(Phases):
    """What each of the R turning channels and its partner are multiplied by, each [B, 1, T, R]: cos, and sin, which is
    negative for the first of a pair."""

    cos: Tensor
    sin: Tensor
    layout: Literal["half", "interleaved"]
    score_factor: float = 1.0

    @classmethod
    def of(
        cls, angles: Tensor, layout: Literal["half", "interleaved"], factor: float = 1.0, score_factor: float = 1.0
    ) -> RotaryPhases:
        """From the angle of each pair, [B, 1, T, R/2]; `factor` lengthens what is turned."""
        cos, sin = angles.cos() * factor, angles.sin() * factor
        if layout == "half":
            return cls(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1), layout, score_factor)
        cos, sin = torch.stack((cos, cos), -1).flatten(-2), torch.stack((-sin, sin), -1).flatten(-2)
        return cls(cos, sin, layout, score_factor)

    def rotate(self, x_BHTD: Tensor) -> Tensor:
        cos, sin = self.cos.to(x_BHTD.dtype), self.sin.to(x_BHTD.dtype)
        width = cos.shape[-1]
        turning = x_BHTD if width == x_BHTD.shape[-1] else x_BHTD[..., :width]
        if self.layout == "half":
            first, second = turning.chunk(2, dim=-1)
            partners = torch.cat((second, first), dim=-1)
        else:
            partners = turning.view(*turning.shape[:-1], -1, 2).flip(-1).flatten(-2)
        turned = turning * cos + partners * sin
        return turned if turning is x_BHTD else torch.cat((turned, x_BHTD[..., width:]), dim=-1)


NO_PHASES = Phases()


class Position(nn.Module):
    """Base of the position kinds: each overrides the one place where it acts."""

    needs_length = False
    """Whether `phases` depends on how long the whole sequence is."""

    def add(self, x_BTM: Tensor, positions_BT: Tensor) -> Tensor:
        """The embeddings with their positions, [B, T, M]."""
        return x_BTM

    def phases(self, positions_BT: Tensor, dtype: torch.dtype, total_BT: Tensor | None = None) -> Phases:
        """What these positions do in attention; angles in float32, or float64 where `dtype` is.

        total_BT: how many tokens each token's whole sequence has ([B or 1, T or 1]; see `total_lengths`); None: all of
        a row are one sequence.
        """
        return NO_PHASES

    def check_growth(self, held_B: Tensor, total_BT: Tensor) -> None:
        """Raise UsageError where the keys of the `held_B` tokens in a cache are none of the sequence that they have
        become the beginning of, which has `total_BT` tokens."""


class NoPosition(Position):
    """No position signal: attention without a mask then treats its input as a set."""

    def __init__(self, config: NoPositionConfig, dims: Dims) -> None:
        super().__init__()


class Sinusoidal(Position):
    """sin and cos of p f_i for channel pair i of M/2, where f_i = 10000^(-2i/M) ("Attention Is All You Need", 3.5).

    Pairs are channels (2i, 2i + 1) in the `interleaved` layout of the paper, (i, i + M/2) in `concatenated` (Marian)
    and in `tensor2tensor` (its code, and Whisper), where f_i = 10000^(-i/(M/2 - 1)). For any k there is one linear map
    that takes PE[p] to PE[p + k] for every p: a rotation of each pair. M2M-100 counts positions from `offset`.
    """

    def __init__(self, config: SinusoidalConfig, dims: Dims) -> None:
        super().__init__()
        self.width = dims.d_model
        self.layout = config.layout
        self.offset = config.offset

    def table(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The signal at `positions` [...], as [..., M]."""
        exponents = exponents_of(self.width, positions.device, dtype)
        if self.layout == "tensor2tensor":
            exponents = exponents * self.width / (self.width - 2)
        angles = positions.unsqueeze(-1).to(dtype) * unscaled(10000.0, exponents)
        if self.layout == "interleaved":
            return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)
        return torch.cat((angles.sin(), angles.cos()), dim=-1)

    def add(self, x_BTM: Tensor, positions_BT: Tensor) -> Tensor:
        return x_BTM + self.table(positions_BT + self.offset, _phase_dtype(x_BTM.dtype)).to(x_BTM.dtype)

    def extra_repr(self) -> str:
        return f"{self.width}, {self.layout}"


class Learned(Position):
    """One learned vector per position (Gehring et al. 2017; BERT, GPT-2), after `offset` rows without one (BART)."""

    def __init__(self, config: LearnedConfig, dims: Dims) -> None:
        super().__init__()
        self.offset = config.offset
        self.weight = nn.Parameter(torch.empty(dims.max_seq_len + config.offset, dims.d_model))

    def add(self, x_BTM: Tensor, positions_BT: Tensor) -> Tensor:
        return x_BTM + F.embedding(positions_BT + self.offset, self.weight)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, {self.weight.shape[1]}"


class Rope(Position):
    """Rotary positions (Su et al. 2021, arXiv 2104.09864): channel pair i of a query or key at position p turns by
    p * theta^(-2i/R), so that scores depend on the difference of positions only.

    Pairs are (i, i + R/2) in the `half` layout (LLaMA of Hugging Face), (2i, 2i + 1) in `interleaved` (RoFormer, Meta's
    LLaMA); channels beyond R do not turn. `scaling` changes the angles for long sequences.
    """

    def __init__(self, config: RopeConfig, dims: Dims) -> None:
        super().__init__()
        self.config = config
        self.width = config.rotary_width(dims.d_model)
        self.scaling: RopeScaling = (
            build(config.scaling, dims.with_(d_model=self.width)) if config.scaling is not None else RopeScaling()
        )
        self.needs_length = self.scaling.needs_length

    def phases(self, positions_BT: Tensor, dtype: torch.dtype, total_BT: Tensor | None = None) -> Phases:
        if total_BT is None and self.needs_length:
            total_BT = total_lengths(positions_BT)
        exponents = exponents_of(self.width, positions_BT.device, _phase_dtype(dtype))
        frequencies = self.scaling.frequencies(self.config.theta, exponents, total_BT)
        angles_B1TR = (positions_BT.unsqueeze(-1).to(exponents.dtype) * frequencies).unsqueeze(1)
        scaling = self.scaling
        return RotaryPhases.of(angles_B1TR, self.config.layout, scaling.attention_factor, scaling.score_factor)

    def check_growth(self, held_B: Tensor, total_BT: Tensor) -> None:
        self.scaling.check_growth(held_B, total_BT)

    def extra_repr(self) -> str:
        return f"{self.width} channels, theta={self.config.theta:g}, {self.config.layout}"


class Relative(Position):
    """T5's relative positions (Raffel et al. 2019, arXiv 1910.10683): a score gets a learned number of its head, chosen
    by the bucket that the distance from query to key falls in. The table [num_buckets, H] serves all layers of a stack.

    Distances are those of slots, which is the same as of positions within one sequence.
    """

    def __init__(self, config: RelativeConfig, dims: Dims) -> None:
        super().__init__()
        self.config = config
        self.causal = dims.causal
        self.table = Table(config.num_buckets, dims.num_heads)

    def phases(self, positions_BT: Tensor, dtype: torch.dtype, total_BT: Tensor | None = None) -> Phases:
        return BiasPhases(RelativeBias(self.table.weight, self))

    def bucket(self, distance: Tensor) -> Tensor:
        """The bucket of each distance k - q, int64, of the same shape.

        Half of the buckets (in an encoder, of each direction's half) are single distances from 0 on, the others are
        spaced logarithmically up to `max_distance`. Where only the past is seen, all keys ahead fall in bucket 0.
        """
        count, ahead = self.config.num_buckets, torch.zeros_like(distance)
        if self.causal:
            far = -distance.clamp(max=0)
        else:
            count //= 2
            far, ahead = distance.abs(), (distance > 0) * count
        single = count // 2
        spread = torch.log(far.clamp(min=single).float() / single) / math.log(self.config.max_distance / single)
        shared = (single + (spread * (count - single)).long()).clamp(max=count - 1)
        return ahead + torch.where(far < single, far, shared)

    def extra_repr(self) -> str:
        return f"up to {self.config.max_distance}"


class RelativeBias(Bias):
    """The bias of one forward; weight is the table [num_buckets, H]."""

    def __init__(self, weight: Tensor, position: Relative) -> None:
        super().__init__(weight)
        self.position = position

    def values(self, weight: Tensor, q_BT1: Tensor, k_11S: Tensor) -> Tensor:
        buckets_BTS = self.position.bucket(k_11S - q_BT1)
        return F.embedding(buckets_BTS, weight).permute(0, 3, 1, 2).contiguous()


class Alibi(Position):
    """Attention with linear biases (Press et al. 2022, arXiv 2108.12409): a score loses the m of its head for each slot
    that lies between query and key, to either side. Nothing is learned.

    For H heads, a power of two, m is 2^(-8i/H), i = 1 .. H. For others: those of the next lower power P, then every
    other one of 2P heads (the authors' code). Distances are those of slots, the same as of positions in one sequence.
    """

    def __init__(self, config: AlibiConfig, dims: Dims) -> None:
        super().__init__()
        self.num_heads = dims.num_heads

    def slopes(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        """m of each head, [H]."""
        power = 2 ** (self.num_heads.bit_length() - 1)
        number = torch.arange(self.num_heads, device=device, dtype=dtype)
        halves = torch.where(number < power, 2 * (number + 1), 2 * (number - power) + 1)
        return torch.exp2(halves * (-4 / power))

    def phases(self, positions_BT: Tensor, dtype: torch.dtype, total_BT: Tensor | None = None) -> Phases:
        return BiasPhases(AlibiBias(self.slopes(positions_BT.device, _phase_dtype(dtype))))

    def extra_repr(self) -> str:
        return f"{self.num_heads} heads"


class AlibiBias(Bias):
    """The bias of one forward; weight is the slopes [H]."""

    def values(self, weight: Tensor, q_BT1: Tensor, k_11S: Tensor) -> Tensor:
        return -weight[:, None, None] * (k_11S - q_BT1).abs().unsqueeze(1)


def exponents_of(width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """2i/width for each pair i of channels, [width/2]."""
    return torch.arange(0, width, 2, device=device, dtype=dtype) / width


def total_lengths(positions_BT: Tensor, lengths_B: Tensor | None = None, documents_BT: Tensor | None = None) -> Tensor:
    """How many tokens each token's whole sequence has, those before it in a cache included: 1 + its largest position.

    [B or 1, 1], or [B, T] where rows hold several documents. lengths_B: how many tokens of a row are real.
    """
    if lengths_B is not None:
        real_BT = torch.arange(positions_BT.shape[1], device=positions_BT.device) < lengths_B[:, None]
        positions_BT = positions_BT.where(real_BT, 0)
    if documents_BT is None:
        return positions_BT.amax(1, keepdim=True) + 1
    run_BT = torch.zeros_like(documents_BT)
    run_BT[:, 1:] = (documents_BT[:, 1:] != documents_BT[:, :-1]).cumsum(1)
    last_BT = torch.zeros_like(run_BT).scatter_reduce(1, run_BT, positions_BT.expand_as(run_BT), "amax")
    return last_BT.gather(1, run_BT) + 1


def _phase_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


build.register(NoPositionConfig, NoPosition)
build.register(SinusoidalConfig, Sinusoidal)
build.register(LearnedConfig, Learned)
build.register(RopeConfig, Rope)
build.register(RelativeConfig, Relative)
build.register(AlibiConfig, Alibi)
