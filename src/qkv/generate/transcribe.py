"""Speech to text, as Whisper does it (Radford et al. 2022, arXiv 2212.04356): windows of sound, each by itself.

Shapes: N samples, B windows at once, F frames, S mels.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from qkv.config.errors import UsageError, nearest
from qkv.config.parts import LogMelInputConfig
from qkv.data.audio import HOP, SAMPLE_RATE, log_mel, read_audio, resample
from qkv.generate.arguments import check_count, check_names
from qkv.generate.beam import Beams, beam_search
from qkv.generate.decode import FinishReason, check_prompts, evaluating, last_logits
from qkv.generate.options import SpeechOptions
from qkv.generate.reader import Reader
from qkv.generate.suppression import NOTHING_SUPPRESSED, Suppression
from qkv.generate.text import text_of
from qkv.nn.transformer import Transformer
from qkv.tokenizer.tokenizer import Tokenizer

Task = Literal["transcribe", "translate"]

_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
_NO_TIMESTAMPS = "<|notimestamps|>"


@dataclass(frozen=True)
class Segment:
    """What was said in one window, from `start` to `end` in seconds. finish_reason "length": the text breaks off."""

    start: float
    end: float
    text: str
    token_ids: list[int]
    finish_reason: FinishReason


@dataclass(frozen=True)
class Transcription:
    """What was said in a recording of so many `seconds`. language: its code; None where the model knows but one."""

    text: str
    language: str | None
    seconds: float
    segments: list[Segment]


def samples_of(audio: Any, rate: int = SAMPLE_RATE) -> Tensor:
    """A recording as samples at 16 kHz, [N]: a WAV file, or an array of floats (1.0: full scale) with its `rate`.

    Raises UsageError for what is neither, and what `qkv.data.audio` raises.
    """
    if isinstance(audio, str | os.PathLike):
        return read_audio(os.fspath(audio))
    try:
        wave_N = torch.as_tensor(audio)
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(f"a recording is a file or an array of samples, not a {type(audio).__name__}") from None
    if wave_N.dim() != 1 or not wave_N.is_floating_point():
        raise UsageError(
            f"a recording is one row of floats [N], not {str(wave_N.dtype).removeprefix('torch.')} "
            f"{list(wave_N.shape)}",
            hint="the mean of the channels; 16-bit samples divided by 32768",
        )
    if not wave_N.numel() or not wave_N.isfinite().all():
        raise UsageError("the recording is empty, or holds samples that are no finite numbers")
    return resample(wave_N.float().cpu(), rate)


@dataclass(frozen=True)
class TranscriptPrompt:
    """What a transcript starts from, in which language it is, and what is not in it."""

    start_ids: list[int]
    language: str | None
    suppress: Suppression


@torch.inference_mode()
def transcript_prompt(
    network: Transformer,
    tokenizer: Tokenizer | None,
    start_ids: Sequence[int],
    wave_N: Tensor,
    *,
    language: str | None = None,
    task: Task = "transcribe",
    suppress: Suppression = NOTHING_SUPPRESSED,
) -> TranscriptPrompt:
    """What the transcript of a recording starts from: `start_ids`, of a model of many languages with one of these and
    the task. language: its code; None is the likeliest for the first window. Timestamps are not written.

    Raises UsageError for a language or task that the model does not know.
    """
    check_transcribes(network)
    languages = _languages(tokenizer)
    start = list(start_ids)
    if tokenizer is not None and (silent := tokenizer.token_to_id(_NO_TIMESTAMPS)) is not None:
        suppress = Suppression({*suppress.ids, *range(silent + 1, tokenizer.vocab_size)}, suppress.first)
    if not set(start) & set(languages.values()):
        if language not in (None, "en") or task != "transcribe":
            raise UsageError("the model knows one language and one task", hint="no language, and task transcribe")
        return TranscriptPrompt(start, None, suppress)
    assert tokenizer is not None
    if language is None:
        features = log_mel_of(network, [wave_N])
        with evaluating(network.modules()):
            scores_V = last_logits(network, [start[:1]], given={"source": features})[0]
        language = max(languages, key=lambda code: float(scores_V[languages[code]]))
    elif language not in languages:
        guess = nearest(language, languages)
        raise UsageError(f"the model knows no language `{language}`", hint=guess or ", ".join(sorted(languages)))
    tokens = [f"<|{language}|>", f"<|{task}|>", _NO_TIMESTAMPS]
    ids = [tokenizer.token_to_id(token) for token in tokens]
    for token, token_id in zip(tokens, ids, strict=True):
        if token_id is None:
            raise UsageError(f"the model's tokenizer has no {token}", hint="task transcribe or translate")
    return TranscriptPrompt([start[0], *(token_id for token_id in ids if token_id is not None)], language, suppress)


def _languages(tokenizer: Tokenizer | None) -> dict[str, int]:
    """The id of each language's token."""
    if tokenizer is None:
        return {}
    tokens = {token_id: tokenizer.id_to_token(token_id) for token_id in sorted(tokenizer.special_ids)}
    return {found[1]: token_id for token_id, token in tokens.items() if (found := _LANGUAGE.fullmatch(token))}


