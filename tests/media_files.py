"""Small images and sound files, and configurations that read them."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from qkv.config.run import Config

WORDS = ("low", "high")
RATE = 8000


def write_images(folder: Path, count: int = 8) -> Path:
    """A table of grey images of 4 x 8, every other one dark on the left; columns image, text and label."""
    lines = ["image\ttext\tlabel"]
    for number in range(count):
        pixels = np.full((4, 8), 10 + number, np.uint8)
        pixels[:, 4 * (number % 2) : 4 * (number % 2) + 4] = 200 + number
        Image.fromarray(pixels).save(folder / f"{number}.png")
        lines.append(f"{number}.png\t{WORDS[number % 2]} {number}\t{WORDS[number % 2]}")
    return _table(folder / "images.tsv", lines)


def write_sound(folder: Path, count: int = 8, seconds: float = 0.1) -> Path:
    """A table of tones, every other one high; columns audio, text and label."""
    lines = ["audio\ttext\tlabel"]
    for number in range(count):
        time = np.arange(int((seconds + number / 1000) * RATE)) / RATE
        tone = 0.5 * np.sin(2 * np.pi * (300 + 1500 * (number % 2)) * time)
        with wave.open(str(folder / f"{number}.wav"), "wb") as file:
            file.setparams((1, 2, RATE, 0, "NONE", ""))
            file.writeframes((tone * 32767).astype("<i2").tobytes())
        lines.append(f"{number}.wav\t{WORDS[number % 2]}\t{WORDS[number % 2]}")
    return _table(folder / "sound.tsv", lines)


def _table(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


INPUTS: dict[str, dict[str, Any]] = {
    "images": {"kind": "patches", "image_size": [4, 8], "patch_size": 4, "channels": 1},
    "audio": {"kind": "log-mel", "num_mels": 8},
}
WRITE = {"images": write_images, "audio": write_sound}


def media_config(kind: str, task: str, files: Path | str, /, **changes: Any) -> Config:
    """A tiny model that classifies or writes (`translate`) what the files of this kind show."""
    small: dict[str, Any] = {
        "d_model": 16,
        "num_layers": 1,
        "attention": {"num_heads": 2},
        "feed_forward": {"d_ff": 16},
        "position": {"kind": "learned"},
    }
    reads = {"input": INPUTS[kind], **({"max_seq_len": 16} if kind == "audio" else {})}
    if task == "classify":
        model = {"family": "encoder", **small, **reads, "head": {"kind": "classifier", "pooling": "mean"}}
    else:
        model = {"family": "encoder-decoder", **small, "encoder": reads, "decoder": {"max_seq_len": 12}}
    tree = {
        "model": model,
        "tokenizer": {"kind": "char"},
        "objective": {"kind": task},
        "data": {"kind": kind, "train": str(files), "validation": 0.25, **changes.pop("data", {})},
        "train": {
            "steps": 3,
            "batch_tokens": 8,
            "log_every": 1,
            "eval_every": None,
            "save_every": None,
            "device": "cpu",
            "precision": "fp32",
            "compile": "off",
            **changes.pop("train", {}),
        },
    }
    return Config.model_validate(tree | changes)
