"""From an image file to what an image encoder reads.

Shapes: C channels, H and W height and width in pixels.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from qkv.config.errors import DamagedError, QkvError, UsageError
from qkv.tokenizer.text import open_file

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "PPM")
"""What is read; Pillow's other readers are rarely met, and some start other programs."""
MAX_PIXELS = 2**26
"""Of a file: 256 MB when unpacked. A small file can promise far more."""

_EIGHT_BITS = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")
"""Pillow's names for images of at most 8 bits a channel."""


def read_image(
    path: str | Path,
    size: int | tuple[int, int],
    *,
    channels: int = 3,
    mean: float | Sequence[float] = 0.5,
    std: float | Sequence[float] = 0.5,
    **fitting: Any,
) -> Tensor:
    """An image file as float32 [C, H, W], from 0 .. 1, minus `mean`, over `std`.

    size: height and width, or one number for both. channels: 3 (RGB) or 1 (grey); what is transparent shows the colour
    it has, and of an animation the first frame is read. mean, std: one number, or one for each channel. fitting: see
    `read_pixels`. The camera's note of how it was held is followed.

    Raises NotFoundError, DamagedError, QkvError for a file that is no image of `FORMATS`, has more than 8 bits a
    channel or more than `MAX_PIXELS`, and UsageError where Pillow is not installed.
    """
    mean_C11, std_C11 = per_channel(mean, std, channels)
    return normalised(read_pixels(path, size, channels, **fitting), mean_C11, std_C11)


def normalised(pixels_CHW: Tensor, mean_C11: Tensor, std_C11: Tensor) -> Tensor:
    """Pixels of 8 bits as float32: 0 .. 1, minus `mean`, over `std`."""
    return (pixels_CHW / 255 - mean_C11) / std_C11


def per_channel(mean: float | Sequence[float], std: float | Sequence[float], channels: int) -> tuple[Tensor, Tensor]:
    """Both as [C, 1, 1]. Raises UsageError for another number of them, and a `std` that is not above 0."""
    mean_C11, std_C11 = _numbers("mean", mean, channels), _numbers("std", std, channels)
    if not (std_C11 > 0).all():
        raise UsageError(f"`std` divides, so it is above 0, not {std!r}")
    return mean_C11, std_C11


def read_pixels(
    path: str | Path,
    size: int | tuple[int, int],
    channels: int = 3,
    *,
    resample: Literal["nearest", "bilinear", "bicubic", "lanczos"] = "bicubic",
    fit: Literal["cover", "stretch"] = "cover",
    crop: float = 1.0,
) -> Tensor:
    """As `read_image`, but as uint8 [C, H, W]. Raises what that raises.

    The image is resized by `resample`, with smoothing where it shrinks: all of it ("stretch"), or with its shape kept,
    so that of its tighter side the share `crop` has the wanted size, and the middle is taken ("cover").
    """
    height, width = (size, size) if isinstance(size, int) else size
    if min(height, width) < 1 or height * width > MAX_PIXELS:
        raise UsageError(f"`size` is a height and width of at most {MAX_PIXELS:,} pixels, not {size!r}")
    if channels not in (1, 3):
        raise UsageError(f"an image file is read as 3 channels (RGB) or 1 (grey), not {channels!r}")
    image = _decode(Path(path), "L" if channels == 1 else "RGB")
    share = crop if fit == "cover" else None
    pixels = np.asarray(_fitted(image, width, height, share, resample)).reshape(height, width, channels)
    return torch.tensor(pixels).permute(2, 0, 1)


def _decode(path: Path, mode: str) -> Image.Image:
    """The whole image, upright, in this mode of Pillow's."""
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError:
        raise UsageError(
            "images are read by the package `pillow`, which is not installed", hint='pip install "qkv[vision]"'
        ) from None
    too_large = f"the image has more than {MAX_PIXELS:,} pixels"
    with open_file(path, decompress=False) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Pillow's own limit and of odd metadata
        try:
            image = Image.open(cast("IO[bytes]", file), formats=FORMATS)
            if image.width * image.height > MAX_PIXELS:
                raise QkvError(too_large, where=str(path), hint="a smaller copy of it")
            if image.mode not in _EIGHT_BITS:
                raise QkvError(
                    f"an image of mode {image.mode} is not supported; 8 bits a channel are",
                    where=str(path),
                    hint="a copy of it with 8 bits a channel",
                )
            if 0 in image.size:
                raise DamagedError("the image has no pixels", where=str(path))
            ImageOps.exif_transpose(image, in_place=True)
            return image if image.mode == mode else image.convert(mode)
        except QkvError:
            raise
        except Image.DecompressionBombError:
            raise QkvError(too_large, where=str(path), hint="a smaller copy of it") from None
        except UnidentifiedImageError:
            raise QkvError(f"the file is no image of {', '.join(FORMATS)}", where=str(path)) from None
        except Exception as error:  # whatever a reader makes of broken bytes
            raise DamagedError(f"the image is damaged: {error}", where=str(path)) from error


def _fitted(image: Image.Image, width: int, height: int, crop: float | None, resample: str) -> Image.Image:
    """The whole image resized (None), or with its shape kept and its tighter side of the size over `crop`, and the
    middle cut out of it: in whole pixels, as torchvision and transformers do."""
    from PIL import Image

    kernel = Image.Resampling[resample.upper()]
    if crop is None:
        return image.resize((width, height), kernel)
    if image.height * width <= image.width * height:
        new_height = round(height / crop)
        new_width = new_height * image.width // image.height
    else:
        new_width = round(width / crop)
        new_height = new_width * image.height // image.width
    left, top = (new_width - width) // 2, (new_height - height) // 2
    if new_width * new_height <= MAX_PIXELS:
        return image.resize((new_width, new_height), kernel).crop((left, top, left + width, top + height))
    # of a long strip the middle alone is resized, whose place Pillow keeps in single precision
    across, down = image.width / new_width, image.height / new_height
    box = (left * across, top * down, (left + width) * across, (top + height) * down)
    return image.resize((width, height), kernel, box=box)


def _numbers(name: str, given: float | Sequence[float], channels: int) -> Tensor:
    numbers = torch.tensor([given] * channels if isinstance(given, int | float) else list(given), dtype=torch.float32)
    if numbers.numel() != channels or not numbers.isfinite().all():
        raise UsageError(f"`{name}` is one number, or one for each of {channels} channels, not {given!r}")
    return numbers[:, None, None]
