"""Matrices held as blocks of few bits, in ggml's formats, and turned into numbers when they are used.

A block is a run of 32 or 256 numbers of a row, with one or more scales of its own. Dequantising costs time at every
use and saves memory: a block of Q4_K has 4.5 bits per number.

Shapes: N blocks, E numbers per block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_AT_ONCE = 1 << 18  # numbers: what is made of them in between stays in the processor's cache


@dataclass(frozen=True)
class BlockFormat:
    """`numbers` per block, held in `size` bytes; `unpack` makes float32 [N, E] of bytes [N, size]."""

    numbers: int
    size: int
    unpack: Callable[[Tensor], Tensor]

    def row_bytes(self, width: int) -> int:
        """The bytes of a row of `width` numbers, which are whole blocks."""
        return width // self.numbers * self.size


def dequantize(blocks: Tensor, kind: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers of `blocks` (bytes, [..., whole blocks * size]), as [..., width]. `kind`: a key of FORMATS."""
    form = FORMATS[kind]
    blocks_NS = blocks.reshape(-1, form.size)
    numbers_NE = torch.empty(len(blocks_NS), form.numbers, dtype=dtype, device=blocks.device)
    step = _AT_ONCE // form.numbers
    for first in range(0, len(blocks_NS), step):
        numbers_NE[first : first + step] = form.unpack(blocks_NS[first : first + step])
    return numbers_NE.view(*blocks.shape[:-1], -1)


class QuantizedLinear(nn.Module):
    """y = W x + b, with W held as blocks and dequantised, in the precision of x, whenever it is used."""

    def __init__(self, kind: str, out_features: int, in_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.kind, self.out_features, self.in_features = kind, out_features, in_features
        blocks = torch.empty(out_features, FORMATS[kind].row_bytes(in_features), dtype=torch.uint8)
        self.blocks: Tensor
        self.register_buffer("blocks", blocks)
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return F.linear(x, dequantize(self.blocks, self.kind, x.dtype), self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, {self.kind}, {self.blocks.nbytes:,} bytes"


def is_quantized(network: nn.Module) -> bool:
    """Whether some of its matrices are held as blocks."""
    return any(isinstance(module, QuantizedLinear) for module in network.modules())


# --- the formats (ggml's names; https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h) -----------------------


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block, [N, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Low halves of all bytes, then high halves: [..., n] -> [..., 2n]."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _bits(packed: Tensor) -> Tensor:
    """The bits of [N, n] bytes, the lowest first: [N, 8n]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(-1) >> shifts & 1).flatten(-2)


def _q4_0(b: Tensor) -> Tensor:
    return _half(b, 0) * (_nibbles(b[:, 2:]).float() - 8)


def _q4_1(b: Tensor) -> Tensor:
    return torch.addcmul(_half(b, 2), _half(b, 0), _nibbles(b[:, 4:]).float())


def _q5_0(b: Tensor) -> Tensor:
    return _half(b, 0) * ((_nibbles(b[:, 6:]) | _bits(b[:, 2:6]) << 4).float() - 16)


def _q5_1(b: Tensor) -> Tensor:
    return torch.addcmul(_half(b, 2), _half(b, 0), (_nibbles(b[:, 8:]) | _bits(b[:, 4:8]) << 4).float())


def _q8_0(b: Tensor) -> Tensor:
    return _half(b, 0) * b[:, 2:].view(torch.int8).float()


def _scales_and_mins(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The eight 6-bit scales and minima that a K-block packs into 12 bytes, each [N, 8, 1]."""
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((low & 63, high & 15 | low >> 6 << 4), dim=-1)
    mins = torch.cat((middle & 63, high >> 4 | middle >> 6 << 4), dim=-1)
    return scales.unsqueeze(-1).float(), mins.unsqueeze(-1).float()


def _k_block(b: Tensor, values: Tensor) -> Tensor:
    """Values [N, 8, 32] times the scales of their eight parts, less the minima: [N, 256]."""
    scales, mins = _scales_and_mins(b[:, 4:16])
    d, d_min = _half(b, 0).unsqueeze(-1), _half(b, 2).unsqueeze(-1)
    return torch.addcmul(-d_min * mins, d * scales, values.float()).flatten(1)


def _q4_k(b: Tensor) -> Tensor:
    return _k_block(b, _nibbles(b[:, 16:].view(-1, 4, 32)).view(-1, 8, 32))


def _q5_k(b: Tensor) -> Tensor:
    low = _nibbles(b[:, 48:].view(-1, 4, 32)).view(-1, 8, 32)
    fifth = _bits(b[:, 16:48]).view(-1, 32, 8).transpose(1, 2)
    return _k_block(b, low | fifth << 4)


def _q6_k(b: Tensor) -> Tensor:
    low = _nibbles(b[:, :128].view(-1, 2, 64))
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=b.device)[:, None]
    high = (b[:, 128:192].view(-1, 2, 1, 32) >> shifts & 3).flatten(2)
    values = (low | high << 4).view(-1, 16, 16).float() - 32
    scales = b[:, 192:208].view(torch.int8).float()
    return (_half(b, 208) * scales).unsqueeze(-1).mul(values).flatten(1)


FORMATS = {
    "Q4_0": BlockFormat(32, 18, _q4_0),
    "Q4_1": BlockFormat(32, 20, _q4_1),
    "Q5_0": BlockFormat(32, 22, _q5_0),
    "Q5_1": BlockFormat(32, 24, _q5_1),
    "Q8_0": BlockFormat(32, 34, _q8_0),
    "Q4_K": BlockFormat(256, 144, _q4_k),
    "Q5_K": BlockFormat(256, 176, _q5_k),
    "Q6_K": BlockFormat(256, 210, _q6_k),
}
