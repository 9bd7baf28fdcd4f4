"""`qkv train`: what people and machines read, and how it fails."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from qkv.cli import main
from qkv.train.loop import Trainer

CONFIG = """
model:
  max_seq_len: 16
  d_model: 32
  num_layers: 2
  attention: {num_heads: 2}
  feed_forward: {d_ff: 48}
tokenizer: {kind: byte}
data: {train: [corpus.txt], validation: 0.1}
train: {steps: 4, batch_tokens: 64, log_every: 1, save_every: 2, precision: fp32, compile: 'off', device: cpu}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a configuration and a text."""
    monkeypatch.setenv("QKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(CONFIG, encoding="utf-8")
    (tmp_path / "corpus.txt").write_text("the cat sees the dog, 我爱你.\n" * 40, encoding="utf-8")
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["train", *arguments])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def interrupt_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Press Ctrl-C in this step."""
    take = Trainer.take_step

    def pressed(self: Trainer) -> dict[str, Any]:
        if self.step + 1 == step:
            signal.raise_signal(signal.SIGINT)
        return take(self)

    monkeypatch.setattr(Trainer, "take_step", pressed)


# --- what is printed --------------------------------------------------------------------------------------------------


def test_off_a_terminal_there_are_plain_lines_on_stderr(capsys) -> None:
    code, out, err = run(capsys, "small.yaml", "--run-dir", "mine")
    assert (code, out) == (0, "")
    lines = err.splitlines()
    assert lines[0] == "run mine"
    assert "parameters" in lines[1]
    assert "training tokens" in lines[1]
    assert "held out" in lines[1]
    assert lines[2].startswith("device cpu, ")
    assert "fp32 (asked for); eager (asked for)" in lines[2]
    assert [line.split("  loss ")[0] for line in lines if "  loss " in line] == [f"step      {n}" for n in range(1, 5)]
    assert any(line.startswith("step      4  validation loss ") for line in lines)
    assert "\x1b" not in err
    assert "\r" not in err
    assert lines[-1] == "try it: qkv generate mine --prompt TEXT"


