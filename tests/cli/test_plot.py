"""`qkv plot`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from generate.tiny import byte_tokenizer, model, network
from media_files import WRITE, media_config

from qkv import Config, Transformer, load
from qkv.checkpoint.store import save_checkpoint
from qkv.cli import main
from qkv.tokenizer import Tokenizer


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


def test_a_curve_that_a_run_has_not_got_is_an_error_that_names_the_run(run_folder, tmp_path, capsys) -> None:
    code, _, err = run(capsys, "plot", "lr", run_folder, "-o", tmp_path / "a.svg", "--log-y")
    assert (code, "no learning rate yet" in err, str(run_folder) in err) == (1, True, True)


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


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Family -> a model folder."""
    folder = tmp_path_factory.mktemp("models")
    sides = {"family": "encoder-decoder", "position": {"kind": "sinusoidal"}}
    changes = {"decoder": {}, "encoder": {"family": "encoder"}, "encoder-decoder": sides}
    for family, change in changes.items():
        model(**change).save(folder / family)
    return {family: str(folder / family) for family in changes}


@pytest.mark.parametrize(
    ("family", "options", "rows", "shape", "title"),
    [
        ("decoder", "", ["<bos>", "a", "b"], [2, 4, 3, 3], "Decoder self-attention, 2 layers, 4 heads"),
        ("decoder", "--layer 1", ["<bos>", "a", "b"], [1, 4, 3, 3], "Decoder self-attention, layer 1, 4 heads"),
        ("decoder", "--layer 1 --head 2", ["<bos>", "a", "b"], [3, 3], "Decoder self-attention, layer 1, head 2"),
        ("encoder", "", ["<bos>", "a", "b", "<eos>"], [2, 4, 4, 4], "Encoder self-attention, 2 layers, 4 heads"),
        ("encoder-decoder", "--stack encoder", ["<bos>", "a", "b", "<eos>"], [2, 4, 4, 4], "Encoder self-attention"),
        ("encoder-decoder", "--target x", ["<bos>", "x"], [2, 4, 2, 2], "Decoder self-attention, 2 layers"),
        (
            "encoder-decoder",
            "--target x --kind cross",
            ["x", "<eos>"],
            [2, 4, 2, 4],
            "Decoder cross-attention, 2 layers",
        ),
        (
            "encoder-decoder",
            "--target x --kind cross --layer 0",
            ["x", "<eos>"],
            [2, 4],
            "Decoder cross-attention, layer 0, mean of 4 heads",
        ),
        (
            "encoder-decoder",
            "--target x --align",
            ["x", "<eos>"],
            [2, 4],
            "Decoder cross-attention, layer 1, mean of 4 heads",
        ),
        (
            "encoder-decoder",
            "--target x --align --layer 0 --head 3",
            ["x", "<eos>"],
            [2, 4],
            "Decoder cross-attention, layer 0, head 3",
        ),
    ],
)
def test_attention_is_plotted(folders, tmp_path, capsys, family, options, rows, shape, title) -> None:
    output = tmp_path / "a.svg"
    code, out, err = run(
        capsys, "plot", "attention", folders[family], "--text", "ab", *options.split(), "-o", output, "--json"
    )
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["path"], found["rows"], found["shape"]) == (str(output), rows, shape)
    assert len(found["columns"]) == shape[-1]
    assert ("weights" in found) == (len(shape) == 2)
    for row in found.get("weights", []):
        assert len(row) == shape[1]
        assert sum(row) == pytest.approx(1)
    drawn = output.read_text(encoding="utf-8")
    assert title in drawn
    assert "Attention weights are not causes: ablate to check; config " in drawn


def test_without_a_target_an_encoder_decoder_s_own_output_is_aligned(folders, tmp_path, capsys) -> None:
    count = len(load(folders["encoder-decoder"], device="cpu").translate("ab").token_ids)
    arguments = ("plot", "attention", folders["encoder-decoder"], "--text", "ab", "--align", "-o", tmp_path / "a.png")
    code, out, _ = run(capsys, *arguments, "--json")
    assert (code, json.loads(out)["shape"]) == (0, [count, 4])
    assert run(capsys, *arguments) == (0, "", f"wrote {tmp_path / 'a.png'}\n")


