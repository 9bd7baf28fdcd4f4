"""Image files as an image encoder reads them."""

from __future__ import annotations

import builtins
import io
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile
from torch import Tensor

from qkv.config.errors import DamagedError, NotFoundError, QkvError, UsageError
from qkv.data import images
from qkv.data.images import read_image


def picture(width: int, height: int, channels: int = 3) -> Image.Image:
    """A smooth image whose channels differ."""
    x, y = np.meshgrid(np.linspace(0, 3, width), np.linspace(0, 2, height))
    waves = [127.5 + 127 * np.sin(x * (1 + channel) + y) for channel in range(channels)]
    return Image.fromarray(np.stack(waves, axis=-1).astype(np.uint8).squeeze())


def png(width: int, height: int) -> bytes:
    """A PNG file that promises an image of this size and holds nothing of it."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def to_file(image: Image.Image | bytes, kind: str = "png", **options: Any) -> Path:
        path = tmp_path / f"image.{kind}"
        if isinstance(image, bytes):
            path.write_bytes(image)
        else:
            image.save(path, **options)
        return path

    return to_file


def unscaled(image: Image.Image) -> Tensor:
    """[C, H, W], 0 .. 1."""
    return torch.from_numpy(np.atleast_3d(np.asarray(image)).copy()).permute(2, 0, 1) / 255


def test_an_image_of_the_size_comes_as_it_is_channels_first(write: Any) -> None:
    image = picture(12, 8)
    found = read_image(write(image), (8, 12), mean=0.0, std=1.0)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, unscaled(image))


def test_mean_and_std_are_per_channel(write: Any) -> None:
    image, mean, std = picture(8, 8), [0.1, 0.2, 0.3], [0.5, 0.25, 2.0]
    found = read_image(write(image), 8, mean=mean, std=std)
    torch.testing.assert_close(
        found, (unscaled(image) - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    )
    plain = read_image(write(image), 8)
    assert plain.min() >= -1
    assert plain.max() <= 1


@pytest.mark.parametrize(("width", "height"), [(60, 40), (40, 60), (40, 40), (20, 33)])
def test_the_centre_is_cut_out_as_if_after_resizing(width: int, height: int, write: Any) -> None:
    image = picture(width, height)
    scale = max(20 / width, 20 / height)
    resized = image.resize((round(width * scale), round(height * scale)), Image.Resampling.BICUBIC)
    left, top = (resized.width - 20) // 2, (resized.height - 20) // 2
    expected = unscaled(resized.crop((left, top, left + 20, top + 20)))
    found = read_image(write(image), 20, mean=0.0, std=1.0)
    torch.testing.assert_close(found, expected, atol=0.05, rtol=0)  # whole pixels there, fractions here
    assert (found - expected).abs().mean() < 0.01


@pytest.mark.parametrize("resample", ["nearest", "bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize(("width", "height"), [(37, 23), (23, 37)])
def test_a_share_of_the_middle_is_what_is_cut_out_of_the_whole_resized(
    width: int, height: int, resample: Any, write: Any
) -> None:
    image = picture(width, height)
    size = (round(10 * width / height - 0.5), 10) if width > height else (10, round(10 * height / width - 0.5))
    whole = image.resize(size, Image.Resampling[resample.upper()])
    left, top = (size[0] - 8) // 2, (size[1] - 8) // 2
    found = read_image(write(image), 8, mean=0.0, std=1.0, crop=0.8, resample=resample)
    torch.testing.assert_close(found, unscaled(whole.crop((left, top, left + 8, top + 8))), atol=1e-6, rtol=0)


def test_the_whole_is_stretched_on_request(write: Any) -> None:
    image = picture(30, 10)
    found = read_image(write(image), (8, 12), mean=0.0, std=1.0, fit="stretch")
    torch.testing.assert_close(found, unscaled(image.resize((12, 8), Image.Resampling.BICUBIC)))


@pytest.mark.parametrize("kind", ["png", "jpg", "webp", "gif", "bmp", "ppm"])
def test_usual_kinds_are_read(kind: str, write: Any) -> None:
    image = picture(24, 16)
    found = read_image(write(image, kind), (16, 24), mean=0.0, std=1.0)
    torch.testing.assert_close(found, unscaled(image), atol=0.2, rtol=0)  # some lose a little


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK"])
def test_other_modes_become_colours_or_grey(mode: str, write: Any) -> None:
    image = picture(8, 8).convert(mode)
    path, loss = write(image, "jpg" if mode == "CMYK" else "png"), 0.05 if mode == "CMYK" else 1e-6
    colours, grey = (read_image(path, 8, channels=channels, mean=0.0, std=1.0) for channels in (3, 1))
    torch.testing.assert_close(colours, unscaled(image.convert("RGB")), atol=loss, rtol=0)
    torch.testing.assert_close(grey, unscaled(image.convert("L")), atol=loss, rtol=0)


def test_how_the_camera_was_held_is_followed(write: Any) -> None:
    image, exif = picture(8, 8), Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    found = read_image(write(image, exif=exif), 8, mean=0.0, std=1.0)
    torch.testing.assert_close(found, unscaled(image.rotate(-90)))


# --- what cannot be read ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", [9_000, 12_000, 60_000])  # Pillow accepts, warns, refuses
def test_a_file_that_promises_too_much_is_refused_unopened(side: int, write: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda _: pytest.fail("it was unpacked"))
    with pytest.raises(QkvError, match="more than 67,108,864 pixels"):
        read_image(write(png(side, side)), 8)


def test_a_long_strip_takes_no_more_memory_than_another_image(write: Any) -> None:
    path = write(Image.new("L", (1_000_000, 1), 128))  # 224 high, it would be 224 million wide
    found = read_image(path, 224, mean=0.0, std=1.0)
    torch.testing.assert_close(found, torch.full((3, 224, 224), 128 / 255))


def test_broken_files_are_called_damaged(write: Any) -> None:
    for kind in ("png", "jpg", "webp", "gif", "bmp"):
        data = io.BytesIO()
        picture(24, 16).save(data, {"jpg": "jpeg"}.get(kind, kind))
        whole = data.getvalue()
        with pytest.raises(DamagedError, match="damaged"):
            read_image(write(whole[: len(whole) * 2 // 3], kind), 8)
    with pytest.raises(DamagedError, match="damaged"):
        read_image(write(png(8, 8)), 8)


def test_whatever_is_broken_gives_one_clear_error_or_an_image(write: Any) -> None:
    draw = np.random.default_rng(0)
    for kind in ("png", "jpeg", "gif", "webp"):
        data = io.BytesIO()
        picture(24, 16).save(data, kind)
        for _ in range(40):
            broken = bytearray(data.getvalue())
            for place in draw.integers(0, min(len(broken), 200), 4):
                broken[place] = draw.integers(0, 256)
            with suppress(QkvError):
                assert read_image(write(bytes(broken)), 8).isfinite().all()


@pytest.mark.parametrize("data", [b"", b"plain text", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n"])
def test_what_is_no_image_is_told_what_is(data: bytes, write: Any) -> None:
    with pytest.raises(QkvError, match="PNG, JPEG") as error:
        read_image(write(data), 8)
    assert not isinstance(error.value, DamagedError)


def test_no_file_a_folder_and_deep_colours_are_told_apart(tmp_path: Path, write: Any) -> None:
    with pytest.raises(NotFoundError):
        read_image(tmp_path / "no.png", 8)
    with pytest.raises(QkvError, match="folder"):
        read_image(tmp_path, 8)
    with pytest.raises(QkvError, match=r"mode I.*8 bits"):
        read_image(write(Image.new("I;16", (8, 8))), 8)


def test_without_pillow_it_says_what_to_install(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = write(picture(8, 8)), builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "PIL":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match=r"qkv\[vision\]"):
        read_image(path, 8)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"size": 0}, "size"),
        ({"size": (8, -1)}, "size"),
        ({"size": images.MAX_PIXELS}, "size"),
        ({"channels": 2}, "channels"),
        ({"mean": [0.5, 0.5]}, "mean"),
        ({"std": [0.5, 0.5, float("nan")]}, "std"),
        ({"std": 0.0}, "std"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused_by_name(options: dict[str, Any], word: str, write: Any) -> None:
    with pytest.raises(UsageError, match=word):
        read_image(write(picture(8, 8)), **({"size": 8} | options))
