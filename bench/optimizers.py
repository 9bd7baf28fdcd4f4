"""Muon against AdamW: two presets, each with its own recipe, three seeds.

    QKV_DATA=FOLDER python bench/optimizers.py [--json optimizers.json] [--seeds 3]

shakespeare-char on the first 90 % of tiny Shakespeare, and gpt-small-code on the text of `qkv demo`. Steps, batches and
schedule are the preset's. Muon has the preset's learning rates; AdamW two rates, so that its row is not a bad choice of
one. Validation loss in nats per token, over all of what is held out. A seed is run for every variant before the next
one; each result is written at once, and what FILE holds is not run again.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from qkv.config.paths import cache_folder
from qkv.config.run import Config
from qkv.data.bundled import python_text
from qkv.data.tokenizers import tokenizer_for
from qkv.train.loop import new_trainer

OPTIMIZERS = {
    "Muon": (),
    "AdamW, 2e-3": ("train.optimizer={kind: adamw, lr: 2e-3, weight_decay: 0.01}",),
    "AdamW, 6e-3": ("train.optimizer={kind: adamw, lr: 6e-3, weight_decay: 0.01}",),
}
Results = dict[str, dict[str, float]]


def data_of(preset: str, folder: Path) -> tuple[str, str]:
    """The configuration's data keys; what is not a file yet is written into `folder`."""
    if preset == "gpt-small-code":
        text = python_text(cache_folder() / "demo")
        return f"data.train=[{text.train}]", f"data.validation=[{text.held_out}]"
    if "QKV_DATA" not in os.environ:
        sys.exit("set QKV_DATA to the folder with tiny-shakespeare")
    (packed,) = (Path(os.environ["QKV_DATA"]) / "tiny-shakespeare").glob("*.gz")
    plain = folder / "input.txt"
    plain.write_bytes(gzip.decompress(packed.read_bytes()))
    return f"data.train=[{plain}]", "data.validation=0.1"


def train(preset: str, *overrides: str) -> dict[str, float]:
    """Validation loss after all steps, and the seconds that they took."""
    config = Config.load(preset, *overrides)
    trainer = new_trainer(config, tokenizer_for(config, cache_folder()), None, None)
    started = time.perf_counter()
    for _ in range(config.train.steps):
        trainer.take_step()
    return {"seconds": time.perf_counter() - started, "loss": trainer.validate()}


def report(results: dict[str, Any], presets: tuple[str, ...], seeds: int) -> None:
    for preset in presets:
        print(f"| {preset} | loss, mean | spread | seconds |\n|---|---|---|---|")
        for name in OPTIMIZERS:
            rows = [results[key] for seed in range(seeds) if (key := f"{preset}: {name} / {seed}") in results]
            if rows:
                losses, seconds = [row["loss"] for row in rows], [row["seconds"] for row in rows]
                spread = f"{min(losses):.3f} to {max(losses):.3f}"
                print(f"| {name} | {statistics.mean(losses):.3f} | {spread} | {statistics.median(seconds):.0f} |")
        print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("optimizers.json"), help="every figure; resumed from")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    presets = ("shakespeare-char", "gpt-small-code")
    results: Results = json.loads(options.json.read_text(encoding="utf-8")) if options.json.is_file() else {}
    with tempfile.TemporaryDirectory() as folder:
        data = {preset: data_of(preset, Path(folder)) for preset in presets}
        for seed in range(options.seeds):
            for preset in presets:
                for name, overrides in OPTIMIZERS.items():
                    key = f"{preset}: {name} / {seed}"
                    if key not in results:
                        results[key] = train(preset, *data[preset], *overrides, f"train.seed={seed}")
                        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
                        print(f"{key}: {results[key]['loss']:.4f}", file=sys.stderr)
    report(results, presets, options.seeds)


if __name__ == "__main__":
    main()
