"""preprocessor_config.json: files become what transformers' processors make of them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

import qkv
from qkv.checkpoint.load import load_model
from qkv.checkpoint.preprocessor import read_preprocessor
from qkv.checkpoint.published import Published
from qkv.config.errors import DamagedError, QkvError
from qkv.generate.media import features_of

from .folders import write_folder

SIZE = 8
VIT: dict[str, Any] = {
    "family": "encoder",
    "d_model": 16,
    "num_layers": 1,
    "input": {"kind": "patches", "image_size": SIZE, "patch_size": 4},
    "norm": {"kind": "layernorm"},
    "position": {"kind": "learned"},
    "attention": {"num_heads": 2, "bias": True},
    "feed_forward": {"kind": "gelu", "d_ff": 24, "bias": True},
    "head": {"kind": "classifier", "num_classes": 3, "pooler": False},
}
SQUARE = {"height": SIZE, "width": SIZE}
STRETCH = {"size": SQUARE, "resample": 2, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.6, 0.7]}
COVER = {**STRETCH, "size": {"shortest_edge": 10}, "do_center_crop": True, "crop_size": SQUARE, "resample": 3}


def told(**keys: Any) -> Published:
    return Published(keys, "preprocessor_config.json")


@pytest.fixture
def pictures(tmp_path: Path) -> list[Path]:
    """Of a shape wider than the model's, one higher, and one of its own."""
    draw, files = np.random.default_rng(0), []
    for number, (width, height) in enumerate([(37, 23), (16, 41), (SIZE, SIZE)]):
        files.append(tmp_path / f"{number}.png")
        Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(files[-1])
    return files


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        (ViTImageProcessorPil, STRETCH),
        (ViTImageProcessorPil, {**STRETCH, "resample": 1, "do_normalize": False}),
        (BitImageProcessorPil, COVER),
        (BitImageProcessorPil, {**COVER, "size": {"shortest_edge": SIZE}, "resample": 2}),
    ],
    ids=["vit", "vit-lanczos", "bit", "bit-whole"],
)
def test_files_are_read_as_transformers_reads_them(
    kind: type, keys: dict[str, Any], pictures: list[Path], tmp_path: Path
) -> None:
    write_folder(tmp_path / "vit", VIT)
    processor = kind(**keys)
    processor.save_pretrained(tmp_path / "vit")
    model = qkv.load(tmp_path / "vit", device="cpu")
    found = torch.stack(features_of(pictures, model.network.config, model.config))
    expected = processor([Image.open(file) for file in pictures], return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)
    assert model.classify(pictures) == model.classify(found)


@pytest.mark.parametrize("data", [{"fit": "stretch", "mean": 0.2}, {"crop": 0.8, "resample": "bilinear", "std": 0.3}])
def test_what_is_written_is_read_back_by_us_and_by_transformers(
    data: dict[str, Any], pictures: list[Path], tmp_path: Path
) -> None:
    write_folder(tmp_path / "vit", VIT, data={"kind": "images", **data})
    model = qkv.load(tmp_path / "vit", device="cpu")
    assert {name: getattr(model.config.data, name) for name in data} == {
        name: (value,) * 3 if name in ("mean", "std") else value for name, value in data.items()
    }
    processor = (ViTImageProcessorPil if "fit" in data else BitImageProcessorPil).from_pretrained(tmp_path / "vit")
    expected = processor([Image.open(file) for file in pictures], return_tensors="pt")["pixel_values"]
    found = torch.stack(features_of(pictures, model.network.config, model.config))
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


def test_of_an_oblong_image_only_the_whole_can_be_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    oblong = {**VIT, "input": {**VIT["input"], "image_size": [8, 12]}}
    for name, fit, written in (("cut", "cover", False), ("whole", "stretch", True)):
        write_folder(tmp_path / name, oblong, data={"kind": "images", "fit": fit})
        assert (tmp_path / name / "preprocessor_config.json").exists() == written
    assert [record.getMessage()[:27] for record in caplog.records] == ["no preprocessor_config.json"]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({**STRETCH, "size": SIZE}, {"fit": "stretch"}),
        ({**STRETCH, "size": 10, "do_center_crop": True, "crop_size": SIZE}, {"fit": "cover", "crop": 0.8}),
        ({**COVER, "crop_size": None, "size": {"shortest_edge": SIZE}}, {"fit": "cover", "crop": 1.0}),
    ],
)
def test_older_files_say_sizes_by_one_number(keys: dict[str, Any], expected: dict[str, Any]) -> None:
    found = read_preprocessor(told(**keys), {"image_size": SIZE})
    assert {name: found[name] for name in ("fit", "crop") if name in found} == expected


def test_another_size_than_the_model_s_is_noted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="qkv"):
        read_preprocessor(told(**STRETCH), {"image_size": 12})
    assert "says [8, 8]" in caplog.text


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"do_pad": True}, "do_pad: True"),
        ({"do_resize": False}, "do_resize: False"),
        ({"do_rescale": False}, "do_rescale: False"),
        ({"rescale_factor": 1 / 127.5}, "rescale_factor"),
        ({"resample": 4}, "resample: 4"),
        ({"resample": None}, "`resample` is missing"),
        ({"size": {"longest_edge": 8}}, "size"),
        ({"size": {"shortest_edge": 8}}, "size"),
        ({"do_center_crop": True, "size": {"shortest_edge": 8}, "crop_size": {"height": 8, "width": 6}}, "size"),
        ({"do_center_crop": True, "size": {"shortest_edge": 8}, "crop_size": 9}, "crop_size: 9"),
        ({"size": None}, "size"),
        ({"size": {"height": "8", "width": 8}}, "`height` should be"),
        ({"size": 0}, "`size` should be"),
        ({"size": True}, "`size` should be"),
        ({"image_mean": [0.5, "a", 0.5]}, "image_mean"),
        ({"image_mean": [10**400, 0.5, 0.5]}, "image_mean"),
        ({"image_std": [1e300, 0.5, 0.5]}, "image_std"),
        ({"image_std": None}, "`image_std` is missing"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(QkvError) as error:
        read_preprocessor(told(**{**STRETCH, **keys}), {"image_size": SIZE})
    assert said in str(error.value)
    assert "preprocessor_config.json" in str(error.value.where)


def test_a_damaged_file_is_called_so(tmp_path: Path) -> None:
    write_folder(tmp_path / "vit", VIT)
    path = tmp_path / "vit" / "preprocessor_config.json"
    assert json.loads(path.read_text(encoding="utf-8"))["size"] == {"shortest_edge": SIZE}
    path.write_text("{", encoding="utf-8")
    with pytest.raises(DamagedError, match="preprocessor_config"):
        load_model(tmp_path / "vit")
    path.unlink()
    path.mkdir()
    with pytest.raises(DamagedError, match="is a folder, and a file is expected") as error:
        load_model(tmp_path / "vit")
    assert error.value.where == str(path)
