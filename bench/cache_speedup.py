"""What the KV cache saves, and that it changes nothing.

    python bench/cache_speedup.py [RUN]

With a RUN (of `qkv demo`, say): 64 greedy tokens with the cache are compared with those without it, for a few prompts.
Then, at the demo's shape with a longer context and random weights, the time of the 32 tokens that end at length 128,
512 and 1,024 is measured with and without the cache, taking turns; given is the median of three.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

import qkv
from qkv.config import Config
from qkv.generate import Decoding, Sampling

NEW, LENGTHS, ROUNDS = 32, (128, 512, 1024), 3


def decode(network: qkv.Transformer, prompt: list[int], new: int, use_cache: bool) -> list[int]:
    greedy = Sampling(temperature=0.0)
    decoding = Decoding(network, [prompt], sampling=greedy, seeds=[0], max_new_tokens=new, use_cache=use_cache)
    for _ in decoding:
        pass
    return decoding.generated[0]


def compare(run: str) -> None:
    model = qkv.load(run)
    for prompt in ("def ", "import ", "class Path", "The statement "):
        ids = model.generate(prompt, max_new_tokens=64, temperature=0.0).token_ids
        same = ids == model.generate(prompt, max_new_tokens=64, temperature=0.0, use_cache=False).token_ids
        print(f"{prompt!r}: {len(ids)} greedy tokens, with and without the cache {'equal' if same else 'DIFFERENT'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", help="a trained run to compare ids on")
    options = parser.parse_args()
    if options.run:
        compare(options.run)
    config = Config.load("gpt-small-code", "model.max_seq_len=1024")
    network = qkv.Transformer(config.model, generator=torch.Generator().manual_seed(0)).eval()
    vocabulary = config.model.vocab_size or 0
    print("\n| length | with cache, ms/token | without, ms/token | speed-up |\n|---|---|---|---|")
    for length in LENGTHS:
        prompt = torch.randint(5, vocabulary, (length - NEW,), generator=torch.Generator().manual_seed(1)).tolist()
        times: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(ROUNDS):
            for use_cache in times:
                started = time.perf_counter()
                decode(network, prompt, NEW, use_cache)
                times[use_cache].append((time.perf_counter() - started) / NEW * 1000)
        cached, whole = (statistics.median(times[use_cache]) for use_cache in (True, False))
        print(f"| {length:,} | {cached:.2f} | {whole:.2f} | {whole / cached:.1f}x |")


if __name__ == "__main__":
    main()
