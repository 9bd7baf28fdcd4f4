"""The frame around every command: words in, exit status out, and no traceback unless asked for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

from qkv.cli import COMMANDS, cli, main

QKV = [sys.executable, "-m", "qkv"]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    output = capsys.readouterr()
    return int(stop.value.code or 0), output.out, output.err


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> None:
    """`qkv echo --text X`, with a mistake of ours when X is `fail`, and no memory when it is `huge`."""

    @click.command()
    @click.option("--text")
    def command(text: str) -> None:
        if text == "fail":
            raise RuntimeError("x\x1b]0;pwn\x07")
        if text == "huge":
            raise RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 4398046511104 bytes"
            )
        click.echo(text)

    monkeypatch.setattr(sys.modules[__name__], "command", command, raising=False)
    monkeypatch.setitem(COMMANDS, "echo", (f"{__name__}:command", ""))


def test_debug_as_the_value_of_an_option_is_kept(echo: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "echo", "--text", "--debug") == (0, "--debug\n", "")


@pytest.mark.parametrize(
    "words",
    [
        ["--debug", "echo", "--text", "fail"],
        ["echo", "--debug", "--text", "fail"],
        ["echo", "--text", "fail", "--debug"],
    ],
)
def test_debug_shows_the_traceback_wherever_it_stands(words: list[str], echo: None) -> None:
    with pytest.raises(RuntimeError):
        main(words)


def test_every_command_takes_debug_and_the_help_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--debug" in run(capsys, "--help")[1]

    def check(command: click.Command, context: click.Context) -> None:
        assert sum("--debug" in option.opts for option in command.params) == 1
        if isinstance(command, click.Group):
            for name in command.list_commands(context):
                inner = command.get_command(context, name)
                assert inner is not None
                check(inner, context)

    check(cli, click.Context(cli))


def test_a_fault_of_ours_is_a_line_without_control_characters(echo: None, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, said = run(capsys, "echo", "--text", "fail")
    assert status == 1
    assert said.startswith("error: qkv itself failed: RuntimeError: x\\x1b]0;pwn\\x07\n")


def test_too_little_memory_is_no_fault_of_ours(echo: None, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, said = run(capsys, "echo", "--text", "huge")
    assert status == 1
    assert said.startswith("error: the machine has too little memory for this\n  try ")


def test_stdout_is_what_it_was_after_a_command(echo: None, capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout
    run(capsys, "echo", "--text", "a")
    assert sys.stdout is before


def test_new_says_where_it_cannot_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "none" / "x.yaml"
    status, _, said = run(capsys, "new", "llama-tiny", "-o", str(target))
    assert status == 3
    assert said.startswith("error: cannot write the file")
    assert f"at {target}" in said


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", [["presets"], ["--help"], ["show", "llama-tiny", "--json"]])
def test_a_full_disk_behind_stdout_is_named(words: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*QKV, *words], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: stdout cannot be written: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.skipif(os.name == "nt", reason="POSIX pipes")
@pytest.mark.parametrize("words", [["presets"], ["--help"], ["show", "llama-tiny", "--json"]])
def test_a_closed_pipe_ends_a_command_quietly(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run([*QKV, *words], stdout=writer, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(os.name == "nt", reason="POSIX locales")
def test_words_are_utf_8_in_a_locale_that_is_not(tmp_path: Path) -> None:
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [*QKV, "show", "你好.yaml"]
    missing = subprocess.run(command, capture_output=True, env=environment, cwd=tmp_path)
    assert "`你好.yaml`" in missing.stderr.decode("utf-8")
    (tmp_path / "你好.yaml").write_text("extends: llama-tiny\n", encoding="utf-8")
    assert subprocess.run(command, capture_output=True, env=environment, cwd=tmp_path).returncode == 0


def test_a_path_that_the_system_refuses_is_no_fault_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "tokenizer", "train", "x" * 5000, "-o", "folder")
    assert (code, out) == (1, "")
    assert "\nerror: the system refuses: " in err
    assert len(err) < 500


@pytest.mark.skipif(sys.platform == "win32", reason="no such signals on Windows")
def test_ctrl_c_while_python_ends_prints_no_traceback() -> None:
    """A thread holds up the end."""
    code = (
        "import sys, threading, time\nfrom qkv.cli import main\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "try:\n    main()\nfinally:\n    print('ending', flush=True)"
    )
    command = [sys.executable, "-c", code, "completion", "bash"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while process.stdout.readline() != "ending\n":
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    assert (process.returncode, err) == (-signal.SIGINT, "")
