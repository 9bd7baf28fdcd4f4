"""Training throughput beside peers, in one run.

    python bench/train_throughput.py [--nanogpt PATH] [--rounds 10] [--steps 2] [--only NAME,...] [--json FILE]

All contenders train the same shape on the same random ids: 6 layers, 6 heads, d_model 384, context 256, batch 16,
vocabulary 4,096, bfloat16 autocast, AdamW (fused), gradient clipping at 1, dropout 0. They take turns, block by block,
so that a slow minute of the machine hits everyone. A ratio is qkv's tokens per second over the peer's in the same
round; given are its mean and a 95 % interval over the rounds. The matrix rate is what plain bfloat16 products of the
model's own shapes reach in the same run (forward and both gradients).

`--nanogpt` names a checkout of nanoGPT (its model.py is imported from there, and never copied).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import qkv
from qkv.config import ModelConfig
from qkv.config.run import TrainConfig
from qkv.train.compute import choose_compute, compile_blocks

LAYERS, HEADS, WIDTH, CONTEXT, BATCH, VOCABULARY = 6, 6, 384, 256, 16, 4096
TOKENS = BATCH * CONTEXT
SWIGLU_WIDTH = 1024


@dataclass
class Contender:
    """A model ready to take steps. `flops`: of one step, forward and backward."""

    name: str
    shape: str
    step: Callable[[], None]
    flops: float


def flops_per_step(matrix_parameters: int) -> float:
    """Six per weight and token, and attention's own products (Chowdhery et al. 2022, appendix B)."""
    return TOKENS * (6 * matrix_parameters + 12 * LAYERS * WIDTH * CONTEXT)


def matrices(network: nn.Module) -> int:
    """Weights of the matrices that a token is multiplied by: all but an untied embedding and positions."""
    return sum(
        p.numel() for n, p in network.named_parameters() if p.dim() == 2 and "wpe" not in n and "position" not in n
    )


def contender(name: str, shape: str, network: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor]) -> Contender:
    decayed = [p for p in network.parameters() if p.dim() >= 2]
    rest = [p for p in network.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=1e-3, betas=(0.9, 0.95), fused=True)
    parameters = list(network.parameters())
    generator = torch.Generator().manual_seed(0)
    network.train()

    def step() -> None:
        ids = torch.randint(0, VOCABULARY, (BATCH, CONTEXT + 1), generator=generator)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Contender(name, shape, step, flops_per_step(matrices(network)))


def ours(shape: str, compiled: bool) -> Contender:
    common = {
        "vocab_size": VOCABULARY,
        "max_seq_len": CONTEXT,
        "d_model": WIDTH,
        "num_layers": LAYERS,
        "tie_embeddings": "head",
        "attention": {"num_heads": HEADS},
    }
    if shape == "gpt2":
        model = ModelConfig(
            **common,
            position={"kind": "learned"},
            norm={"kind": "layernorm"},
            feed_forward={"kind": "gelu", "bias": False},
        )
    else:
        model = ModelConfig(**common, feed_forward={"kind": "swiglu", "d_ff": SWIGLU_WIDTH})
    network = qkv.Transformer(model)
    choose_compute(TrainConfig(), network, compiled)
    if compiled:
        compile_blocks(network)

    def loss_of(ids: Tensor, labels: Tensor) -> Tensor:
        output = network(ids, labels=labels)
        return output.loss_sum / TOKENS

    return contender(f"qkv {shape} {'compiled' if compiled else 'eager'}", shape, network, loss_of)


def transformers_peer(shape: str, compiled: bool) -> Contender:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    if shape == "gpt2":
        network = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCABULARY,
                n_positions=CONTEXT,
                n_embd=WIDTH,
                n_layer=LAYERS,
                n_head=HEADS,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                use_cache=False,
                attn_implementation="sdpa",
            )
        )
    else:
        network = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY,
                max_position_embeddings=CONTEXT,
                hidden_size=WIDTH,
                intermediate_size=SWIGLU_WIDTH,
                num_hidden_layers=LAYERS,
                num_attention_heads=HEADS,
                tie_word_embeddings=True,
                use_cache=False,
                attn_implementation="sdpa",
            )
        )
    call = torch.compile(network) if compiled else network

    def loss_of(ids: Tensor, labels: Tensor) -> Tensor:
        logits = call(input_ids=ids).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    return contender(f"transformers {shape} {'compiled' if compiled else 'eager'}", shape, network, loss_of)


