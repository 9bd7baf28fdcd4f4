"""`qkv completion`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from qkv.cli import main

COMMANDS = ("eval", "data", "plot", "doctor", "runs", "completion")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    return int(stop.value.code or 0), capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_completes_qkv(capsys, shell: str) -> None:
    code, script = run(capsys, "completion", shell)
    assert code == 0
    assert "_QKV_COMPLETE" in script
    assert f"{shell}_complete" in script
    told = json.loads(run(capsys, "completion", shell, "--json")[1])
    assert told["script"].strip() == script.strip()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_accepts_the_script(capsys) -> None:
    script = run(capsys, "completion", "bash")[1]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize(("words", "wanted"), [("qkv comp", "plain,completion"), ("qkv plot m", "plain,masks")])
def test_completing_prints_the_candidates_without_torch(words: str, wanted: str) -> None:
    environment = {
        **os.environ,
        "_QKV_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    code = (
        "import sys\nfrom qkv.cli import main\n"
        "try:\n    main([])\nexcept SystemExit: pass\n"
        "print('heavy:', [m for m in ('torch', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert wanted in done.stdout.splitlines()
    assert "heavy: []" in done.stdout


@pytest.mark.parametrize("arguments", [("powershell",), ()])
def test_another_shell_or_none_is_wrong_usage(capsys, arguments) -> None:
    assert run(capsys, "completion", *arguments) == (2, "")


@pytest.mark.parametrize("command", [*COMMANDS, "data show", "data prepare", "plot loss", "plot positions"])
def test_help_imports_neither_torch_nor_pydantic_nor_matplotlib(command: str) -> None:
    code = (
        "import sys\nfrom qkv.cli import main\n"
        f"try:\n    main({command.split()} + ['--help'])\nexcept SystemExit: pass\n"
        "print('heavy:', [m for m in ('torch', 'pydantic', 'numpy', 'matplotlib') if m in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "heavy: []" in output
    assert "--json" in output or "Commands" in output
