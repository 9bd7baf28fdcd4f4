"""The texts that are scored."""

from __future__ import annotations

import gzip
import json

import pytest

from qkv.config.data import JsonlDataConfig, TextDataConfig
from qkv.config.errors import NotFoundError, QkvError, UsageError
from qkv.config.run import Config
from qkv.evaluate import text_corpus, validation_corpus

BOS, EOS = 257, 258


@pytest.fixture(autouse=True)
def _ids(byte_tokenizer) -> None:
    assert (byte_tokenizer.bos_id, byte_tokenizer.eos_id) == (BOS, EOS)


def documents(corpus) -> list[list[int]]:
    return [corpus.document(index).tolist() for index in range(corpus.num_documents)]


def test_a_text_file_is_one_document_with_a_beginning_and_no_end(byte_tokenizer, tmp_path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffé\r\n".encode())
    assert documents(text_corpus(path, byte_tokenizer)) == [[BOS, *"é\n".encode()]]
    assert documents(text_corpus(path, byte_tokenizer, ends=True)) == [[BOS, *"é\n".encode(), EOS]]


def test_a_file_is_divided_as_the_model_knows_it(byte_tokenizer, tmp_path) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"ab\ncd\n"))
    lines = text_corpus(path, byte_tokenizer, TextDataConfig(split="lines"))
    assert documents(lines) == [[BOS, *b"ab"], [BOS, *b"cd"]]


def test_the_name_says_whether_a_file_is_jsonl(byte_tokenizer, tmp_path) -> None:
    line = json.dumps({"text": "ab", "story": "cd"}).encode()
    for name in ("a.jsonl", "a.jsonl.gz"):
        path = tmp_path / name
        path.write_bytes(gzip.compress(line) if name.endswith("gz") else line)
        assert documents(text_corpus(path, byte_tokenizer, TextDataConfig())) == [[BOS, *b"ab"]]
        assert documents(text_corpus(path, byte_tokenizer, JsonlDataConfig(key="story"))) == [[BOS, *b"cd"]]
    text = tmp_path / "a.txt"
    text.write_bytes(line)
    assert documents(text_corpus(text, byte_tokenizer, JsonlDataConfig())) == [[BOS, *line]]


def test_text_that_spells_a_special_token_is_text(byte_tokenizer, tmp_path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("<eos>", encoding="utf-8")
    assert documents(text_corpus(path, byte_tokenizer)) == [[BOS, *b"<eos>"]]


def test_a_file_without_text_or_none_at_all_is_refused(byte_tokenizer, tmp_path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("  \n", encoding="utf-8")
    with pytest.raises(QkvError, match="no text"):
        text_corpus(path, byte_tokenizer)
    with pytest.raises(NotFoundError):
        text_corpus(tmp_path / "b.txt", byte_tokenizer)
    path.write_bytes(b"ab\xff")
    with pytest.raises(QkvError, match="0xff"):
        text_corpus(path, byte_tokenizer)
    for data in (TextDataConfig(bad_bytes="drop"), JsonlDataConfig(bad_bytes="drop")):
        assert documents(text_corpus(path, byte_tokenizer, data)) == [[BOS, *b"ab"]]


def test_validation_files_are_enough_even_when_the_training_files_are_gone(byte_tokenizer, tmp_path) -> None:
    path = tmp_path / "held-out.txt"
    path.write_text("ab", encoding="utf-8")
    config = Config.model_validate(
        {"model": {}, "data": {"train": [str(tmp_path / "gone.txt")], "validation": [str(path)]}}
    )
    assert documents(validation_corpus(config, byte_tokenizer, tmp_path / "cache")) == [[BOS, *b"ab", EOS]]


def test_a_fraction_held_out_is_what_training_holds_out(byte_tokenizer, tmp_path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("\n".join(f"line {number}" for number in range(40)), encoding="utf-8")
    data = {"train": [str(path)], "validation": 0.2, "split": "lines"}
    config = Config.model_validate({"model": {}, "data": data})
    from qkv.data import prepare

    prepared = prepare(config, byte_tokenizer, tmp_path / "cache")
    held_out = validation_corpus(config, byte_tokenizer, tmp_path / "cache")
    assert documents(held_out) == documents(prepared.validation)
    assert 0 < held_out.num_documents < 40


@pytest.mark.parametrize("data", [{}, {"train": ["a.txt"], "validation": 0.0}, {"train": ["a.txt"], "validation": []}])
def test_a_model_without_validation_data_asks_for_a_file(byte_tokenizer, tmp_path, data) -> None:
    config = Config.model_validate({"model": {}, "data": data})
    with pytest.raises(UsageError, match="no validation data") as error:
        validation_corpus(config, byte_tokenizer, tmp_path)
    assert "--data" in str(error.value)
