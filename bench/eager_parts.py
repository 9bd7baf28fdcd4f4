"""What eager training on a CPU gains by three parts of its own: forward and backward, milliseconds, side by side.

    python bench/eager_parts.py [--turns 30]

RMSNorm beside F.rms_norm, attention of short rows by `math` beside `sdpa` (bfloat16, causal), and Muon's matrices side
by side beside torch.optim.Muon, which takes them one by one. Both sides take turns; given are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional as F

from qkv.config.parts import RMSNormConfig
from qkv.nn.build import Dims
from qkv.nn.kernels import KernelName, new_kernel
from qkv.nn.mask import Causal, Mask
from qkv.nn.norm import RMSNorm
from qkv.nn.score import Scoring
from qkv.train.muon import Muon

Work = Callable[[], object]
NORMED = [(16, 64, 4, 32), (16, 64, 128), (16, 256, 192), (64, 48, 256)]
ROWS = [(16, 4, 64, 32), (60, 4, 50, 64), (32, 4, 128, 64), (16, 4, 256, 64), (4, 6, 512, 64)]
MATRICES = [(16, 128, 128), (24, 192, 192), (24, 256, 256), (18, 704, 256)]


def milliseconds(turns: int, *sides: Work) -> list[float]:
    """The median time of each side."""
    times: list[list[float]] = [[] for _ in sides]
    for turn in range(turns + 2):
        for side, found in zip(sides, times, strict=True):
            started = time.perf_counter()
            side()
            if turn > 1:
                found.append(1e3 * (time.perf_counter() - started))
    return [statistics.median(found) for found in times]


def norm(shape: tuple[int, ...]) -> tuple[Work, Work]:
    """F.rms_norm, and ours."""
    x, gradient = torch.randn(shape, requires_grad=True), torch.randn(shape)
    ours = RMSNorm(RMSNormConfig(), Dims(shape[-1]))
    return (
        lambda: F.rms_norm(x, shape[-1:], ours.weight, ours.eps).backward(gradient),  # type: ignore[no-untyped-call]
        lambda: ours(x).backward(gradient),
    )


def attention(shape: tuple[int, ...]) -> tuple[Work, Work]:
    """`sdpa`, and `math`."""
    q, k, v, gradient = (torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(4))
    mask = Mask.square(Causal(), shape[2], torch.device("cpu"))

    def by(name: KernelName) -> Work:
        kernel = new_kernel(name)
        scoring = Scoring(shape[-1] ** -0.5)
        return lambda: kernel(q, k, v, mask, scoring).backward(gradient)

    return by("sdpa"), by("math")


def muon(shape: tuple[int, ...]) -> tuple[Work, Work]:
    """torch.optim.Muon, and ours."""

    def matrices() -> list[nn.Parameter]:
        found = [nn.Parameter(torch.randn(shape[1:])) for _ in range(shape[0])]
        for matrix in found:
            matrix.grad = torch.randn(shape[1:])
        return found

    return torch.optim.Muon(matrices()).step, Muon(matrices()).step


def table(
    name: str,
    theirs: str,
    ours: str,
    shapes: Sequence[tuple[int, ...]],
    new: Callable[..., tuple[Work, Work]],
    turns: int,
) -> None:
    print(f"\n| {name} | {theirs} | {ours} | ratio |\n|---|---|---|---|")
    for shape in shapes:
        before, after = milliseconds(turns, *new(shape))
        print(f"| {' x '.join(map(str, shape))} | {before:.2f} | {after:.2f} | {before / after:.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=30)
    turns = parser.parse_args().turns
    torch.manual_seed(0)
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    table("RMSNorm of", "F.rms_norm", "qkv", NORMED, norm, turns)
    table("attention, B x H x T x D", "sdpa", "math", ROWS, attention, turns)
    table("Muon's step, matrices", "torch", "qkv", MATRICES, muon, turns)


if __name__ == "__main__":
    main()
