"""Small images and spoken words, trained and judged as anyone would: digits to be told apart, digits in a row to be
written in words, spoken digits to be written down.

    QKV_DATA=FOLDER python bench/digits.py classify|caption|transcribe [-o FOLDER] [key=value ...]

Writes the data as files, trains the preset of the task through `qkv.fit` with a part of the training data held out, and
judges the run once, on the test part. A key=value overrides a key of the preset. Prints a JSON line.

classify: UCI's 8 x 8 digits; row number mod 5 == 4 is the test part. Accuracy. caption: canvases of 12 x 40 pixels with
1 to 4 of these digits from left to right, anywhere but on each other, training ones from training digits and test ones
from test digits. Captions that match word for word. transcribe: the Free Spoken Digit Dataset, four speakers; the
recordings 0 to 4 of each digit and speaker are the test part. Word error rate.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import qkv
from qkv.evaluate import classification_scores, error_rate, exact_match

try:
    from PIL import Image
except ModuleNotFoundError:
    sys.exit("this needs pillow: pip install pillow")

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
HEIGHT, WIDTH, SIDE = 12, 40, 8
CANVASES = {"train": 12_000, "test": 1_000}
HELD_OUT = 0.05
Pixels = NDArray[np.uint8]
Parts = dict[str, list[tuple[str, str]]]
"""Of each part, the files and what belongs to each."""


def digits() -> dict[str, list[tuple[Pixels, int]]]:
    """The images [8, 8] of each part, and which digit they show."""
    with gzip.open(source("digits8x8/digits.csv.gz")) as file:
        rows = np.loadtxt(file, delimiter=",", dtype=np.int64)
    images = (rows[:, :-1].reshape(-1, SIDE, SIDE) * 255 // 16).astype(np.uint8)
    parts: dict[str, list[tuple[Pixels, int]]] = {"train": [], "test": []}
    for number, (image, label) in enumerate(zip(images, rows[:, -1].tolist(), strict=True)):
        parts["test" if number % 5 == 4 else "train"].append((image, label))
    return parts


def single_digits(folder: Path) -> Parts:
    parts: Parts = {}
    for part, examples in digits().items():
        parts[part] = []
        for number, (image, label) in enumerate(examples):
            parts[part].append((f"{part}/{number:04}.png", str(label)))
            Image.fromarray(image).save(folder / parts[part][-1][0])
    return parts


def canvases(folder: Path) -> Parts:
    parts: Parts = {}
    for seed, (part, examples) in enumerate(digits().items()):
        rng, parts[part] = np.random.default_rng(seed), []
        for number in range(CANVASES[part]):
            chosen = [examples[place] for place in rng.integers(0, len(examples), rng.integers(1, 5))]
            parts[part].append((f"{part}/{number:05}.png", " ".join(WORDS[label] for _, label in chosen)))
            Image.fromarray(canvas([image for image, _ in chosen], rng)).save(folder / parts[part][-1][0])
    return parts


def canvas(images: Sequence[Pixels], rng: np.random.Generator) -> Pixels:
    """The images from left to right, with what is left of the width between them, and each at a height of its own."""
    found = np.zeros((HEIGHT, WIDTH), np.uint8)
    left = np.sort(rng.integers(0, WIDTH - SIDE * len(images), len(images), endpoint=True))
    for place, (image, gap) in enumerate(zip(images, left.tolist(), strict=True)):
        top, start = rng.integers(0, HEIGHT - SIDE, endpoint=True), gap + SIDE * place
        found[top : top + SIDE, start : start + SIDE] = image
    return found


def recordings(folder: Path) -> Parts:
    parts: Parts = {"train": [], "test": []}
    with tarfile.open(source("fsdd/fsdd-4speakers.tar.xz")) as archive:
        for member in archive:
            name = Path(member.name)
            if name.suffix == ".wav":
                digit, _, index = name.stem.split("_")
                part = "test" if int(index) < 5 else "train"
                parts[part].append((f"{part}/{name.name}", WORDS[int(digit)]))
                content = archive.extractfile(member)
                assert content is not None
                (folder / part / name.name).write_bytes(content.read())
    return parts


def accuracy(model: qkv.Model, files: list[Path], answers: list[str]) -> dict[str, float]:
    found = [one.label for one in model.classify(files, top=1)]
    return {"accuracy": classification_scores(found, answers, sorted(set(answers))).accuracy}


def exact_captions(model: qkv.Model, files: list[Path], answers: list[str]) -> dict[str, float]:
    found = [one.text for one in model.caption(files)]
    return {"exact_match": exact_match(found, answers), "word_error_rate": error_rate(found, answers, "word")}


def word_errors(model: qkv.Model, files: list[Path], answers: list[str]) -> dict[str, float]:
    found = [model.transcribe(file).text for file in files]
    return {"word_error_rate": error_rate(found, answers, "word")}


TASKS: dict[str, tuple[str, str, Callable[[Path], Parts], Callable[..., dict[str, float]]]] = {
    "classify": ("vit-tiny", "image\tlabel", single_digits, accuracy),
    "caption": ("caption-tiny", "image\ttext", canvases, exact_captions),
    "transcribe": ("speech-tiny", "audio\ttext", recordings, word_errors),
}
"""Task -> its preset, the header of its tables, what writes the data and what judges the model."""


def source(name: str) -> Path:
    if "QKV_DATA" not in os.environ:
        sys.exit("set QKV_DATA to the folder with digits8x8 and fsdd")
    return Path(os.environ["QKV_DATA"]) / name


def tell(event: dict[str, Any]) -> None:
    print(json.dumps(event), file=sys.stderr, flush=True)


def run(task: str, folder: Path, overrides: list[str]) -> dict[str, Any]:
    preset, header, write, judge = TASKS[task]
    for part in ("train", "test"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    parts = write(folder)
    for part, examples in parts.items():
        lines = [header, *("\t".join(example) for example in examples)]
        (folder / f"{part}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
    config = qkv.Config.load(preset, f"data.train={folder / 'train.tsv'}", f"data.validation={HELD_OUT}", *overrides)
    started = time.perf_counter()
    trained = qkv.fit(config, run_dir=folder / "run", listener=tell)
    seconds = time.perf_counter() - started
    model = qkv.load(trained.path)
    files, answers = ([example[side] for example in parts["test"]] for side in (0, 1))
    figures = judge(model, [folder / file for file in files], answers)
    count = sum(parameter.numel() for parameter in model.network.parameters())
    examples = {f"{part}_examples": len(examples) for part, examples in parts.items()}
    return {"task": task, "preset": preset, "parameters": count, **examples, "seconds": round(seconds, 1), **figures}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("-o", "--output", type=Path, help="where data and run are kept (default: runs/digits-TASK)")
    arguments = parser.parse_intermixed_args()  # -o may stand before the overrides
    place = arguments.output or Path("runs") / f"digits-{arguments.task}"
    print(json.dumps(run(arguments.task, place, arguments.overrides)))
