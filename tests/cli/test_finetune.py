"""`qkv finetune`: from masked words to a classifier, and how it fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qkv.cli import main
from qkv.config.run import Config
from qkv.train.loop import fit

MODEL = """
model:
  family: encoder
  max_seq_len: 32
  d_model: 32
  num_layers: 2
  tie_embeddings: head
  attention: {num_heads: 2}
  feed_forward: {d_ff: 48}
tokenizer: {kind: byte}
data: {kind: jsonl, train: [texts.jsonl], validation: 0.1}
train: {steps: 2, batch_tokens: 64, eval_every: null, save_every: null, precision: fp32, compile: 'off', device: cpu}
"""
SHORT = ("train.steps=2", "train.schedule.warmup=1", "train.precision=fp32", "train.compile=off", "train.device=cpu")
PRESET = ("sentiment-finetune", "data.train=[texts.jsonl]", *SHORT)


@pytest.fixture(autouse=True)
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with texts, their labels, and an encoder that has read them: `run`."""
    monkeypatch.setenv("QKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(MODEL, encoding="utf-8")
    rows = [{"text": f"the {word} number {n}", "label": word} for n in range(40) for word in ("good", "bad")]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return fit(Config.load("small.yaml"), run_dir="run").path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def test_a_pretrained_encoder_becomes_a_classifier_that_can_be_resumed(capsys) -> None:
    code, out, err = run(capsys, "finetune", "run", *PRESET, "--run-dir", "tuned")
    assert (code, out) == (0, ""), err
    lines = err.splitlines()
    said = "starting from run/checkpoints/step-000002; head.output.weight, head.output.bias start fresh"
    assert lines[:2] == [said, "run tuned"]
    assert any("validation loss" in line and "accuracy" in line for line in lines)
    assert lines[-1] == "try it: qkv classify tuned TEXT"
    code, out, err = run(capsys, "classify", "tuned", "the good number 1")
    assert code == 0, err
    assert "good" in out or "bad" in out
    assert run(capsys, "train", "--resume", "tuned", "train.steps=3")[0] == 0


def test_json_tells_the_start_as_a_note(capsys) -> None:
    code, out, err = run(capsys, "finetune", "run", *PRESET, "--run-dir", "tuned", "--json")
    assert (code, err) == (0, "")
    events = [json.loads(line) for line in out.splitlines()]
    assert [event["event"] for event in events][:2] == ["note", "start"]
    assert events[0]["text"].startswith("starting from run/checkpoints/step-000002; head.output.weight")
    assert events[-1]["run"] == "tuned"


def test_a_new_run_is_named_after_its_configuration(capsys) -> None:
    assert run(capsys, "finetune", "run", *PRESET)[0] == 0
    assert "_sentiment-finetune_" in Path("runs/latest").resolve().name


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("run",), 2, "Missing argument 'CONFIG'"),
        (("run", "nonsense"), 3, "no configuration file and no preset is called `nonsense`"),
        (("nowhere", *PRESET), 3, "there is no such file or folder"),
        (("bert-small", *PRESET), 3, "a preset is a configuration without weights"),
        (("run", *PRESET, "model.d_model=64"), 2, "`model.d_model` is 32 in the model, and may not become 64"),
        (("run", "small.yaml", "--run-dir", "run"), 5, "the run folder is not empty"),
    ],
)
def test_what_cannot_be_meant_is_one_clear_error(arguments: tuple[str, ...], code: int, said: str, capsys) -> None:
    result, out, err = run(capsys, "finetune", *arguments)
    assert (result, out) == (code, "")
    assert said in err
    assert "Traceback" not in err
    assert not Path("runs").exists()
