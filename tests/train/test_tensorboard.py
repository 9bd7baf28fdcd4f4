"""TensorBoard's event files repeat metrics.jsonl."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from qkv.cli import main
from qkv.config.errors import UsageError
from qkv.train.loop import fit
from qkv.train.resume import resume
from qkv.train.tensorboard import TensorBoard

from .small import config, metrics

pytest.importorskip("tensorboard", reason="needs the package tensorboard: pip install 'qkv[tensorboard]'")


def measured(run: str | Path) -> dict[str, list[tuple[int, float]]]:
    """Key -> (step, value) of every event there is, none purged."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(Path(run) / "tensorboard"), purge_orphaned_data=False)
    events.Reload()
    return {key: [(event.step, event.value) for event in events.Scalars(key)] for key in events.Tags()["scalars"]}


def told(run: str | Path) -> dict[str, list[tuple[int, float]]]:
    """The same of metrics.jsonl; training and validation both tell the tokens of a step."""
    found: dict[str, dict[int, float]] = {}
    for record in metrics(run):
        for key, value in record.items():
            if key != "step":
                found.setdefault(key, {})[record["step"]] = value
    return {key: list(series.items()) for key, series in found.items()}


def assert_same(run: str | Path) -> None:
    first, second = measured(run), told(run)
    assert first.keys() == second.keys()
    for key, series in first.items():
        assert [step for step, _ in series] == [step for step, _ in second[key]]
        assert [value for _, value in series] == pytest.approx([value for _, value in second[key]], rel=1e-6)


def test_every_metric_is_there_and_a_run_that_goes_on_doubles_none() -> None:
    settings = config("train.eval_every=2", "train.steps=3")
    with TensorBoard() as board:
        run = fit(settings, run_dir="run", listener=board).path
    assert_same(run)
    resume(run, steps=4)  # nobody watched
    with TensorBoard() as board:
        resume(run, steps=6, listener=board)
    assert [step for step, _ in measured(run)["loss"]] == [1, 2, 3, 4, 5, 6]
    assert_same(run)


def test_the_command_writes_them_on_request() -> None:
    config()
    with pytest.raises(SystemExit) as stop:
        main(["train", "small.yaml", "train.steps=1", "--run-dir", "run", "--tensorboard"])
    assert not stop.value.code
    assert_same("run")


def test_a_missing_package_is_one_error_with_the_command(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UsageError, match="not installed") as error:
        TensorBoard()
    assert 'pip install "qkv[tensorboard]"' in str(error.value)
    config()
    with pytest.raises(SystemExit) as stop:
        main(["train", "small.yaml", "--run-dir", "run", "--tensorboard"])
    assert stop.value.code == 2
    assert not Path("run").exists()
