"""`qkv classify`."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from generate.tiny import byte_tokenizer, model, network

from qkv.cli import main
from qkv.config.objectives import ClassifyObjectiveConfig
from qkv.config.run import Config
from qkv.model import Model

LINES = ["so good", "", "a much longer text that is not good at all", "我"]
LABELS = ("bad", "一般", "good")


def classifier() -> Model:
    made = network(family="encoder", head={"kind": "classifier", "num_classes": 3, "pooling": "mean"})
    return Model(made, byte_tokenizer(), Config(model=made.config, objective=ClassifyObjectiveConfig(labels=LABELS)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "folder"
    classifier().save(path)
    return str(path)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "lines.txt"
    path.write_text("\n".join(LINES), encoding="utf-8")
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["classify", *map(str, arguments)])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def test_texts_come_with_their_classes_likeliest_first(folder: str, capsys) -> None:
    code, out, err = run(capsys, folder, "so good", "我", "--top", "2")
    expected = []
    for text in ("so good", "我"):
        found = classifier().classify(text, top=2).probabilities
        expected += [text, *(f"  {p:>7.2%}  {label}" for label, p in found.items())]
    assert (code, out.splitlines(), err) == (0, expected, "")


def test_each_line_of_a_file_gives_a_label_and_its_probability(folder: str, file: Path, capsys, monkeypatch) -> None:
    code, out, err = run(capsys, folder, "--file", file, "--batch-size", "2")
    expected = [f"{found.label}\t{found.probability:.4f}" for found in classifier().classify(LINES)]
    assert (code, out.splitlines()) == (0, expected)
    assert err.startswith("4 lines in ")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(file.read_bytes())))
    assert run(capsys, folder, "--file", "-")[:2] == (0, out)
    output = file.with_name("out.txt")
    assert run(capsys, folder, "--file", file, "-o", output)[:2] == (0, "")
    assert output.read_text(encoding="utf-8") == out


def test_json_has_an_object_per_text(folder: str, file: Path, capsys) -> None:
    code, out, err = run(capsys, folder, "--file", file, "--json")
    found = [json.loads(line) for line in out.splitlines()]
    assert (code, err, [one["text"] for one in found]) == (0, "", LINES)
    for one, expected in zip(found, classifier().classify(LINES), strict=True):
        assert (one["label"], list(one["probabilities"])) == (expected.label, list(expected.probabilities))
        assert one["probability"] == pytest.approx(expected.probability)
    alone = json.loads(run(capsys, folder, "so good", "--json")[1])
    assert (alone["text"], alone["label"], alone["probability"]) == (
        "so good",
        found[0]["label"],
        pytest.approx(found[0]["probability"]),
    )


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ((), 2, "nothing to classify"),
        (("a", "--file", "b"), 2, "texts and a file"),
        (("--file", "gone.txt"), 3, "gone.txt"),
        (("a", "--top", "0"), 2, "--top"),
        (("a", "--batch-size", "0"), 2, "--batch-size"),
        (("a", "--device", "abacus"), 2, "abacus"),
        (("a", "-o", "no/such/folder"), 3, "no/such/folder"),
    ],
)
def test_a_mistake_is_one_error_with_its_code(folder: str, arguments, code: int, said: str, capsys) -> None:
    actual, out, err = run(capsys, folder, *arguments)
    assert (actual, out) == (code, "")
    assert said in err
    assert "Traceback" not in err


def test_a_model_that_does_not_classify_is_refused_by_name(tmp_path: Path, capsys) -> None:
    model().save(tmp_path / "m")
    code, out, err = run(capsys, tmp_path / "m", "so good")
    assert (code, out) == (2, "")
    assert "family decoder with a head of kind language-model does not classify" in err
