"""The first losses of each small preset, kept in golden/: what changes how a model starts or learns is seen here.

A change that is meant rewrites them, `pytest tests/train/test_golden.py --rewrite-golden`, and CHANGELOG says why they
moved. The losses are those of float32 on one thread, not compiled. They are compared within a tolerance, because other
processors add in another order; from the second step on within a wider one, because Muon rounds its updates to bfloat16
and so turns a last bit into one of eight.
"""

from __future__ import annotations

import json
import platform
from pathlib import Path

import numpy as np
import pytest
import torch
from media_files import write_sound
from PIL import Image

from qkv.config.load import preset_names
from qkv.config.run import Config
from qkv.data.tokenizers import has_texts, tokenizer_for
from qkv.train.loop import new_trainer

GOLDEN = Path(__file__).parent / "golden"
STEPS = 3
FIRST, LATER = 1e-5, 2e-3
"""Relative tolerances of the loss at step 1 and after; of the gradient norm ten times as much."""

BYTES = "tokenizer={kind: byte}"  # a tokenizer that is trained belongs to other tests
TEXT = ("train.batch_tokens=256", "data={kind: text, train: [corpus.txt], validation: 0}", BYTES)
PAIRS = ("train.batch_tokens=64", "data={train: [pairs.tsv], validation: 0}")
SMALL: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("decoder-tiny", "alibi-tiny", "attnres-tiny", "deepnorm-tiny", "hyper-tiny", "mhc-tiny"), TEXT),
    **dict.fromkeys(("llama-tiny", "gemma-tiny", "mla-tiny", "moe-tiny", "gpt-small-code"), TEXT),
    **dict.fromkeys(("encoder-tiny", "bert-small"), TEXT),
    "shakespeare-char": TEXT[:2],
    **dict.fromkeys(("encoder-decoder-tiny", "transformer-tiny-mt", "transformer-small-mt"), (*PAIRS, BYTES)),
    "g2p": PAIRS,
    "pinyin": (*PAIRS, "tokenizer.target.kind=word"),
    "sentiment": ("train.batch_tokens=256", "data={train: [labelled.tsv], validation: 0}", BYTES),
    "vit-tiny": ("train.batch_tokens=8", "data={train: [8x8.tsv], validation: 0}"),
    "caption-tiny": ("train.batch_tokens=16", "data={train: [12x40.tsv], validation: 0}"),
    "speech-tiny": ("train.batch_tokens=32", "data={train: [sound.tsv], validation: 0}"),
}
"""Preset -> what makes its run short, and its data small."""

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="dropout draws other random numbers on other processors"
)


@pytest.fixture
def made_data(tmp_path: Path) -> None:
    """Files of each kind in the working folder, by arithmetic."""
    words = ["the", "a", "cat", "dog", "house", "tree", "sees", "likes", "of", "in", "under", "quickly"]
    texts = [[words[(7 * n + 5 * k * k) % len(words)] for k in range(2 + n % 7)] for n in range(200)]
    lines = [" ".join(text) for text in texts]
    pairs = [f"{line}\t{' '.join(reversed(text))}" for line, text in zip(lines, texts, strict=True)]
    labelled = ["text\tlabel", *(f"{line}\t{'yes' if 'cat' in line else 'no'}" for line in lines)]
    for name, table in (("corpus.txt", lines), ("pairs.tsv", pairs), ("labelled.tsv", labelled)):
        (tmp_path / name).write_text("\n".join(table) + "\n", encoding="utf-8")
    for shape in ((8, 8), (12, 40)):
        _write_images(tmp_path / "x".join(map(str, shape)), shape)
    write_sound(tmp_path, count=16)


def _write_images(place: Path, shape: tuple[int, int]) -> None:
    """16 images, light to the left or to the right, and their table."""
    rows = ["image\ttext\tlabel"]
    for number in range(16):
        column = np.arange(shape[1]) if number % 2 else np.arange(shape[1])[::-1]
        pixels = np.broadcast_to((column * 200 // shape[1] + number).astype(np.uint8), shape)
        Image.fromarray(pixels).save(f"{place}-{number}.png")
        side = "right" if number % 2 else "left"
        rows.append(f"{place.name}-{number}.png\tto the {side}\t{side}")
    place.with_suffix(".tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")


def first_steps(preset: str) -> dict[str, list[float]]:
    """Losses and gradient norms of the first steps."""
    computed = ("train.device=cpu", "train.precision=fp32", "train.compile='off'")
    config = Config.load(preset, "data=null", *SMALL[preset], *computed)
    tokenizer = tokenizer_for(config, "cache") if has_texts(config) else None
    source_tokenizer = tokenizer_for(config, "cache", "source") if config.tokenizer.source else None
    trainer = new_trainer(config, tokenizer, source_tokenizer, None)
    with torch.random.fork_rng():
        torch.manual_seed(config.train.seed)
        taken = [trainer.take_step() for _ in range(STEPS)]
    return {key: [float(f"{step[key]:.8g}") for step in taken] for key in ("loss", "grad_norm")}


@pytest.mark.parametrize("preset", SMALL)
def test_a_preset_starts_and_learns_as_it_did(preset: str, made_data: None, pytestconfig: pytest.Config) -> None:
    found, file = first_steps(preset), GOLDEN / f"{preset}.json"
    if pytestconfig.getoption("rewrite_golden"):
        file.write_text(json.dumps(found) + "\n", encoding="utf-8")
    golden = json.loads(file.read_text(encoding="utf-8"))
    for key, factor in (("loss", 1), ("grad_norm", 10)):
        assert found[key][:1] == pytest.approx(golden[key][:1], rel=FIRST * factor), key
        assert found[key][1:] == pytest.approx(golden[key][1:], rel=LATER * factor), key


def test_every_small_preset_has_its_golden_losses() -> None:
    published = {"whisper-tiny"}
    assert {name for name in preset_names() if "tiny" in name} - published <= SMALL.keys()
    assert {path.stem for path in GOLDEN.glob("*.json")} == SMALL.keys()
