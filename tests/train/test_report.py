"""report.md: the whole run in a page, whole or broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qkv.train.loop import fit
from qkv.train.report import write_report

from .small import config, step, train


def test_a_report_tells_the_run() -> None:
    run = fit(config("train.eval_every=2", "train.save_every=2"), run_dir="run", preset="decoder-tiny").path
    page = (run / "report.md").read_text(encoding="utf-8")
    told = json.loads((run / "env.json").read_text(encoding="utf-8"))
    assert page.startswith("# run\n\n- all of 4 steps\n- training loss ")
    assert "- learning rate 0.001 at most, 0.0001 at the end\n" in page
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
