"""What runs left behind, whole and damaged."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from qkv.config.errors import NotFoundError
from qkv.evaluate import list_runs, read_metrics, summarise_run


def make_run(path: Path, *, steps: int = 4, taken: int = 4, began: int = 1000) -> Path:
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(f"train: {{steps: {steps}}}\n", encoding="utf-8")
    lines = [{"step": step, "loss": 5.0 - step} for step in range(1, taken + 1)]
    lines += [{"step": step, "val_loss": abs(3.5 - step)} for step in range(2, taken + 1)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    os.utime(path / "config.yaml", (began, began))
    return path


def test_a_run_is_summarised(tmp_path) -> None:
    run = summarise_run(make_run(tmp_path / "a"))
    assert (run.name, run.step, run.steps, run.loss) == ("a", 4, 4, 1.0)
    assert (run.best_val_loss, run.best_val_step) == (0.5, 3)  # and 4: the first of them
    assert (run.state, run.problems) == ("complete", [])


def test_fewer_steps_than_planned_are_an_interrupted_run(tmp_path) -> None:
    run = summarise_run(make_run(tmp_path / "a", steps=9))
    assert (run.state, run.step, run.steps) == ("interrupted", 4, 9)


def test_a_resumed_run_has_the_steps_of_its_newest_checkpoint(tmp_path) -> None:
    path = make_run(tmp_path / "a", steps=4)
    (path / "checkpoints/step-000004").mkdir(parents=True)
    (path / "checkpoints/step-000004/config.yaml").write_text("train: {steps: 50}\n", encoding="utf-8")
    run = summarise_run(path)
    assert (run.steps, run.state) == (50, "interrupted")


def test_runs_are_listed_oldest_first_and_the_latest_is_marked(tmp_path) -> None:
    make_run(tmp_path / "b", began=1000)
    make_run(tmp_path / "a", began=2000)
    (tmp_path / "notes").mkdir()
    assert [(run.name, run.newest) for run in list_runs(tmp_path)] == [("b", False), ("a", True)]
    (tmp_path / "latest").symlink_to("b")
    assert [(run.name, run.newest) for run in list_runs(tmp_path)] == [("b", True), ("a", False)]


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("metrics.jsonl", b'{"step": 1, "loss": 2.0}\n{"step": \n{"step": 3, "loss": 1.5}\n', "metrics.jsonl:2"),
        ("metrics.jsonl", b"\xff\xfe\n", "metrics.jsonl:1"),
        ("metrics.jsonl", b"[1]\n", "metrics.jsonl:1"),
        ("metrics.jsonl", None, "metrics.jsonl is missing"),
        ("config.yaml", b"train: [\n", "config.yaml is damaged"),
        ("config.yaml", b"model: {}\n", "config.yaml is damaged"),
        ("config.yaml", b"train: {steps: many}\n", "train.steps is no number"),
        ("config.yaml", None, "config.yaml is missing"),
    ],
)
def test_a_damaged_file_is_named_and_the_list_goes_on(tmp_path, file: str, content: bytes | None, said: str) -> None:
    make_run(tmp_path / "good", began=1)
    bad = make_run(tmp_path / "bad", began=2)
    (bad / "env.json").write_text("{}", encoding="utf-8")
    (bad / file).unlink()
    if content is not None:
        (bad / file).write_bytes(content)
    good, damaged = sorted(list_runs(tmp_path), key=lambda run: run.state)
    assert (good.state, damaged.state) == ("complete", "damaged")
    assert len(damaged.problems) == 1
    assert said in damaged.problems[0]


def test_a_last_line_cut_off_by_a_kill_is_no_damage(tmp_path) -> None:
    path = make_run(tmp_path / "a")
    with (path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 5, "lo')
    metrics = read_metrics(path)
    assert metrics.problems == []
    assert metrics.last_step == 4


def test_values_that_are_not_finite_are_no_points_of_a_curve(tmp_path) -> None:
    path = make_run(tmp_path / "a")
    (path / "metrics.jsonl").write_text('{"step": 1, "loss": NaN}\n{"step": 2, "loss": 2}\n', encoding="utf-8")
    assert read_metrics(path).series("loss") == ([2], [2.0])


def test_numbers_beyond_every_float_are_no_points_and_no_steps(tmp_path) -> None:
    path = make_run(tmp_path / "a")
    huge = "9" * 400
    lines = f'{{"step": 1, "loss": {huge}}}\n{{"step": {huge}, "loss": 2}}\n{{"step": -1}}\n{{"step": 3, "loss": 1}}\n'
    (path / "metrics.jsonl").write_text(lines, encoding="utf-8")
    metrics = read_metrics(path)
    assert metrics.series("loss") == ([3], [1.0])
    assert metrics.problems == ["metrics.jsonl:2 is damaged", "metrics.jsonl:3 is damaged"]
    assert summarise_run(path).state == "damaged"


def test_a_missing_run_is_answered_with_the_nearest_name(tmp_path) -> None:
    make_run(tmp_path / "shakespeare_1")
    with pytest.raises(NotFoundError) as error:
        read_metrics(tmp_path / "shakespere_1")
    assert "shakespeare_1" in str(error.value)
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFoundError, match=r"no metrics.jsonl"):
        read_metrics(tmp_path / "empty")
    with pytest.raises(NotFoundError, match="no such folder"):
        list_runs(tmp_path / "nowhere")
