"""How memory and time of attention grow with the length of the text: `python bench/attention_memory.py`.

One head of width 64, causal, float32, forward and backward. Every number comes from a process of its own: memory is the
peak of resident memory above what the process held before (PyTorch, queries, keys, values, the gradient that comes in);
time is the median of a few runs on one thread in another process. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

KERNELS = ("math", "tiled", "sdpa")
LENGTHS = (1024, 2048, 4096, 8192, 16384)
WIDTH = 64
WARM_UP = 256
MIB = 2**20

Quantity = Literal["memory", "time"]


class TooBigError(Exception):
    """A measurement that would not fit the memory that is free now."""


def measure(kernel: str, length: int, quantity: Quantity) -> float:
    """Bytes or seconds of one forward and backward, from a fresh process. Raises TooBigError."""
    free, needed = _free_memory(), _expected_peak(kernel, length)
    if free is not None and needed > 0.9 * free:
        raise TooBigError(f"{kernel} at {length} needs about {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free")
    environment = dict(os.environ)
    if quantity == "memory":
        # glibc would keep freed tensors on its heap, where the next ones hide; this returns them at once
        environment["MALLOC_MMAP_THRESHOLD_"] = str(2**16)
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", kernel, str(length), quantity]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout)


def growth(kernel: str, lengths: Sequence[int], quantity: Quantity = "memory") -> float:
    """The exponent e of length^e from the first to the last length, freshly measured: 1 is linear, 2 quadratic."""
    return exponent({length: measure(kernel, length, quantity) for length in (min(lengths), max(lengths))})


def exponent(values: dict[int, float]) -> float:
    """The log-log slope over the last two doublings (the last three lengths), or over what there is."""
    last = sorted(values)[-3:]
    if len(last) < 2 or min(values[length] for length in last) <= 0:
        return math.nan
    return math.log(values[last[-1]] / values[last[0]]) / math.log(last[-1] / last[0])


# --- the fresh process ------------------------------------------------------------------------------------------------


def _work(kernel: str, length: int, quantity: Quantity) -> float:
    import torch

    from qkv.nn.kernels import new_kernel
    from qkv.nn.mask import Causal, Mask
    from qkv.nn.score import Scoring

    def tensors(length: int) -> list[torch.Tensor]:
        return [torch.randn(1, 1, length, WIDTH, requires_grad=index < 3) for index in range(4)]

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gradient: torch.Tensor) -> None:
        mask = Mask.square(Causal(), q.shape[2], q.device)
        attend(q, k, v, mask, Scoring(WIDTH**-0.5)).backward(gradient)
        for tensor in (q, k, v):
            tensor.grad = None

    torch.set_num_threads(1)
    torch.manual_seed(0)
    attend = new_kernel(kernel)  # type: ignore[arg-type]
    inputs = tensors(length)
    run(*tensors(WARM_UP))
    if quantity == "memory":
        before = _reset_peak()
        run(*inputs)
        return _peak() - before
    seconds: list[float] = []
    while len(seconds) < 5 and sum(seconds) < 3:
        start = time.perf_counter()
        run(*inputs)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _reset_peak() -> int:
    """Start a new peak where the system allows it; the peak from which to count, in bytes."""
    # where it does not, the old peak counts: after importing PyTorch it is hardly above what is held
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    """The most resident memory this process ever had (or since the reset), in bytes."""
    kernel_says = _kibibytes("/proc/self/status", "VmHWM:")
    if kernel_says is not None:
        return kernel_says
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if platform.system() == "Darwin" else 1024)


def _free_memory() -> int | None:
    """Bytes that new processes could have; None where the system does not say."""
    return _kibibytes("/proc/meminfo", "MemAvailable:")


def _kibibytes(path: str, name: str) -> int | None:
    """The bytes on a line `name <n> kB` of one of Linux's own files; None on another system."""
    with contextlib.suppress(OSError):
        for line in Path(path).read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    return None


def _expected_peak(kernel: str, length: int) -> float:
    """A little more than was measured: math holds several T x T matrices at once."""
    return 6.0 * 4 * length**2 if kernel == "math" else 1e4 * length


# --- the table --------------------------------------------------------------------------------------------------------


def collect(kernels: Sequence[str], lengths: Sequence[int]) -> dict[str, Any]:
    """All measurements: `{"memory": {kernel: {length: bytes}}, "time": ..., "growth": ..., "skipped": [...]}`."""
    result: dict[str, Any] = {"memory": {}, "time": {}, "growth": {"memory": {}, "time": {}}, "skipped": []}
    for kernel in kernels:
        for quantity in ("memory", "time"):
            values: dict[int, float] = {}
            for length in sorted(lengths):
                try:
                    values[length] = measure(kernel, length, quantity)  # type: ignore[arg-type]
                except TooBigError as error:
                    result["skipped"].append(f"{quantity} of {error}")
            result[quantity][kernel] = values
            slope = exponent(values)
            result["growth"][quantity][kernel] = None if math.isnan(slope) else slope
    return result


def table(result: dict[str, Any]) -> str:
    """The measurements as Markdown."""
    kernels = list(result["memory"])
    heads = [f"{kernel}, MiB" for kernel in kernels] + [f"{kernel}, s" for kernel in kernels]
    lines = ["| T | " + " | ".join(heads) + " |", "|---:" * (len(heads) + 1) + "|"]
    for length in sorted({length for values in result["memory"].values() for length in values}):
        memory = [_cell(result["memory"][kernel].get(length), "{:,.1f}", 1 / MIB) for kernel in kernels]
        seconds = [_cell(result["time"][kernel].get(length), "{:.3f}") for kernel in kernels]
        lines.append(f"| {length:,} | " + " | ".join(memory + seconds) + " |")
    slopes = [result["growth"][quantity][kernel] for quantity in ("memory", "time") for kernel in kernels]
    exponents = [_cell(slope, "T^{:.2f}") for slope in slopes]
    lines.append("| growth | " + " | ".join(exponents) + " |")
    return "\n".join([*lines, *(f"\nskipped: {reason}" for reason in result["skipped"])])


def _cell(value: float | None, form: str, factor: float = 1.0) -> str:
    return "" if value is None else form.format(value * factor)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=KERNELS)
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--json", action="store_true", help="print JSON (bytes, seconds, exponents), not a table")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        kernel, length, quantity = options.worker
        print(_work(kernel, int(length), quantity))
        return
    result = collect(options.kernels, options.lengths)
    print(json.dumps(result, indent=2) if options.json else table(result))


if __name__ == "__main__":
    main()
