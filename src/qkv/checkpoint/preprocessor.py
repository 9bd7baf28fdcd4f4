"""preprocessor_config.json, which says how a published model reads image files, as our `data` section and back."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from qkv.checkpoint.published import Published
from qkv.config.base import MAX_NUMBER
from qkv.config.data import ImagesDataConfig
from qkv.config.parts import PatchInputConfig

log = logging.getLogger("qkv")

_RESAMPLING = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
"""Pillow's numbers."""
_STEPS = ("do_resize", "do_center_crop", "do_rescale", "do_normalize", "do_convert_rgb")


def read_preprocessor(told: Published, reads: Mapping[str, Any]) -> dict[str, Any]:
    """The `data` section of a model with this `input` section. Images become of the model's own size; that the file
    says another is noted. Raises QkvError that names what is not supported."""
    for key in sorted(told.keys):
        if key.startswith("do_") and told.keys[key] and key not in _STEPS:
            raise told.unsupported(key, told.keys[key], f"supported: {', '.join(_STEPS)}")
    told.only("do_resize", True)
    told.only("do_rescale", True)
    factor = told.number("rescale_factor", 1 / 255)
    if not math.isclose(factor, 1 / 255, rel_tol=1e-3):
        raise told.unsupported("rescale_factor", factor, "only 1/255 is supported")
    number = told.whole("resample")
    if number not in _RESAMPLING:
        names = (f"{key} ({name})" for key, name in _RESAMPLING.items())
        raise told.unsupported("resample", number, f"supported: {', '.join(names)}")
    normalised = told.flag("do_normalize", True)
    return {
        "kind": "images",
        "mean": _numbers(told, "image_mean") if normalised else 0.0,
        "std": _numbers(told, "image_std") if normalised else 1.0,
        "resample": _RESAMPLING[number],
        **_fit(told, reads["image_size"]),
    }


def _fit(told: Published, image_size: Any) -> dict[str, Any]:
    """How an image of another shape becomes one of the model's."""
    cropped = told.flag("do_center_crop", False)
    size, crop = _edges(told, "size", "shortest_edge" if cropped else None), _edges(told, "crop_size", None)
    found: dict[str, Any]
    if not cropped and size.keys() == {"height", "width"}:
        shape, found = [size["height"], size["width"]], {"fit": "stretch"}
    elif cropped and size.keys() == {"shortest_edge"} and crop.get("height") == crop.get("width"):
        side, whole = crop.get("height", size["shortest_edge"]), size["shortest_edge"]
        if side > whole:
            raise told.unsupported("crop_size", side, f"supported: within a shortest_edge of {whole}")
        shape, found = [side, side], {"fit": "cover", "crop": side / whole}
    else:
        raise told.unsupported("size", size, "supported: height and width, or shortest_edge and a square crop_size")
    if shape != (image_size if isinstance(image_size, list) else [image_size] * 2):
        log.warning("images are read as %s pixels, the model's size, and %s says %s", image_size, told.where, shape)
    return found


def _edges(told: Published, key: str, alone: str | None) -> dict[str, int]:
    """A size by its edges. A number alone is that of `alone`, or of a square (None)."""
    value = told.keys.get(key)
    if isinstance(value, int):
        edge = told.whole(key, least=1)
        return {alone: edge} if alone else {"height": edge, "width": edge}
    section = told.section(key)
    return {edge: section.whole(edge, least=1) for edge in section.keys if edge in section}


def _numbers(told: Published, key: str) -> list[float]:
    """One number for each channel."""
    numbers: list[float] = []
    for value in told.list(key):
        if type(value) not in (int, float) or not abs(value) <= MAX_NUMBER:
            raise told.unsupported(key, value, "one number for each channel")
        numbers.append(float(value))
    return numbers


def write_preprocessor(data: ImagesDataConfig, reads: PatchInputConfig) -> dict[str, Any] | None:
    """The file of a model that reads images so; None, with a note, where no published reader does."""
    height, width = reads.image_shape
    shape: dict[str, Any]
    if data.fit == "stretch":
        shape = {"image_processor_type": "ViTImageProcessor", "size": {"height": height, "width": width}}
    elif height == width:
        shape = {
            "image_processor_type": "BitImageProcessor",
            "do_center_crop": True,
            "crop_size": {"height": height, "width": width},
            "size": {"shortest_edge": round(height / data.crop)},
        }
    else:
        log.warning("no preprocessor_config.json: there, images are cut to a square or, with data.fit=stretch, not cut")
        return None
    return {
        **shape,
        "do_resize": True,
        "resample": next(number for number, name in _RESAMPLING.items() if name == data.resample),
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": _per_channel(data.mean, reads.channels),
        "image_std": _per_channel(data.std, reads.channels),
        "do_convert_rgb": reads.channels == 3,
    }


def _per_channel(value: float | tuple[float, ...], channels: int) -> list[float]:
    return list(value) if isinstance(value, tuple) else [value] * channels
