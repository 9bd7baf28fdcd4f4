"""Reading a prompt and writing on, by qkv and by transformers with the same weights, taking turns.

    python bench/inference_speed.py MODEL [--prompt-tokens 512] [--new-tokens 64] [--rounds 5]

MODEL is a decoder that qkv loads (`qkv fetch smollm2`). It is written as a Hugging Face folder and read by
transformers, in float32 and in bfloat16. Printed: prompt tokens per second to the first new token, new tokens per
second after it, the medians of the ratios, and whether both wrote the same. With `--start` also, of fresh processes:
seconds from `qkv.load` to the first token without imports, seconds from the start of the process, and the peak memory
beside the size of the model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM

import qkv

START = """
import time
import qkv, qkv.model, qkv.checkpoint.load
began = time.perf_counter()
model = qkv.load({model!r}, dtype={dtype!r})
model.generate("Once upon a time", max_new_tokens=1, temperature=0)
seconds = time.perf_counter() - began
import json, resource
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
size = sum(p.numel() * p.element_size() for p in model.network.parameters())
print(json.dumps([seconds, peak, size]))
"""

BASE = (
    "import qkv.model, qkv.checkpoint.load, resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)"
)


def seconds_of(work: Callable[[], list[int]]) -> tuple[float, list[int]]:
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def contest(model: str, dtype: str, options: argparse.Namespace) -> None:
    ours = qkv.load(model, device="cpu", dtype=dtype)
    with tempfile.TemporaryDirectory() as folder:
        ours.save_hf(f"{folder}/model")
        precision = torch.float32 if dtype == "fp32" else torch.bfloat16
        theirs = AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=precision).eval()
    vocabulary = ours.network.config.vocab_size
    prompt = torch.randint(vocabulary // 2, (options.prompt_tokens,), generator=torch.Generator().manual_seed(0))

    def by_qkv(count: int) -> list[int]:
        return list(ours.generate(prompt.tolist(), max_new_tokens=count, temperature=0).token_ids)

    @torch.inference_mode()
    def by_transformers(count: int) -> list[int]:
        ids = prompt[None]
        mask = torch.ones_like(ids)
        written = theirs.generate(
            ids, attention_mask=mask, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        return written[0, len(prompt) :].tolist()

    speeds: dict[str, dict[str, list[float]]] = {
        name: {"prefill": [], "decode": []} for name in ("qkv", "transformers")
    }
    texts = {}
    for turn in range(options.rounds + 1):
        for name, work in (("qkv", by_qkv), ("transformers", by_transformers)):
            first, _ = seconds_of(lambda work=work: work(1))
            whole, texts[name] = seconds_of(lambda work=work: work(options.new_tokens))
            if turn:  # the first warms up
                speeds[name]["prefill"].append(options.prompt_tokens / first)
                speeds[name]["decode"].append((len(texts[name]) - 1) / (whole - first))
    same = len([1 for a, b in zip(texts["qkv"], texts["transformers"], strict=False) if a == b])
    for kind in ("prefill", "decode"):
        a, b = speeds["qkv"][kind], speeds["transformers"][kind]
        ratios = [x / y for x, y in zip(a, b, strict=True)]
        print(
            f"{dtype} {kind}: qkv {statistics.median(a):,.1f}, transformers {statistics.median(b):,.1f} tokens/s, "
            f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        )
    print(f"{dtype}: {same} of {len(texts['qkv'])} tokens are equal")


def start(model: str, dtype: str) -> None:
    base = int(subprocess.run([sys.executable, "-c", BASE], capture_output=True, text=True, check=True).stdout)
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", START.format(model=model, dtype=dtype)], capture_output=True, text=True, check=True
    )
    whole = time.perf_counter() - began
    seconds, peak, size = json.loads(done.stdout.splitlines()[-1])
    print(
        f"{dtype} start: first token {seconds:.2f} s after qkv.load, {whole:.2f} s after the process began; peak "
        f"{peak / 2**20:,.0f} MiB, of which {base / 2**20:,.0f} MiB imports; the model has {size / 2**20:,.0f} MiB "
        f"(ratio {(peak - base) / size:.2f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--start", action="store_true")
    options = parser.parse_args()
    for dtype in ("fp32", "bf16") if options.start else ():  # first: a process inherits the peak of its parent
        start(options.model, dtype)
    for dtype in ("fp32", "bf16"):
        contest(options.model, dtype, options)


if __name__ == "__main__":
    main()
