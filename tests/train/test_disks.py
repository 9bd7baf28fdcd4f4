"""Disks that fill up and disks that may not be written, where the system lets the test mount one."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qkv.checkpoint.store import load_checkpoint
from qkv.config.errors import QkvError
from qkv.train import loop
from qkv.train.loop import fit
from qkv.train.resume import resume

from .small import assert_same_checkpoint, config, step, steps_of, train

CHANGES = ("train.save_every=2", "train.keep=1")


def mount(disk: Path, options: str) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)]
    return shutil.which("mount") is not None and subprocess.run(command, capture_output=True).returncode == 0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    if not mount(place, "size=2m"):
        pytest.skip("the system does not let this user mount a disk")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize(
    ("left", "checked", "said"),
    [
        (200_000, True, r"the checkpoints need \d+ kB, and the disk has \d+ kB free"),
        (200_000, False, r"the checkpoint could not be written: [\s\S]*No space left"),
        (0, False, "the samples cannot be written: No space left"),
    ],
    ids=["found before", "in the middle", "at once"],
)
def test_a_disk_that_fills_up_is_one_clear_error_and_nothing_is_lost(
    left: int, checked: bool, said: str, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(event: dict[str, Any]) -> None:
        if event["event"] == "checkpoint":
            (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free - left))

    with monkeypatch.context() as patch:
        if not checked:
            patch.setattr(loop, "require_space", lambda path, needed, **options: None)
        with pytest.raises(QkvError, match=said):
            fit(config(*CHANGES), run_dir=disk / "run", listener=fill)
    assert steps_of(disk / "run") == ["step-000002"]
    assert load_checkpoint(disk / "run").state["step"] == 2
    (disk / "filler").unlink()
    resume(disk / "run")
    assert_same_checkpoint(step(train("whole", *CHANGES), 4), step(disk / "run", 4))


def test_a_disk_that_may_not_be_written_is_one_clear_error_and_the_model_still_loads(disk: Path) -> None:
    fit(config(*CHANGES, "train.steps=2"), run_dir=disk / "run")
    assert mount(disk, "remount,ro")
    with pytest.raises(QkvError, match="the run folder cannot be written: Read-only file system"):
        resume(disk / "run", steps=4)
    with pytest.raises(QkvError, match="the run folder cannot be made: Read-only file system"):
        train(str(disk / "other"))
    assert load_checkpoint(disk / "run").state["step"] == 2
    assert mount(disk, "remount,rw")
    assert resume(disk / "run", steps=4).step == 4
