"""Files become documents by a stated rule, and what cannot be read is named."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qkv.config.data import DataConfig, JsonlDataConfig, TextDataConfig
from qkv.config.errors import ConfigError, NotFoundError, QkvError
from qkv.data import documents as module
from qkv.data import normalize, read_documents, read_pieces
from qkv.tokenizer import text as text_module


def documents(path: Path, content: bytes, **options: Any) -> list[str]:
    path.write_bytes(content)
    return list(read_documents([path], TextDataConfig(**options)))


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("file", ["one\ntwo\n\n \nthree\n"]),
        ("lines", ["one", "two", "three"]),
        ("blank-lines", ["one\ntwo", "three"]),
    ],
)
def test_text_is_divided_into_files_lines_or_paragraphs(tmp_path: Path, split: str, expected: list[str]) -> None:
    assert documents(tmp_path / "a.txt", b"one\ntwo\n\n \nthree\n", split=split) == expected


def test_jsonl_documents_are_the_values_of_a_key(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "a\\nb"}\n\n{"body": ""}\n{"body": "c\\u00e9", "x": [1]}', encoding="utf-8")
    assert list(read_documents([path], JsonlDataConfig(key="body"))) == ["a\nb", "cé"]


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".xz", lzma.compress)])
def test_compressed_files_are_read_as_they_are(tmp_path: Path, suffix: str, compress: Any) -> None:
    assert documents(tmp_path / f"a.txt{suffix}", compress("zwölf\n".encode())) == ["zwölf\n"]


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".xz", lzma.compress)])
def test_a_damaged_archive_is_an_error_not_a_shorter_corpus(tmp_path: Path, suffix: str, compress: Any) -> None:
    packed = compress(bytes(range(128)) * 50)
    for damaged in (packed[:-9], b"plain text"):
        with pytest.raises(QkvError, match="damaged or cut off") as caught:
            documents(tmp_path / f"a.txt{suffix}", damaged)
        assert f"a.txt{suffix}" in str(caught.value.where)


# --- the rule: byte order mark, line ends -----------------------------------------------------------------------------


def test_a_byte_order_mark_is_dropped_at_the_start_only(tmp_path: Path) -> None:
    assert documents(tmp_path / "a.txt", "\ufeffone\ufeff\n\ufefftwo".encode()) == ["one\ufeff\n\ufefftwo"]
    assert documents(tmp_path / "empty.txt", "\ufeff".encode()) == []


@pytest.mark.parametrize("block", [3, 4, 5, 1 << 20])
def test_crlf_becomes_lf_and_a_lone_cr_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(text_module, "_BLOCK", block)
    assert documents(tmp_path / "a.txt", b"one\r\ntwo\rthree\r\r\nend\r") == ["one\ntwo\rthree\r\nend\r"]


def test_training_and_serving_read_the_same_text(tmp_path: Path) -> None:
    text = "\ufeffone\r\ntwo\rthree\u2028\n"
    (from_file,) = documents(tmp_path / "a.txt", text.encode())
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}), encoding="utf-8")
    (from_json,) = read_documents([tmp_path / "a.jsonl"], JsonlDataConfig())
    assert from_file == from_json == normalize(text)


def test_lines_end_at_line_feeds_only(tmp_path: Path) -> None:
    line = "a\u2028b\u2029c\x85d\x0ce\x1cf\x0bg"
    assert documents(tmp_path / "a.txt", f"{line}\nnext".encode(), split="lines") == [line, "next"]
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": line}, ensure_ascii=False) + "\n{}", encoding="utf-8")
    with pytest.raises(QkvError) as caught:
        list(read_documents([tmp_path / "a.jsonl"], JsonlDataConfig()))
    assert str(caught.value.where).endswith("a.jsonl:2")


# --- bytes that are not UTF-8 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("head", "block"), [("", 1 << 20), ("\ufeff", 1 << 20), ("é" * 5, 3), ("漢" * 5, 4)])
def test_a_bad_byte_is_named_with_file_and_offset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: str, block: int
) -> None:
    monkeypatch.setattr(text_module, "_BLOCK", block)
    start = f"{head}ok\r\n".encode()
    with pytest.raises(QkvError, match="0xff") as caught:
        documents(tmp_path / "a.txt", start + b"\xffrest")
    assert caught.value.where == f"{tmp_path / 'a.txt'}: byte {len(start)}"
    assert caught.value.hint == "data.bad_bytes=replace or data.bad_bytes=drop"


def test_a_character_cut_off_by_the_end_of_the_file_is_a_bad_byte(tmp_path: Path) -> None:
    with pytest.raises(QkvError, match="0xe6") as caught:
        documents(tmp_path / "a.txt", "ab漢".encode()[:-1])
    assert str(caught.value.where).endswith("byte 2")


def test_offsets_in_an_archive_are_of_the_decompressed_text(tmp_path: Path) -> None:
    with pytest.raises(QkvError) as caught:
        documents(tmp_path / "a.gz", gzip.compress(b"abc\xff"))
    assert str(caught.value.where).endswith("byte 3 of the decompressed text")


def test_bad_bytes_can_be_replaced_or_dropped(tmp_path: Path) -> None:
    assert documents(tmp_path / "a.txt", b"a\xffb", bad_bytes="replace") == ["a\ufffdb"]
    assert documents(tmp_path / "a.txt", b"a\xffb", bad_bytes="drop") == ["ab"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("bad_bytes", ["error", "drop"])
def test_utf16_is_refused_by_name(tmp_path: Path, encoding: str, bad_bytes: str) -> None:
    with pytest.raises(QkvError, match=encoding[:6].upper()) as caught:
        documents(tmp_path / "a.txt", "Some Latin text.\n".encode(encoding), bad_bytes=bad_bytes)
    assert "iconv" in str(caught.value.hint)


# --- JSON lines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('{"text": "a"', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('["a"]', "expected a JSON object, got list"),
        ('{"txt": "a"}', "no key `text`"),
        ('{"text": null}', "not a string but NoneType"),
        ('{"text": "\\ud800"}', "half of a surrogate pair"),
    ],
)
def test_json_errors_name_file_and_line(tmp_path: Path, line: str, what: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "fine"}}\r\n\r\n{line}\n', encoding="utf-8")
    with pytest.raises(QkvError, match=what) as caught:
        list(read_documents([path], JsonlDataConfig()))
    assert caught.value.where == f"{path}:3"


def test_a_missing_key_suggests_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": 1, "txt": "a"}', encoding="utf-8")
    with pytest.raises(QkvError) as caught:
        list(read_documents([tmp_path / "a.jsonl"], JsonlDataConfig()))
    assert caught.value.hint == "data.key=txt"


def test_half_a_surrogate_pair_can_be_replaced_or_dropped(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b\\ud83d\\ude00"}', encoding="utf-8")
    for bad_bytes, text in (("replace", "a\ufffdb😀"), ("drop", "ab😀")):
        assert list(read_documents([tmp_path / "a.jsonl"], JsonlDataConfig(bad_bytes=bad_bytes))) == [text]


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_missing_file_suggests_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").touch()
    with pytest.raises(NotFoundError) as caught:
        list(read_documents([tmp_path / "corpsu.txt"], TextDataConfig()))
    assert caught.value.hint == str(tmp_path / "corpus.txt")
    with pytest.raises(QkvError, match="a folder stands"):
        list(read_documents([tmp_path], TextDataConfig()))


def test_another_kind_of_data_is_refused() -> None:
    with pytest.raises(ConfigError, match="not read as documents"):
        list(read_documents(["a"], DataConfig(kind="images")))


# --- pieces -----------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.text(alphabet="ab \n\r漢é.", max_size=60),
    split=st.sampled_from(["file", "lines", "blank-lines"]),
    block=st.integers(3, 9),
    limit=st.integers(1, 12),
)
def test_blocks_and_pieces_never_change_the_documents(
    tmp_path: Path, text: str, split: str, block: int, limit: int
) -> None:
    """Against a reference that reads everything at once."""
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    whole = text.replace("\r\n", "\n")
    lines = whole.split("\n")
    paragraphs: list[list[str]] = [[]]
    for line in lines:
        paragraphs[-1].append(line) if line.strip() else paragraphs.append([])
    expected = {"file": [whole], "lines": lines, "blank-lines": ["\n".join(lines) for lines in paragraphs]}[split]
    expected = [document for document in expected if document.strip()]

    data = TextDataConfig.model_validate({"split": split})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_module, "_BLOCK", block)
        assert list(read_documents([path], data)) == expected
        patch.setattr(module, "PIECE_CHARACTERS", limit)
        pieces = list(read_pieces([path], data))
        assert all(len(piece.text) <= limit for piece in pieces)
        found = "".join(piece.text + "\0" * piece.ends for piece in pieces).split("\0")[:-1]
    assert [document for document in found if document.strip()] == expected


def test_a_long_document_is_cut_between_words_wherever_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_CHARACTERS", 12)
    path = tmp_path / "a.txt"
    path.write_text("short\nSome words, and more - of them\n", encoding="utf-8")
    pieces = [piece.text for piece in read_pieces([path], TextDataConfig(split="lines"))]
    assert pieces == ["short", "Some", " words, and", " more - of", " them"]
