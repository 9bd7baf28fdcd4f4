"""Images and sound through the whole of training: classified and written, saved and loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from media_files import WRITE, media_config

import qkv
from qkv.config.errors import UsageError
from qkv.train.loop import fit
from qkv.train.resume import resume

TASKS = [("images", "classify"), ("images", "translate"), ("audio", "classify"), ("audio", "translate")]


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """`train("images", "classify", ...)`: the folder of a short run, beside its files."""
    monkeypatch.setenv("QKV_CACHE", str(tmp_path / "cache"))

    def run(kind: str, task: str, name: str = "run", **changes: Any) -> Path:
        table = tmp_path / ("images.tsv" if kind == "images" else "sound.tsv")
        if not table.exists():
            WRITE[kind](tmp_path)
        return fit(media_config(kind, task, table, **changes), run_dir=tmp_path / name).path

    return run


@pytest.mark.parametrize(("kind", "task"), TASKS)
def test_a_run_trains_validates_and_loads(kind: str, task: str, train: Callable[..., Path], tmp_path: Path) -> None:
    folder = train(kind, task)
    model = qkv.load(folder, device="cpu")
    record = (folder / "metrics.jsonl").read_text().splitlines()[-1]
    assert ("val_accuracy" if task == "classify" else "val_bleu") in record
    files = [tmp_path / f"{n}.{'png' if kind == 'images' else 'wav'}" for n in range(3)]
    if task == "classify":
        assert " of 0 tokens" not in (page := (folder / "report.md").read_text())
        assert f" training {'images' if kind == 'images' else 'recordings'}, " in page
        assert model.tokenizer is None
        assert {one.label for one in model.classify(files)} <= {"low", "high"}
    elif kind == "images":
        together = model.caption(files, max_new_tokens=4)
        for file, one in zip(files, together, strict=True):
            alone = model.caption(file, max_new_tokens=4)
            assert (alone.text, alone.token_ids) == (one.text, one.token_ids)
            assert alone.score == pytest.approx(one.score, abs=1e-5)
    else:
        assert model.transcribe(files[0], max_new_tokens=4).seconds == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize(("kind", "task"), TASKS)
def test_a_resumed_run_is_the_run_that_never_stopped(kind: str, task: str, train: Callable[..., Path]) -> None:
    noise = {"shift": 1} if kind == "images" else {"mask_mels": 2, "mask_frames": 4}
    changes = {"data": noise, "train": {"steps": 4, "save_every": 2, "keep": 9, "schedule": {"kind": "constant"}}}
    whole = train(kind, task, **changes)
    half = train(kind, task, "half", **{**changes, "train": {**changes["train"], "steps": 2}})
    resume(half, steps=4)
    first, second = (
        qkv.load(one / "checkpoints" / "step-000004", device="cpu").network.state_dict() for one in (whole, half)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_what_training_reads_is_what_transcribe_gives(train: Callable[..., Path], tmp_path: Path) -> None:
    """The first token of a transcript is the likeliest by the batch that training would make."""
    model = qkv.load(train("audio", "translate", data={"validation": 0}), device="cpu")
    prepared = qkv.data.prepare(model.config, model.tokenizer, tmp_path / "again")
    assert isinstance(prepared.train, qkv.data.Pairs)
    features = prepared.train.source.document(2)
    with torch.no_grad():
        logits = model.network(torch.tensor([model.reader.start_ids]), source=features[None])
    found = model.transcribe(tmp_path / "2.wav", max_new_tokens=1).segments[0].token_ids
    assert found == [int(logits[0, -1, : model.tokenizer.vocab_size].argmax())]


def test_what_a_model_does_not_do_is_refused_by_name(train: Callable[..., Path], tmp_path: Path) -> None:
    model = qkv.load(train("images", "classify"), device="cpu")
    for call, told in (
        (lambda: model.caption(tmp_path / "0.png"), "does not caption images"),
        (lambda: model.transcribe(torch.zeros(800)), "does not transcribe"),
        (lambda: model.classify(torch.zeros(3, 4, 8)), r"an image is a file or a float tensor \[1, 4, 8\], not"),
        (lambda: model.classify([7]), "an image is a file or a float tensor"),
    ):
        with pytest.raises(UsageError, match=told):
            call()
    tensor = torch.zeros(2, 1, 4, 8)
    assert len(model.classify(tensor)) == 2
    assert model.classify(tensor[0]).label == model.classify(tensor)[0].label
