"""report.md: the whole run in a page, whole or broken."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from qkv.config.errors import QkvError
from qkv.train import loop
from qkv.train.loop import Interrupted, NonFiniteError, fit
from qkv.train.report import write_report
from qkv.train.resume import resume

from .small import config, metrics, step, train
from .test_resume import interrupting

DIVERGING = ("train.optimizer.lr=1e30", "train.clip=null", "data.validation=0", "train.skip_non_finite=0")


def test_a_report_tells_the_run() -> None:
    run = fit(config("train.eval_every=2", "train.save_every=2"), run_dir="run", preset="decoder-tiny").path
    page = (run / "report.md").read_text(encoding="utf-8")
    told = json.loads((run / "env.json").read_text(encoding="utf-8"))
    assert page.startswith("# run\n\n- all of 4 steps\n- training loss ")
    assert "- learning rate 0.001 at most, 0.0001 at step 4\n" in page
    assert "| `model.d_model` | `128` | `32` |\n" in page
    assert "layers." not in page
    assert f"- {told['training']['parameters']:,} parameters\n" in page
    assert all(f"  - {group}\n" in page for group in told["training"]["optimizer"])
    assert f"- fingerprint of the data: `{told['data_fingerprint']}`\n" in page
    assert "- `step-000002`, validation loss " in page
    assert "- best: `step-000004`\n" in page
    assert "`step-000004.txt`:\n\n    " in page
    assert "damaged" not in page


def test_it_is_written_anew_from_the_files_and_names_those_that_are_broken() -> None:
    run = train("run", "train.steps=2", "train.save_every=1")
    before = (run / "report.md").read_text(encoding="utf-8")
    assert write_report(run).read_text(encoding="utf-8") == before
    (run / "loss.svg").touch()
    (run / "env.json").unlink()
    (step(run, 1) / "state.json").write_text("{", encoding="utf-8")
    skip = {"step": 3, "skipped": 1, "non_finite": "loss", "places": ["corpus.txt:7"]}
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(f"{json.dumps(skip)}\nnonsense\n")
    page = write_report(run).read_text(encoding="utf-8")
    assert "![loss.svg](<loss.svg>)" in page
    assert "- step 3: loss not finite; corpus.txt:7\n" in page
    problems = page.partition("## What is missing or damaged\n\n")[2].splitlines()
    assert [line for line in problems if "env.json" in line] == ["- env.json is missing"]
    assert any("metrics.jsonl:" in line for line in problems)
    assert any("step-000001/state.json is damaged" in line for line in problems)


@pytest.mark.parametrize("taken", [0, 1])
def test_a_run_that_stopped_early_has_a_report(taken: int) -> None:
    run = Path("run")
    run.mkdir()
    (run / "config.yaml").write_text("train: {steps: 9}\n", encoding="utf-8")
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2}\n' * taken, encoding="utf-8")
    page = write_report(run).read_text(encoding="utf-8")
    assert f"- {taken} of 9 steps so far\n" in page
    assert ("training loss" in page) == bool(taken)


def test_the_further_losses_of_training_are_told_beside_its_own() -> None:
    run = train("run", "model.mtp.depth=1", "train.steps=2", "train.eval_every=1")
    first, last = (record["mtp_loss"] for record in metrics(run) if "mtp_loss" in record)
    told = f"  - mtp loss, which training adds to it: {first:.4f} at step 1, {last:.4f} at step 2\n"
    assert told in (run / "report.md").read_text(encoding="utf-8")


def test_an_interrupted_run_has_its_report() -> None:
    with pytest.raises(Interrupted):
        fit(config(), run_dir="run", listener=interrupting(3))
    page = Path("run/report.md").read_text(encoding="utf-8")
    assert "- 3 of 4 steps so far\n" in page
    assert re.search(r"^- learning rate 0.001 at most, 0.\d+ at step 3$", page, re.MULTILINE)
    assert "- best: `step-000003`\n" in page
    resume("run")
    assert "- all of 4 steps\n" in Path("run/report.md").read_text(encoding="utf-8")


def test_a_run_that_an_error_ends_has_its_report() -> None:
    with pytest.raises(NonFiniteError):
        train("run", *DIVERGING)
    page = Path("run/report.md").read_text(encoding="utf-8")
    assert " of 4 steps so far\n- training loss " in page


def test_a_second_ctrl_c_waits_for_no_report() -> None:
    def listen(event: dict[str, Any]) -> None:
        for _ in range(2 * (event["event"] == "train")):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        fit(config(), run_dir="run", listener=listen)
    assert not Path("run/report.md").exists()


def test_a_report_that_cannot_be_written_hides_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(run: Path) -> Path:
        raise QkvError("the report cannot be written")

    monkeypatch.setattr(loop, "write_report", fail)
    with pytest.raises(NonFiniteError):
        train("broken", *DIVERGING)
    with pytest.raises(Interrupted):
        fit(config(), run_dir="stopped", listener=interrupting(2))
    with pytest.raises(QkvError, match="the report cannot be written"):
        train("whole")


def test_a_disk_that_fills_up_leaves_the_older_report(monkeypatch: pytest.MonkeyPatch) -> None:
    run = train("run", "train.steps=2")
    before = {path: path.read_bytes() for path in run.iterdir() if path.is_file()}

    def write(self: Path, text: str, **options: Any) -> int:
        self.write_bytes(text[:20].encode())
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", write)
    with pytest.raises(QkvError, match=r"the report cannot be written: No space left[\s\S]*report\.md"):
        write_report(run)
    assert {path: path.read_bytes() for path in run.iterdir() if path.is_file()} == before
