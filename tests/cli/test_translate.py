"""`qkv translate`: line in, line out."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from generate.tiny import CONTEXT, model

from qkv import load
from qkv.cli import main
from qkv.model import Model
from qkv.tokenizer import Tokenizer

LINES = ["one", "", "a much longer line", "  ", "zwei\u2028halbe", "我"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "folder"
    model(family="encoder-decoder").save(path)
    return str(path)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "lines.txt"
    path.write_text("\n".join(LINES) + "\n", encoding="utf-8")
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["translate", *map(str, arguments)])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="ascii"))


def told(text: str) -> str:
    return text.replace("\n", " ")


# --- lines ------------------------------------------------------------------------------------------------------------


def test_each_line_gives_a_line_in_order_and_blank_ones_stay_blank(folder: str, file: Path, capsys) -> None:
    code, out, err = run(capsys, folder, file, "--max-new-tokens", "6")
    expected = model(family="encoder-decoder").translate(LINES, max_new_tokens=6)
    assert code == 0
    assert out.split("\n") == [*(told(one.text) for one in expected), ""]
    assert expected[1].text == expected[3].text == ""
    assert len({one.text for one in expected}) == len(LINES) - 1
    assert err.startswith("6 lines in ")
    assert "per second" in err


def test_standard_input_and_a_file_are_read_by_the_same_rule(folder: str, tmp_path: Path, capsys, monkeypatch) -> None:
    options = ("--max-new-tokens", "6")
    data = b"\xef\xbb\xbfone\r\ntwo"
    (tmp_path / "a.txt").write_bytes(data)
    (tmp_path / "b.txt").write_bytes(b"one\ntwo\n")
    expected = run(capsys, folder, tmp_path / "b.txt", *options)[1]
    assert run(capsys, folder, tmp_path / "a.txt", *options)[:2] == (0, expected)
    for dash in ((), ("-",)):
        stdin(monkeypatch, data)
        assert run(capsys, folder, *dash, *options)[:2] == (0, expected)
    stdin(monkeypatch, b"")
    assert run(capsys, folder)[:2] == (0, "")


def test_a_line_break_in_a_translation_does_not_shift_the_lines(folder: str, file: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(Tokenizer, "decode", lambda *_, **__: "a\nb")
    assert run(capsys, folder, file, "--max-new-tokens", "2")[1] == "a b\n" * len(LINES)


def test_a_pipe_sees_each_line_before_the_next_is_written(folder: str) -> None:
    command = [sys.executable, "-m", "qkv", "translate", folder, "--batch-size", "1", "--max-new-tokens", "3"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        too_long = threading.Timer(60, process.kill)
        too_long.start()
        assert process.stdin is not None
        assert process.stdout is not None
        for line in (b"one\n", b"two\n"):
            process.stdin.write(line)
            process.stdin.flush()
            assert process.stdout.readline().endswith(b"\n")
        process.stdin.close()
    too_long.cancel()
    assert process.returncode == 0


# --- other outputs ----------------------------------------------------------------------------------------------------


def test_json_has_an_object_per_line(folder: str, file: Path, capsys) -> None:
    options: dict[str, Any] = {"beam_size": 3, "n_best": 2, "length_penalty": 1.0, "length_penalty_kind": "power"}
    flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]
    code, out, err = run(capsys, folder, file, *flags, "--max-new-tokens", "5", "--batch-size", "2", "--json")
    found = [json.loads(line) for line in out.split("\n")[:-1]]
    expected = model(family="encoder-decoder").translate(LINES, max_new_tokens=5, **options)
    assert (code, err, [one["source"] for one in found]) == (0, "", LINES)
    for one, wanted in zip(found, expected, strict=True):
        assert set(one) >= {"source", "text", "token_ids", "score", "logprob", "finish_reason", "hypotheses"}
        assert (one["text"], one["token_ids"], one["finish_reason"]) == (
            wanted.text,
            wanted.token_ids,
            wanted.finish_reason,
        )
        assert one["score"] == pytest.approx(wanted.score, abs=1e-4)
        assert [each["text"] for each in one["hypotheses"]] == [each.text for each in wanted.hypotheses]


def test_n_best_lines_are_number_translation_and_score(folder: str, file: Path, capsys) -> None:
    code, out, _ = run(capsys, folder, file, "--n-best", "2", "--max-new-tokens", "5")
    rows = [line.split(" ||| ") for line in out.split("\n")[:-1]]
    expected = model(family="encoder-decoder").translate(LINES, n_best=2, max_new_tokens=5)
    wanted = [(number, each) for number, one in enumerate(expected) for each in one.hypotheses]
    assert code == 0
    assert [(row[0], row[1]) for row in rows] == [(str(number), told(each.text)) for number, each in wanted]
    assert [float(row[2]) for row in rows] == pytest.approx([each.score for _, each in wanted], abs=1e-3)


def test_the_output_goes_to_a_file_that_is_never_the_input(folder: str, file: Path, tmp_path: Path, capsys) -> None:
    expected = run(capsys, folder, file, "--max-new-tokens", "5")[1]
    output = tmp_path / "out.txt"
    output.write_text("older\n" * 99, encoding="utf-8")
    code, out, err = run(capsys, folder, file, "--max-new-tokens", "5", "-o", output)
    assert (code, out) == (0, "")
    assert output.read_text(encoding="utf-8") == expected
    assert "6 lines in" in err
    before = file.read_bytes()
    code, _, err = run(capsys, folder, file, "-o", file)
    assert (code, "replace the lines" in err) == (2, True)
    assert file.read_bytes() == before


def test_a_bar_is_drawn_on_a_terminal_unless_the_translations_are_seen_there(
    folder: str, file: Path, capsys, monkeypatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    _, _, err = run(capsys, folder, file, "--max-new-tokens", "2")
    assert f"{len(LINES)}/{len(LINES)}" in err
    assert err.count("\x1b[?25l") == err.count("\x1b[?25h") > 0  # the cursor
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert "\x1b" not in run(capsys, folder, file, "--max-new-tokens", "2")[2]


def test_translations_that_were_cut_off_are_counted(folder: str, file: Path, capsys) -> None:
    assert "end of the context: 4" in run(capsys, folder, file, "--max-new-tokens", "1")[2]


def test_a_vocabulary_of_its_own_for_the_sources_is_saved_and_used(tmp_path: Path, capsys, monkeypatch) -> None:
    source_tokenizer = Tokenizer.train("ab ba", kind="char")
    made = model(family="encoder-decoder")
    made = Model(made.network, made.tokenizer, made.config, source_tokenizer)
    made.save(tmp_path / "m")
    assert load(tmp_path / "m").source_tokenizer.fingerprint == source_tokenizer.fingerprint
    stdin(monkeypatch, b"ab\n")
    found = json.loads(run(capsys, tmp_path / "m", "--max-new-tokens", "4", "--json")[1])
    assert found["token_ids"] == made.translate("ab", max_new_tokens=4).token_ids
    assert found["token_ids"] != model(family="encoder-decoder").translate("ab", max_new_tokens=4).token_ids


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_what_came_before_an_overlong_line_is_written_and_the_line_is_named(
    folder: str, file: Path, capsys, tmp_path: Path
) -> None:
    file.write_text("one\ntwo\n" + "x" * CONTEXT + "\nfour\n", encoding="utf-8")
    output = tmp_path / "out.txt"
    code, _, err = run(capsys, folder, file, "--max-new-tokens", "4", "-o", output)
    assert code == 1
    assert f"line 3 has {CONTEXT + 2} tokens" in err
    assert f" {CONTEXT}" in err.splitlines()[0]
    expected = model(family="encoder-decoder").translate(["one", "two"], max_new_tokens=4)
    assert output.read_text(encoding="utf-8") == "".join(told(one.text) + "\n" for one in expected)


def test_an_output_keeps_what_it_held_until_there_is_an_answer(folder: str, file: Path, tmp_path: Path, capsys) -> None:
    old = tmp_path / "old.txt"
    old.write_text("what was there\n", encoding="utf-8")
    long = tmp_path / "long.txt"
    long.write_text("x" * 10 * CONTEXT + "\n", encoding="utf-8")
    assert run(capsys, folder, long, "-o", old)[0] != 0
    assert old.read_text(encoding="utf-8") == "what was there\n"
    assert run(capsys, folder, file, "-o", old, "--max-new-tokens", "2")[0] == 0
    assert "what was there" not in old.read_text(encoding="utf-8")
    long.write_text("", encoding="utf-8")
    assert run(capsys, folder, long, "-o", old)[0] == 0
    assert old.read_text(encoding="utf-8") == ""


def test_what_was_translated_before_an_interruption_is_kept_and_counted(
    folder: str, file: Path, capsys, monkeypatch, tmp_path: Path
) -> None:
    translated = Model.translate_stream

    def interrupted(self: Model, *arguments: Any, **options: Any) -> Iterator[Any]:
        found = translated(self, *arguments, **options)
        yield next(found)
        yield next(found)
        raise KeyboardInterrupt

    monkeypatch.setattr(Model, "translate_stream", interrupted)
    output = tmp_path / "out.txt"
    code, _, err = run(capsys, folder, file, "--max-new-tokens", "4", "-o", output)
    assert code == 130
    assert f"interrupted; answers that are in {output}: 2\n" in err
    assert output.read_text(encoding="utf-8").count("\n") == 2


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--beam-size", "0"), 2, "beam_size"),
        (("--beam-size", "two"), 2, "two"),
        (("--beam-size", "1000000"), 2, "beam_size is at most 1,000"),
        (("--n-best", "5"), 2, "n_best"),
        (("--n-best", "0"), 2, "n_best"),
        (("--length-penalty", "nan"), 2, "length_penalty"),
        (("--length-penalty-kind", "none"), 2, "none"),
        (("--batch-size", "0"), 2, "batch_size"),
        (("--max-new-tokens", "-1"), 2, "max_new_tokens"),
        (("--device", "abacus"), 2, "abacus"),
        (("--bad-bytes", "eat"), 2, "eat"),
        (("-o", "no/such/folder"), 3, "no/such/folder"),
        (("-o", "."), 1, "directory"),
    ],
)
def test_a_wrong_option_is_one_error_and_writes_nothing(
    folder: str, file: Path, capsys, arguments, code: int, said: str
) -> None:
    actual, out, err = run(capsys, folder, file, *arguments)
    assert (actual, out) == (code, "")
    assert said in err.lower()
    assert "Traceback" not in err


def test_what_cannot_be_read_is_one_error(folder: str, tmp_path: Path, capsys, monkeypatch) -> None:
    code, _, err = run(capsys, folder, tmp_path / "gone.txt")
    assert (code, "no such file" in err) == (3, True)
    code, _, err = run(capsys, tmp_path / "gone", tmp_path)
    assert (code, "folder stands" in err) == (1, True)
    stdin(monkeypatch, b"ab\xff\n")
    code, out, err = run(capsys, folder)
    assert (code, out) == (1, "")
    assert "byte 2" in err
    assert "try --bad-bytes replace" in err
    stdin(monkeypatch, b"ab\xff\n")
    assert run(capsys, folder, "--bad-bytes", "drop", "--max-new-tokens", "2")[0] == 0


def test_nothing_on_a_terminal_says_how_to_use_it(folder: str, capsys, monkeypatch) -> None:
    stdin(monkeypatch, b"")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    code, out, err = run(capsys, folder)
    assert (code, out) == (2, "")
    assert "FILE" in err


@pytest.mark.parametrize("family", ["decoder", "encoder"])
def test_a_model_of_another_family_is_refused_by_name(family: str, file: Path, tmp_path: Path, capsys) -> None:
    model(family=family).save(tmp_path / "m")
    code, out, err = run(capsys, tmp_path / "m", file)
    assert (code, out) == (2, "")
    assert f"a model of family {family} does not translate" in err


@pytest.mark.parametrize("command", ["translate", "fill-mask", "classify", "eval"])
def test_help_imports_no_torch(command: str) -> None:
    code = (
        "import sys\nfrom qkv.cli import main\n"
        f"try:\n    main([{command!r}, '--help'])\nexcept SystemExit: pass\n"
        "print('heavy:', [m for m in ('torch', 'pydantic', 'numpy', 'rich') if m in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "heavy: []" in output
