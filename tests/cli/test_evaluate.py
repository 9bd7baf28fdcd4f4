"""`qkv eval`."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from qkv import Config, Transformer
from qkv.checkpoint.store import save_checkpoint
from qkv.cli import main
from qkv.tokenizer.tokenizer import Tokenizer

TEXT = "to be or not to be, that is the question. 我爱你\n" * 4


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def make_model(folder: Path, *overrides: str, tokenizer: Tokenizer | None) -> Path:
    small = ("model.d_model=16", "model.num_layers=1", "model.max_seq_len=32", "model.vocab_size=300")
    config = Config.load("decoder-tiny", *small, "model.feed_forward.d_ff=24", *overrides)
    network = Transformer(config.model, generator=torch.Generator().manual_seed(0))
    save_checkpoint(folder, network, config, tokenizer)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("eval") / "model", tokenizer=Tokenizer.train([], kind="byte"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_json_has_the_promised_keys_and_they_agree(model, text, capsys) -> None:
    code, out, err = run(capsys, "eval", model, "--data", text, "--json")
    figures = json.loads(out)
    assert (code, err) == (0, "")
    assert figures["tokens"] == len(TEXT.encode())
    assert figures["perplexity"] == pytest.approx(math.exp(figures["loss"]))
    bits = figures["loss"] * figures["tokens"] / math.log(2)
    assert figures["bits_per_byte"] == pytest.approx(bits / len(TEXT.encode()))


def test_the_same_figures_are_told_to_people(model, text, capsys) -> None:
    figures = json.loads(run(capsys, "eval", model, "--data", text, "--json")[1])
    code, out, _ = run(capsys, "eval", model, "--data", text)
    assert code == 0
    for name in ("loss", "perplexity", "bits_per_byte"):
        assert f"{figures[name]:.4f}" in out


def test_the_batch_size_does_not_change_the_figures_and_the_stride_does(model, text, capsys) -> None:
    def loss(*options: str) -> float:
        return float(json.loads(run(capsys, "eval", model, "--data", text, "--json", *options)[1])["loss"])

    assert loss("--batch-size", "1") == pytest.approx(loss("--batch-size", "7"), rel=1e-6)
    assert loss("--window", "32", "--stride", "32") == pytest.approx(loss(), rel=1e-6)
    assert abs(loss("--stride", "5") - loss()) > 1e-6


def test_max_windows_limits_the_tokens(model, text, capsys) -> None:
    options = ("--window", "20", "--stride", "10", "--max-windows", "3", "--json")
    assert json.loads(run(capsys, "eval", model, "--data", text, *options)[1])["tokens"] == 20 + 10 + 10


@pytest.mark.parametrize(
    ("asked", "loaded"), [((), "fp32"), (("--dtype", "fp32"), "fp32"), (("--dtype", "bf16"), "bf16")]
)
def test_figures_are_float32_unless_asked_otherwise(model, text, capsys, monkeypatch, asked, loaded: str) -> None:
    import qkv.model

    seen: dict[str, object] = {}
    load = qkv.model.load
    monkeypatch.setattr(qkv.model, "load", lambda path, **options: load(path, **(seen.update(options) or options)))
    code, _, err = run(capsys, "eval", model, "--data", text, *asked, "--allow-package", "mine")
    assert code == 0, err
    assert seen == {"device": "auto", "dtype": loaded, "allow": ("mine",)}


def test_without_data_the_run_s_validation_data_are_scored(tmp_path, text, capsys, monkeypatch) -> None:
    monkeypatch.setenv("QKV_CACHE", str(tmp_path / "cache"))
    tokenizer = Tokenizer.train([], kind="byte")
    model = make_model(tmp_path / "m", f"data.validation=[{text}]", "data.train=[gone.txt]", tokenizer=tokenizer)
    figures = json.loads(run(capsys, "eval", model, "--json")[1])
    assert figures["tokens"] == len(TEXT.encode()) + 1  # and the end
    assert figures["bytes"] == len(TEXT.encode())


def test_an_encoder_is_scored_on_masked_tokens(tmp_path, text, capsys) -> None:
    tokenizer = Tokenizer.train([], kind="byte")
    overrides = ("model.family=encoder", "model.position.kind=learned", "objective={kind: masked, rate: 0.5}")
    model = make_model(tmp_path / "m", *overrides, tokenizer=tokenizer)
    code, out, _ = run(capsys, "eval", model, "--data", text, "--json")
    figures = json.loads(out)
    assert code == 0
    assert figures["tokens"] == pytest.approx(len(TEXT.encode()) / 2, rel=0.05)
    assert figures["bits_per_byte"] is None
    code, _, err = run(capsys, "eval", model, "--data", text, "--stride", "2")
    assert (code, "--stride" in err) == (2, True)


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--window", "0"), 2, "window must be at least 1"),
        (("--window", "-4"), 2, "window must be at least 1"),
        (("--window", "33"), 2, "at most 32"),
        (("--window", "8", "--stride", "9"), 2, "stride 9"),
        (("--stride", "0"), 2, "stride must be at least 1"),
        (("--max-windows", "0"), 2, "max_windows"),
        (("--batch-size", "-1"), 2, "batch_size"),
        (("--task", "bleu"), 2, "`bleu`"),
        (("--device", "gpu"), 2, "device"),
        (("--dtype", "int4"), 2, "int4"),
    ],
)
def test_a_wrong_option_exits_with_its_code(model, text, capsys, options, code: int, said: str) -> None:
    actual, out, err = run(capsys, "eval", model, "--data", text, *options)
    assert (actual, out) == (code, "")
    assert said in err


@pytest.mark.parametrize(
    ("content", "code", "said"),
    [
        (None, 3, "no such file"),
        (b"", 1, "no text"),
        (b" \n", 1, "no text"),
        (b"ab\xffc", 1, "--bad-bytes"),
        ("ab".encode("utf-16"), 1, "UTF-16"),
    ],
)
def test_a_file_that_cannot_be_scored_is_one_message(model, tmp_path, capsys, content, code: int, said: str) -> None:
    path = tmp_path / "a.txt"
    if content is not None:
        path.write_bytes(content)
    actual, out, err = run(capsys, "eval", model, "--data", path, "--json")
    assert (actual, out) == (code, "")
    assert said in err
    assert "Traceback" not in err


def test_bad_bytes_are_dropped_on_request(model, tmp_path, capsys) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"ab\xffc")
    code, out, _ = run(capsys, "eval", model, "--data", path, "--bad-bytes", "drop", "--json")
    assert (code, json.loads(out)["tokens"]) == (0, 3)


def test_text_of_a_single_token_is_refused_where_nothing_stands_before_it(tmp_path, capsys) -> None:
    model = make_model(tmp_path / "m", tokenizer=Tokenizer.train([], kind="byte", special={"eos": "<eos>"}))
    path = tmp_path / "a.txt"
    path.write_text("a", encoding="utf-8")
    code, _, err = run(capsys, "eval", model, "--data", path)
    assert code == 1
    assert "1 token" in err


def test_a_model_that_is_missing_or_cannot_be_scored_is_refused(tmp_path, text, capsys) -> None:
    code, _, err = run(capsys, "eval", tmp_path / "gone", "--data", text)
    assert (code, "gone" in err) == (3, True)
    silent = make_model(tmp_path / "silent", tokenizer=None)
    code, _, err = run(capsys, "eval", silent, "--data", text)
    assert (code, "no tokenizer" in err) == (2, True)
    dataless = make_model(tmp_path / "dataless", tokenizer=Tokenizer.train([], kind="byte"))
    code, _, err = run(capsys, "eval", dataless)
    assert (code, "--data" in err) == (2, True)


def test_a_figure_that_json_cannot_hold_is_null(model, text, capsys, monkeypatch) -> None:
    import qkv.evaluate.perplexity as module

    monkeypatch.setattr(module, "perplexity", lambda *_, **__: module.Scores(900.0, math.inf, 0.0, 5))
    out = run(capsys, "eval", model, "--data", text, "--json")[1]
    assert json.loads(out, parse_constant=pytest.fail)["perplexity"] is None
