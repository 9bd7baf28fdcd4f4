"""One process at a time in a run folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qkv.checkpoint.lock import holder, locked
from qkv.config.errors import ConflictError, QkvError

HOLD = """
import sys
from pathlib import Path
from qkv.checkpoint.lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_who_holds_a_folder_is_named_and_others_are_refused(tmp_path: Path) -> None:
    assert holder(tmp_path) is None
    with locked(tmp_path):
        told = holder(tmp_path)
        assert told is not None
        assert told.startswith(f"process {os.getpid()} on ")
        with pytest.raises(ConflictError, match=rf"going on in process {os.getpid()} on ") as refused, locked(tmp_path):
            pass
        assert refused.value.exit_code == 5
    assert holder(tmp_path) is None
    with locked(tmp_path):
        pass


def test_a_lock_is_dropped_whatever_ended_its_holder(tmp_path: Path) -> None:
    with pytest.raises(KeyError), locked(tmp_path):
        raise KeyError
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    with pytest.raises(ConflictError, match=f"process {process.pid} "), locked(tmp_path):
        pass
    process.kill()
    process.communicate(timeout=60)
    assert holder(tmp_path) is None
    with locked(tmp_path):
        pass


def test_asking_makes_nothing_and_what_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    assert holder(tmp_path) is None
    assert holder(tmp_path / "gone") is None
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(QkvError, match="the run folder cannot be written: No such file"), locked(tmp_path / "gone"):
        pass


@pytest.mark.parametrize("kind", ["folder", "named pipe"])
def test_what_is_no_file_in_the_lock_s_place_holds_nothing_and_is_named(kind: str, tmp_path: Path) -> None:
    if kind == "named pipe" and not hasattr(os, "mkfifo"):
        pytest.skip("this system has no named pipes")
    (os.mkdir if kind == "folder" else os.mkfifo)(tmp_path / ".lock")
    assert holder(tmp_path) is None
    with pytest.raises(QkvError, match="the run folder cannot be written") as error, locked(tmp_path):
        pass
    assert error.value.where == str(tmp_path / ".lock")
