"""`qkv bench`."""

from __future__ import annotations

import json

import pytest

from qkv.cli import main

SMALL = ("decoder-tiny", "model.num_layers=1", "model.max_seq_len=16", "train.batch_tokens=64", "train.compile=off")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def test_training_is_measured_as_a_table_with_its_progress_on_stderr(capsys) -> None:
    code, out, err = run(capsys, "bench", "train", *SMALL, "--steps", "2", "train.precision=fp32")
    assert code == 0, err
    told = {line[:26].strip(): line[26:].strip() for line in out.splitlines()}
    assert told["trained on"] == "random data of the model's shapes"
    assert "eager (asked for)" in told["computed"]
    assert "fp32 (asked for)" in told["computed"]
    assert "median of 2 steps" in told["tokens/s"]
    assert told["tokens per step"] == "64"
    assert {"GFLOP/s", "matrix rate, GFLOP/s", "ratio", "first step after", "attention", "optimiser"} <= told.keys()
    assert "step    2 of 2" in err


def test_the_same_is_one_object_for_machines(capsys) -> None:
    code, out, err = run(capsys, "bench", "train", *SMALL, "--steps", "2", "--json")
    assert code == 0, err
    told = json.loads(out)
    assert told["tokens_per_second"]["min"] <= told["tokens_per_second"]["median"] <= told["tokens_per_second"]["max"]
    assert told["ratio"] == pytest.approx(told["flops_per_second"] / told["matrix_rate"])
    assert sum(told["parts"]["shares"].values()) == pytest.approx(1)
    assert told["interrupted"] is False


def test_sizes_that_the_data_would_decide_are_assumed_and_said(capsys) -> None:
    arguments = ("vit-tiny", "model.num_layers=1", "train.batch_tokens=4", "train.compile=off", "--steps", "1")
    code, out, err = run(capsys, "bench", "train", *arguments)
    assert code == 0, err
    assert "model.head.num_classes=2: the data decide" in out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("decoder-tiny", "--steps", "0"), 2, "0 is not in the range"),
        (("decoder-tniy",), 3, "decoder-tiny"),
        (("decoder-tiny", "model.d_modle=3"), 2, "d_model"),
        (("decoder-tiny", "train.device=cuda:7"), 2, "cuda"),
        (("decoder-tiny", "data.train=[nowhere.txt]"), 3, "nowhere.txt"),
        (("shakespeare-char", "model.vocab_size=3"), 2, "no room for special tokens"),
    ],
)
def test_what_cannot_be_measured_is_one_error(arguments, code, words, capsys) -> None:
    found, out, err = run(capsys, "bench", "train", *arguments)
    assert (found, out) == (code, "")
    assert words in err
    assert "Traceback" not in err
