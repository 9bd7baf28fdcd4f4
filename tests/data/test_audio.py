"""Sound files, resampling and log-mel features."""

from __future__ import annotations

import json
import math
import struct
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import WhisperFeatureExtractor

from qkv.config.errors import DamagedError, NotFoundError, QkvError, UsageError
from qkv.data import audio
from qkv.data.audio import log_mel, mel_filters, read_audio, read_wav, resample

PCM, FLOAT = 1, 3


def tone(hertz: float, rate: int, seconds: float = 0.25) -> Tensor:
    """A sine at half of full scale, float64."""
    return 0.5 * torch.sin(2 * math.pi * hertz * torch.arange(int(rate * seconds), dtype=torch.float64) / rate)


def riff(*chunks: tuple[bytes, bytes], sizes: dict[bytes, int] | None = None) -> bytes:
    """A RIFF file; `sizes` overrides what a chunk claims."""
    body = b"WAVE"
    for name, data in chunks:
        size = (sizes or {}).get(name, len(data))
        body += name + struct.pack("<I", size) + data + b"\0" * (len(data) % 2)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def header(code: int = PCM, channels: int = 1, rate: int = 16000, width: int = 2, bits: int | None = None) -> bytes:
    block = channels * width
    return struct.pack("<HHIIHH", code, channels, rate, rate * block, block, 8 * width if bits is None else bits)


def numbers(wave_N: Tensor, code: int, width: int) -> bytes:
    """Samples between -1 and 1 as a WAV file holds them."""
    values = wave_N.numpy()
    if code == FLOAT:
        return values.astype(f"<f{width}").tobytes()
    whole = np.round(values * (2 ** (8 * width - 1) - 1)).astype("<i8")
    if width == 1:
        return (whole + 128).astype(np.uint8).tobytes()
    return whole.view(np.uint8).reshape(-1, 8)[:, :width].tobytes()


@pytest.fixture
def write(tmp_path: Path) -> Callable[[bytes], Path]:
    def to_file(data: bytes) -> Path:
        path = tmp_path / "sound.wav"
        path.write_bytes(data)
        return path

    return to_file


# --- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extensible", [False, True])
@pytest.mark.parametrize(("code", "width"), [(PCM, 1), (PCM, 2), (PCM, 3), (PCM, 4), (FLOAT, 4), (FLOAT, 8)])
def test_every_width_holds_the_same_sound(code: int, width: int, extensible: bool, write: Any) -> None:
    sound = torch.cat((tone(440, 16000, 0.01), torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)))
    head = header(code, width=width)
    if extensible:
        guid = struct.pack("<H", code) + bytes.fromhex("000000001000800000aa00389b71")
        head = header(0xFFFE, width=width) + struct.pack("<HHI", 22, 8 * width, 4) + guid
    found, rate = read_wav(write(riff((b"fmt ", head), (b"data", numbers(sound, code, width)))))
    assert (rate, found.dtype, found.shape) == (16000, torch.float32, sound.shape)
    step = 2.0 ** (1 - 8 * width) if code == PCM else 0
    torch.testing.assert_close(found.double(), sound, atol=2 * step + 1e-7, rtol=0)


