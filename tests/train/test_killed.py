"""Real processes, really killed: checkpoints on disk are whole, and going on ends in the same weights."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from qkv.checkpoint.store import load_checkpoint
from qkv.evaluate.runs import summarise_run

from .processes import needs_processes, run, start
from .small import assert_equal, assert_same_checkpoint, losses, metrics, step, steps_of, train, weights, write_config

pytestmark = needs_processes

STEPS = 30
# a checkpoint after every step, so that kills fall into saving and rotating too
OFTEN = (
    "model.dropout=0.1",
    f"train.steps={STEPS}",
    "train.micro_batch_tokens=48",
    "train.save_every=1",
    "train.eval_every=5",
    "train.keep=1",
)


def last_step(run: Path) -> int:
    """The last step in the metrics; the last line may be cut off."""
    file = run / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.is_file() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("\n")), default=0)


def wait_for(happened: Callable[[], bool], alive: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not happened():
        assert alive(), f"the process ended early: {Path('output.txt').read_text(encoding='utf-8')}"
        assert time.monotonic() < end
        time.sleep(0.001)


class Killable:
    """`qkv *arguments` in a process of its own: forked, or a new interpreter."""

    def __init__(self, arguments: list[str], *, interpreter: bool) -> None:
        self.forked = None if interpreter else start(*arguments)
        if interpreter:
            with Path("output.txt").open("wb") as output:
                self.popen = subprocess.Popen([sys.executable, "-m", "qkv", *arguments], stdout=output, stderr=output)

    def alive(self) -> bool:
        return self.forked.is_alive() if self.forked else self.popen.poll() is None

    def kill(self) -> int | None:
        if self.forked is None:
            self.popen.kill()
            return self.popen.wait(60)
        self.forked.kill()
        self.forked.join(60)
        return self.forked.exitcode


def check_killed_run(moments: list[tuple[int, float]], *, interpreter: bool, steps: int = STEPS) -> None:
    """Kill a run `delay` seconds after each of some steps was logged, and compare it with one that never stopped."""
    settings = str(write_config())
    changes = (*OFTEN, f"train.steps={steps}")
    whole, killed = train("whole", *changes), Path("killed")
    for number, delay in moments:
        arguments = ["--resume", "killed"]
        if not list(killed.glob("checkpoints/step-*")):  # killed before it had saved anything
            shutil.rmtree(killed, ignore_errors=True)
            arguments = [settings, *changes, "--run-dir", "killed"]
        process = Killable(["train", *arguments], interpreter=interpreter)
        wait_for(lambda number=number: last_step(killed) >= number, process.alive)
        time.sleep(delay)
        assert process.kill() == -signal.SIGKILL
        for path in killed.glob("checkpoints/step-*"):
            load_checkpoint(path)  # whatever bears a checkpoint's name is whole
    code, output = run("train", "--resume", "killed")
    assert code == 0, output
    assert steps_of(killed) == steps_of(whole)  # nothing half-written stays behind
    assert_same_checkpoint(step(whole, steps), step(killed, steps))
    assert losses(killed) == losses(whole)
    assert [number for number, _ in losses(killed)] == list(range(1, steps + 1))


def test_a_run_killed_at_random_moments_ends_in_the_same_weights() -> None:
    draw = random.Random(1)
    steps = sorted(draw.sample(range(2, STEPS - 4), 4))
    check_killed_run([(number, draw.uniform(0, 0.02)) for number in steps], interpreter=False)


@pytest.mark.slow
def test_an_interpreter_killed_at_twenty_random_moments_ends_in_the_same_weights() -> None:
    """Some of them before the first step, while it imports, reads the data or loads the checkpoint."""
    draw = random.Random(0)
    moments = [(number, draw.uniform(0, 0.05)) for number in sorted(draw.sample(range(2, 200), 14))]
    for _ in range(6):
        moments.insert(draw.randrange(7), (0, draw.uniform(0.1, 3)))
    check_killed_run(moments, interpreter=True, steps=300)


def test_a_run_is_left_to_the_process_that_is_in_it_until_it_is_killed() -> None:
    settings = str(write_config())
    process = Killable(
        ["train", settings, "train.steps=9000", "train.save_every=1", "--run-dir", "mine"], interpreter=False
    )
    wait_for(lambda: last_step(Path("mine")) >= 2, process.alive)
    assert summarise_run(Path("mine")).state == "running"
    code, output = run("train", "--resume", "mine")
    assert code == 5
    assert f"the run is going on in process {process.forked.pid} on " in output
    process.kill()
    assert summarise_run(Path("mine")).state == "interrupted"
    assert run("train", "--resume", "mine", f"train.steps={last_step(Path('mine')) + 2}")[0] == 0


def test_ctrl_c_saves_exits_130_and_prints_how_to_go_on() -> None:
    settings = str(write_config())
    changes = ("train.steps=2000", "train.schedule.kind=constant", "train.eval_every=1000")
    arguments = [sys.executable, "-m", "qkv", "train", settings, *changes, "--run-dir", "stopped"]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: last_step(Path("stopped")) >= 3, lambda: process.poll() is None)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    (saved,) = steps_of("stopped")
    number = int(saved.removeprefix("step-"))
    assert (process.returncode, out) == (130, "")
    assert "qkv train --resume stopped\n" in err
    assert "Traceback" not in err
    assert metrics("stopped")[-1]["step"] == number
    code, output = run("train", "--resume", "stopped", f"train.steps={number + 3}")
    assert code == 0, output
    changes = (*changes, f"train.steps={number + 3}", "train.eval_every=null")
    assert_equal(weights(train("whole", *changes), number + 3), weights("stopped", number + 3))


def test_a_full_disk_is_one_clear_error_and_the_earlier_checkpoint_stays() -> None:
    """The disk is played by a limit on the size of files, below that of the weights."""
    train("run", "train.steps=4", "train.save_every=2")
    shutil.rmtree(step("run", 4))
    kept = {path: path.read_bytes() for path in step("run", 2).rglob("*") if path.is_file()}
    code, output = run("train", "--resume", "run", file_bytes=50_000)
    assert code == 1
    assert "the checkpoint could not be written" in output
    assert "File too large" in output
    assert "earlier checkpoints are untouched" in output
    assert "Traceback" not in output
    assert steps_of("run") == ["step-000002"]
    assert {path: path.read_bytes() for path in kept} == kept
    assert run("train", "--resume", "run")[0] == 0
