"""Weights that Hugging Face folders hold in few bits, with a scale for each block, as the numbers they stand for.

Shapes: E experts, O rows and I columns of a matrix, K = I / 32 blocks of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from qkv.checkpoint.published import Published
from qkv.checkpoint.tensors import FLOATS, Stored, in_pieces
from qkv.config.errors import DamagedError, QkvError

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""The numbers of four bits, without their sign, which is the highest bit."""

BLOCK = 32
"""Numbers that share a scale in MXFP4."""


def as_floats(config: Published, tensors: Mapping[str, Stored], where: Path) -> dict[str, Stored]:
    """The tensors of a folder, by name, with those of few bits as bfloat16, by the name of the matrix.

    Only weights are meant: how a model quantises what it computes (`activation_scheme`) is set aside. Raises QkvError
    for a method that is not supported, and DamagedError for a matrix whose scales are missing or do not fit, or that is
    there as floats too.
    """
    if "quantization_config" not in config:
        return dict(tensors)
    told = config.section("quantization_config")
    method = told.keys.get("quant_method")
    if method == "mxfp4":
        return _joined(tensors, "_blocks", "_scales", "", _mxfp4, where)
    if method == "fp8":
        told.only("fmt", "e4m3")
        size = told.list("weight_block_size")
        if len(size) != 2 or not all(isinstance(side, int) and side > 0 for side in size):
            raise told.unsupported("weight_block_size", size, "[128, 128]")
        join = partial(_fp8, size=(size[0], size[1]))
        return _joined(tensors, ".weight", ".weight_scale_inv", ".weight", join, where)
    raise QkvError(
        f"weights quantised by `{method!s:.80}` are not supported",
        where=config.where,
        hint="the model in float or bfloat16, or a GGUF file; supported: mxfp4, fp8",
    )


def _joined(
    tensors: Mapping[str, Stored],
    values: str,
    scales: str,
    ours: str,
    join: Callable[[Stored, Stored], Stored | None],
    where: Path,
) -> dict[str, Stored]:
    """Every pair of names that end with `values` and `scales` as one tensor, whose name ends with `ours`."""
    found = dict(tensors)
    for name in tensors:
        if not name.endswith(scales):
            continue
        stem = name.removesuffix(scales)
        packed = found.pop(stem + values, None)
        whole = packed and join(packed, found.pop(name))
        if packed and stem + ours in found:
            raise DamagedError(f"`{stem + ours}` is there twice, packed as `{stem}{values}` too", where=str(where))
        if whole is None:
            raise DamagedError(f"`{stem}{values}` is missing, or does not fit `{name}`", where=str(where))
        found[stem + ours] = whole
    for name, stored in found.items():
        if name.endswith(values) and stored.dtype in (torch.uint8, torch.float8_e4m3fn):
            raise DamagedError(f"`{name.removesuffix(values)}{scales}` is missing", where=str(where))
    return found


def _mxfp4(blocks: Stored, scales: Stored) -> Stored | None:
    """Of all experts, as gpt-oss has them: [E, O, K, 16] bytes and [E, O, K] scales, transposed to [E, I, O]."""
    bytes_fit = {blocks.dtype, scales.dtype} == {torch.uint8} and blocks.shape == (*scales.shape, BLOCK // 2)
    if not bytes_fit or len(scales.shape) != 3:
        return None
    experts, rows, count = scales.shape
    shape = (experts, count * BLOCK, rows)

    def read(dtype: torch.dtype | None) -> Tensor:
        blocks_EOKB, scales_EOK = blocks.read(None), scales.read(None)
        return in_pieces(
            shape,
            dtype or torch.bfloat16,
            lambda first, last: mxfp4(blocks_EOKB[first:last], scales_EOK[first:last]).mT,
        )

    return Stored(shape, torch.bfloat16, read)


def mxfp4(blocks_EOKB: Tensor, scales_EOK: Tensor) -> Tensor:
    """[E, O, I]: two numbers of four bits (E2M1) in a byte, the lower half first, times 2^(scale - 127) (E8M0) for each
    block of 32 (OCP Microscaling Formats specification 1.0, 5.3 and 5.4)."""
    halves = torch.stack((blocks_EOKB & 15, blocks_EOKB >> 4), dim=-1).flatten(-2).int()
    numbers = E2M1[halves & 7] * torch.where(halves > 7, -1.0, 1.0)
    return torch.ldexp(numbers, scales_EOK.int()[..., None] - 127).flatten(2)


def _fp8(weight: Stored, scales: Stored, size: tuple[int, int]) -> Stored | None:
    """A matrix [O, I] of eight bits (E4M3), and the number that each block of `size` is multiplied with."""
    fits = weight.dtype == torch.float8_e4m3fn and len(weight.shape) == 2 and scales.dtype in FLOATS
    if not fits or scales.shape != tuple(-(-side // of) for side, of in zip(weight.shape, size, strict=True)):
        return None

    def read(dtype: torch.dtype | None) -> Tensor:
        weight_OI, scales_KL = weight.read(None), scales.read(torch.float32)
        scales_KI = scales_KL.repeat_interleave(size[1], dim=1)[:, : weight.shape[1]]

        def rows(first: int, last: int) -> Tensor:
            return weight_OI[first:last].float() * scales_KI[torch.arange(first, last) // size[0]]

        return in_pieces(weight.shape, dtype or torch.bfloat16, rows)

    return Stored(weight.shape, torch.bfloat16, read)
