"""Speech to text, in windows that know nothing of each other."""

from __future__ import annotations

import wave
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from torch import Tensor

from qkv.config.errors import NotFoundError, UsageError
from qkv.config.model import ModelConfig
from qkv.config.run import Config
from qkv.data.audio import SAMPLE_RATE, log_mel
from qkv.generate.transcribe import transcript_prompt, windows
from qkv.model import Model
from qkv.nn import Transformer
from qkv.tokenizer import Tokenizer

from .tiny import byte_tokenizer, greedy_by_hand, model

WHISPER = ("<|startoftranscript|>", "<|en|>", "<|zh|>", "<|transcribe|>", "<|translate|>", "<|notimestamps|>")
START, EN, ZH, TRANSCRIBE, TRANSLATE, SILENT = range(260, 266)
STAMPS = range(266, 269)


@cache
def whisper_tokenizer() -> Tokenizer:
    """Bytes, and the special tokens of a model that knows two languages; timestamps are ordinary tokens there."""
    made = tokenizers.Tokenizer.from_str(byte_tokenizer()._text)
    made.add_special_tokens(list(WHISPER))
    made.add_tokens(["<|0.00|>", "<|0.02|>", "<|0.04|>"])
    return Tokenizer(made.to_str(), kind="byte", roles=byte_tokenizer().roles)


def speech_model(tokenizer: Tokenizer | None = None, **generation: Any) -> Model:
    """Reads a second at a time."""
    tree = {
        "family": "encoder-decoder",
        "d_model": 16,
        "num_layers": 2,
        "attention": {"num_heads": 4},
        "feed_forward": {"kind": "gelu", "d_ff": 24},
        "encoder": {"input": {"kind": "log-mel", "num_mels": 8}, "max_seq_len": 50, "position": {"kind": "sinusoidal"}},
        "decoder": {"vocab_size": 269, "max_seq_len": 40, "position": {"kind": "learned"}},
        "init": {"kind": "normal", "std": 0.5},
    }
    made = Transformer(ModelConfig.model_validate(tree), generator=torch.Generator().manual_seed(0)).eval()
    generation = {"start_ids": [257], **generation}
    return Model(made, tokenizer or byte_tokenizer(), Config.model_validate({"model": tree, "generation": generation}))


def sound(seconds: float) -> Tensor:
    """Noise whose loudness changes, so that windows differ."""
    count = int(seconds * SAMPLE_RATE)
    noise = torch.randn(count, generator=torch.Generator().manual_seed(1))
    return 0.1 * noise * (1 + torch.sin(torch.linspace(0, 40, count)))


def test_a_window_is_decoded_from_its_log_mel_features() -> None:
    made, wave_N = speech_model(), sound(0.7)
    features = log_mel(wave_N, 8, seconds=1.0)[None]
    expected = greedy_by_hand(made.network, [257], 6, source=features)
    found = made.transcribe(wave_N, max_new_tokens=6)
    (segment,) = found.segments
    assert segment.token_ids == expected[: len(segment.token_ids)]
    assert (segment.start, segment.end, found.seconds, found.language) == (0.0, 0.7, 0.7, None)
    assert found.text == byte_tokenizer().decode(segment.token_ids).strip()


def test_windows_follow_each_other_and_cut_where_it_is_quiet() -> None:
    wave_N = sound(3.3)
    wave_N[15_000:15_400] = 0  # within the last sixth of the first second
    found = windows(wave_N, SAMPLE_RATE)
    assert 15_000 <= found[0][1] <= 15_400
    assert (found[0][0], found[-1][1]) == (0, len(wave_N))
    assert [end for _, end in found[:-1]] == [start for start, _ in found[1:]]
    for start, end in found[:-1]:
        assert SAMPLE_RATE * 5 // 6 <= end - start <= SAMPLE_RATE
    assert found[-1][1] - found[-1][0] <= SAMPLE_RATE
    assert windows(wave_N[:SAMPLE_RATE], SAMPLE_RATE) == [(0, SAMPLE_RATE)]
    assert windows(torch.zeros(SAMPLE_RATE + 1), SAMPLE_RATE)[1][1] == SAMPLE_RATE + 1
    assert windows(torch.ones(25), 10) == [(0, 10), (10, 20), (20, 25)]


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_a_long_recording_is_its_windows_each_alone(batch_size: int) -> None:
    made, wave_N = speech_model(), sound(3.3)
    found = made.transcribe(wave_N, batch_size=batch_size, max_new_tokens=8)
    assert len(found.segments) == 4
    for segment in found.segments:
        part = wave_N[round(segment.start * SAMPLE_RATE) : round(segment.end * SAMPLE_RATE)]
        alone = made.transcribe(part, max_new_tokens=8)
        assert [one.token_ids for one in alone.segments] == [segment.token_ids]
    assert found.text == "".join(segment.text for segment in found.segments).strip()
    assert list(made.transcribe_stream(wave_N, batch_size=batch_size, max_new_tokens=8)) == found.segments