def nanogpt_peer(path: str, compiled: bool) -> Contender:
    sys.path.insert(0, path)
    from model import GPT, GPTConfig  # type: ignore[import-not-found]

    network = GPT(
        GPTConfig(
            block_size=CONTEXT,
            vocab_size=VOCABULARY,
            n_layer=LAYERS,
            n_head=HEADS,
            n_embd=WIDTH,
            dropout=0.0,
            bias=False,
        )
    )
    call = torch.compile(network) if compiled else network
    return contender(
        f"nanoGPT {'compiled' if compiled else 'eager'}", "gpt2", network, lambda ids, labels: call(ids, labels)[1]
    )


def matrix_rate(seconds: float = 1.0) -> float:
    """FLOP/s of bfloat16 products at the model's shapes, forward and both gradients, mixed as in a step."""
    pairs = []
    for inner, outer, times in ((WIDTH, WIDTH, 4), (WIDTH, SWIGLU_WIDTH, 2), (SWIGLU_WIDTH, WIDTH, 1)):
        x = torch.randn(TOKENS, inner, dtype=torch.bfloat16)
        w = torch.randn(outer, inner, dtype=torch.bfloat16)
        g = torch.randn(TOKENS, outer, dtype=torch.bfloat16)
        pairs.append((x, w, g, times))
    done, started = 0.0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        for x, w, g, times in pairs:
            for _ in range(times):
                _ = x @ w.t(), g @ w, g.t() @ x
                done += 6.0 * x.numel() * w.shape[0]
    return done / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", help="a checkout of nanoGPT to measure against")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=2, help="steps per block")
    parser.add_argument("--only", help="comma-separated parts of contenders' names")
    parser.add_argument("--json", help="write every figure here")
    options = parser.parse_args()

    makers: list[tuple[str, Callable[[], Contender]]] = []
    for shape in ("gpt2", "llama"):
        for compiled in (False, True):
            kind = "compiled" if compiled else "eager"
            makers.append((f"qkv {shape} {kind}", lambda s=shape, c=compiled: ours(s, c)))
            makers.append((f"transformers {shape} {kind}", lambda s=shape, c=compiled: transformers_peer(s, c)))
    if options.nanogpt:
        makers.append(("nanoGPT eager", lambda: nanogpt_peer(options.nanogpt, False)))
        makers.append(("nanoGPT compiled", lambda: nanogpt_peer(options.nanogpt, True)))
    if options.only:
        wanted = options.only.split(",")
        makers = [(name, make) for name, make in makers if any(part in name for part in wanted)]

    contenders = []
    for name, make in makers:
        started = time.perf_counter()
        made = make()
        for _ in range(2):
            made.step()
        print(f"{name}: ready after {time.perf_counter() - started:.1f} s", file=sys.stderr)
        contenders.append(made)
    rates: dict[str, list[float]] = {made.name: [] for made in contenders}
    machine: list[float] = []
    for index in range(options.rounds):
        machine.append(matrix_rate())
        order = contenders if index % 2 == 0 else contenders[::-1]
        for made in order:
            started = time.perf_counter()
            for _ in range(options.steps):
                made.step()
            rates[made.name].append(options.steps * TOKENS / (time.perf_counter() - started))
        print(f"round {index + 1} of {options.rounds}", file=sys.stderr)
    report(contenders, rates, machine)
    if options.json:
        figures = {"tokens_per_second": rates, "matrix_flops": machine}
        Path(options.json).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def report(contenders: list[Contender], rates: dict[str, list[float]], machine: list[float]) -> None:
    """Markdown tables: speed and share of the matrix rate, then ratios to peers of the same shape."""
    rate = statistics.mean(machine)
    print(
        f"matrix rate {rate / 1e9:.0f} GFLOP/s (min {min(machine) / 1e9:.0f}, max {max(machine) / 1e9:.0f}); ", end=""
    )
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}\n")
    print("| contender | tokens/s | min | max | GFLOP/s | share of matrix rate |\n|---|---|---|---|---|---|")
    for made in contenders:
        speeds = rates[made.name]
        flops = statistics.mean(speeds) / TOKENS * made.flops
        print(
            f"| {made.name} | {statistics.mean(speeds):,.0f} | {min(speeds):,.0f} | {max(speeds):,.0f} "
            f"| {flops / 1e9:.0f} | {flops / rate:.2f} |"
        )
    print("\n| ratio | mean | 95 % interval |\n|---|---|---|")
    for mine in contenders:
        for peer in contenders:
            same_mode = mine.name.split()[-1] == peer.name.split()[-1]
            if (
                mine.name.startswith("qkv")
                and not peer.name.startswith("qkv")
                and mine.shape == peer.shape
                and same_mode
            ):
                ratios = [a / b for a, b in zip(rates[mine.name], rates[peer.name], strict=True)]
                mean = statistics.mean(ratios)
                half = 1.96 * statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else float("nan")
                print(f"| {mine.name} / {peer.name} | {mean:.3f} | {mean - half:.3f} to {mean + half:.3f} |")


if __name__ == "__main__":
    main()
