"""What a training step costs with each residual stream, beside the plain one, in one run.

    python bench/residual_cost.py [--rounds 10] [--only NAME ...] [--modes eager compiled] [--json FILE]
    python bench/residual_cost.py --profile mhc [--modes eager]

A decoder of 8 layers, d_model 512, 8 heads, vocabulary 4,096 takes steps on 8 x 256 random ids: forward, backward,
clipping, AdamW. Four streams where there are several; Attention Residuals in blocks of two layers. In float32, and
under bfloat16 autocast where the machine multiplies it; eager, and compiled as `qkv train` compiles. All take turns,
step by step, so that a slow minute of the machine hits everyone. A ratio is the time of a step over the plain stream's
in the same round, precision and mode; given are its mean and a 95 % interval over the rounds.

`--profile NAME` prints where one step of NAME and of the plain stream spend their time.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import qkv
from qkv.config import ModelConfig
from qkv.nn.device import multiplies_bf16
from qkv.train.compute import Compute, compile_blocks

LAYERS, HEADS, WIDTH, CONTEXT, BATCH, VOCABULARY = 8, 8, 512, 256, 8, 4096
KINDS = {
    "plain": {"kind": "plain"},
    "hyper-connections": {"kind": "hyper-connections", "streams": 4},
    "mhc": {"kind": "mhc", "streams": 4},
    "attention-residuals": {"kind": "attention-residuals", "block_size": 2},
}
CPU = torch.device("cpu")
PRECISIONS = {"fp32": torch.float32} | ({"bf16": torch.bfloat16} if multiplies_bf16(CPU) else {})


class Contender:
    """A model ready to take steps in any precision."""

    def __init__(self, kind: str, compiled: bool) -> None:
        model = ModelConfig(
            vocab_size=VOCABULARY,
            max_seq_len=CONTEXT,
            d_model=WIDTH,
            num_layers=LAYERS,
            tie_embeddings="head",
            attention={"num_heads": HEADS},
            residual=KINDS[kind],
        )
        self.compiled = compiled
        self.network = qkv.Transformer(model).train()
        if compiled:
            compile_blocks(self.network)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=1e-4, fused=True)

    def step(self, precision: str) -> float:
        """Seconds of one training step."""
        ids = torch.randint(0, VOCABULARY, (BATCH, CONTEXT + 1))
        started = time.perf_counter()
        with Compute(CPU, PRECISIONS[precision], self.compiled, ()).forward_passes():
            output = self.network(ids[:, :-1].contiguous(), labels=ids[:, 1:].contiguous())
        output.loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - started


Times = dict[str, dict[str, list[float]]]


def compete(kinds: list[str], modes: list[str], rounds: int) -> Times:
    """Seconds per step of each round, by "precision, mode" and kind."""
    contenders = {(mode, kind): Contender(kind, mode == "compiled") for mode in modes for kind in kinds}
    for (mode, kind), made in contenders.items():
        started = time.perf_counter()
        for precision in PRECISIONS:
            made.step(precision)
            made.step(precision)
        print(f"{kind}, {mode}: ready after {time.perf_counter() - started:.1f} s", file=sys.stderr)
    times: Times = {f"{precision}, {mode}": {kind: [] for kind in kinds} for precision in PRECISIONS for mode in modes}
    for index in range(rounds):
        for precision in PRECISIONS:
            for mode in modes:
                for kind in kinds if index % 2 == 0 else kinds[::-1]:
                    times[f"{precision}, {mode}"][kind].append(contenders[mode, kind].step(precision))
        print(f"round {index + 1} of {rounds}", file=sys.stderr)
    return times


def report(times: Times) -> None:
    """One markdown table: milliseconds per step, and ratios to plain."""
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}\n")
    print("| precision, mode | residual | ms per step | min | max | time / plain | 95 % interval |")
    print("|---|---|---|---|---|---|---|")
    for place, by_kind in times.items():
        for kind, seconds in by_kind.items():
            ratios = [mine / plain for mine, plain in zip(seconds, by_kind["plain"], strict=True)]
            mean = statistics.mean(ratios)
            half = 1.96 * statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else math.nan
            print(
                f"| {place} | {kind} | {1e3 * statistics.mean(seconds):,.0f} | {1e3 * min(seconds):,.0f} "
                f"| {1e3 * max(seconds):,.0f} | {mean:.3f} | {mean - half:.3f} to {mean + half:.3f} |"
            )


def show_profile(kind: str, modes: list[str]) -> None:
    """Where the time of one step goes, by operator."""
    for mode in modes:
        for name in dict.fromkeys(("plain", kind)):
            made = Contender(name, mode == "compiled")
            for precision in PRECISIONS:
                made.step(precision)
                made.step(precision)
                with profile(activities=[ProfilerActivity.CPU]) as found:
                    made.step(precision)
                print(f"{name}, {precision}, {mode}")
                print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=20, max_name_column_width=60))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", nargs="*", choices=list(KINDS), default=list(KINDS), help="besides plain")
    parser.add_argument("--modes", nargs="*", choices=["eager", "compiled"], default=["eager", "compiled"])
    parser.add_argument("--profile", choices=list(KINDS), help="print an operator table instead")
    parser.add_argument("--json", type=Path, help="write every figure here")
    options = parser.parse_args()
    if options.profile:
        show_profile(options.profile, options.modes)
        return
    times = compete(list(dict.fromkeys(("plain", *options.only))), options.modes, options.rounds)
    report(times)
    if options.json:
        options.json.write_text(json.dumps(times, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
