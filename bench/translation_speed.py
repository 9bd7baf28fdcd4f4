r"""Translating the same sentences with the same weights, by qkv and by transformers, taking turns.

    python bench/translation_speed.py RUN SOURCE.en [--beam-size 4] [--rounds 3]

RUN is a run of the shape of Marian, so that its weights fit a `MarianMTModel`:

    qkv train transformer-tiny-mt 'data.train={source: [train.en], target: [train.de]}' --run-dir RUN \
        'model.position={kind: sinusoidal, layout: concatenated}' 'model.norm={kind: layernorm, placement: post}' \
        'model.attention={num_heads: 4, bias: true, qk_norm: none}' \
        'model.feed_forward={kind: relu, d_ff: 1024, bias: true}'

Both translate batches of `--batch-size` sentences sorted by length with the length penalty n^alpha, and search until
no open beam can win (`early_stopping="never"` there). Printed: sentences per second of each turn, the median of the
ratios, and how many translations are equal.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from transformers import MarianMTModel

import qkv


def marian(model: qkv.Model) -> MarianMTModel:
    """The same network in transformers, through the files that both read."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_hf(f"{folder}/marian")
        peer = MarianMTModel.from_pretrained(f"{folder}/marian", attn_implementation="sdpa", dtype=torch.float32)
    return peer.eval()


def by_qkv(model: qkv.Model, texts: list[str], options: argparse.Namespace) -> list[str]:
    results = model.translate(
        texts,
        beam_size=options.beam_size,
        length_penalty=options.length_penalty,
        length_penalty_kind="power",
        batch_size=options.batch_size,
    )
    return [result.text for result in results]


@torch.inference_mode()
def by_transformers(peer: MarianMTModel, model: qkv.Model, texts: list[str], options: argparse.Namespace) -> list[str]:
    tokenizer = model.tokenizer
    assert tokenizer is not None
    rows = [[tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id] for text in texts]
    order = sorted(range(len(rows)), key=lambda number: len(rows[number]))
    results = [""] * len(rows)
    for first in range(0, len(order), options.batch_size):
        numbers = order[first : first + options.batch_size]
        longest = max(len(rows[number]) for number in numbers)
        ids = torch.full((len(numbers), longest), tokenizer.pad_id)
        mask = torch.zeros_like(ids)
        for place, number in enumerate(numbers):
            ids[place, : len(rows[number])] = torch.tensor(rows[number])
            mask[place, : len(rows[number])] = 1
        written = peer.generate(
            input_ids=ids,
            attention_mask=mask,
            num_beams=options.beam_size,
            length_penalty=options.length_penalty,
            early_stopping="never" if options.beam_size > 1 else False,
            do_sample=False,
            max_new_tokens=2 * longest + 16,
        )
        for number, row in zip(numbers, written.tolist(), strict=True):
            results[number] = tokenizer.decode([i for i in row[1:] if i != tokenizer.pad_id])
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("source", type=Path)
    parser.add_argument("--beam-size", type=int, default=4)
    parser.add_argument("--length-penalty", type=float, default=1.0)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    model = qkv.load(options.run)
    peer = marian(model)
    texts = options.source.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    by_qkv(model, texts[:64], options)
    by_transformers(peer, model, texts[:64], options)
    ratios = []
    for turn in range(options.rounds):
        started = time.perf_counter()
        ours = by_qkv(model, texts, options)
        middle = time.perf_counter()
        theirs = by_transformers(peer, model, texts, options)
        ended = time.perf_counter()
        speeds = len(texts) / (middle - started), len(texts) / (ended - middle)
        ratios.append(speeds[0] / speeds[1])
        print(f"turn {turn + 1}: qkv {speeds[0]:.1f}, transformers {speeds[1]:.1f} sentences/s")
    equal = sum(one == other for one, other in zip(ours, theirs, strict=True))
    print(f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    print(f"{equal:,} of {len(texts):,} translations are equal")


if __name__ == "__main__":
    main()