def transcribe(
    network: Transformer,
    tokenizer: Tokenizer | None,
    wave_N: Tensor,
    prompt: TranscriptPrompt,
    *,
    eos_ids: Collection[int] = (),
    beam_size: int = 1,
    batch_size: int = 4,
    max_new_tokens: int | None = None,
) -> Iterator[Segment]:
    """What was said in each window of a recording (samples at 16 kHz, [N]), in order.

    The windows are those of `windows`: one after the other, without overlap, and none knows what was said in another.
    max_new_tokens: of each; by default half the decoder's context. batch_size: windows that are decoded at once.

    Raises UsageError before the model runs for a model that is not for speech and for arguments out of range.
    """
    context = check_transcribes(network)
    beams = Beams(beam_size)
    batch_size = check_count("batch_size", batch_size, least=1)
    limit = context // 2 if max_new_tokens is None else check_count("max_new_tokens", max_new_tokens)
    parts = windows(wave_N, window_samples(network))

    def segments() -> Iterator[Segment]:
        for first in range(0, len(parts), batch_size):
            batch = parts[first : first + batch_size]
            found = beam_search(
                network,
                [prompt.start_ids] * len(batch),
                beams,
                max_new_tokens=limit,
                eos_ids=eos_ids,
                source=log_mel_of(network, [wave_N[start:end] for start, end in batch]),
                vocab_size=None if tokenizer is None else tokenizer.vocab_size,
                suppress=prompt.suppress,
            )
            for (start, end), (best, *_) in zip(batch, found, strict=True):
                text = text_of(best.token_ids, tokenizer, eos_ids)
                yield Segment(start / SAMPLE_RATE, end / SAMPLE_RATE, text, best.token_ids, best.finish_reason)

    return segments()


def transcripts(reader: Reader, wave_N: Tensor, options: SpeechOptions) -> tuple[TranscriptPrompt, Iterator[Segment]]:
    """What the transcript of a recording starts from, and what `transcribe` finds in each window."""
    check_names(options, SpeechOptions.__annotations__)
    check_transcribes(reader.network)
    given: dict[str, Any] = dict(options)
    said = {name: given.pop(name) for name in ("language", "task") if name in given}
    network, tokenizer = reader.network, reader.tokenizer
    prompt = transcript_prompt(network, tokenizer, reader.start_ids, wave_N, suppress=reader.suppression, **said)
    return prompt, transcribe(network, tokenizer, wave_N, prompt, eos_ids=reader.eos_ids, **given)


def windows(wave_N: Tensor, longest: int) -> list[tuple[int, int]]:
    """Where to cut a recording into windows of at most `longest` samples, as (start, end): each at the quietest moment
    of its last sixth, so that few words are cut in two."""
    found, start = [], 0
    while len(wave_N) - start > longest:
        span, earliest = max(longest // 150, 1), start + longest - longest // 6
        energy = wave_N[earliest : start + longest].double().square().cumsum(0)
        around = energy[span:] - energy[:-span]
        end = earliest + (int(around.argmin()) + span // 2 + 1 if len(around) else longest // 6)
        found.append((start, end))
        start = end
    return [*found, (start, len(wave_N))]


def window_samples(network: Transformer) -> int:
    """How many samples the encoder reads at once: 30 s of them in Whisper."""
    assert network.encoder is not None
    return 2 * network.encoder.config.max_seq_len * HOP


def one_window(network: Transformer, audio: Any) -> Tensor:
    """A recording, as `samples_of` takes it, that the encoder reads at once. Raises UsageError for a longer one."""
    wave_N = samples_of(audio)
    longest = window_samples(network)
    if len(wave_N) > longest:
        seconds = [count / SAMPLE_RATE for count in (len(wave_N), longest)]
        raise UsageError(f"the recording lasts {seconds[0]:.1f} s, and the model reads {seconds[1]:.1f} s at once")
    return wave_N


def log_mel_of(network: Transformer, waves: Sequence[Tensor]) -> Tensor:
    """What the encoder reads of each window [B, F, S]: as much of it as it can hold, and silence after it."""
    assert network.encoder is not None
    reads = network.encoder.config.input
    assert isinstance(reads, LogMelInputConfig)
    parameter = next(network.parameters())
    seconds = window_samples(network) / SAMPLE_RATE
    features = torch.stack([log_mel(wave_N, reads.num_mels, seconds=seconds) for wave_N in waves])
    return features.to(parameter.device, parameter.dtype)


def check_transcribes(network: Transformer) -> int:
    """The decoder's context. Raises UsageError for what does not write down speech."""
    reads = None if network.encoder is None else network.encoder.config.input
    if network.decoder is None or not isinstance(reads, LogMelInputConfig):
        what = f", and reads {reads.kind}" if reads else ""
        raise UsageError(
            f"a model of family {network.config.family} does not transcribe{what}",
            hint="an encoder-decoder whose encoder reads log-mel features, such as Whisper",
        )
    return check_prompts(network, [])
