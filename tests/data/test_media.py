"""Images and sound with texts or labels: from files to batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from media_files import WORDS, WRITE, media_config, write_images, write_sound
from torch import Tensor

from qkv.config.errors import NotFoundError, QkvError
from qkv.data import BatchLoader, Labelled, Pairs, Prepared, batch_json, describe_batch, prepare, validation_batches
from qkv.data.audio import log_mel, read_audio
from qkv.data.images import read_image
from qkv.data.media import Features, medium_of
from qkv.data.tokenizers import has_texts, tokenizer_for
from qkv.tokenizer import Tokenizer

KINDS = ["images", "audio"]


def prepared(kind: str, task: str, place: Path | str, cache: Path, **changes: Any) -> tuple[Prepared, Tokenizer | None]:
    config = media_config(kind, task, place, **changes)
    tokenizer = tokenizer_for(config, cache) if has_texts(config) else None
    return prepare(config, tokenizer, cache), tokenizer


def features_of(data: Any) -> Features:
    found = data.source if isinstance(data, Pairs) else data.texts
    assert isinstance(found, Features)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_gives_each_file_its_text(kind: str, tmp_path: Path) -> None:
    data, tokenizer = prepared(kind, "translate", WRITE[kind](tmp_path), tmp_path, data={"validation": 0})
    assert isinstance(data.train, Pairs)
    assert tokenizer is not None
    expected = [f"{WORDS[n % 2]} {n}" if kind == "images" else WORDS[n % 2] for n in range(8)]
    assert [tokenizer.decode(data.train.target.document(n).tolist()) for n in range(8)] == expected
    assert features_of(data.train).num_documents == 8


def test_what_an_encoder_reads_is_what_the_readers_of_files_give(tmp_path: Path) -> None:
    write_images(tmp_path)
    data, _ = prepared("images", "classify", tmp_path / "images.tsv", tmp_path, data={"mean": 0.2, "std": 0.7})
    image = read_image(tmp_path / "0.png", (4, 8), channels=1, mean=0.2, std=0.7)
    assert any(torch.equal(features_of(part).document(0), image) for part in (data.train, data.validation))
    write_sound(tmp_path)
    data, _ = prepared("audio", "translate", tmp_path / "sound.tsv", tmp_path, data={"validation": 0})
    features = log_mel(read_audio(tmp_path / "3.wav"), 8, seconds=0.32)
    assert torch.equal(features_of(data.train).document(3), features)


@pytest.mark.parametrize("kind", KINDS)
def test_folders_are_named_by_the_label_or_text_of_their_files(kind: str, tmp_path: Path) -> None:
    table = WRITE[kind](tmp_path)
    for line in table.read_text().splitlines()[1:]:
        name, _, label = line.split("\t")
        place = tmp_path / "sorted" / label
        place.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).rename(place / name)
    (tmp_path / "sorted" / ".hidden").mkdir()
    data, _ = prepared(kind, "classify", tmp_path / "sorted", tmp_path, data={"validation": 0})
    assert isinstance(data.train, Labelled)
    assert data.labels == ("high", "low")
    assert data.train.labels_D.tolist() == [0] * 4 + [1] * 4
    texts, tokenizer = prepared(kind, "translate", tmp_path / "sorted", tmp_path, data={"validation": 0})
    assert isinstance(texts.train, Pairs)
    assert tokenizer is not None
    assert tokenizer.decode(texts.train.target.document(7).tolist()) == "low"


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_tables_may_be_json_lines_or_csv_and_name_their_columns(suffix: str, tmp_path: Path) -> None:
    write_images(tmp_path, 3)
    rows = [("0.png", "a, b"), ("1.png", "c"), ("2.png", "a, b")]
    table = tmp_path / f"table.{suffix}"
    if suffix == "csv":
        table.write_text("path,what\n" + "".join(f'{name},"{text}"\n' for name, text in rows))
    else:
        table.write_text("".join(json.dumps({"path": name, "what": text}) + "\n" for name, text in rows))
    keys = {"file_key": "path", "label_key": "what", "validation": 0}
    data, _ = prepared("images", "classify", table, tmp_path, data=keys)
    assert data.labels == ("a, b", "c")


@pytest.mark.parametrize("name", ["gone.png", "x" * 300])
def test_a_file_that_is_not_there_is_named_with_its_line(name: str, tmp_path: Path) -> None:
    table = write_images(tmp_path)
    table.write_text(f"image\ttext\tlabel\n0.png\tlow\tlow\n{name}\tlow\tlow\n", encoding="utf-8")
    with pytest.raises(NotFoundError, match=f"there is no file .*{name}") as error:
        prepared("images", "classify", table, tmp_path)
    assert error.value.where == f"{table}:3"


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_read_once(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = WRITE[kind](tmp_path)
    first, _ = prepared(kind, "translate", table, tmp_path / "cache")
    assert not first.reused
    for name in ("read_audio", "read_pixels"):
        monkeypatch.setattr(f"qkv.data.media.{name}", lambda *_: pytest.fail("it was read again"))
    again, _ = prepared(kind, "translate", table, tmp_path / "cache")
    assert again.reused
    assert again.fingerprint == first.fingerprint
    assert torch.equal(features_of(again.train).document(1), features_of(first.train).document(1))


def test_a_changed_file_and_another_size_are_read_anew(tmp_path: Path) -> None:
    table = write_images(tmp_path)
    first, _ = prepared("images", "classify", table, tmp_path / "cache")
    (tmp_path / "0.png").write_bytes((tmp_path / "1.png").read_bytes())
    changed, _ = prepared("images", "classify", table, tmp_path / "cache")
    assert not changed.reused
    assert changed.fingerprint != first.fingerprint


@pytest.mark.parametrize("kind", KINDS)
def test_a_fraction_held_out_is_chosen_by_what_is_in_the_files(kind: str, tmp_path: Path) -> None:
    """Copies are on one side, whatever they are called."""
    table = WRITE[kind](tmp_path)
    lines = table.read_text().splitlines()
    copies = []
    for line in lines[1:]:
        name, rest = line.split("\t", 1)
        (tmp_path / f"copy-{name}").write_bytes((tmp_path / name).read_bytes())
        copies.append(f"copy-{name}\t{rest}")
    table.write_text("\n".join([*lines, *copies]) + "\n")
    data, _ = prepared(kind, "classify", table, tmp_path)
    assert data.validation is not None
    sides = [
        {features_of(part).document(n).numpy().tobytes() for n in range(part.num_documents)}
        for part in (data.train, data.validation)
    ]
    assert sides[0].isdisjoint(sides[1])
    assert len(sides[0]) + len(sides[1]) == 8


def test_sound_that_the_context_does_not_hold_is_left_out_and_said(tmp_path: Path) -> None:
    write_sound(tmp_path, 3, seconds=0.318)  # 0.318, 0.319 and 0.320 s; the context holds 0.32 s
    (tmp_path / "2.wav").write_bytes((tmp_path / "2.wav").read_bytes())
    table = write_sound(tmp_path, 4, seconds=0.318)
    data, _ = prepared("audio", "translate", table, tmp_path, data={"validation": 0})
    assert data.train.num_documents == 3
    assert data.notes == ("1 of 4 training recordings are left out: they become more than 16 vectors",)


def test_empty_and_long_texts_are_left_out_and_said(tmp_path: Path) -> None:
    table = write_images(tmp_path, 3)
    table.write_text("image\ttext\n0.png\tlow\n1.png\t  \n2.png\tlonger than twelve\n")
    data, _ = prepared("images", "translate", table, tmp_path, data={"validation": 0})
    assert data.train.num_documents == 1
    assert data.notes == (
        "1 of 3 training images are left out: their texts have more than 12 tokens",
        "1 of 3 training images are left out: their texts are empty",
    )


# --- batches ----------------------------------------------------------------------------------------------------------


def loader(data: Prepared, config: Any, tokenizer: Tokenizer | None, **options: Any) -> BatchLoader:
    return BatchLoader(data.train, config.objective, tokenizer, max_seq_len=12, batch_tokens=8, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("task", ["classify", "translate"])
def test_a_step_takes_so_many_labels_or_target_tokens_and_an_epoch_all_files(
    kind: str, task: str, tmp_path: Path
) -> None:
    config = media_config(kind, task, WRITE[kind](tmp_path), data={"validation": 0})
    tokenizer = tokenizer_for(config, tmp_path) if has_texts(config) else None
    data = prepare(config, tokenizer, tmp_path)
    steps, seen = loader(data, config, tokenizer), []
    while steps.state_dict()["epoch"] == 0:
        (batch,) = next(steps)
        features = batch.inputs if task == "classify" else batch.source
        assert features is not None
        assert features.dtype == torch.float32
        assert features.shape[1:] == ((1, 4, 8) if kind == "images" else (32, 8))
        assert 0 < batch.tokens == batch.target_count <= 8
        assert set(batch.arguments) == (set() if task == "classify" else {"lengths", "source"})
        seen += [row.numpy().tobytes() for row in features]
    whole = features_of(data.train)
    assert sorted(seen) == sorted(whole.document(n).numpy().tobytes() for n in range(8))


def test_shifted_images_are_moved_by_a_pixel_and_validation_sees_them_as_they_are(tmp_path: Path) -> None:
    changes = {"data": {"shift": 1}, "objective": {"kind": "classify", "labels": WORDS}}
    config = media_config("images", "classify", write_images(tmp_path), **changes)
    data = prepare(config, None, tmp_path)
    train = features_of(data.train)
    keys = [(0, epoch) for epoch in range(40)]
    moved = train.batch([0] * 40, keys)
    padded = torch.nn.functional.pad(train.document(0), (1, 1, 1, 1), mode="replicate")
    possible = {padded[:, y : y + 4, x : x + 8].numpy().tobytes() for y in range(3) for x in range(3)}
    assert {image.numpy().tobytes() for image in moved} == possible
    assert torch.equal(moved, train.batch([0] * 40, keys))
    assert data.validation is not None
    (batch, *_) = validation_batches(data.validation, config.objective, None, max_seq_len=3, batch_tokens=64)
    held = features_of(data.validation)
    assert torch.equal(batch.inputs, torch.stack([held.document(n) for n in range(held.num_documents)]))


def test_masked_sound_has_a_band_and_a_stretch_of_silence() -> None:
    config = media_config("audio", "classify", "sound.tsv", data={"mask_mels": 3, "mask_frames": 6})
    medium = medium_of(config.data, config.model)
    plain = np.random.default_rng(0).random((32, 8), np.float32)
    widths = set()
    for seed in range(100):
        changed = medium.varied(plain, np.random.default_rng(seed))
        silent = changed == plain.min()
        assert (changed[~silent] == plain[~silent]).all()
        mels, frames = np.flatnonzero(silent.all(axis=0)), np.flatnonzero(silent.all(axis=1))
        assert all(np.diff(masked).max(initial=1) == 1 for masked in (mels, frames))
        widths.add((len(mels), len(frames)))
    assert [set(found) for found in zip(*widths, strict=True)] == [set(range(4)), set(range(7))]


def test_a_batch_of_images_is_shown_by_its_shape(tmp_path: Path) -> None:
    table = write_images(tmp_path)
    config = media_config("images", "classify", table, data={"validation": 0})
    data = prepare(config, None, tmp_path)
    (batch,) = next(loader(data, config, None))
    assert batch_json(batch) == {"inputs_shape": [8, 1, 4, 8], "labels": batch.labels.tolist()}
    rows = describe_batch(batch, None, looks_ahead=True, labels=data.labels)
    assert [row.label for row in rows] == [data.labels[number] for number in batch.labels.tolist()]
    config = media_config("images", "translate", table, data={"validation": 0})
    tokenizer = tokenizer_for(config, tmp_path)
    (batch,) = next(loader(prepare(config, tokenizer, tmp_path), config, tokenizer))
    rows = describe_batch(batch, tokenizer, looks_ahead=False)
    assert batch_json(batch)["source_shape"][1:] == [1, 4, 8]
    assert rows[0].source == []
    assert "".join(slot.label or "" for slot in rows[0].slots).startswith(WORDS)


# --- what cannot be read ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "error", "told"),
    [
        ("image\ttext\ngone.png\tlow\n", NotFoundError, r"gone\.png.*\n.*table\.tsv:2"),
        ("image\tcaption\n0.png\tlow\n", QkvError, "no column `text`"),
        ("picture\ttext\n0.png\tlow\n", QkvError, "no column `image`"),
        ("image\ttext\n\tlow\n", QkvError, r"`image` is no name of a file"),
        ("image\ttext\ntable.tsv\tlow\n", QkvError, "no image of PNG"),
        ("image\ttext\n", QkvError, "nothing follows its header"),
    ],
)
def test_a_wrong_table_is_one_clear_error(table: str, error: type[QkvError], told: str, tmp_path: Path) -> None:
    write_images(tmp_path, 1)
    path = tmp_path / "table.tsv"
    path.write_text(table)
    with pytest.raises(error, match=told):
        prepare(media_config("images", "translate", path), Tokenizer.train([], kind="byte"), tmp_path)


def test_a_folder_without_folders_and_an_empty_label_are_refused(tmp_path: Path) -> None:
    table = write_images(tmp_path, 2)
    with pytest.raises(QkvError, match="no folders with files"):
        prepared("images", "classify", tmp_path, tmp_path / "cache")
    table.write_text("image\tlabel\n0.png\tlow\n1.png\t\n")
    with pytest.raises(QkvError, match="`label` is empty"):
        prepared("images", "classify", table, tmp_path)


def test_a_mean_for_another_number_of_channels_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    table = write_images(tmp_path, 2)
    with pytest.raises(QkvError, match="`mean` is one number, or one for each of 1"):
        prepared("images", "classify", table, tmp_path / "cache", data={"mean": [0.5, 0.5]})
    assert not (tmp_path / "cache").exists()


def test_stored_arrays_are_little_endian_and_of_the_size_the_manifest_says(tmp_path: Path) -> None:
    data, _ = prepared("images", "classify", write_images(tmp_path), tmp_path, data={"validation": 0})
    (files,) = data.files
    stored = np.fromfile(files.folder / "values.bin", np.uint8).reshape(8, 1, 4, 8)
    image: Tensor = features_of(data.train).document(2)
    torch.testing.assert_close(image, (torch.from_numpy(stored[2]) / 255 - 0.5) / 0.5)
