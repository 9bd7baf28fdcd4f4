"""Documents are held out by their content and the seed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from qkv.config.run import Config
from qkv.data import Corpus, prepare


def texts(corpus: Corpus | None) -> list[str]:
    assert corpus is not None
    return [bytes(corpus.document(i)[:-1].tolist()).decode() for i in range(corpus.num_documents)]


def split(folder: Path, tokenizer: Any, contents: list[str], seed: int = 0, **data: Any) -> tuple[list[str], list[str]]:
    """Training and validation documents; one file per string of `contents`."""
    files = []
    for index, content in enumerate(contents):
        (folder / f"{index}.txt").write_bytes(content.encode())
        files.append(str(folder / f"{index}.txt"))
    config = Config.model_validate({"model": {}, "train": {"seed": seed}, "data": {"train": files, **data}})
    prepared = prepare(config, tokenizer, folder / "cache")
    return texts(prepared.train), texts(prepared.validation) if prepared.validation else []


def test_the_split_survives_reordering_and_new_documents(tmp_path: Path, tokenizer: Any) -> None:
    lines = [f"line {number}" for number in range(400)]
    train, held = split(tmp_path, tokenizer, ["\n".join(lines)], split="lines", validation=0.1)
    assert sorted(train + held) == sorted(lines)
    assert 20 <= len(held) <= 60

    random.Random(0).shuffle(lines)
    half = "\n".join(lines[:150]), "\n".join(["new", *lines[150:]])
    train_again, held_again = split(tmp_path, tokenizer, list(half), split="lines", validation=0.1)
    assert set(held_again) - {"new"} == set(held)
    assert set(train_again) - {"new"} == set(train)


def test_another_seed_holds_out_others_without_tokenising_again(tmp_path: Path, make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer()
    lines = "\n".join(f"line {number}" for number in range(400))
    held = [split(tmp_path, tokenizer, [lines], seed, split="lines", validation=0.1)[1] for seed in (0, 1, 0)]
    assert held[0] == held[2] != held[1]
    assert tokenizer.calls == 1


def test_copies_of_a_document_are_on_one_side(tmp_path: Path, tokenizer: Any) -> None:
    lines = [f"line {number % 50}" for number in range(200)]
    train, held = split(tmp_path, tokenizer, ["\n".join(lines)], split="lines", validation=0.3)
    assert held
    assert not set(train) & set(held)


@pytest.mark.parametrize("fraction", [0.001, 0.999])
def test_two_documents_give_both_sides_one(tmp_path: Path, tokenizer: Any, fraction: float) -> None:
    for seed in range(5):
        train, held = split(tmp_path, tokenizer, ["a\nb"], seed, split="lines", validation=fraction)
        assert sorted(train + held) == ["a", "b"]
        assert len(train) == 1


def test_a_larger_fraction_holds_out_more_of_the_same(tmp_path: Path, tokenizer: Any) -> None:
    lines = "\n".join(f"line {number}" for number in range(200))
    small = split(tmp_path, tokenizer, [lines], split="lines", validation=0.1)[1]
    large = split(tmp_path, tokenizer, [lines], split="lines", validation=0.4)[1]
    assert set(small) < set(large)


@pytest.mark.parametrize("how", [{}, {"split": "lines"}])
def test_a_single_document_loses_its_end(tmp_path: Path, tokenizer: Any, how: dict[str, str]) -> None:
    text = "".join(chr(97 + index % 26) for index in range(100))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    config = Config.model_validate({"model": {}, "data": {"train": str(tmp_path / "a.txt"), "validation": 0.1, **how}})
    prepared = prepare(config, tokenizer, tmp_path / "cache")
    assert prepared.validation is not None
    ids = [*text.encode(), 256]
    assert prepared.train.document(0).tolist() == ids[:91]
    assert prepared.validation.document(0).tolist() == ids[91:]


def test_few_files_each_lose_their_end_and_many_are_held_out_whole(tmp_path: Path, tokenizer: Any) -> None:
    files = [f"{index:02}" * 50 for index in range(30)]
    train, held = split(tmp_path, tokenizer, files[:3], validation=0.1)
    assert len(train) == len(held) == 3
    train, held = split(tmp_path, tokenizer, files, validation=0.1)
    assert sorted(train + held) == files


def test_validation_files_are_read_the_same_way(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "v.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    options = {"split": "lines", "validation": str(tmp_path / "v.txt")}
    train, held = split(tmp_path, tokenizer, ["a\nb"], **options)
    assert (train, held) == (["a", "b"], ["one", "two"])


@pytest.mark.parametrize("validation", [0, []])
def test_zero_and_no_files_mean_no_validation(tmp_path: Path, tokenizer: Any, validation: Any) -> None:
    assert split(tmp_path, tokenizer, ["a\nb"], split="lines", validation=validation) == (["a", "b"], [])
