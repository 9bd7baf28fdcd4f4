"""`qkv fill-mask`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from generate.tiny import model

from qkv.cli import main
from qkv.model import Model
from qkv.tokenizer import Tokenizer


def encoder() -> Model:
    tokenizer = Tokenizer.train(["the cat sat on the mat", "我爱你"], kind="char")
    head = {"kind": "masked-language-model"}
    return model(tokenizer, family="encoder", position={"kind": "learned"}, head=head)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "folder"
    encoder().save(path)
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["fill-mask", *map(str, arguments)])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def test_json_has_an_object_per_text_and_a_list_per_mask(folder: str, capsys) -> None:
    texts = ["the [MASK]at", "<mask>at [MASK]at", "我[MASK]你"]
    code, out, err = run(capsys, folder, *texts, "--top", "3", "--json")
    found = [json.loads(line) for line in out.splitlines()]
    expected = encoder().fill_mask(texts, top=3)
    assert (code, err, [one["text"] for one in found]) == (0, "", texts)
    assert [len(one["masks"]) for one in found] == [1, 2, 1]
    assert found[1]["masks"][1] == [asdict(guess) for guess in expected[1][1]]
    assert [guess["token"] for guess in found[2]["masks"][0]] == [guess.token for guess in expected[2]]


def test_people_read_each_text_and_the_probabilities_of_its_guesses(folder: str, capsys) -> None:
    code, out, err = run(capsys, folder, "我[MASK]你", "[MASK]at<mask>", "--top", "2")
    alone, (first, second) = (encoder().fill_mask(text, top=2) for text in ("我[MASK]你", "[MASK]at<mask>"))
    alone, first, second = (
        [f"  {guess.probability:>7.2%}  {guess.token!r}" for guess in guesses] for guesses in (alone, first, second)
    )
    assert (code, err) == (0, "")
    assert out.splitlines() == ["我[MASK]你", *alone, "[MASK]at<mask>", "  mask 1", *first, "  mask 2", *second]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "TEXT"),
        (("no gap",), "no mask"),
        (("a [MASK]", "--top", "0"), "--top"),
        (("a [MASK]", "--device", "abacus"), "abacus"),
    ],
)
def test_a_mistake_exits_with_2_and_says_what_is_wrong(folder: str, arguments, said: str, capsys) -> None:
    code, out, err = run(capsys, folder, *arguments)
    assert (code, out) == (2, "")
    assert said in err


def test_a_model_that_fills_no_mask_is_refused_by_name(tmp_path: Path, capsys) -> None:
    model().save(tmp_path / "m")
    code, _, err = run(capsys, tmp_path / "m", "a [MASK]")
    assert code == 2
    assert "family decoder has no masked-language-model head" in err
    assert run(capsys, tmp_path / "gone", "a [MASK]")[0] == 3
