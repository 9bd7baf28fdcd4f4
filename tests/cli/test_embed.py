"""`qkv embed`."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from generate.tiny import model
from media_files import media_config, write_images

from qkv.cli import main
from qkv.config.run import Config
from qkv.model import Model
from qkv.nn import Transformer

LINES = ["so good", "", "a much longer text that is not good at all", "我"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "folder"
    model(family="encoder").save(path)
    return str(path)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "lines.txt"
    path.write_text("\n".join(LINES), encoding="utf-8")
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["embed", *map(str, arguments)])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def test_the_lines_of_a_file_become_an_array(folder: str, file: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    output = tmp_path / "out.npy"
    code, out, err = run(capsys, folder, file, "-o", output, "--batch-size", "2")
    assert (code, out) == (0, "")
    assert f"4 vectors of 16 numbers: the lines of {file}" in err
    found = np.load(output)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, model(family="encoder").embed(LINES), atol=2e-5)
    for arguments in ((folder, "-"), (folder,)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(file.read_bytes())))
        output.unlink()
        assert run(capsys, *arguments, "-o", output)[0] == 0
        np.testing.assert_allclose(np.load(output), found, atol=2e-5)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_texts_are_given_as_they_are(folder: str, tmp_path: Path, capsys) -> None:
    code, out, err = run(capsys, folder, "so good", "我", "--json", "--pooling", "max", "--normalise")
    found = [json.loads(line) for line in out.splitlines()]
    expected = model(family="encoder").embed(["so good", "我"], pooling="max", normalise=True)
    assert (code, err, [one["text"] for one in found]) == (0, "", ["so good", "我"])
    np.testing.assert_allclose([one["embedding"] for one in found], expected, atol=2e-5)
    output = tmp_path / "out.jsonl"
    assert run(capsys, folder, "so good", "我", "--json", "--pooling", "max", "--normalise", "-o", output)[1] == ""
    assert output.read_text(encoding="utf-8") == out
    err = run(capsys, folder, "no-such-file.txt", "-o", tmp_path / "one.npy")[2]
    assert "1 vectors of 16 numbers: the texts given" in err


def test_an_empty_file_gives_no_vectors(folder: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "empty.txt").touch()
    assert run(capsys, folder, tmp_path / "empty.txt", "-o", tmp_path / "out.npy")[0] == 0
    assert np.load(tmp_path / "out.npy").shape == (0, 16)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("text",), 2, "-o OUT.npy, or --json"),
        (("text", "-o", "no/such/out.npy"), 3, "no/such/out.npy"),
        (("text", "--json", "--pooling", "sum"), 2, "--pooling"),
        (("text", "--json", "--batch-size", "0"), 2, "--batch-size"),
    ],
)
def test_a_mistake_is_one_error_with_its_code(folder: str, arguments, code: int, said: str, capsys) -> None:
    actual, out, err = run(capsys, folder, *arguments)
    assert (actual, out) == (code, "")
    assert said in err
    assert "Traceback" not in err


def test_the_lines_that_are_read_are_not_overwritten(folder: str, file: Path, capsys) -> None:
    code, _, err = run(capsys, folder, file, "-o", file)
    assert (code, file.read_text(encoding="utf-8").split("\n")) == (2, LINES)
    assert "would replace the lines" in err


def test_a_decoder_is_refused_unless_the_last_token_is_meant(tmp_path: Path, capsys) -> None:
    model().save(tmp_path / "m")
    code, out, err = run(capsys, tmp_path / "m", "so good", "--json")
    assert (code, out) == (2, "")
    assert "the last token alone has read the whole text" in err
    assert run(capsys, tmp_path / "m", "so good", "--json", "--pooling", "last")[0] == 0


def test_a_model_of_images_reads_files(tmp_path: Path, capsys) -> None:
    write_images(tmp_path, 2)
    tree = media_config("images", "classify", "").model.model_dump()
    config = Config.model_validate({"model": {**tree, "head": {"kind": "embedding", "width": 5}}})
    of_images = Model(Transformer(config.model, generator=torch.Generator().manual_seed(0)).eval(), None, config)
    of_images.save(tmp_path / "model")
    files = [str(tmp_path / f"{number}.png") for number in range(2)]
    code, out, _ = run(capsys, tmp_path / "model", *files, "--json")
    found = [json.loads(line) for line in out.splitlines()]
    assert (code, [one["image"] for one in found]) == (0, files)
    np.testing.assert_allclose([one["embedding"] for one in found], of_images.embed(files), atol=1e-5)
    assert len(found[0]["embedding"]) == 5
    code, out, err = run(capsys, tmp_path / "model", "--json")
    assert (code, out) == (2, "")
    assert "the model reads images" in err


def test_to_evaluate_a_model_of_vectors_is_answered_with_the_command_for_it(tmp_path: Path, capsys) -> None:
    model(family="encoder", head={"kind": "none"}).save(tmp_path / "model")
    with pytest.raises(SystemExit) as stop:
        main(["eval", str(tmp_path / "model"), "--data", __file__])
    assert stop.value.code == 2
    assert capsys.readouterr().err.splitlines()[1:] == ["  try qkv embed, which writes its vectors"]
