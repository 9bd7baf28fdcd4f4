"""Files of pairs and of texts with labels are read record by record, and no record loses its partner."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.config.data import LabelledDataConfig, ParallelDataConfig
from qkv.config.errors import NotFoundError, QkvError
from qkv.data import records
from qkv.data.documents import lines_of, whole
from qkv.data.records import check_sides, count_lines, files_of, read_labels, read_side, read_texts

PAIRS = [("a dog", "ein Hund"), ("two cats", "zwei Katzen"), ("我爱你", "I love you")]
SOURCES, TARGETS = ([pair[side] for pair in PAIRS] for side in (0, 1))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str, text: str | bytes) -> str:
    Path(name).write_bytes(text.encode() if isinstance(text, str) else text)
    return name


def parallel(train: Any, **options: Any) -> ParallelDataConfig:
    return ParallelDataConfig.model_validate({"train": train, **options})


def labelled(train: Any, **options: Any) -> LabelledDataConfig:
    return LabelledDataConfig.model_validate({"train": train, **options})


def sides(data: ParallelDataConfig) -> tuple[list[str], list[str]]:
    source, target = (list(whole(read_side(data, "train", side))) for side in ("source", "target"))
    return source, target


def examples(data: LabelledDataConfig) -> list[tuple[str, str]]:
    labels = [label for label, _ in read_labels(data, "train")]
    return list(zip(whole(read_texts(data, "train")), labels, strict=True))


def lines(texts: list[str]) -> str:
    return "".join(f"{text}\n" for text in texts)


def tsv(pairs: list[tuple[str, str]]) -> str:
    return lines([f"{source}\t{target}" for source, target in pairs])


def jsonl(pairs: list[tuple[str, str]]) -> str:
    return lines([json.dumps({"source": source, "target": target}) for source, target in pairs])


# --- pairs ------------------------------------------------------------------------------------------------------------


def test_two_files_tsv_and_jsonl_give_the_same_pairs() -> None:
    forms = [
        {"source": write("a.en", lines(SOURCES)), "target": write("a.de", lines(TARGETS))},
        {"source": [write("b.en", "\ufeff" + lines(SOURCES).replace("\n", "\r\n"))], "target": ["a.de"]},
        {"source": write("c.en", lines(SOURCES).removesuffix("\n")), "target": "a.de"},
        {"source": write("d.en.gz", gzip.compress(lines(SOURCES).encode())), "target": "a.de"},
        {"source": "a.en", "target": write("d.de.xz", lzma.compress(lines(TARGETS).encode()))},
        write("a.tsv", tsv(PAIRS)),
        [write("b.tsv", tsv(PAIRS[:1])), write("c.tsv.gz", gzip.compress(tsv(PAIRS[1:]).encode()))],
        write("a.jsonl", jsonl(PAIRS)),
        write("b.jsonl.xz", lzma.compress(jsonl(PAIRS).encode())),
        [write("c.jsonl", "\n" + jsonl(PAIRS[:2])), write("d.tsv", "\n" + tsv(PAIRS[2:]) + "\n")],
    ]
    for form in forms:
        assert sides(parallel(form)) == (SOURCES, TARGETS), form
        assert sides(parallel(form, reverse=True)) == (TARGETS, SOURCES), form


def test_lines_end_at_line_feeds_only_so_that_pairs_stay_together() -> None:
    """What `str.splitlines` takes for the end of a line would shift all pairs after it."""
    odd = ["a\u2028b", "c\x0cd", "e\x85f", "g\x1ch", "i\rj", "k\u2029l\x0bm"]
    plain = [str(number) for number in range(len(odd))]
    pairs = list(zip(odd, plain, strict=True))
    write("odd", lines(odd))
    write("plain", lines(plain))
    for form in ({"source": "odd", "target": "plain"}, write("a.tsv", tsv(pairs)), write("a.jsonl", jsonl(pairs))):
        assert sides(parallel(form)) == (odd, plain)


def test_a_blank_side_keeps_its_place() -> None:
    data = parallel({"source": write("a", "one\n\ufeff\n  \nfour\n"), "target": write("b", "eins\nzwei\ndrei\n\n")})
    assert sides(data) == (["one", "", "", "four"], ["eins", "zwei", "drei", ""])


def test_a_long_line_comes_in_pieces_of_one_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "PIECE_CHARACTERS", 8)
    text = "a few words, more than fit"
    pieces = list(read_side(parallel({"source": write("a", text), "target": write("b", "x")}), "train", "source"))
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert len(pieces) > 2


def test_keys_name_what_is_the_source_and_the_target() -> None:
    write("a.jsonl", lines([json.dumps({"en": "a dog", "de": "ein Hund", "id": 3})]))
    assert sides(parallel("a.jsonl", source_key="en", target_key="de")) == (["a dog"], ["ein Hund"])
    assert sides(parallel("a.jsonl", source_key="en", target_key="de", reverse=True)) == (["ein Hund"], ["a dog"])


def test_the_files_of_a_side_are_those_that_hold_it() -> None:
    data = parallel({"source": ["a", "b"], "target": ["c", "d"]}, validation=["e.tsv"])
    assert files_of(data, "train") == ("a", "b", "c", "d")
    assert files_of(data, "train", "target") == ("c", "d")
    assert files_of(data.model_copy(update={"reverse": True}), "train", "target") == ("a", "b")
    assert files_of(data, "validation", "source") == files_of(data, "validation", "target") == ("e.tsv",)
    assert files_of(parallel("a.tsv"), "validation") == ()


def test_unequal_counts_are_refused_file_by_file() -> None:
    """Equal sums do not make pairs."""
    write("two", "a\nb\n")
    write("three", "a\nb\nc\n")
    with pytest.raises(QkvError, match=r"two has 2 lines and three has 3") as caught:
        check_sides(parallel({"source": ["two", "three"], "target": ["three", "two"]}), "train")
    assert caught.value.where == "three"
    with pytest.raises(QkvError, match=r"three has 3 lines and two has 2"):
        check_sides(parallel({"source": "three", "target": "two"}), "train")
    check_sides(parallel({"source": ["two", "three"], "target": ["two", "three"]}), "train")
    check_sides(parallel("absent.tsv"), "train")


@settings(max_examples=100, deadline=None)
@given(
    content=st.lists(st.sampled_from([b"a", b"\n", b"\r\n", b"\r", b"\xe6\x88\x91", b"\xff", b"\xe6"])).map(b"".join)
)
def test_lines_are_counted_as_they_are_read(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "counted"
    path.write_bytes(content)
    for bad_bytes in ("replace", "drop"):
        assert count_lines(path, bad_bytes) == len(list(lines_of(path, bad_bytes)))


@pytest.mark.parametrize(
    ("name", "content", "said", "where"),
    [
        ("a.tsv", "a\tb\nc\n", "this line has 0 tabs", "a.tsv:2"),
        ("a.tsv", "a\tb\n\nc\td\te\n", "this line has 2 tabs", "a.tsv:3"),
        ("a.jsonl", jsonl(PAIRS) + '{"source": "a"}\n', "no key `target`", "a.jsonl:4"),
        ("a.jsonl", '{"source": "a", "target": null}\n', "`target` is not a string", "a.jsonl:1"),
        ("a.jsonl", "[]\n", "expected a JSON object", "a.jsonl:1"),
        ("a.jsonl", "a\tb\n", "not JSON", "a.jsonl:1"),
        ("a.tsv", b"a\tb\xff\n", "not UTF-8: 0xff", "a.tsv: byte 3"),
        ("a.tsv", "a\tb\nc\td\n".encode("utf-16"), "UTF-16", "a.tsv"),
    ],
)
def test_what_is_no_pair_is_named_by_file_and_line(name: str, content: str | bytes, said: str, where: str) -> None:
    with pytest.raises(QkvError, match=said) as caught:
        sides(parallel(write(name, content)))
    assert caught.value.where == where


def test_files_that_are_missing_or_no_text_are_named() -> None:
    write("a", "x\ny\n")
    with pytest.raises(NotFoundError, match="no such file"):
        sides(parallel({"source": "gone", "target": "a"}))
    with pytest.raises(QkvError, match="UTF-16") as caught:
        sides(parallel({"source": write("wide", "x\ny\n".encode("utf-16")), "target": "a"}))
    assert caught.value.where == "wide"
    with pytest.raises(QkvError, match="cut off"):
        sides(parallel({"source": write("b.gz", gzip.compress(b"x\ny\n")[:-9]), "target": "a"}))
    bad = {"source": write("bad", b"\xffx\ny\n"), "target": "a"}
    with pytest.raises(QkvError, match="0xff"):
        sides(parallel(bad))
    assert sides(parallel(bad, bad_bytes="drop")) == (["x", "y"], ["x", "y"])


# --- texts with a label -----------------------------------------------------------------------------------------------


def test_tsv_csv_and_jsonl_give_the_same_examples() -> None:
    expected = [('good, very "good"', "pos"), ("bad\u2028", "neg"), ("", "pos")]
    write("a.tsv", "id\ttext\tlabel\n" + lines([f"{n}\t{t}\t{label}" for n, (t, label) in enumerate(expected)]))
    write("a.csv", 'label,text\r\npos,"good, very ""good"""\r\n\r\nneg,bad\u2028\r\npos,\r\n')
    write("a.jsonl", lines([json.dumps({"label": label, "text": text}) for text, label in expected]))
    write("b.tsv.gz", gzip.compress(Path("a.tsv").read_bytes()))
    for name in ("a.tsv", "a.csv", "a.jsonl", "b.tsv.gz"):
        assert examples(labelled(name)) == expected, name
    assert examples(labelled(["a.csv", "a.jsonl"])) == expected * 2


