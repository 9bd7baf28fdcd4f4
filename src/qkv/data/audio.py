"""From a sound file to what a speech encoder reads: WAV, one channel at 16 kHz, log-mel features.

Shapes: N samples, F frames, K frequencies, S mels. Samples are float32, 1.0 is full scale.
"""

from __future__ import annotations

import math
import struct
from functools import cache
from io import BufferedIOBase
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from qkv.config.errors import DamagedError, QkvError, UsageError
from qkv.tokenizer.text import open_file

SAMPLE_RATE = 16_000
"""Samples per second of what speech models read."""
WINDOW, HOP = 400, 160
"""Samples under a frame's window (25 ms), and from one frame to the next (10 ms)."""
MAX_SAMPLES = 2**28
"""Per channel, of a file: 1 GiB as float32, 4.6 hours at 16 kHz."""

_RATES = range(1_000, 384_001)
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_CODECS = {2: "ADPCM", 6: "A-law", 7: "mu-law", 17: "ADPCM", 85: "MP3"}
_OTHER_FILES = {
    b"fLaC": "FLAC",
    b"OggS": "Ogg",
    b"ID3": "MP3",
    b"\xff\xfb": "MP3",
    b"\xff\xf3": "MP3",
    b"FORM": "AIFF",
    b"RF64": "RF64, a WAV of more than 4 GB",
    b"RIFX": "big-endian WAV",
    b"\x1aE\xdf\xa3": "Matroska or WebM",
}
_CONVERT = "ffmpeg -i OLD -ac 1 -ar 16000 NEW.wav"


# --- reading ----------------------------------------------------------------------------------------------------------


def read_audio(path: str | Path) -> Tensor:
    """A WAV file as one channel at 16 kHz, [N]. Raises what `read_wav` raises."""
    wave_N, rate = read_wav(path)
    return resample(wave_N, rate)


class _Format(NamedTuple):
    floating: bool
    channels: int
    rate: int
    width: int
    """Bytes of a sample."""


def read_wav(path: str | Path) -> tuple[Tensor, int]:
    """The samples of a WAV file [N], the mean of its channels, and how many there are in a second.

    Read are PCM of 8, 16, 24 and 32 bits and float of 32 and 64. Raises NotFoundError, DamagedError for a file that
    breaks off or contradicts itself, and QkvError for another format, with how to convert it.
    """
    path = Path(path)
    with open_file(path, decompress=False) as file:
        try:
            layout, size = _header(file, path)
            return _samples(file, size, layout, path), layout.rate
        except OSError as error:
            raise QkvError(f"the file cannot be read: {error.strerror}", where=str(path)) from error


def _header(file: BufferedIOBase, path: Path) -> tuple[_Format, int]:
    """The format of a WAV file and the bytes of its sound, at which it then stands."""
    head = file.read(12)
    if head[:4] != b"RIFF" or head[8:] != b"WAVE":
        raise _not_wav(head, path)
    layout: _Format | None = None
    while True:
        name, size = struct.unpack("<4sI", _exactly(file, 8, path))
        if name == b"data":
            break
        body = _exactly(file, min(size, 26) if name == b"fmt " else 0, path)
        if name == b"fmt ":
            layout = _format(body, path)
        file.seek(size + size % 2 - len(body), 1)  # a chunk of odd size has a byte of padding
    if layout is None:
        raise DamagedError("the sound comes before its format", where=str(path))
    rest = path.stat().st_size - file.tell()
    if size == 0xFFFFFFFF:  # whoever wrote to a pipe did not know the size
        size = rest
    if size > rest:
        raise DamagedError(f"the file breaks off: {size:,} bytes of sound promised, {rest:,} there", where=str(path))
    return layout, size


def _exactly(file: BufferedIOBase, size: int, path: Path) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise DamagedError("the file ends where its sound should begin", where=str(path))
    return data


def _format(body: bytes, path: Path) -> _Format:
    """What a `fmt ` chunk says."""
    if len(body) < 16:
        raise DamagedError(f"its format takes 16 bytes, and there are {len(body)}", where=str(path))
    code, channels, rate, _, block, bits = struct.unpack("<HHIIHH", body[:16])
    if code == _EXTENSIBLE and len(body) >= 26:
        code = struct.unpack("<H", body[24:26])[0]
    if code not in (_PCM, _FLOAT):
        kind = _CODECS.get(code, f"code {code}")
        raise QkvError(f"WAV of kind {kind} is not supported; PCM and float are", where=str(path), hint=_CONVERT)
    width = block // channels if channels else 0
    if not width or width * channels != block or bits > 8 * width:
        raise DamagedError(f"{channels} channels of {bits} bits do not make {block} bytes", where=str(path))
    if width not in ((4, 8) if code == _FLOAT else (1, 2, 3, 4)):
        raise QkvError(f"samples of {bits} bits are not supported", where=str(path), hint=_CONVERT)
    if rate not in _RATES:
        raise QkvError(f"{rate:,} samples per second are not supported", where=str(path), hint=_CONVERT)
    return _Format(code == _FLOAT, channels, rate, width)