def test_json_is_one_object_per_line_on_stdout_and_nothing_else(capsys) -> None:
    code, out, err = run(capsys, "small.yaml", "--run-dir", "mine", "--json")
    assert (code, err) == (0, "")
    events = [json.loads(line) for line in out.splitlines()]
    kinds = [event["event"] for event in events]
    assert kinds == ["start", "train", "train", "checkpoint", "train", "train", "validation", "checkpoint", "end"]
    training = [event for event in events if event["event"] == "train"]
    assert all(event.keys() >= {"step", "loss", "lr", "grad_norm", "tokens", "tokens_per_second"} for event in training)
    assert events[-3].keys() >= {"step", "tokens", "val_loss"}
    assert events[-1]["run"] == events[0]["run"] == "mine"
    written = [json.loads(line) for line in Path("mine/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    told = [{key: value for key, value in event.items() if key != "event"} for event in events]
    assert written == [line for line in told if line.keys() & {"loss", "val_loss"}]


@pytest.mark.parametrize(
    ("overrides", "measure", "use"),
    [
        (
            ("model.family=encoder-decoder", "objective={kind: translate, measure: exact-match}"),
            "exact match",
            "qkv translate mine FILE",
        ),
        (("model.family=encoder", "model.head.kind=classifier"), "accuracy", "qkv classify mine TEXT"),
    ],
)
def test_validation_tells_the_task_s_own_measure_and_the_end_what_to_do(overrides, measure, use: str, capsys) -> None:
    kind, header = ("parallel", "") if measure == "exact match" else ("labelled", "text\tlabel\n")
    Path("data.tsv").write_text(header + "".join(f"a{n}\tb{n % 3}\n" for n in range(40)), encoding="utf-8")
    data = f"data={{kind: {kind}, train: [data.tsv], validation: 0.1}}"
    code, _, err = run(capsys, "small.yaml", *overrides, data, "--run-dir", "mine")
    (told,) = [line for line in err.splitlines() if "validation loss" in line]
    value = json.loads(Path("mine/metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert code == 0
    assert told.endswith(f"  {measure} {value[f'val_{measure}'.replace(' ', '_')]:.4g}")
    assert err.splitlines()[-1] == f"try it: {use}"
    assert f"| step | validation loss | {measure} |\n" in Path("mine/report.md").read_text(encoding="utf-8")


def test_a_masked_model_is_tried_by_filling_masks(capsys) -> None:
    err = run(capsys, "small.yaml", "model.family=encoder", "--run-dir", "mine")[2]
    assert err.splitlines()[-1] == 'try it: qkv fill-mask mine "TEXT with a [MASK]"'


def test_on_a_terminal_there_is_a_bar_and_the_terminal_is_left_as_it_was(
    capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    code, out, err = run(capsys, "small.yaml", "--run-dir", "mine")
    assert (code, out) == (0, "")
    assert "4/4" in err
    assert "validation loss" in err
    assert err.count("\x1b[?25l") == err.count("\x1b[?25h") > 0  # the cursor


def test_the_printed_compute_says_threads_precision_and_compilation_with_reasons(capsys) -> None:
    arguments = ("train.precision=auto", "train.compile=auto", "train.device=auto", "train.steps=1")
    line = run(capsys, "small.yaml", *arguments)[2].splitlines()[2]
    device, precision, compilation, kernel = line.split("; ")
    assert device.startswith("device ")
    assert precision.startswith(("fp32 (auto: ", "bf16 (auto: "))
    assert compilation.startswith("eager (auto: ")
    short = " cpu" in device
    assert kernel == ("attention by math (16 tokens at most)" if short else "attention by sdpa")


def test_without_a_run_dir_the_run_is_named_after_its_configuration(capsys) -> None:
    code, _, err = run(capsys, "small.yaml", "train.steps=1")
    (folder,) = [path for path in Path("runs").iterdir() if not path.is_symlink()]
    assert code == 0
    assert "_small_" in folder.name
    assert str(folder) in err
    assert Path("runs/latest").resolve() == folder.resolve()


def test_a_preset_is_trained_with_overrides_in_their_order(capsys) -> None:
    overrides = ("data.train=[corpus.txt]", "train.steps=9", "train.steps=1", "train.batch_tokens=128")
    code, _, err = run(capsys, "decoder-tiny", *overrides, "model.vocab_size=null", "--run-dir", "mine")
    assert code == 0, err
    saved = yaml.safe_load(Path("mine/config.yaml").read_text(encoding="utf-8"))
    assert (saved["train"]["steps"], saved["model"]["d_model"]) == (1, 128)


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ((), 2, "which CONFIG?"),
        (("--json",), 2, "which CONFIG?"),
        (("gpt-clasic", "data.train=[corpus.txt]"), 3, "gpt-classic"),
        (("no-such.yaml",), 3, "no-such.yaml"),
        (("small.yaml", "train.stesp=3"), 2, "steps"),
        (("small.yaml", "train.steps=0"), 2, "train.steps"),
        (("small.yaml", "train.steps=many"), 2, "train.steps"),
        (("small.yaml", "train.optimizer.kind=sgd"), 2, "adamw"),
        (("small.yaml", "steps"), 2, "key=value"),
        (("small.yaml", "data.train=[]"), 2, "data.train"),
        (("small.yaml", "data.train=[corpus.tx]"), 3, "corpus.txt"),
        (("small.yaml", "data.train=[.]"), 1, "folder"),
        (("small.yaml", "data.validation=[missing.txt]"), 3, "missing.txt"),
        (("small.yaml", "tokenizer={path: nowhere}"), 3, "nowhere"),
        (("small.yaml", "model.vocab_size=100"), 2, "the tokenizer has 260 ids"),
        (("small.yaml", "tokenizer={kind: bpe, vocab_size: 400}", "model.vocab_size=300"), 2, "tokenizer.vocab_size"),
        (("small.yaml", "model.max_seq_len=5000"), 1, "too few"),
        (("small.yaml", "data.train=[tiny.txt]"), 1, "too few"),
        (("small.yaml", "data.train=[empty.txt]"), 1, "too few"),
        (("small.yaml", "data.train=[binary.txt]"), 1, "0xff"),
        (("small.yaml", "model.family=encoder-decoder"), 1, "a pair is source, tab, target"),
        (("small.yaml", "train.schedule.warmup=5"), 2, "train.schedule.warmup"),
        (("small.yaml", "train.device=abacus"), 2, "abacus"),
        (("small.yaml", "--run-dir", "corpus.txt"), 5, "not empty"),
        (("small.yaml", "--run-dir", "used"), 5, "not empty"),
        (("small.yaml", "--run-dir", "corpus.txt/run"), 1, "Not a directory"),
        (("small.yaml", "--no-such-option"), 2, "--no-such-option"),
    ],
)
def test_a_mistake_is_one_error_with_its_code_and_leaves_no_run(arguments, code: int, said: str, capsys) -> None:
    Path("tiny.txt").write_text("tiny", encoding="utf-8")
    Path("empty.txt").write_text("", encoding="utf-8")
    Path("binary.txt").write_bytes(b"abc\xff" * 99)
    Path("used").mkdir()
    Path("used/notes").write_text("precious", encoding="utf-8")
    before = {path for path in Path().rglob("*") if "cache" not in path.parts}
    place = () if "--run-dir" in arguments or not arguments else ("--run-dir", "new")
    actual, out, err = run(capsys, *arguments, *place)
    assert (actual, out) == (code, "")
    assert said in err
    assert err.lower().count("error:") == 1
    assert "qkv itself failed" not in err
    assert "Traceback" not in err
    assert {path for path in Path().rglob("*") if "cache" not in path.parts} == before


def test_without_a_run_dir_a_mistake_leaves_no_runs_folder(capsys) -> None:
    assert run(capsys, "small.yaml", "model.max_seq_len=5000")[0] == 1
    assert not Path("runs").exists()


def test_a_loss_that_explodes_is_one_error_that_names_the_step(capsys) -> None:
    overrides = ("train.optimizer.lr=1e30", "train.clip=null", "data.validation=0", "--run-dir", "mine")
    code, _, err = run(capsys, "small.yaml", *overrides)
    assert code == 1
    assert "at step 2" in err
    assert "a lower learning rate" in err
    assert "Traceback" not in err


# --- Ctrl-C and --resume ----------------------------------------------------------------------------------------------


def test_ctrl_c_saves_exits_130_and_says_how_to_go_on(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(3, patch)
        code, out, err = run(capsys, "small.yaml", "--run-dir", "mine")
    assert (code, out) == (130, "")
    assert err.splitlines().count("interrupted and saved; go on with: qkv train --resume mine") == 1
    assert "Traceback" not in err
    assert sorted(path.name for path in Path("mine/checkpoints").iterdir()) == ["step-000002", "step-000003"]
    code, _, err = run(capsys, "--resume", "mine")
    assert code == 0
    assert "loss on the fixed batch: " in err
    assert [line.split()[1] for line in err.splitlines() if "grad norm" in line] == ["4"]


def test_json_stays_json_when_interrupted(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(2, patch)
        code, out, err = run(capsys, "small.yaml", "--run-dir", "mine", "--json")
    assert code == 130
    assert [json.loads(line)["event"] for line in out.splitlines()][-1] == "checkpoint"
    assert "qkv train --resume mine" in err
    code, out, _ = run(capsys, "--resume", "mine", "--json")
    assert code == 0
    assert [json.loads(line)["step"] for line in out.splitlines() if '"train"' in line] == [3, 4]


def test_more_steps_may_be_asked_for_when_going_on(capsys) -> None:
    assert run(capsys, "small.yaml", "--run-dir", "mine")[0] == 0
    code, _, err = run(capsys, "--resume", "mine")
    assert code == 2
    assert "train.steps=N" in err
    assert run(capsys, "--resume", "mine", "train.steps=6")[0] == 0
    assert "step-000006" in {path.name for path in Path("mine/checkpoints").iterdir()}


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("small.yaml", "--resume", "mine"), 2, "small.yaml"),
        (("--resume", "mine", "train.seed=1"), 2, "train.seed=1"),
        (("--resume", "mine", "train.steps=9", "train.optimizer.lr=1"), 2, "train.optimizer.lr=1"),
        (("--resume", "mine", "train.steps=many"), 2, "`train.steps` is a whole number, got `many`"),
        (("--resume", "mine", "train.steps=-9"), 2, "got `-9`"),
        (("--resume", "mine", "train.steps="), 2, "got ``"),
        (("--resume", "mine", "train.steps=²"), 2, "got `²`"),
        (("--resume", "mine", "train.steps=0"), 2, "train.steps"),
        (("--resume", "mine", "train.steps=3"), 2, "the run is at step 4 already"),
        (("--resume", "mine", "--run-dir", "other"), 2, "--run-dir"),
        (("--resume", "nowhere"), 3, "nowhere"),
        (("--resume", "corpus.txt"), 3, "corpus.txt"),
        (("--resume", "mine/checkpoints/step-000002", "train.steps=9"), 5, "step-000004"),
    ],
)
def test_nothing_but_more_steps_may_change_when_a_run_goes_on(arguments, code: int, said: str, capsys) -> None:
    assert run(capsys, "small.yaml", "--run-dir", "mine")[0] == 0
    before = {path: path.read_bytes() for path in Path("mine").rglob("*") if path.is_file()}
    actual, out, err = run(capsys, *arguments)
    assert (actual, out) == (code, "")
    assert said in err
    assert err.lower().count("error:") == 1
    assert "qkv itself failed" not in err
    assert {path: path.read_bytes() for path in Path("mine").rglob("*") if path.is_file()} == before


def test_damage_is_named_when_a_run_goes_on(capsys) -> None:
    assert run(capsys, "small.yaml", "--run-dir", "mine")[0] == 0
    file = Path("mine/checkpoints/step-000004/training.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    code, _, err = run(capsys, "--resume", "mine", "train.steps=6")
    assert code == 1
    assert "training.safetensors is not what was written" in err


def test_a_run_whose_own_configuration_is_gone_goes_on_from_its_checkpoint_s(capsys) -> None:
    assert run(capsys, "small.yaml", "--run-dir", "run")[0] == 0
    Path("run/config.yaml").unlink()
    code, _, err = run(capsys, "--resume", "run", "train.steps=5")
    assert code == 0
    assert err.splitlines()[-1].startswith("try it: qkv generate ")
