"""`qkv plot`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qkv import Config, Transformer
from qkv.checkpoint.store import save_checkpoint
from qkv.cli import main


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    path = tmp_path / "runs/some"
    path.mkdir(parents=True)
    (path / "config.yaml").write_text("train: {steps: 2}\n", encoding="utf-8")
    (path / "metrics.jsonl").write_text('{"step": 1, "loss": 3}\n{"step": 2, "loss": 2}\n', encoding="utf-8")
    return path


def test_loss_is_plotted_from_runs(run_folder, tmp_path, capsys) -> None:
    code, out, _ = run(capsys, "plot", "loss", run_folder, run_folder, "-o", tmp_path / "a.svg", "--json")
    assert (code, json.loads(out)) == (0, {"path": str(tmp_path / "a.svg")})
    drawn = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert "loss (nats per token)" in drawn
    assert "some" in drawn


def test_positions_are_plotted_from_a_configuration(tmp_path, capsys) -> None:
    code, out, err = run(
        capsys, "plot", "positions", "attention-is-all-you-need", "--length", "9", "-o", tmp_path / "a.svg"
    )
    assert (code, out) == (0, "")
    assert "a.svg" in err
    assert "9 positions, 512 dimensions" in (tmp_path / "a.svg").read_text(encoding="utf-8")


def test_learned_positions_are_plotted_from_a_model(tmp_path, capsys) -> None:
    config = Config.load("encoder-tiny")
    save_checkpoint(tmp_path / "model", Transformer(config.model), config)
    code, _, err = run(capsys, "plot", "positions", tmp_path / "model", "-o", tmp_path / "a.svg")
    assert code == 0, err
    assert "Learned positions: 128 positions" in (tmp_path / "a.svg").read_text(encoding="utf-8")
    code, _, err = run(capsys, "plot", "positions", tmp_path / "model", "model.d_model=8", "-o", tmp_path / "b.svg")
    assert (code, "overridden" in err) == (2, True)


def test_masks_are_plotted(tmp_path, capsys) -> None:
    assert run(capsys, "plot", "masks", "-o", tmp_path / "a.png")[0] == 0
    assert (tmp_path / "a.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("plot", "los", "x", "-o", "a.png"), 2, "loss"),
        (("plot", "heads", "-o", "a.png"), 2, "heads"),
        (("plot", "masks"), 2, "--output"),
        (("plot", "masks", "-o", "a.jpg"), 2, ".jpg"),
        (("plot", "masks", "-o", "a"), 2, "PNG"),
        (("plot", "masks", "-o", "gone/a.png"), 1, "cannot be written"),
        (("plot", "loss", "-o", "a.png"), 2, "RUN"),
        (("plot", "loss", "gone", "-o", "a.png"), 3, "no such run"),
        (("plot", "positions", "llama-tiny", "-o", "a.png"), 2, "rope"),
        (("plot", "positions", "encoder-tiny", "-o", "a.png"), 2, "weights"),
        (("plot", "positions", "attention-is-all-you-need", "--length", "-3", "-o", "a.png"), 2, "-3"),
        (("plot", "positions", "no-such", "-o", "a.png"), 3, "no-such"),
    ],
)
def test_a_mistake_exits_with_its_code_and_writes_nothing(
    tmp_path, capsys, monkeypatch, arguments, code: int, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    actual, out, err = run(capsys, *arguments)
    assert (actual, out) == (code, "")
    assert said in err
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())