@pytest.mark.parametrize(
    ("kind", "file", "columns", "said"),
    [("images", "0.png", 3, ["what is read", "elsewhere)"]), ("audio", "0.wav", 16, ["mel", "seconds"])],
)
def test_attention_is_drawn_upon_an_image_and_below_a_recording(tmp_path, capsys, kind, file, columns, said) -> None:
    WRITE[kind](tmp_path, 1)
    config = media_config(kind, "translate", "files.tsv")
    config = config.model_copy(update={"model": config.model.with_vocab_size(260)})
    save_checkpoint(tmp_path / "model", Transformer(config.model), config, byte_tokenizer())
    arguments = ("plot", "attention", tmp_path / "model", "--file", tmp_path / file, "-o", tmp_path / "a.svg", "--json")
    code, out, err = run(capsys, *arguments, "--align", "--target", "ab")
    assert code == 0, err
    found = json.loads(out)
    assert (found["rows"], found["shape"]) == (["a", "b", "<eos>"], [3, columns])
    assert found.get("grid") == ([1, 2] if kind == "images" else None)
    assert all(sum(row) == pytest.approx(1) for row in found["weights"])
    drawn = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert all(words in drawn for words in ("Decoder cross-attention, layer 0, mean of 2 heads", *said))
    code, _, err = run(capsys, "plot", "attention", tmp_path / "model", "--text", "ab", "-o", tmp_path / "b.svg")
    assert (code, "--file FILE" in err) == (2, True)


def test_a_source_is_read_by_its_own_tokenizer(tmp_path, capsys) -> None:
    letters = Tokenizer.train("abc", kind="char")
    encoder = {"vocab_size": letters.vocab_size}
    pair = network(family="encoder-decoder", position={"kind": "sinusoidal"}, encoder=encoder)
    config = Config(model=pair.config)
    save_checkpoint(tmp_path / "both", pair, config, byte_tokenizer(), source_tokenizer=letters)
    arguments = ("--text", "cab", "--target", "é", "--align", "-o", tmp_path / "a.png", "--json")
    code, out, err = run(capsys, "plot", "attention", tmp_path / "both", *arguments)
    assert code == 0, err
    assert json.loads(out)["rows"] == ["\\xc3", "\\xa9", "<eos>"]
    assert json.loads(out)["columns"] == ["<bos>", "c", "a", "b", "<eos>"]


@pytest.mark.parametrize(
    ("family", "options", "said"),
    [
        ("decoder", "--layer 2", "layers 0 to 1, got 2"),
        ("decoder", "--layer -1", "layers 0 to 1, got -1"),
        ("decoder", "--layer 1 --head 4", "heads 0 to 3, got 4"),
        ("decoder", "--head 1", "--layer N --head 1"),
        ("decoder", "--kind cross", "only the decoder of an encoder-decoder"),
        ("decoder", "--align", "only the decoder of an encoder-decoder"),
        ("decoder", "--target x", "no target"),
        ("decoder", "--stack encoder", "no encoder"),
        ("encoder-decoder", "--target x --align --kind self", "--align without --kind self"),
        ("encoder-decoder", "--target x --stack encoder", "no target"),
        ("encoder-decoder", "--stack encoder --align", "only the decoder of an encoder-decoder"),
        ("encoder-decoder", "--kind both", "both"),
    ],
)
def test_attention_that_is_not_there_exits_with_2(folders, tmp_path, capsys, family, options, said) -> None:
    output = tmp_path / "a.png"
    code, out, err = run(capsys, "plot", "attention", folders[family], "--text", "ab", *options.split(), "-o", output)
    assert (code, out) == (2, "")
    assert said in err
    assert not output.exists()


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
        (("plot", "grad-norm", "gone", "-o", "a.png"), 3, "no such run"),
        (("plot", "speed", "gone", "-o", "a.gif"), 2, "PNG"),
        (("plot", "positions", "llama-tiny", "-o", "a.png"), 2, "rope"),
        (("plot", "positions", "encoder-tiny", "-o", "a.png"), 2, "weights"),
        (("plot", "positions", "attention-is-all-you-need", "--length", "-3", "-o", "a.png"), 2, "-3"),
        (("plot", "positions", "no-such", "-o", "a.png"), 3, "no-such"),
        (("plot", "attention", "no-such", "--text", "a", "-o", "a.png"), 3, "no-such"),
        (("plot", "attention", "no-such", "--text", "a", "-o", "a.jpg"), 2, ".jpg"),
        (("plot", "attention", "no-such", "-o", "a.png"), 2, "--text"),
        (("plot", "attention", "no-such", "--text", "a", "--file", "a.wav", "-o", "a.png"), 2, "--file"),
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