def test_a_csv_field_in_quotes_may_hold_lines() -> None:
    write("a.csv", 'text,label\n"one\n\ntwo",x\nthree,y\n')
    assert examples(labelled("a.csv")) == [("one\n\ntwo", "x"), ("three", "y")]


def test_the_columns_are_found_by_their_names() -> None:
    write("a.csv", "\ufeffreview , stars\ngood, 5 \n")
    assert examples(labelled("a.csv", text_key="review", label_key="stars")) == [("good", "5")]


def test_labels_that_are_no_strings_in_json_are_spelled_as_there() -> None:
    write("a.jsonl", lines([json.dumps({"text": "x", "label": label}) for label in (1, 0, True, "1")]))
    assert [label for _, label in examples(labelled("a.jsonl"))] == ["1", "0", "true", "1"]


@pytest.mark.parametrize(
    ("name", "content", "said", "where"),
    [
        ("a.tsv", "text\tlabel\na\tx\nb\t \n", "`label` is empty", "a.tsv:3"),
        ("a.tsv", "text\tlabel\na\tx\n\nb\n", "names 2 columns, and this record has 1", "a.tsv:4"),
        ("a.tsv", "text\tlabel\na\tx\ty\n", "names 2 columns, and this record has 3", "a.tsv:2"),
        ("a.tsv", "\ngood\tx\n", "no column `text`", "a.tsv:2"),
        ("a.csv", "txt,label\na,x\n", r"no column `text`[\s\S]*data\.text_key=txt", "a.csv:1"),
        ("a.csv", "text,label,text\na,x,b\n", "several columns `text`", "a.csv:1"),
        ("a.csv", 'text,label\na,x\n"b,y\nc,z\n', "not CSV", "a.csv:4"),
        ("a.tsv", "", "the file is empty", "a.tsv"),
        ("a.tsv", "\ntext\tlabel\n\n", "nothing follows its header", "a.tsv:2"),
        ("a.csv", "text,label\n", "nothing follows its header", "a.csv:1"),
        ("a.jsonl", '{"text": "a", "label": 1}\n{"text": "b"}\n', "no key `label`", "a.jsonl:2"),
        ("a.jsonl", '{"text": "a", "label": 1.5}\n', "`label` is not a word but float", "a.jsonl:1"),
        ("a.jsonl", '{"text": "a", "label": null}\n', "`label` is not a word but NoneType", "a.jsonl:1"),
        ("a.jsonl", '{"text": 3, "label": "x"}\n', "`text` is not a string but int", "a.jsonl:1"),
    ],
)
def test_what_is_no_example_is_named_by_file_and_line(name: str, content: str, said: str, where: str) -> None:
    with pytest.raises(QkvError, match=said) as caught:
        examples(labelled(write(name, content)))
    assert caught.value.where == where


def test_a_hint_names_no_column_that_is_used_already() -> None:
    with pytest.raises(QkvError) as caught:
        examples(labelled(write("a.jsonl", '{"text": "a", "lable": "x"}\n')))
    assert caught.value.hint == "data.label_key=lable"
    with pytest.raises(QkvError) as caught:
        examples(labelled(write("a.jsonl", '{"text": "a"}\n')))
    assert caught.value.hint is None


def test_a_label_says_where_it_stands() -> None:
    names = [write(f"{n}.jsonl", json.dumps({"text": f"text {n}", "label": n}) + "\n") for n in range(3)]
    data = labelled(names)
    assert list(read_labels(data, "train")) == [("0", "0.jsonl:1"), ("1", "1.jsonl:1"), ("2", "2.jsonl:1")]
