"""Texts with their answers: raw, of files or of what training holds out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qkv.config.data import LabelledDataConfig, ParallelDataConfig, SideFiles
from qkv.config.errors import NotFoundError, QkvError, UsageError
from qkv.config.run import Config
from qkv.data.prepare import Labelled, Pairs, prepare
from qkv.evaluate.error_rates import error_rate, exact_match
from qkv.evaluate.examples import Examples, held_out_examples, pair_scores, read_examples, within_context
from qkv.evaluate.translation import translation_scores
from qkv.tokenizer.tokenizer import Tokenizer


def config(family: str, data: dict[str, Any], **more: Any) -> Config:
    model = {"family": family, "vocab_size": 260, "max_seq_len": 12, "d_model": 16, "num_layers": 1}
    head = {"head": {"kind": "classifier", "num_classes": 2}} if family == "encoder" else {}
    return Config.model_validate({"model": {**model, **head}, "data": data, **more})


def written(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


# --- reading ----------------------------------------------------------------------------------------------------------


def test_references_are_what_the_file_has_and_not_what_ids_become(tmp_path: Path) -> None:
    data = ParallelDataConfig(train=(written(tmp_path / "a.tsv", "  ein  Hund\u2028\tA  dog \r\nzwei\t两\n"),))
    assert read_examples(data) == Examples(["  ein  Hund\u2028", "zwei"], ["A  dog ", "两"])
    turned = data.model_copy(update={"reverse": True})
    assert read_examples(turned).texts == ["A  dog ", "两"]


def test_two_files_belong_together_line_by_line(tmp_path: Path) -> None:
    sides = {"source": (written(tmp_path / "a", "x\n\nz\n"),), "target": (written(tmp_path / "b", "1\n2\n3"),)}
    assert read_examples(ParallelDataConfig(train=SideFiles(**sides))) == Examples(["x", "", "z"], ["1", "2", "3"])
    written(tmp_path / "b", "1\n2\n")
    with pytest.raises(QkvError, match="has 3 lines"):
        read_examples(ParallelDataConfig(train=SideFiles(**sides)))


def test_a_label_that_the_model_does_not_know_is_named_with_its_place(tmp_path: Path) -> None:
    data = LabelledDataConfig(train=(written(tmp_path / "a.tsv", "label\ttext\ngood\tx\nbaad\ty\n"),))
    assert read_examples(data) == Examples(["x", "y"], ["good", "baad"])
    with pytest.raises(QkvError, match="baad") as caught:
        read_examples(data, labels=["bad", "good"])
    assert caught.value.where == f"{tmp_path / 'a.tsv'}:3"


def test_files_without_an_example_are_refused(tmp_path: Path) -> None:
    with pytest.raises(QkvError, match="no example"):
        read_examples(ParallelDataConfig(train=(written(tmp_path / "a.tsv", "\n"),)))
    with pytest.raises(NotFoundError):
        read_examples(ParallelDataConfig(train=(str(tmp_path / "gone.tsv"),)))


# --- what is held out -------------------------------------------------------------------------------------------------


def test_pairs_held_out_are_those_that_training_holds_out(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    lines = "".join(f"s{n % 40}\tt{n}{'x' * (n % 50 == 7) * 20}\n" for n in range(200))
    data = {"kind": "parallel", "train": [written(tmp_path / "a.tsv", lines)], "validation": 0.2}
    settings = config("encoder-decoder", data, train={"seed": 3})
    examples = held_out_examples(settings)
    held = prepare(settings, byte_tokenizer, tmp_path / "cache").validation
    assert isinstance(held, Pairs)
    short = [(text, answer) for text, answer in zip(examples.texts, examples.answers, strict=True) if len(answer) < 11]
    decode = byte_tokenizer.decode
    assert short == [
        (decode(held.source.document(n).tolist()), decode(held.target.document(n).tolist()))
        for n in range(held.num_documents)
    ]
    assert 10 < len(short) < len(examples.texts) < 100  # the overlong are here too


def test_labelled_texts_held_out_are_those_that_training_holds_out(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    lines = "text\tlabel\n" + "".join(f"{n}\t{'ab'[n % 3 == 0]}\n" for n in range(100))
    data = {"kind": "labelled", "train": [written(tmp_path / "a.tsv", lines)], "validation": 0.3}
    settings = config("encoder", data)
    examples = held_out_examples(settings, ["a", "b"])
    held = prepare(settings, byte_tokenizer, tmp_path / "cache").validation
    assert isinstance(held, Labelled)
    assert examples.texts == [byte_tokenizer.decode(held.texts.document(n).tolist()) for n in range(held.num_documents)]
    assert examples.answers == ["ab"[number] for number in held.labels_D]


def test_listed_validation_files_need_no_training_files(tmp_path: Path) -> None:
    data = {"kind": "parallel", "train": ["gone.tsv"], "validation": [written(tmp_path / "v.tsv", "a\tb\n")]}
    assert held_out_examples(config("encoder-decoder", data)) == Examples(["a"], ["b"])


@pytest.mark.parametrize(
    "data",
    [
        {"kind": "parallel"},
        {"kind": "parallel", "train": ["a.tsv"], "validation": 0.0},
        {"kind": "parallel", "train": ["a.tsv"], "validation": []},
    ],
)
def test_without_validation_data_it_is_said_what_to_give(data: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="no validation data") as caught:
        held_out_examples(config("encoder-decoder", data))
    assert caught.value.hint == "--data FILE"


# --- scoring ----------------------------------------------------------------------------------------------------------


def test_bleu_is_of_all_lines_and_error_rates_of_distinct_sources() -> None:
    examples = Examples(["a", "b", "a"], ["a dog runs here", "a cat sat there", "one dog runs here"])
    found = {"a": "one dog runs here", "b": "a cat sits there"}
    assert examples.variants == {"a": ["a dog runs here", "one dog runs here"], "b": ["a cat sat there"]}
    scores = pair_scores(examples, found)
    lines = [found[text] for text in examples.texts]
    plain = translation_scores(lines, examples.answers)
    assert (scores.bleu, scores.chrf, scores.signature) == (plain.bleu, plain.chrf, plain.signature)
    assert scores.sentences == 3
    variants = list(examples.variants.values())
    assert scores.exact_match == exact_match(list(found.values()), variants) == 0.5
    assert scores.word_error_rate == error_rate(list(found.values()), variants, "word") == 1 / 8
    assert scores.character_error_rate == error_rate(list(found.values()), variants, "character")
    assert "case:lc|" in pair_scores(examples, found, lowercase=True).signature
    assert "tok:char|" in pair_scores(examples, found, tokenize="char").signature


def test_a_text_that_the_context_does_not_hold_becomes_empty(byte_tokenizer: Tokenizer) -> None:
    assert within_context(["abc", "abcd", "", "abcde"], byte_tokenizer, 6) == ["abc", "abcd", "", ""]
