"""`qkv bench`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from qkv.checkpoint.store import save_checkpoint
from qkv.cli import main
from qkv.config import Config
from qkv.evaluate import limits
from qkv.nn import threads
from qkv.nn.transformer import Transformer

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
    assert " (1 step)\n" in out  # which has no median


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


# --- reading and writing ----------------------------------------------------------------------------------------------


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_SECONDS_EACH", 0.001)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A model with weights."""
    config = Config.load("decoder-tiny", *SMALL[1:3], "model.vocab_size=50", "tokenizer={}")
    save_checkpoint(tmp_path / "model", Transformer(config.model), config, None)
    return str(tmp_path / "model")


def told(out: str) -> dict[str, str]:
    return {line[:26].strip(): line[26:].strip() for line in out.splitlines()}


@pytest.mark.usefixtures("short")
def test_reading_is_measured_as_a_table_with_its_progress_on_stderr(capsys, folder) -> None:
    code, out, err = run(capsys, "bench", "prefill", folder, "--turns", "2", "--batch-size", "3", "--dtype", "bf16")
    assert code == 0, err
    rows = told(out)
    assert rows["computed"].startswith("device ")
    assert "bfloat16; attention by sdpa" in rows["computed"]
    assert rows["read"] == "16 tokens in 3 rows"
    assert "median of 2 turns" in rows["tokens/s"]
    assert {"GFLOP/s", "matrix rate, GFLOP/s", "ratio"} <= rows.keys()
    assert "turn   2 of 2" in err


@pytest.mark.usefixtures("short")
def test_writing_is_measured_as_a_table_with_its_progress_on_stderr(capsys, folder) -> None:
    arguments = ("--turns", "2", "--prompt-tokens", "5", "--new-tokens", "4")
    code, out, err = run(capsys, "bench", "decode", folder, *arguments)
    assert code == 0, err
    rows = told(out)
    assert "float32" in rows["computed"]
    assert rows["written"] == "4 tokens after 5 in 1 row"
    assert "median of 2 turns" in rows["ms per token"]
    assert "of weights" in rows["MB read per step"]
    assert {"tokens/s", "GB/s", "memory rate, GB/s", "ratio"} <= rows.keys()
    assert "turn   2 of 2" in err


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("prefill", {"flops_per_second", "matrix_rate", "flops"}),
        ("decode", {"milliseconds_per_token", "bytes_per_second", "memory_rate", "weight_bytes", "cache_bytes"}),
    ],
)
def test_a_configuration_is_measured_with_random_weights(capsys, kind, keys) -> None:
    code, out, err = run(capsys, "bench", kind, "decoder-tiny", *SMALL[1:3], "--turns", "1", "--json")
    assert code == 0, err
    assert "random weights" in err
    found = json.loads(out)
    rates = found["tokens_per_second"]
    assert 0 < rates["min"] <= rates["median"] <= rates["max"]
    assert keys | {"ratio", "seconds", "compute", "peak_memory", "prompt_tokens", "batch_size"} <= found.keys()
    assert (found["interrupted"], found["assumed"], len(found["seconds"])) == (False, {}, 1)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_ctrl_c_shows_what_was_measured(capsys, monkeypatch, kind) -> None:
    import qkv.cli.bench

    def tell(text: str) -> None:
        if "turn   2" in text:
            raise KeyboardInterrupt

    monkeypatch.setattr(qkv.cli.bench, "_tell", tell)
    code, out, _ = run(capsys, "bench", kind, "decoder-tiny", *SMALL[1:3])
    assert code == 0
    assert "median of 2 turns" in told(out)["tokens/s"]
    assert "ratio" not in told(out)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("decode", "encoder-tiny"), 2, "does not decode"),
        (("decode", "decoder-tiny", "--new-tokens", "128"), 2, "do not fit the model's context of 128"),
        (("prefill", "decoder-tiny", "--prompt-tokens", "129"), 2, "do not fit the model's context of 128"),
        (("prefill", "decoder-tiny", "--turns", "0"), 2, "0 is not in the range"),
        (("prefill", "decoder-tniy"), 3, "decoder-tiny"),
        (("decode", "decoder-tiny", "--quantize", "keep"), 2, "random weights have no blocks to keep"),
        (("decode", "decoder-tiny", "--device", "cuda:7"), 2, "cuda"),
        (("prefill", "smollm2-not"), 3, "smollm2-not"),
    ],
)
def test_what_cannot_be_read_or_written_is_one_error(arguments, code, words, capsys) -> None:
    found, out, err = run(capsys, "bench", *arguments)
    assert (found, out) == (code, "")
    assert words in err
    assert "Traceback" not in err


def test_weights_are_not_overridden(capsys, folder) -> None:
    code, _, err = run(capsys, "bench", "decode", folder, "model.num_layers=3")
    assert code == 2
    assert "a model with weights cannot be overridden\n  at model.num_layers=3" in err


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("arguments", [("train", *SMALL, "--steps", "1"), ("prefill", "decoder-tiny", *SMALL[1:3])])
def test_commands_compute_with_as_many_threads_as_they_have_cores(capsys, monkeypatch, arguments) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "usable_cores", lambda: threads.Cores(1, "the container's limit"))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        code, out, err = run(capsys, "bench", *arguments)
    finally:
        torch.set_num_threads(before)
    assert code == 0, err
    if "device cpu" in out:
        assert "device cpu, 1 thread (the container's limit)" in told(out)["computed"]