def test_the_standard_library_s_files_are_read_and_channels_are_averaged(tmp_path: Path) -> None:
    left, right = np.array([0, 8192, -32768], "<i2"), np.array([0, -8192, 0], "<i2")
    path = tmp_path / "stereo.wav"
    with wave.open(str(path), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(np.stack((left, right), axis=1).tobytes())
    found, rate = read_wav(path)
    assert rate == 8000
    assert found.tolist() == [0.0, 0.0, -0.5]


def test_other_chunks_are_passed_over_and_sound_from_a_pipe_has_no_size(write: Any) -> None:
    sound = numbers(torch.tensor([0.5, -0.5], dtype=torch.float64), PCM, 2)
    note = (b"LIST", b"odd")
    path = write(riff(note, (b"fmt ", header()), note, (b"data", sound), sizes={b"data": 0xFFFFFFFF}))
    assert read_wav(path)[0].tolist() == pytest.approx([0.5, -0.5], abs=1e-4)


def test_long_files_are_read_in_parts(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = torch.linspace(-1, 1, 100, dtype=torch.float64).repeat(2**16)
    path = write(riff((b"fmt ", header(FLOAT, width=4)), (b"data", numbers(sound, FLOAT, 4))))
    assert torch.equal(read_wav(path)[0], sound.float())
    monkeypatch.setattr(audio, "MAX_SAMPLES", 16000 * 60 * 2)
    with pytest.raises(QkvError, match="6 minutes, and at most 2"):
        read_wav(path)


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"fLaC" + bytes(40), "FLAC"),
        (b"OggS" + bytes(40), "Ogg"),
        (b"ID3\x04" + bytes(40), "MP3"),
        (b"\0\0\0\x20ftypM4A " + bytes(40), "MP4"),
        (b"RIFX" + bytes(4) + b"WAVE" + bytes(40), "big-endian"),
        (b"RIFF" + bytes(4) + b"AVI " + bytes(40), "no WAV"),
        (b"just text, and not a little", "no WAV"),
        (riff((b"fmt ", header(7, width=1)), (b"data", bytes(8))), "mu-law"),
        (riff((b"fmt ", header(0x1234)), (b"data", bytes(8))), "code 4660"),
        (riff((b"fmt ", header(width=6)), (b"data", bytes(12))), "48 bits"),
        (riff((b"fmt ", header(FLOAT, width=2)), (b"data", bytes(12))), "16 bits"),
        (riff((b"fmt ", header(rate=10)), (b"data", bytes(8))), "10 samples per second"),
    ],
)
def test_another_format_is_refused_with_how_to_convert_it(data: bytes, word: str, write: Any) -> None:
    with pytest.raises(QkvError, match=word) as error:
        read_wav(write(data))
    assert not isinstance(error.value, DamagedError)
    assert "ffmpeg" in str(error.value)
    assert "sound.wav" in str(error.value)


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "empty"),
        (riff((b"fmt ", header()[:10])), "16 bytes"),
        (riff((b"data", bytes(8))), "before its format"),
        (riff((b"fmt ", header()), (b"data", bytes(8)), sizes={b"data": 4_000_000_000}), "4,000,000,000"),
        (riff((b"fmt ", header()), (b"LIST", b""), sizes={b"LIST": 4_000_000_000}), "ends where"),
        (riff((b"fmt ", header()), (b"data", bytes(7))), "within a sample"),
        (riff((b"fmt ", header(channels=0)), (b"data", bytes(8))), "0 channels"),
        (riff((b"fmt ", header(bits=24)), (b"data", bytes(8))), "24 bits"),
        (riff((b"fmt ", header(FLOAT, width=4)), (b"data", struct.pack("<ff", 0.5, math.inf))), "finite"),
        (riff((b"fmt ", header(FLOAT, width=8)), (b"data", struct.pack("<d", 1e300))), "finite"),
    ],
)
def test_a_damaged_file_is_called_damaged(data: bytes, word: str, write: Any) -> None:
    with pytest.raises(DamagedError, match=word):
        read_wav(write(data))


def test_no_file_a_folder_and_no_sound_are_told_apart(tmp_path: Path, write: Any) -> None:
    with pytest.raises(NotFoundError):
        read_audio(tmp_path / "no.wav")
    with pytest.raises(QkvError, match="folder"):
        read_audio(tmp_path)
    with pytest.raises(QkvError, match="no sound"):
        read_audio(write(riff((b"fmt ", header()), (b"data", b""))))


def test_whatever_is_broken_gives_one_clear_error(write: Any) -> None:
    good = riff((b"LIST", b"abc"), (b"fmt ", header(channels=2)), (b"data", bytes(range(64))))
    draw = np.random.default_rng(0)
    broken = [good[:length] for length in range(len(good))]
    for _ in range(100):
        data = bytearray(good)
        for place in draw.integers(0, 60, 3):
            data[place] = draw.integers(0, 256)
        broken.append(bytes(data))
    refusals = 0
    for data in broken:
        try:
            read_wav(write(data))
        except QkvError:
            refusals += 1
    assert refusals > len(good)


# --- resampling -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000, 44101])
def test_a_tone_keeps_its_pitch_and_loudness(rate: int) -> None:
    sound = resample(tone(440, rate), rate)
    assert len(sound) == math.ceil(int(rate * 0.25) * 16000 / rate)
    inside = slice(200, -200)  # beyond its ends the sound is silent
    torch.testing.assert_close(sound[inside], tone(440, 16000)[: len(sound)][inside], atol=2e-4, rtol=0)


