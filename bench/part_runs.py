"""300 steps on the demo's text with one part exchanged for another, otherwise the same model.

    python bench/part_runs.py [--json part_runs.json] [--seeds 3] [--steps 300] [--only NAME ...]

The text is that of `qkv demo`: Python's own documentation and standard library, validation on files held out of it;
1,024 target tokens per step; AdamW, its peak learning rate after a tenth of the steps. Nothing is tuned for any part.

residual, position: every residual stream and every position kind in a decoder of 4 layers, d_model 128, context 128;
BPE with 2,048 entries; peak learning rate 2e-3. All have 1.38 million parameters within 1.2 %: what most kinds bring
along is small, and with mHC, which brings 7 %, the feed-forward is that much narrower.

experts, attention: the presets moe-tiny and mla-tiny (6 layers, d_model 384, context 256, BPE with 4,096 entries; peak
learning rate 1e-3) beside llama-tiny, with as many active parameters: a dense feed-forward as wide as the two experts
that a token goes to; as many heads of keys and values as of queries, and a wider feed-forward.

Every run is a process of its own, so that its peak of resident memory is its own; seconds are those of the 300 steps.
A seed is run for every variant before the next seed, so that a slow quarter of an hour hits all variants. Each result
is written at once, and runs that FILE holds are not repeated. A run diverges when a loss is not finite, or when at the
end it is no better than guessing at random among all tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

Variants = dict[str, tuple[str, ...]]

SMALL = (
    "gpt-small-code",
    "model.d_model=128",
    "model.max_seq_len=128",
    "model.attention.num_heads=4",
    "model.feed_forward.d_ff=384",
    "train.optimizer={kind: adamw, lr: 2e-3}",
)
ADAMW = "train.optimizer={kind: adamw, lr: 1e-3}"
RESIDUALS: Variants = {
    "plain": (),
    "plain, value residual": ("model.attention.value_residual=learned",),
    "rezero": ("model.residual.kind=rezero",),
    "layerscale": ("model.residual.kind=layerscale",),
    "plain, post-norm, Xavier": ("model.norm.placement=post", "model.init.kind=xavier"),
    "deepnorm, post-norm, Xavier": (
        "model.residual.kind=deepnorm",
        "model.norm.placement=post",
        "model.init.kind=xavier",
    ),
    "hyper-connections, static": ("model.residual={kind: hyper-connections, dynamic: false}",),
    "hyper-connections, dynamic": ("model.residual.kind=hyper-connections",),
    "mhc": ("model.residual.kind=mhc", "model.feed_forward.d_ff=320"),
    "attention-residuals, full": ("model.residual.kind=attention-residuals",),
    "attention-residuals, block": ("model.residual={kind: attention-residuals, block_size: 2}",),
}
POSITIONS: Variants = {
    "rope": (),
    "none": ("model.position.kind=none",),
    "sinusoidal": ("model.position.kind=sinusoidal",),
    "sinusoidal, embedding x sqrt(d)": ("model.position.kind=sinusoidal", "model.embedding.scale=sqrt-d-model"),
    "learned": ("model.position.kind=learned",),
    "rope, interleaved": ("model.position.layout=interleaved",),
    "relative": ("model.position.kind=relative",),
    "alibi": ("model.position.kind=alibi",),
}
EXPERTS: Variants = {
    "dense (llama-tiny)": ("llama-tiny", ADAMW),
    "8 experts, 2 of them active (moe-tiny)": ("moe-tiny", ADAMW),
}
ATTENTION: Variants = {
    "multi-head": ("llama-tiny", ADAMW, "model.attention.num_kv_heads=6", "model.feed_forward.d_ff=1035"),
    "latent (mla-tiny)": ("mla-tiny", ADAMW),
}


def over(base: tuple[str, ...], variants: Variants) -> Variants:
    return {name: (*base, *overrides) for name, overrides in variants.items()}


TABLES = {
    "residual": over(SMALL, RESIDUALS),
    "position": over(SMALL, POSITIONS),
    "experts": EXPERTS,
    "attention": ATTENTION,
}
"""Table -> variant -> its preset and what is said over it. Times are compared with the first variant's."""
SAME = ("position", "rope"), ("residual", "plain")
"""The preset itself is a row of both tables, and one run."""

Results = dict[str, dict[str, Any]]


def overrides_of(table: str, name: str, steps: int, seed: int) -> list[str]:
    """The preset of a run, and all that is said over it."""
    return [
        *TABLES[table][name],
        "train.batch_tokens=1024",
        f"train.steps={steps}",
        f"train.schedule={{kind: cosine, warmup: {steps // 10}}}",
        f"train.seed={seed}",
        "train.eval_every=null",
    ]


