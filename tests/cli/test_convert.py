"""`qkv convert`, and `--torch-bin`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from generate.tiny import model
from safetensors.torch import load_file

import qkv
from qkv.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "folder"
    model().save(path)
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def test_a_model_goes_to_the_other_format_and_back(folder: Path, tmp_path: Path, capsys) -> None:
    code, out, err = run(capsys, "convert", folder, "--to", "hf", "-o", tmp_path / "theirs")
    assert (code, out, err) == (0, "", f"written: {tmp_path / 'theirs'}\n")
    code, out, _ = run(capsys, "convert", tmp_path / "theirs", "--to", "qkv", "-o", tmp_path / "ours", "--json")
    assert (code, json.loads(out)) == (0, {"output": str(tmp_path / "ours"), "format": "qkv"})
    ours, before = load_file(tmp_path / "ours" / "model.safetensors"), load_file(folder / "model.safetensors")
    assert ours.keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in ours.items())


def test_weights_keep_their_precision_unless_told(folder: Path, tmp_path: Path, capsys) -> None:
    half = tmp_path / "half"
    assert run(capsys, "convert", folder, "--to", "hf", "-o", half, "--dtype", "bf16")[0] == 0
    assert run(capsys, "convert", half, "--to", "hf", "-o", tmp_path / "again")[0] == 0
    for name in ("half", "again"):
        tensors = load_file(tmp_path / name / "model.safetensors")
        assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
        assert json.loads((tmp_path / name / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_what_cannot_be_written_is_refused(folder: Path, tmp_path: Path, capsys) -> None:
    code, _, err = run(capsys, "convert", folder, "--to", "gguf", "-o", tmp_path / "x")
    assert (code, "'hf', 'qkv'" in err) == (2, True)
    code, _, err = run(capsys, "convert", folder, "--to", "hf", "-o", folder)
    assert (code, "something at the Hugging Face folder's place" in err) == (5, True)
    code, _, err = run(capsys, "convert", tmp_path / "nowhere", "--to", "hf", "-o", tmp_path / "x")
    assert code == 3
    assert not (tmp_path / "x").exists()


def test_a_pickle_is_read_only_when_asked_for(folder: Path, tmp_path: Path, capsys) -> None:
    qkv.load(folder, device="cpu").save_hf(tmp_path / "theirs")
    weights = tmp_path / "theirs" / "model.safetensors"
    torch.save(load_file(weights), tmp_path / "theirs" / "pytorch_model.bin")
    weights.unlink()
    command = ("generate", tmp_path / "theirs", "--prompt", "a", "--max-new-tokens", 1, "--seed", 0, "--json")
    code, _, err = run(capsys, *command)
    assert (code, "--torch-bin" in err) == (4, True)
    code, out, _ = run(capsys, *command, "--torch-bin")
    assert code == 0
    expected = qkv.load(folder).generate("a", max_new_tokens=1, seed=0)
    assert json.loads(out)["token_ids"] == expected.token_ids