def _samples(file: BufferedIOBase, size: int, layout: _Format, path: Path) -> Tensor:
    """The mean of the channels, [N]."""
    count, left = divmod(size, layout.width * layout.channels)
    if left:
        raise DamagedError("the file breaks off within a sample", where=str(path))
    if not count:
        raise QkvError("the file holds no sound", where=str(path))
    if count > MAX_SAMPLES:
        minutes = [number // layout.rate // 60 for number in (count, MAX_SAMPLES)]
        raise QkvError(
            f"the file holds {minutes[0]} minutes, and at most {minutes[1]} are read at once",
            where=str(path),
            hint="ffmpeg -i OLD -f segment -segment_time 1800 NEW%03d.wav",
        )
    wave_N = torch.empty(count)
    step = max(2**22 // layout.channels, 1)
    for start in range(0, count, step):
        taken = min(step, count - start)
        data = _exactly(file, taken * layout.width * layout.channels, path)
        numbers = _numbers(data, layout).reshape(taken, layout.channels)
        with np.errstate(invalid="ignore"):  # infinities are refused below
            wave_N[start : start + taken] = torch.from_numpy(numbers.mean(axis=1, dtype=np.float64))
    if not wave_N.isfinite().all():
        raise DamagedError("there are samples that are no finite numbers", where=str(path))
    return wave_N


def _numbers(data: bytes, layout: _Format) -> np.ndarray:
    """Samples as numbers between -1 and 1."""
    if layout.floating:
        return np.frombuffer(data, f"<f{layout.width}")
    if layout.width == 1:  # the only unsigned one
        return np.frombuffer(data, np.uint8).astype(np.float32) / 128 - 1
    if layout.width == 3:
        wide = np.zeros((len(data) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        return wide.view("<i4")[:, 0] / 2.0**31
    return np.frombuffer(data, f"<i{layout.width}") / 2.0 ** (8 * layout.width - 1)


def _not_wav(head: bytes, path: Path) -> QkvError:
    if not head:
        return DamagedError("the file is empty", where=str(path))
    kind = next((name for begin, name in _OTHER_FILES.items() if head.startswith(begin)), None)
    if head[4:8] == b"ftyp":
        kind = "MP4"
    what = f"{kind} is not read" if kind else "the file is no WAV"
    return QkvError(f"{what}; sound is read from WAV files", where=str(path), hint=_CONVERT)


# --- resampling -------------------------------------------------------------------------------------------------------

CROSSINGS, ROLLOFF, BETA = 32, 0.95, 8.0
"""Zeros of the sinc on either side, its cutoff as a share of the lower Nyquist frequency, and the shape of the Kaiser
window: up to 0.87 of that frequency all passes, above 1.03 of it 1/10,000 (-80 dB)."""


def resample(wave_N: Tensor, rate: int, wanted: int = SAMPLE_RATE) -> Tensor:
    """The same sound with `wanted` samples per second for `rate`, [ceil(N wanted / rate)].

    Band-limited interpolation (Smith, "Digital Audio Resampling", ccrma.stanford.edu/~jos/resample): each new sample is
    the sum of the old ones around it, weighted by a sinc under a Kaiser window. Beyond its ends the sound is silent.
    """
    for name, number in (("rate", rate), ("wanted", wanted)):
        if number not in _RATES:
            raise UsageError(f"`{name}` is {_RATES[0]} to {_RATES[-1]} samples per second, not {number!r}")
    _check_wave(wave_N, 1)
    if rate == wanted:
        return wave_N
    common = math.gcd(rate, wanted)
    old, new = rate // common, wanted // common
    weights = _interpolation(old, new).to(wave_N.dtype)
    taps = weights.shape[1]
    around = F.pad(wave_N, (taps // 2 - 1, taps // 2)).unfold(0, taps, 1)
    result_N = wave_N.new_empty(-(-len(wave_N) * new // old))
    step = 2**22 // taps
    for start in range(0, len(result_N), step):
        at = torch.arange(start, min(start + step, len(result_N))) * old
        result_N[start : start + step] = (around[at // new] * weights[at % new]).sum(1)
    return result_N


def _interpolation(old: int, new: int) -> Tensor:
    """The weights of the old samples around a new one, for each place between two that a new one can have: row r is
    for r / new past the middle, [new, taps]."""
    cutoff = ROLLOFF * min(1.0, new / old)
    reach = math.ceil(CROSSINGS / cutoff)
    offsets = torch.arange(1 - reach, reach + 1, dtype=torch.float64)
    distance = offsets - torch.arange(new, dtype=torch.float64)[:, None] / new
    window: Tensor = torch.special.i0(BETA * (1 - (distance / reach) ** 2).clamp(min=0).sqrt())
    weights = torch.sinc(cutoff * distance) * window
    return weights / weights.sum(1, keepdim=True)


# --- log-mel features -------------------------------------------------------------------------------------------------


def log_mel(wave_N: Tensor, num_mels: int = 80, *, seconds: float | None = None) -> Tensor:
    """Whisper's log-mel features of sound at 16 kHz, [F, S]: 100 frames per second, values within 2 of each other.

    seconds: pad with silence, or cut, to so long first (30 for Whisper). Of several rows [B, N], each on its own:
    [B, F, S]. Radford et al. 2022, arXiv 2212.04356, 2.2; as in github.com/openai/whisper, audio.py.
    """
    _check_wave(wave_N, 1, 2)
    if seconds is not None:
        if not 0 < seconds <= MAX_SAMPLES / SAMPLE_RATE:
            raise UsageError(f"`seconds` is a number from 0 to {MAX_SAMPLES // SAMPLE_RATE}, not {seconds!r}")
        samples = round(seconds * SAMPLE_RATE)
        wave_N = F.pad(wave_N[..., :samples], (0, max(samples - wave_N.shape[-1], 0)))
    if wave_N.shape[-1] <= WINDOW // 2:
        raise UsageError(
            f"{wave_N.shape[-1]} samples are less than one frame, {WINDOW // 2 + 1}", hint="log_mel(..., seconds=30)"
        )
    window = torch.hann_window(WINDOW, dtype=wave_N.dtype, device=wave_N.device)
    spectrum = torch.stft(wave_N, WINDOW, HOP, window=window, return_complex=True)
    power_KF = spectrum[..., :-1].abs() ** 2
    mel_SF = mel_filters(num_mels).to(power_KF).T @ power_KF
    log_SF = mel_SF.clamp(min=1e-10).log10()
    log_SF = log_SF.maximum(log_SF.amax(dim=(-2, -1), keepdim=True) - 8.0)
    return (log_SF.transpose(-1, -2) + 4.0) / 4.0


@cache
def mel_filters(num_mels: int) -> Tensor:
    """How much each of 201 frequencies, 0 to 8 kHz, counts for each mel, [K, S]: triangles that overlap by half, evenly
    spaced on Slaney's scale and of equal area (Slaney, "Auditory Toolbox", 1998)."""
    if not 1 <= num_mels <= WINDOW // 2:
        raise UsageError(f"`num_mels` is 1 to {WINDOW // 2}, not {num_mels!r}")
    top = SAMPLE_RATE / 2
    frequencies_K = torch.linspace(0, top, WINDOW // 2 + 1, dtype=torch.float64)
    corners = _hertz(torch.linspace(0, _mel(top), num_mels + 2, dtype=torch.float64))
    low, middle, high = corners[:-2], corners[1:-1], corners[2:]
    rising_KS = (frequencies_K[:, None] - low) / (middle - low)
    falling_KS = (high - frequencies_K[:, None]) / (high - middle)
    triangles_KS = rising_KS.minimum(falling_KS).clamp(min=0)
    return (triangles_KS * 2 / (high - low)).float()


_LINEAR = 1000.0
"""Hz up to which Slaney's scale is linear, 15 mels there; above it a mel is a factor of 6.4^(1/27)."""
_STEP = math.log(6.4) / 27


def _mel(hertz: float) -> float:
    return hertz * 15 / _LINEAR if hertz < _LINEAR else 15 + math.log(hertz / _LINEAR) / _STEP


def _hertz(mels: Tensor) -> Tensor:
    return torch.where(mels < 15, mels * _LINEAR / 15, _LINEAR * torch.exp((mels - 15) * _STEP))


def _check_wave(wave_N: Tensor, *dims: int) -> None:
    if isinstance(wave_N, Tensor):
        if wave_N.dtype in (torch.float32, torch.float64) and wave_N.dim() in dims and wave_N.numel():
            return
        found = f"{str(wave_N.dtype).removeprefix('torch.')} {list(wave_N.shape)}"
    else:
        found = type(wave_N).__name__
    raise UsageError(f"sound is a float32 tensor [N], not {found}", hint="qkv.data.audio.read_audio(path)")