def key_of(table: str, name: str, seed: int) -> str:
    table, name = SAME[1] if (table, name) == SAME[0] else (table, name)
    return f"{table}: {name} / {seed}"


# --- the fresh process ------------------------------------------------------------------------------------------------


def work(preset: str, *overrides: str) -> dict[str, Any]:
    """Train once. Validation loss in nats per token, seconds, peak memory in MiB, parameters; whether it diverged."""
    from qkv.config.errors import QkvError
    from qkv.config.paths import cache_folder
    from qkv.config.run import Config
    from qkv.data.bundled import python_text
    from qkv.data.tokenizers import tokenizer_for
    from qkv.train.loop import new_trainer

    text = python_text(cache_folder() / "demo")
    files = (f"data.train=[{text.train}]", f"data.validation=[{text.held_out}]")
    config = Config.load(preset, *files, *overrides)
    trainer = new_trainer(config, tokenizer_for(config, cache_folder()), None, None)
    result: dict[str, Any] = {"parameters": sum(p.numel() for p in trainer.network.parameters()), "diverged": None}
    started = time.perf_counter()
    try:
        for _ in range(config.train.steps):
            trainer.take_step()
        result["seconds"] = time.perf_counter() - started
        result["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
            2**20 if sys.platform == "darwin" else 2**10
        )
        result["loss"] = trainer.validate()
    except QkvError as error:
        return {**result, "diverged": str(error)}
    if not result["loss"] < math.log(config.model.vocab_size or 0):
        result["diverged"] = f"validation loss {result['loss']:.3f}"
    return result


# --- all runs ---------------------------------------------------------------------------------------------------------


def run_all(results: Results, path: Path, only: list[str], seeds: int, steps: int) -> None:
    """Fill `results` with what is missing, and write them to `path` after every run."""
    for seed in range(seeds):
        for table, variants in TABLES.items():
            for name in variants:
                key = key_of(table, name, seed)
                overrides = overrides_of(table, name, steps, seed)
                if only and not any(part in f"{table}: {name}" for part in only):
                    continue
                if results.get(key, {}).get("overrides") == overrides:
                    continue
                command = [sys.executable, str(Path(__file__).resolve()), "--worker", json.dumps(overrides)]
                done = subprocess.run(command, capture_output=True, encoding="utf-8")
                if done.returncode:
                    print(f"{key}: not run:\n{done.stderr[-1000:]}", file=sys.stderr)
                    continue
                results[key] = {"overrides": overrides, **json.loads(done.stdout.splitlines()[-1])}
                path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
                print(f"{key}: {_line(results[key])}", file=sys.stderr)


def _line(result: dict[str, Any]) -> str:
    if result["diverged"]:
        return f"DIVERGED: {result['diverged']}"
    return f"loss {result['loss']:.4f}, {result['seconds']:.1f} s, {result['memory']:,.0f} MiB"


def report(results: Results, seeds: int) -> None:
    """One markdown table per axis. Time is relative to the first variant's run with the same seed."""
    for table, variants in TABLES.items():
        first = next(iter(variants))
        print(f"| {table} | loss, mean | spread | seconds | time / first | MiB | parameters |")
        print("|---|---|---|---|---|---|---|")
        for name in variants:
            rows = [(seed, results[key]) for seed in range(seeds) if (key := key_of(table, name, seed)) in results]
            done = [row for _, row in rows if not row["diverged"]]
            if len(done) < len(rows):
                print(f"| {name} | diverged in {len(rows) - len(done)} of {len(rows)} runs | | | | | |")
                continue
            if not done:
                print(f"| {name} | not run | | | | | |")
                continue
            losses, seconds = [row["loss"] for row in done], [row["seconds"] for row in done]
            firsts = {seed: results.get(key_of(table, first, seed)) for seed, _ in rows}
            ratios = [row["seconds"] / base["seconds"] for seed, row in rows if (base := firsts[seed])]
            ratio = f"{statistics.median(ratios):.2f}" if ratios else ""
            print(
                f"| {name} | {statistics.mean(losses):.3f} | {min(losses):.3f} to {max(losses):.3f} "
                f"| {statistics.median(seconds):.1f} | {ratio} | {max(row['memory'] for row in done):,.0f} "
                f"| {done[0]['parameters']:,} |"
            )
        print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("part_runs.json"), help="every figure; resumed from")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--only", nargs="*", default=[], help="parts of names, such as `residual: mhc`")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(work(*json.loads(options.worker))))
        return
    results: Results = json.loads(options.json.read_text(encoding="utf-8")) if options.json.is_file() else {}
    run_all(results, options.json, options.only, options.seeds, options.steps)
    report(results, options.seeds)


if __name__ == "__main__":
    main()
