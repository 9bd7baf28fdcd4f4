"""`qkv selfcheck` and `qkv parity`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from generate.tiny import model

from qkv.cli import main
from qkv.model import Model
from qkv.nn.kernels import KERNELS, TiledKernel


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "folder"
    model().save(path)
    return path


@pytest.fixture(autouse=True)
def _without_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its calls takes half a second on a CPU."""
    monkeypatch.delitem(KERNELS, "flex")


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([*map(str, arguments)])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


# --- selfcheck --------------------------------------------------------------------------------------------------------


def test_each_check_is_a_line_with_its_number_its_tolerance_and_a_verdict(folder: Path, capsys) -> None:
    code, out, err = run(capsys, "selfcheck", folder, "--no-compile")
    head, *lines = out.splitlines()
    assert (code, err) == (0, "")
    assert head.split() == ["largest", "difference", "tolerance", "verdict"]
    assert all(line.endswith("ok") for line in lines[:-1])
    assert lines[-1].split() == ["compiled", "left", "out"]
    assert any("0 tokens" in line for line in lines)


def test_json_has_every_check_and_one_verdict(folder: Path, capsys, monkeypatch) -> None:
    found = json.loads(run(capsys, "selfcheck", folder, "--no-compile", "--json")[1])
    assert found["ok"] is True
    assert {"name", "unit", "difference", "tolerance", "note", "failed", "ok"} == set(found["checks"][0])
    usual = TiledKernel.forward
    monkeypatch.setattr(TiledKernel, "forward", lambda self, *given: 1.01 * usual(self, *given))
    code, out, _ = run(capsys, "selfcheck", folder, "--no-compile", "--json")
    assert (code, json.loads(out)["ok"]) == (1, False)
    code, out, _ = run(capsys, "selfcheck", folder, "--no-compile")
    assert code == 1
    assert [line.split()[1] for line in out.splitlines() if line.endswith("FAILED")] == ["tiled"]


def test_of_bfloat16_nothing_is_promised(folder: Path, capsys) -> None:
    code, out, _ = run(capsys, "selfcheck", folder, "--no-compile", "--dtype", "bf16")
    assert code == 0
    assert "not promised" in out
    assert not any(line.endswith("ok") for line in out.splitlines())


# --- parity -----------------------------------------------------------------------------------------------------------


def changed(folder: Path, name: str) -> Path:
    """The model with one weight moved."""
    made = model()
    with torch.no_grad():
        made.network.get_parameter(name).mul_(1.01)
    made.save(folder / "changed")
    return folder / "changed"


def test_a_model_of_ours_is_compared_with_transformers(folder: Path, capsys) -> None:
    code, out, err = run(capsys, "parity", folder)
    assert code == 0
    assert [line.split("  ")[0] for line in out.splitlines()[1:]] == [
        "logits",
        "log-probabilities",
        "with a cache",
        "decoder embedding",
        "decoder layer 0",
        "decoder layer 1",
    ]
    assert "DIFFERS" not in out
    assert "4 sequences" in err


def test_the_first_layer_that_differs_from_another_model_is_named(folder: Path, tmp_path: Path, capsys) -> None:
    other = changed(tmp_path, "decoder.blocks.1.feed_forward.function.up.weight")
    code, out, err = run(capsys, "parity", folder, "--against", other)
    assert code == 1
    assert "the models differ, from decoder layer 1 on" in err
    assert [line.split("  ")[0] for line in out.splitlines() if line.endswith("DIFFERS")] == [
        "logits",
        "log-probabilities",
        "with a cache",
        "decoder layer 1",
    ]
    found = json.loads(run(capsys, "parity", folder, "--against", other, "--json")[1])
    assert (found["ok"], found["first_layer"]) == (False, "decoder layer 1")
    assert found["logits"]["absolute"] > found["tolerance"]
    assert run(capsys, "parity", folder, "--against", other, "--tolerance", "100")[0] == 0
    assert run(capsys, "parity", folder, "--against", folder)[0] == 0


def test_what_is_no_number_is_no_number_in_json(folder: Path, tmp_path: Path, capsys) -> None:
    made = model()
    with torch.no_grad():
        made.network.get_parameter("decoder.final_norm.weight")[0] = float("nan")
    made.save(tmp_path / "nan")
    code, out, _ = run(capsys, "parity", folder, "--against", tmp_path / "nan", "--json")
    assert code == 1
    assert json.loads(out, parse_constant=pytest.fail)["logits"]["absolute"] is None


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--against", "no/such/model"), 3, "no/such/model"),
        (("--tolerance", "a"), 2, "--tolerance"),
        (("--tolerance", "-1"), 2, "--tolerance"),
    ],
)
def test_a_mistake_is_one_error_with_its_code(folder: Path, arguments, code: int, said: str, capsys) -> None:
    actual, out, err = run(capsys, "parity", folder, *arguments)
    assert (actual, out) == (code, "")
    assert said in err
    assert "Traceback" not in err


def test_a_model_that_is_published_nowhere_cannot_be_compared_with_transformers(tmp_path: Path, capsys) -> None:
    made = model(norm={"kind": "rmsnorm", "placement": "sandwich"}, position={"kind": "learned"})
    Model(made.network, made.tokenizer, made.config).save(tmp_path / "m")
    code, out, err = run(capsys, "parity", tmp_path / "m")
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    assert "no published architecture is this model" in err
    assert "try --against MODEL" in err
