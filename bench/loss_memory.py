"""What a training step holds in memory: `python bench/loss_memory.py`.

The loss: the head over a large vocabulary, forward and backward, by chunks as qkv computes it and with all logits at
once. Blocks: a whole decoder, forward and backward, that keeps its activations or computes its blocks again
(`train.activation_checkpointing`). Both under bfloat16 autocast, gradients included.

Every number comes from a process of its own: memory is the peak of resident memory above what the process held before
(PyTorch, weights, hidden vectors); time is the median of a few runs in another process. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from qkv import Transformer
from qkv.config import ModelConfig
from qkv.nn.loss import cross_entropy
from qkv.train.compute import recompute_blocks

WIDTH, CONTEXT, BATCH, VOCABULARY, LAYERS = 384, 256, 16, 50_257, 6
MIB = 2**20


def at_once(h_NM: Tensor, weight_VM: Tensor, bias_V: Tensor | None, labels_N: Tensor) -> Tensor:
    """The loss of all logits at once."""
    return F.cross_entropy(F.linear(h_NM, weight_VM, bias_V).float(), labels_N, reduction="sum")


def loss_step(compute: Callable[..., Tensor], tokens: int) -> Callable[[], None]:
    """Forward and backward of a head over `tokens` hidden vectors."""
    h_NM = torch.randn(tokens, WIDTH, requires_grad=True)
    weight_VM = (torch.randn(VOCABULARY, WIDTH) * 0.02).requires_grad_()
    labels_N = torch.randint(0, VOCABULARY, (tokens,))

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = compute(h_NM, weight_VM, None, labels_N)
        (loss / tokens).backward()
        h_NM.grad = weight_VM.grad = None

    return step


def blocks_step(recomputes: bool, tokens: int) -> Callable[[], None]:
    """Forward and backward of a decoder with a small vocabulary over rows of `CONTEXT` tokens."""
    tree = {
        "vocab_size": 256,
        "max_seq_len": CONTEXT,
        "d_model": WIDTH,
        "num_layers": LAYERS,
        "attention": {"num_heads": 6},
    }
    network = Transformer(ModelConfig.model_validate(tree)).train()
    if recomputes:
        recompute_blocks(network)
    ids_BT = torch.randint(0, 256, (tokens // CONTEXT, CONTEXT))

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = network(ids_BT, labels=ids_BT)
        output.loss.backward()
        network.zero_grad(set_to_none=True)

    return step


STEPS: dict[str, Callable[[int], Callable[[], None]]] = {
    "loss, all logits at once": lambda tokens: loss_step(at_once, tokens),
    "loss by chunks": lambda tokens: loss_step(cross_entropy, tokens),
    "blocks, activations kept": lambda tokens: blocks_step(False, tokens),
    "blocks computed again": lambda tokens: blocks_step(True, tokens),
}
"""The second of each pair is compared with the first."""


# --- the fresh process ------------------------------------------------------------------------------------------------


def work(name: str, tokens: int, quantity: str) -> float:
    """Bytes or seconds of one step."""
    torch.manual_seed(0)
    STEPS[name](CONTEXT)()  # what is allocated once, at the first step of any size
    step = STEPS[name](tokens)
    if quantity == "memory":
        before = _reset_peak()
        step()
        return _peak() - before
    step()
    seconds = []
    while len(seconds) < 3 or sum(seconds) < 3:
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _reset_peak() -> int:
    """Start a new peak where the system allows it; the peak from which to count, in bytes."""
    # where it does not, the old peak counts: after importing PyTorch it is hardly above what is held
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    """The most resident memory this process ever had (or since the reset), in bytes."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if platform.system() == "Darwin" else 1024)


def measure(name: str, tokens: int, quantity: str) -> float:
    """`work` in a process of its own."""
    # glibc would keep freed tensors on its heap, where the next ones hide; this returns them at once
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**16)} if quantity == "memory" else None
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", name, quantity, "--tokens", str(tokens)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=BATCH * CONTEXT, help="of a step; a multiple of 256")
    parser.add_argument("--json", action="store_true", help="print JSON (bytes, seconds), not a table")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(work(options.worker[0], options.tokens, options.worker[1]))
        return
    figures = {
        name: {quantity: measure(name, options.tokens, quantity) for quantity in ("memory", "time")} for name in STEPS
    }
    if options.json:
        print(json.dumps(figures, indent=2))
        return
    print(f"{options.tokens:,} tokens, d_model {WIDTH}; vocabulary {VOCABULARY:,}; {LAYERS} blocks")
    print("\n| | MiB | ratio | s | ratio |\n|---|---:|---:|---:|---:|")
    names = list(STEPS)
    for index, name in enumerate(names):
        memory, seconds = figures[name]["memory"], figures[name]["time"]
        first = figures[names[index - index % 2]]
        print(
            f"| {name} | {memory / MIB:,.0f} | {memory / first['memory']:.2f} "
            f"| {seconds:.2f} | {seconds / first['time']:.2f} |"
        )


if __name__ == "__main__":
    main()
