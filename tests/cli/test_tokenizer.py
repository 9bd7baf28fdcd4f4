"""`qkv tokenizer`: what each command prints, and how it fails."""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from qkv.cli.tokenizer import KINDS, tokenizer
from qkv.config.errors import QkvError
from qkv.tokenizer import Tokenizer, pieces

TEXT = "the lower, the newer <eos>\n我爱你，你爱我。\r\n"
READ = TEXT.replace("\r\n", "\n")
"""TEXT by the rule of `qkv.tokenizer.text`."""


def run(*arguments: object, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(tokenizer, [str(argument) for argument in arguments], input=stdin)


def answer(*arguments: object, stdin: bytes | None = None) -> Any:
    """The JSON object that the command prints."""
    result = run(*arguments, "--json", stdin=stdin)
    if result.exception:
        raise result.exception
    assert result.stderr == ""
    (line,) = result.stdout.splitlines()
    return json.loads(line)


def failure(*arguments: object) -> QkvError:
    error = run(*arguments).exception
    assert isinstance(error, QkvError)
    return error


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_bytes(TEXT.encode() * 20)
    return path


@pytest.fixture
def folder(corpus: Path, tmp_path: Path) -> Path:
    answer("train", corpus, "--vocab-size", 300, "-o", tmp_path / "tok")
    return tmp_path / "tok"


@pytest.mark.parametrize("kind", KINDS)
def test_train_writes_a_tokenizer_of_each_kind(corpus: Path, tmp_path: Path, kind: str) -> None:
    said = answer("train", corpus, "--vocab-size", 270, "--kind", kind, "-o", tmp_path / "tok")
    loaded = Tokenizer.load(tmp_path / "tok")
    assert (said["kind"], said["vocab_size"], said["fingerprint"]) == (kind, loaded.vocab_size, loaded.fingerprint)
    assert said["special"]["eos"] == loaded.eos_id


def test_the_kinds_of_the_command_are_those_of_the_room() -> None:
    assert KINDS == pieces.KINDS


def test_train_reads_archives(corpus: Path, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt.gz").write_bytes(gzip.compress(corpus.read_bytes()))
    said = answer("train", tmp_path / "corpus.txt.gz", "--vocab-size", 300, "-o", tmp_path / "other")
    assert said["fingerprint"] == Tokenizer.load(folder).fingerprint


def test_train_leaves_what_is_there_alone(corpus: Path, folder: Path, tmp_path: Path) -> None:
    before = Tokenizer.load(folder).fingerprint
    assert failure("train", corpus, "--kind", "char", "-o", folder).exit_code == 5
    assert failure("train", corpus, "-o", corpus).exit_code == 5
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine", encoding="utf-8")
    assert failure("train", corpus, "-o", tmp_path / "other", "--force").exit_code == 5
    assert Tokenizer.load(folder).fingerprint == before
    answer("train", corpus, "--kind", "char", "-o", folder, "--force")
    assert Tokenizer.load(folder).kind == "char"


def test_train_fails_before_it_writes(corpus: Path, tmp_path: Path) -> None:
    assert failure("train", tmp_path / "none.txt", "-o", tmp_path / "tok").exit_code == 3
    assert failure("train", corpus, "--vocab-size", 10, "-o", tmp_path / "tok").exit_code == 2
    corpus.write_bytes(b"ab\xff")
    error = failure("train", corpus, "-o", tmp_path / "tok")
    assert error.where == f"{corpus}: byte 2"
    assert error.hint == "--bad-bytes replace or --bad-bytes drop"
    assert not (tmp_path / "tok").exists()
    answer("train", corpus, "--vocab-size", 260, "--bad-bytes", "replace", "-o", tmp_path / "tok")


def test_encode_takes_an_argument_a_file_or_standard_input(corpus: Path, folder: Path) -> None:
    ids = Tokenizer.load(folder).encode(READ)
    assert answer("encode", folder, TEXT) == {"ids": ids}
    assert answer("encode", folder, "\ufeff" + TEXT) == {"ids": ids}
    assert answer("encode", folder, stdin=TEXT.encode()) == {"ids": ids}
    corpus.write_bytes(b"\xef\xbb\xbf" + TEXT.encode())
    assert answer("encode", folder, "--text-file", corpus) == {"ids": ids}
    assert failure("encode", folder, "text", "--text-file", corpus).exit_code == 2


def test_encode_parses_special_tokens_on_request(folder: Path) -> None:
    loaded = Tokenizer.load(folder)
    assert loaded.eos_id not in answer("encode", folder, "a<eos>")["ids"]
    assert answer("encode", folder, "a<eos>", "--parse-special")["ids"][-1] == loaded.eos_id
    assert answer("encode", folder, "a", "--add-special")["ids"] == loaded.encode("a", add_special=True)


def test_ids_printed_for_people_are_ids_for_decode(folder: Path) -> None:
    said = run("encode", folder, TEXT)
    printed = said.stdout
    assert "␣the" in said.stderr
    assert answer("decode", folder, *printed.split()) == {"text": READ}
    assert answer("decode", folder, printed.replace(" ", ",")) == {"text": READ}
    as_json = json.dumps(list(map(int, printed.split())))
    assert run("decode", folder, as_json).stdout_bytes == READ.encode() + b"\n"


def test_decode_prints_line_ends_as_they_are(folder: Path) -> None:
    ids = json.dumps(Tokenizer.load(folder).encode(TEXT))
    assert run("decode", folder, ids).stdout_bytes == TEXT.encode() + b"\n"


def test_decode_shows_special_tokens_on_request(folder: Path) -> None:
    eos = Tokenizer.load(folder).eos_id
    assert answer("decode", folder, eos) == {"text": ""}
    assert answer("decode", folder, eos, "--keep-special") == {"text": "<eos>"}


@pytest.mark.parametrize("wrong", ["-1", "999", "x", "1.5"])
def test_decode_names_a_wrong_id(folder: Path, wrong: str) -> None:
    error = failure("decode", folder, "5", wrong)
    assert error.exit_code == 2
    assert wrong in error.what
    assert "\n" not in error.what


def test_strict_encoding_names_the_unknown_character(corpus: Path, tmp_path: Path) -> None:
    answer("train", corpus, "--kind", "char", "-o", tmp_path / "tok")
    assert "U+05D0" in failure("encode", tmp_path / "tok", "א", "--strict").what


def test_explain_needs_no_tokenizer_and_shows_what_words_share() -> None:
    said = answer("explain", "lower newer")
    for piece in said["pieces"]:
        assert piece["steps"][0]["left"] == "e"
        assert piece["steps"][0]["right"] == "r"
        assert piece["tokens"][-1] == "er"
    printed = run("explain", "lower newer")
    assert "toy tokenizer" in printed.stderr
    assert "e + r" in printed.stdout


def test_explain_takes_the_tokenizer_either_way(folder: Path) -> None:
    said = answer("explain", folder, "the newer 我")
    assert said == answer("explain", "-t", folder, "the newer 我")
    assert answer("explain", folder, "a\r\nb") == answer("explain", folder, "a\nb")
    assert [token_id for piece in said["pieces"] for token_id in piece["ids"]] == Tokenizer.load(folder).encode(
        "the newer 我"
    )
    assert failure("explain", "one", "two", "three").exit_code == 2


def test_stats_count_chinese_and_other_characters(corpus: Path, folder: Path) -> None:
    said = answer("stats", folder, corpus)
    assert said["characters"] == len(READ) * 20
    assert said["bytes"] == len(READ.encode()) * 20
    assert said["chinese"]["characters"] == 8 * 20
    assert said["tokens"] == pytest.approx(said["chinese"]["tokens"] + said["other"]["tokens"])
    assert "Chinese" in run("stats", folder, corpus).stdout


def test_a_missing_tokenizer_is_not_found(tmp_path: Path) -> None:
    for arguments in (
        ["encode", tmp_path / "none", "a"],
        ["decode", tmp_path, "1"],
        ["explain", tmp_path / "none", "a"],
    ):
        assert failure(*arguments).exit_code == 3


def test_a_tiktoken_file_that_is_not_known_needs_its_encoding(tmp_path: Path) -> None:
    path = tmp_path / "mine.tiktoken"
    tokens = [*(bytes([byte]) for byte in range(256)), b"he"]
    path.write_bytes(b"\n".join(b"%s %d" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)))
    assert "--encoding NAME" in (failure("encode", path, "hehe").hint or "")
    assert answer("encode", path, "hehe", "--encoding", "cl100k_base") == {"ids": [256, 256]}
    assert answer("decode", path, "256", "--encoding", "r50k_base") == {"text": "he"}
    assert answer("explain", path, "he", "--encoding", "cl100k_base")["pieces"][0]["tokens"] == ["he"]
