"""`qkv runs`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qkv.cli import main


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """runs/ in the working folder: one complete, one interrupted and the latest, one damaged."""
    monkeypatch.chdir(tmp_path)
    for name, steps in (("complete", 2), ("interrupted", 9), ("damaged", 2)):
        path = tmp_path / "runs" / name
        path.mkdir(parents=True)
        (path / "config.yaml").write_text(f"train: {{steps: {steps}}}\n", encoding="utf-8")
        lines = '{"step": 1, "loss": 3.5}\n{"step": 2, "loss": 2.25}\n{"step": 2, "val_loss": 2.5}\n'
        (path / "metrics.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "runs/damaged/metrics.jsonl").write_text("{]\n", encoding="utf-8")
    (tmp_path / "runs/latest").symlink_to("interrupted")
    return tmp_path / "runs"


def test_runs_lists_every_run_and_marks_the_newest(runs, capsys) -> None:
    code, out, _ = run(capsys, "runs", "--json")
    found = {row["name"]: row for row in json.loads(out)["runs"]}
    assert code == 0
    assert {name: row["state"] for name, row in found.items()} == {
        "complete": "complete",
        "interrupted": "interrupted",
        "damaged": "damaged",
    }
    assert [name for name, row in found.items() if row["newest"]] == ["interrupted"]
    assert (found["complete"]["loss"], found["complete"]["best_val_loss"]) == (2.25, 2.5)
    assert (found["complete"]["best_val_step"], found["damaged"]["best_val_step"]) == (2, None)
    assert (found["interrupted"]["step"], found["interrupted"]["steps"]) == (2, 9)


def test_people_see_the_same_and_which_file_is_damaged(runs, capsys) -> None:
    code, out, err = run(capsys, "runs", runs)
    assert code == 0
    (newest,) = [line for line in out.splitlines() if line.startswith("*")]
    assert newest.split()[1:] == ["interrupted", "2/9", "2.2500", "2.5000", "at", "2", "interrupted"]
    assert str(Path("damaged")) in err
    assert "metrics.jsonl:1" in err


def test_no_folder_is_not_found_and_an_empty_one_is_said_to_be(tmp_path, capsys) -> None:
    assert run(capsys, "runs", tmp_path / "gone")[0] == 3
    code, out, err = run(capsys, "runs", tmp_path)
    assert (code, out) == (0, "")
    assert "no runs" in err
    assert json.loads(run(capsys, "runs", tmp_path, "--json")[1]) == {"runs": []}


def test_who_has_trained_nothing_yet_is_told_how_to(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, "runs")
    assert (code, out) == (0, "")
    assert err.startswith("no runs in runs yet\n  try `qkv train`")
    assert json.loads(run(capsys, "runs", "--json")[1]) == {"runs": []}


def test_of_many_common_steps_some_are_shown_and_all_counted(runs, capsys) -> None:
    lines = "".join(json.dumps({"step": step, "loss": 1 / step}) + "\n" for step in range(1, 1201))
    (runs / "complete/metrics.jsonl").write_text(lines, encoding="utf-8")
    (runs / "interrupted/metrics.jsonl").write_text(lines.replace("1.0}", "2.0}"), encoding="utf-8")
    out = run(capsys, "runs", "diff", runs / "complete", runs / "interrupted")[1]
    assert "loss: 1,200 steps that both logged, 8 of them shown\n" in out
    rows = out.partition("at step")[2].splitlines()[1:]
    assert [row.split()[0] for row in rows][::7] == ["1", "1,200"]


def test_two_runs_are_compared(runs, capsys) -> None:
    code, out, err = run(capsys, "runs", "diff", runs / "complete", runs / "interrupted")
    assert code == 0
    assert "train.steps  2 -> 9\n" in out
    assert "data: unknown" in out
    assert "\nloss: the same at all 2 steps that both logged\n" in out
    assert "val_loss: the same at the one step that both logged\n" in out
    assert "B - A" not in out
    assert err.count("env.json is missing") == 2
    code, out, _ = run(capsys, "runs", "diff", runs / "complete", runs / "interrupted", "--json")
    found = json.loads(out)
    assert found["config"] == [{"key": "train.steps", "first": 2, "second": 9}]
    assert [row["step"] for row in found["metrics"]["loss"]] == [1, 2]


def test_metrics_without_a_common_step_are_named(runs, capsys) -> None:
    lines = '{"step": 1, "loss": 3.5}\n{"step": 1, "val_loss": 2.5}\n{"step": 4, "val_loss": 2.0, "mtp_loss": 1}\n'
    (runs / "interrupted/metrics.jsonl").write_text(lines, encoding="utf-8")
    pair = runs / "complete", runs / "interrupted"
    out = run(capsys, "runs", "diff", *pair)[1]
    assert "\nval_loss: 1 step of A, 2 steps of B, none in common\n" in out
    assert "\nmtp_loss: 0 steps of A, 1 step of B, none in common\n" in out
    assert json.loads(run(capsys, "runs", "diff", *pair, "--json")[1])["metrics"]["val_loss"] == []
    for one in pair:
        (one / "metrics.jsonl").write_text("", encoding="utf-8")
    assert run(capsys, "runs", "diff", *pair)[1].endswith("\nmetrics: neither has any\n")


def test_a_report_is_written_for_a_run_that_is_broken(runs, capsys) -> None:
    code, out, _ = run(capsys, "runs", "report", runs / "damaged", "--json")
    assert (code, json.loads(out)) == (0, {"path": str(runs / "damaged/report.md")})
    page = (runs / "damaged/report.md").read_text(encoding="utf-8")
    assert "- metrics.jsonl:1 is damaged\n" in page
    assert "- env.json is missing\n" in page


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("runs", "report", "gone"), 3, "no such run"),
        (("runs", "report", "."), 3, "no run"),
        (("runs", "diff", "runs/complete"), 2, "B"),
        (("runs", "diff", "runs/complete", "gone"), 3, "no such run"),
        (("runs", "runs", "more"), 2, "more"),
    ],
)
def test_a_mistake_exits_with_its_code(runs, capsys, arguments, code: int, said: str) -> None:
    actual, out, err = run(capsys, *arguments)
    assert (actual, out) == (code, "")
    assert said in err
