"""`qkv transcribe`."""

from __future__ import annotations

import json
import wave
from pathlib import Path

import pytest
import torch
from generate.test_transcribe import sound, speech_model

from qkv.cli import main
from qkv.data.audio import SAMPLE_RATE, read_audio


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "folder"
    speech_model().save(path)
    return str(path)


@pytest.fixture
def audio(tmp_path: Path) -> Path:
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setparams((1, 2, SAMPLE_RATE, 0, "NONE", ""))
        file.writeframes((sound(2.2) * 16384).to(torch.int16).numpy().tobytes())
    return tmp_path / "a.wav"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["transcribe", *map(str, arguments)])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def test_each_window_gives_a_line_and_the_time_goes_to_stderr(folder: str, audio: Path, capsys) -> None:
    code, out, err = run(capsys, folder, audio, "--max-new-tokens", "5")
    expected = speech_model().transcribe(read_audio(audio), max_new_tokens=5)
    assert code == 0
    assert out == "".join(segment.text.strip() + "\n" for segment in expected.segments)
    assert [line for line in err.splitlines() if line.endswith(" of 2.2 s")] == [
        f"{segment.end:.1f} of 2.2 s" for segment in expected.segments
    ]
    assert f"cut off at --max-new-tokens: {len(expected.segments)}" in err


def test_json_has_the_text_and_its_windows(folder: str, audio: Path, capsys) -> None:
    code, out, err = run(capsys, folder, audio, "--max-new-tokens", "5", "--beam-size", "2", "--json")
    found, expected = json.loads(out), speech_model().transcribe(audio, max_new_tokens=5, beam_size=2)
    assert (code, err, found["text"], found["language"]) == (0, "", expected.text, None)
    assert found["seconds"] == pytest.approx(2.2)
    assert [(one["start"], one["token_ids"]) for one in found["segments"]] == [
        (segment.start, segment.token_ids) for segment in expected.segments
    ]


def test_of_several_files_each_gives_a_line_in_order(folder: str, audio: Path, tmp_path: Path, capsys) -> None:
    other = tmp_path / "b.wav"
    with wave.open(str(other), "wb") as file:
        file.setparams((1, 2, SAMPLE_RATE, 0, "NONE", ""))
        file.writeframes((sound(0.4) * 16384).to(torch.int16).numpy().tobytes())
    files = [other, audio]
    expected = [speech_model().transcribe(file, max_new_tokens=5).text for file in files]
    assert len(speech_model().transcribe(audio, max_new_tokens=5).segments) > 1
    code, out, err = run(capsys, folder, *files, "--max-new-tokens", "5")
    assert (code, out) == (0, "".join(text.replace("\n", " ") + "\n" for text in expected))
    assert f"{audio}: 2.2 of 2.2 s" in err
    out = run(capsys, folder, *files, "--max-new-tokens", "5", "--json")[1]
    found = [json.loads(line) for line in out.splitlines()]
    assert [(one["audio"], one["text"]) for one in found] == list(zip(map(str, files), expected, strict=True))


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("gone.wav",), 3, "gone.wav"),
        (("AUDIO", "gone.wav"), 3, "gone.wav"),
        (("AUDIO", "--language", "zh"), 2, "one language"),
        (("AUDIO", "--task", "sing"), 2, "--task"),
        (("AUDIO", "--beam-size", "0"), 2, "beam_size"),
    ],
)
def test_a_mistake_is_one_error_with_its_code(
    folder: str, audio: Path, arguments, code: int, said: str, capsys
) -> None:
    given = [audio if each == "AUDIO" else each for each in arguments]
    actual, out, err = run(capsys, folder, *given)
    assert (actual, out) == (code, "")
    assert said in err
    assert "Traceback" not in err


def test_a_prompt_for_a_speech_model_is_answered_with_the_command_for_it(folder: str, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["generate", folder, "--prompt", "hi"])
    assert "try transcribe" in capsys.readouterr().err


def test_a_file_that_is_no_sound_is_refused(folder: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "a.wav").write_bytes(b"no sound")
    code, _, err = run(capsys, folder, tmp_path / "a.wav")
    assert code == 1
    assert "no WAV" in err