def test_a_search_and_the_ends_and_what_is_suppressed_are_as_in_translation() -> None:
    plain = speech_model().transcribe(sound(0.9), max_new_tokens=10)
    third = plain.segments[0].token_ids[2]
    ended = speech_model(eos_ids=[third]).transcribe(sound(0.9), max_new_tokens=10)
    assert ended.segments[0].token_ids[-1] == third
    assert ended.segments[0].finish_reason == "stop"
    without = speech_model(suppress_ids=[third]).transcribe(sound(0.9), max_new_tokens=10, beam_size=3)
    assert third not in without.segments[0].token_ids


def test_files_and_arrays_of_any_rate_are_the_same_recording(tmp_path: Path) -> None:
    made, wave_N = speech_model(), sound(1.5)
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setparams((1, 2, SAMPLE_RATE, 0, "NONE", ""))
        file.writeframes((wave_N * 32768).round().clamp(-32768, 32767).to(torch.int16).numpy().tobytes())
    rounded = (wave_N * 32768).round().clamp(-32768, 32767) / 32768
    expected = made.transcribe(rounded).segments
    for audio in (tmp_path / "a.wav", str(tmp_path / "a.wav"), rounded.numpy(), rounded.double().tolist()):
        assert made.transcribe(audio).segments == expected
    half = made.transcribe(rounded[::2], rate=SAMPLE_RATE // 2)
    assert half.seconds == pytest.approx(1.5)
    with pytest.raises(NotFoundError):
        made.transcribe(tmp_path / "gone.wav")


@pytest.mark.parametrize(
    ("audio", "said"),
    [
        (np.zeros(100, np.int16), "int16"),
        (np.zeros((2, 100), np.float32), r"\[2, 100\]"),
        ([], "empty|float"),
        (torch.zeros(0), "empty"),
        (torch.tensor([0.0, float("nan")]), "no finite"),
        (None, "NoneType"),
        ({"a": 1}, "dict"),
    ],
)
def test_what_is_no_recording_is_refused(audio: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        speech_model().transcribe(audio)


def test_options_that_mean_nothing_and_models_for_text_are_refused() -> None:
    made = speech_model()
    for options, said in (
        ({"beam_size": 0}, "beam_size"),
        ({"batch_size": 0}, "batch_size"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"rate": 7}, "rate"),
        ({"beams": 3}, "no option 'beams'"),
    ):
        with pytest.raises(UsageError, match=said):
            made.transcribe(sound(0.5), **options)
    for family in ("decoder", "encoder-decoder"):
        with pytest.raises(UsageError, match="does not transcribe"):
            model(family=family).transcribe(sound(0.5))


# --- languages --------------------------------------------------------------------------------------------------------


def prompt(language: str | None = None, task: Any = "transcribe", start: tuple[int, ...] = (START, EN)) -> Any:
    made = speech_model(whisper_tokenizer())
    return transcript_prompt(made.network, made.tokenizer, start, sound(0.7), language=language, task=task)


def test_language_and_task_are_said_by_tokens() -> None:
    assert prompt("zh").start_ids == [START, ZH, TRANSCRIBE, SILENT]
    assert prompt("en", "translate").start_ids == [START, EN, TRANSLATE, SILENT]
    assert (prompt("zh").language, prompt("en").language) == ("zh", "en")
    with pytest.raises(UsageError, match="no language `german`") as caught:
        prompt("german")
    assert "en, zh" in str(caught.value)
    with pytest.raises(UsageError, match=r"<\|sing\|>"):
        prompt("en", "sing")


def test_the_language_is_by_default_the_likeliest() -> None:
    made = speech_model(whisper_tokenizer(), start_ids=[START, EN, TRANSCRIBE, SILENT])
    features = log_mel(sound(0.7), 8, seconds=1.0)[None]
    with torch.no_grad():
        scores_V = made.network(torch.tensor([[START]]), source=features)[0, -1]
    likeliest = "en" if scores_V[EN] > scores_V[ZH] else "zh"
    found = made.transcribe(sound(0.7), max_new_tokens=4)
    assert found.language == likeliest
    assert found.segments == made.transcribe(sound(0.7), max_new_tokens=4, language=likeliest).segments
    other = {"en": "zh", "zh": "en"}[likeliest]
    assert found.segments != made.transcribe(sound(0.7), max_new_tokens=4, language=other).segments


def test_a_model_of_one_language_takes_no_other() -> None:
    assert prompt(start=(START, SILENT)).start_ids == [START, SILENT]
    assert prompt("en", start=(START, SILENT)).language is None
    for language, task in (("zh", "transcribe"), (None, "translate")):
        with pytest.raises(UsageError, match="one language and one task"):
            prompt(language, task, start=(START, SILENT))


def test_timestamps_are_never_written() -> None:
    assert set(STAMPS) <= prompt().suppress.ids
    assert not {START, EN, SILENT, 65} & prompt().suppress.ids
