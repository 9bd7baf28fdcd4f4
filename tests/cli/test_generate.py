"""`qkv generate`."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from generate.tiny import CONTEXT, model

from qkv.cli import main
from qkv.nn import Transformer

KEYS = {
    "text",
    "token_ids",
    "prompt_tokens",
    "completion_tokens",
    "finish_reason",
    "seconds",
    "tokens_per_second",
    "seed",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "folder"
    model().save(path)
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["generate", *arguments])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def test_json_has_the_promised_keys_and_equals_python(folder: str, capsys) -> None:
    code, out, err = run(
        capsys, folder, "--prompt", "hello", "--max-new-tokens", "7", "--seed", "3", "--top-k", "40", "--json"
    )
    found = json.loads(out)
    expected = model().generate("hello", max_new_tokens=7, seed=3, top_k=40)
    assert (code, set(found)) == (0, KEYS)
    assert (found["text"], found["token_ids"]) == (expected.text, expected.token_ids)
    assert (found["prompt_tokens"], found["completion_tokens"], found["finish_reason"]) == (6, 7, "length")
    assert err == ""


def test_every_option_reaches_the_model(folder: str, capsys) -> None:
    options = {
        "max_new_tokens": 12,
        "temperature": 0.9,
        "top_k": 60,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.1,
        "seed": 4,
        "logprobs": 2,
    }
    arguments = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    expected = model().generate("<eos>", parse_special=True, stop=["x", "y"], **options)
    flags = ["--parse-special", "--stop", "x", "--stop", "y", "--no-cache", "--device", "cpu", "--dtype", "fp32"]
    code, out, _ = run(capsys, folder, "--prompt", "<eos>", "--json", *arguments, *flags)
    found = json.loads(out)
    assert code == 0
    assert (found["text"], found["token_ids"], found["prompt_tokens"]) == (expected.text, expected.token_ids, 2)
    assert [entry["token_id"] for entry in found["logprobs"]] == expected.token_ids
    assert found["logprobs"][0]["top"][0] == {
        "token_id": expected.logprobs[0].top[0].token_id,
        "token": expected.logprobs[0].top[0].token,
        "logprob": pytest.approx(expected.logprobs[0].top[0].logprob, abs=1e-4),
    }


def test_beams_search_for_the_likeliest_text(folder: str, capsys) -> None:
    expected = model().generate("hello", max_new_tokens=7, beam_size=3, length_penalty=2.0)
    arguments = (folder, "--prompt", "hello", "--max-new-tokens", "7", "--beam-size", "3", "--length-penalty", "2")
    found = json.loads(run(capsys, *arguments, "--json")[1])
    assert (found["text"], found["token_ids"]) == (expected.text, expected.token_ids)
    assert found["token_ids"] != model().generate("hello", max_new_tokens=7, temperature=0).token_ids
    assert "seed" not in found
    assert "seed" not in run(capsys, *arguments)[2]


def test_no_cache_makes_none(folder: str, capsys, monkeypatch) -> None:
    arguments = (folder, "--prompt", "a", "--max-new-tokens", "5", "--seed", "1")
    cached = run(capsys, *arguments)[1]
    monkeypatch.setattr(Transformer, "new_cache", lambda *_: pytest.fail("a cache was made"))
    assert run(capsys, *arguments, "--no-cache")[:2] == (0, cached)


def test_the_text_is_on_stdout_and_the_time_on_stderr(folder: str, capsys) -> None:
    arguments = (folder, "--prompt", "a", "--max-new-tokens", "9", "--seed", "1")
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (0, model().generate("a", max_new_tokens=9, seed=1).text + "\n")
    assert "9 tokens in" in err
    assert run(capsys, *arguments, "--stream")[:2] == (0, out)


def test_streamed_json_is_pieces_and_then_the_whole(folder: str, capsys) -> None:
    arguments = (folder, "--prompt", "a", "--max-new-tokens", "20", "--seed", "1", "--json")
    whole = json.loads(run(capsys, *arguments)[1])
    *pieces, last = [json.loads(line) for line in run(capsys, *arguments, "--stream")[1].splitlines()]
    assert "".join(piece["piece"] for piece in pieces) == last["text"] == whole["text"]
    assert len(pieces) > 1
    assert set(last) == KEYS


def test_samples_and_several_prompts(folder: str, capsys) -> None:
    arguments = ("--max-new-tokens", "5", "--seed", "2", "--json")
    one = json.loads(run(capsys, folder, "--prompt", "a", "--num-samples", "1", *arguments)[1])
    three = json.loads(run(capsys, folder, "--prompt", "a", "--num-samples", "3", *arguments)[1])
    assert [len(found["samples"]) for found in (one, three)] == [1, 3]
    assert three["samples"][0]["text"] == one["samples"][0]["text"]
    both = json.loads(run(capsys, folder, "--prompt", "b", "--prompt", "a", *arguments)[1])
    assert both["results"][1]["text"] == one["samples"][0]["text"]
    nested = json.loads(run(capsys, folder, "--prompt", "b", "--prompt", "a", "--num-samples", "3", *arguments)[1])
    assert [sample["text"] for sample in nested["results"][1]["samples"]] == [
        sample["text"] for sample in three["samples"]
    ]
    _, out, err = run(capsys, folder, "--prompt", "a", "--num-samples", "3", *arguments[:-1])
    assert out == "".join(sample["text"] + "\n" for sample in three["samples"])
    assert err.count("tokens in") == 1
    assert "15 tokens in" in err
    assert [line for line in err.splitlines() if line.startswith("---")] == ["--- 2 of 3", "--- 3 of 3"]
    assert [sample["seed"] for sample in three["samples"]] == [2, 3, 4]


def test_a_seed_that_was_drawn_is_told_and_gives_the_same_text_again(folder: str, capsys) -> None:
    arguments = (folder, "--prompt", "a", "--max-new-tokens", "9")
    for stream in ((), ("--stream",)):
        _, out, err = run(capsys, *arguments, *stream)
        seed = err.split("seed ")[1].strip()
        assert run(capsys, *arguments, "--seed", seed)[1] == out
    found = json.loads(run(capsys, *arguments, "--json")[1])
    again = json.loads(run(capsys, *arguments, "--json", "--seed", str(found["seed"]))[1])
    assert again["token_ids"] == found["token_ids"]
    assert "seed" not in run(capsys, *arguments, "--seed", "3")[2]
    assert "seed" not in run(capsys, *arguments, "--temperature", "0")[2]


def test_a_text_that_the_context_ended_says_so(folder: str, capsys) -> None:
    arguments = (folder, "--prompt", "x" * (CONTEXT - 3), "--seed", "1")
    assert "finish reason: context full" in run(capsys, *arguments)[2]
    assert "finish reason: length" in run(capsys, *arguments, "--max-new-tokens", "2")[2]


def stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="ascii"))


def test_a_dash_reads_all_of_stdin(folder: str, capsys, monkeypatch) -> None:
    stdin(monkeypatch, "你 \n".encode())
    code, out, _ = run(capsys, folder, "--prompt", "-", "--max-new-tokens", "0", "--json")
    assert (code, json.loads(out)["prompt_tokens"]) == (0, 6)
    stdin(monkeypatch, b"ab\xff")
    code, _, err = run(capsys, folder, "--prompt", "-")
    assert code == 1
    assert "byte 2" in err


def test_no_new_tokens_prints_an_empty_line_and_can_score_the_prompt(folder: str, capsys) -> None:
    assert run(capsys, folder, "--prompt", "abc", "--max-new-tokens", "0")[:2] == (0, "\n")
    _, out, _ = run(capsys, folder, "--prompt", "abc", "--max-new-tokens", "0", "--logprobs", "1", "--json")
    assert [entry["token"] for entry in json.loads(out)["prompt_logprobs"]] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--prompt"),
        (("--prompt", "a", "--temperature", "-1"), "temperature"),
        (("--prompt", "a", "--temperature", "nan"), "temperature"),
        (("--prompt", "a", "--temperature", "warm"), "temperature"),
        (("--prompt", "a", "--top-p", "0"), "top_p"),
        (("--prompt", "a", "--frequency-penalty", "1e39"), "frequency_penalty"),
        (("--prompt", "a", "--max-new-tokens", "-1"), "max_new_tokens"),
        (("--prompt", "a", "--seed", "-1"), "seed"),
        (("--prompt", "a", "--stop", ""), "stop string"),
        (("--prompt", "a", "--num-samples", "0"), "num_samples"),
        (("--prompt", "a", "--logprobs", "-1"), "logprobs"),
        (("--prompt", "a", "--beam-size", "0"), "beam_size"),
        (("--prompt", "a", "--beam-size", "4", "--length-penalty", "-1"), "length_penalty"),
        (("--prompt", "a", "--length-penalty", "1"), "--beam-size"),
        (("--prompt", "a", "--beam-size", "4", "--stream"), "only at the end"),
        (("--prompt", "a", "--beam-size", "4", "--top-k", "3"), "top_k"),
        (("--prompt", "a", "--beam-size", "4", "--num-samples", "2"), "num_samples"),
        (("--prompt", "a", "--quantize", "int8"), "int8"),
        (("--prompt", "a", "--quantize", "int3"), "int3"),
        (("--prompt", "a", "--dtype", "fp8"), "fp8"),
        (("--prompt", "a", "--device", "abacus"), "abacus"),
        (("--prompt", "a", "--stream", "--num-samples", "2"), "one text is streamed"),
        (("--prompt", "x" * CONTEXT), f"{CONTEXT + 1} tokens"),
    ],
)
def test_a_mistake_exits_with_2_and_says_what_is_wrong(folder: str, arguments, said: str, capsys) -> None:
    code, out, err = run(capsys, folder, *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err


def test_a_model_that_is_not_there_exits_with_3(tmp_path: Path, capsys) -> None:
    code, out, err = run(capsys, str(tmp_path / "nothing"), "--prompt", "a")
    assert (code, out) == (3, "")
    assert "nothing" in err


def test_help_imports_no_torch() -> None:
    code = (
        "import sys\nfrom qkv.cli.generate import generate\n"
        "try:\n    generate(['--help'])\nexcept SystemExit: pass\n"
        "print('heavy:', [m for m in ('torch', 'pydantic', 'numpy') if m in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "heavy: []" in output