def test_what_16_khz_cannot_hold_is_taken_out_not_folded_down() -> None:
    assert resample(tone(10_000, 48000), 48000)[200:-200].abs().max() < 5e-5
    assert resample(tone(3_000, 8000), 8000)[200:-200].abs().max() > 0.49


def test_silence_and_a_constant_stay_what_they_are() -> None:
    torch.testing.assert_close(resample(torch.ones(3000), 44100)[100:-100], torch.ones(889), atol=1e-6, rtol=0)
    sound = tone(440, 16000).float()
    assert resample(sound, 16000) is sound


def test_long_sound_is_resampled_in_parts_that_fit_together() -> None:
    draw = torch.Generator().manual_seed(0)
    sound = torch.randn(99_999, generator=draw)
    torch.testing.assert_close(resample(sound, 48000)[-1000:], resample(sound[-6000:], 48000)[-1000:])


# --- log-mel features -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_mels", [80, 128])
def test_the_mel_filters_are_those_of_transformers(num_mels: int) -> None:
    expected = WhisperFeatureExtractor(feature_size=num_mels).mel_filters
    torch.testing.assert_close(mel_filters(num_mels), torch.from_numpy(expected).float(), atol=1e-8, rtol=1e-5)


@pytest.mark.parametrize("seconds", [0.5, 30, None])
def test_log_mel_features_are_those_of_transformers(seconds: float | None) -> None:
    draw = torch.Generator().manual_seed(0)
    sound = (tone(440, 16000, 1.0) + 0.1 * torch.randn(16000, generator=draw)).float()
    extractor = WhisperFeatureExtractor(chunk_length=30)
    padded = {"padding": "max_length"} if seconds == 30 else {"padding": False}
    given = sound[:8000] if seconds == 0.5 else sound
    expected = extractor(given.numpy(), sampling_rate=16000, return_tensors="pt", **padded).input_features[0].T
    found = log_mel(sound, seconds=seconds)
    assert found.shape == ({0.5: 50, 30: 3000, None: 100}[seconds], 80)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_each_row_of_a_batch_is_on_its_own() -> None:
    loud, soft = tone(440, 16000, 0.2).float(), 0.01 * tone(900, 16000, 0.2).float()
    together = log_mel(torch.stack((loud, soft)))
    torch.testing.assert_close(together, torch.stack((log_mel(loud), log_mel(soft))))


def test_the_reference_clip_has_its_reference_features(data_file: Callable[[str], Path]) -> None:
    golden = json.loads(data_file("golden/whisper_tiny_en.json").read_text(encoding="utf-8"))["logmel"]
    found = log_mel(read_audio(data_file("speech-jfk/jfk.wav")), seconds=30)
    assert [1, *found.T.shape] == golden["shape"]
    assert found.mean().item() == pytest.approx(golden["mean"], abs=2e-5)
    assert found[:5, 10].tolist() == pytest.approx(golden["sample_bin10_frames0_5"], abs=1e-4)


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: log_mel(torch.zeros(200)), "200 samples"),
        (lambda: log_mel(torch.zeros(0)), r"\[0\]"),
        (lambda: log_mel(torch.zeros(1, 1, 400)), r"\[1, 1, 400\]"),
        (lambda: log_mel(torch.zeros(400, dtype=torch.int64)), "int64"),
        (lambda: log_mel([0.0] * 400), "list"),  # type: ignore[arg-type]
        (lambda: log_mel(torch.zeros(400), 0), "num_mels"),
        (lambda: log_mel(torch.zeros(400), seconds=0), "seconds"),
        (lambda: log_mel(torch.zeros(400), seconds=math.inf), "seconds"),
        (lambda: log_mel(torch.zeros(400), seconds=math.nan), "seconds"),
        (lambda: resample(torch.zeros(400), 0), "rate"),
        (lambda: resample(torch.zeros(400), 8000, 10**9), "wanted"),
        (lambda: resample(torch.zeros(2, 400), 8000), r"\[2, 400\]"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused_by_name(call: Callable[[], Tensor], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        call()
