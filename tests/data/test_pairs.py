"""Pairs and texts with labels, from files to training and validation data: nothing is lost in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qkv.config.errors import QkvError
from qkv.config.run import Config
from qkv.data import Corpus, Labelled, Pairs, Prepared, prepare
from qkv.tokenizer import Tokenizer

WORDS = [(f"word {number}", f"Wort {number}") for number in range(200)]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(name: str, rows: list[tuple[str, str]], header: str = "") -> str:
    Path(name).write_text(header + "".join(f"{one}\t{other}\n" for one, other in rows), encoding="utf-8", newline="\n")
    return name


def pairs_config(train: Any, context: int = 32, seed: int = 0, **data: Any) -> Config:
    model = {"family": "encoder-decoder", "max_seq_len": context}
    return Config.model_validate({"model": model, "data": {"train": train, **data}, "train": {"seed": seed}})


def labels_config(train: Any, context: int = 32, labels: Any = None, **data: Any) -> Config:
    model = {"family": "encoder", "max_seq_len": context, "head": {"kind": "classifier"}}
    objective = {"kind": "classify", "labels": labels}
    return Config.model_validate({"model": model, "data": {"train": train, **data}, "objective": objective})


def texts(corpus: Corpus, tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.decode(corpus.document(number)) for number in range(corpus.num_documents)]


def pairs_of(data: Any, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    assert isinstance(data, Pairs)
    return list(zip(texts(data.source, tokenizer), texts(data.target, tokenizer), strict=True))


def examples_of(data: Any, prepared: Prepared, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    assert isinstance(data, Labelled)
    names = [prepared.labels[number] for number in data.labels_D]
    return list(zip(texts(data.texts, tokenizer), names, strict=True))


# --- pairs ------------------------------------------------------------------------------------------------------------


def test_pairs_come_back_in_order_and_the_other_way_round(seq2seq: Tokenizer) -> None:
    files = write("a.tsv", WORDS)
    prepared = prepare(pairs_config(files, validation=0), seq2seq, "cache")
    assert pairs_of(prepared.train, seq2seq) == WORDS
    assert (prepared.validation, prepared.notes, prepared.reused) == (None, (), False)
    first = prepared.train
    assert isinstance(first, Pairs)
    assert first.source.document(0).tolist() == [257, *b"word 0", 258]
    assert (first.num_documents, first.num_tokens) == (200, first.target.num_tokens)
    back = prepare(pairs_config(files, validation=0, reverse=True), seq2seq, "cache")
    assert pairs_of(back.train, seq2seq) == [(target, source) for source, target in WORDS]
    assert back.fingerprint != prepared.fingerprint
    assert prepare(pairs_config(files, validation=0), seq2seq, "cache").reused


def test_either_side_is_read_by_its_own_tokenizer(seq2seq: Tokenizer) -> None:
    letters = Tokenizer.train("word 0123456789", kind="char")
    config = pairs_config(write("a.tsv", WORDS), validation=0)
    prepared = prepare(config, seq2seq, "cache", source_tokenizer=letters)
    assert isinstance(prepared.train, Pairs)
    assert texts(prepared.train.source, letters) == [source for source, _ in WORDS]
    assert texts(prepared.train.target, seq2seq) == [target for _, target in WORDS]
    assert prepare(config, seq2seq, "cache").fingerprint != prepared.fingerprint


def test_overlong_and_empty_pairs_are_left_out_and_said(seq2seq: Tokenizer) -> None:
    """A source has its begin and end in the context, a target only one of them: its last token is not read."""
    rows = [("a" * 6, "b" * 7), ("a" * 7, "b"), ("a", "b" * 8), ("", "b"), ("a", " "), ("x" * 99, ""), ("c", "d")]
    lines = {"source": "a.en", "target": "a.de"}
    for side, name in enumerate(lines.values()):
        Path(name).write_text("".join(row[side] + "\n" for row in rows), encoding="utf-8")
    prepared = prepare(pairs_config(lines, context=8, validation=0), seq2seq, "cache")
    assert pairs_of(prepared.train, seq2seq) == [rows[0], rows[-1]]
    assert prepared.notes == (
        "2 of 7 training pairs are left out: they have more than 8 source or 8 target tokens",
        "3 of 7 training pairs are left out: a side is empty",
    )
    prepared = prepare(pairs_config(write("good.tsv", WORDS), context=12, validation=lines), seq2seq, "cache")
    assert prepared.notes == ("3 of 7 validation pairs are left out: a side is empty",)
    assert pairs_of(prepared.validation, seq2seq) == [*rows[:3], rows[-1]]


def test_each_side_has_the_context_of_its_own_stack(seq2seq: Tokenizer) -> None:
    config = pairs_config(write("a.tsv", [("aaaa", "bb"), ("aa", "bbbb"), ("a", "b")]), validation=0)
    model = {"family": "encoder-decoder", "encoder": {"max_seq_len": 4}, "decoder": {"max_seq_len": 8}}
    config = Config.model_validate({"model": model, "data": config.data.model_dump()})
    prepared = prepare(config, seq2seq, "cache")
    assert pairs_of(prepared.train, seq2seq) == [("aa", "bbbb"), ("a", "b")]
    assert prepared.notes == ("1 of 3 training pairs are left out: they have more than 4 source or 8 target tokens",)


def test_data_without_a_usable_pair_are_refused_with_the_reason(seq2seq: Tokenizer) -> None:
    with pytest.raises(QkvError, match=r"nothing to learn from; 200 of 200 training pairs are left out") as caught:
        prepare(pairs_config(write("a.tsv", WORDS), context=4), seq2seq, "cache")
    assert caught.value.where == "a.tsv"
    Path("empty.tsv").touch()
    with pytest.raises(QkvError, match="nothing to learn from\n"):
        prepare(pairs_config("empty.tsv"), seq2seq, "cache")


def test_all_translations_of_a_source_are_on_one_side(seq2seq: Tokenizer) -> None:
    rows = [(f"word {number % 40}", f"Wort {number}") for number in range(200)]
    file = write("a.tsv", rows)
    held = []
    for seed in (0, 1):
        prepared = prepare(pairs_config(file, seed=seed, validation=0.3), seq2seq, "cache")
        kept, out = pairs_of(prepared.train, seq2seq), pairs_of(prepared.validation, seq2seq)
        assert sorted(kept + out) == sorted(rows)
        assert not {source for source, _ in kept} & {source for source, _ in out}
        assert 20 <= len(out) <= 110
        held.append(out)
    assert held[0] != held[1]


def test_files_held_out_are_pairs_too(seq2seq: Tokenizer) -> None:
    lines = {"source": "b.en", "target": "b.de"}
    Path("b.en").write_text("one\ntwo\n", encoding="utf-8")
    Path("b.de").write_text("eins\nzwei\n", encoding="utf-8")
    prepared = prepare(pairs_config(write("a.tsv", WORDS), validation=lines), seq2seq, "cache")
    assert pairs_of(prepared.train, seq2seq) == WORDS
    assert pairs_of(prepared.validation, seq2seq) == [("one", "eins"), ("two", "zwei")]
    Path("b.de").write_text("eins\nzwei\ndrei\n", encoding="utf-8")
    with pytest.raises(QkvError, match="do not belong together"):
        prepare(pairs_config("a.tsv", validation=lines), seq2seq, "cache")


def test_targets_begin_with_what_the_decoder_starts_from(seq2seq: Tokenizer) -> None:
    """In place of the tokenizer's begin, which a tokenizer then need not have; what is cached apart."""
    write("a.tsv", [("ab", "c"), ("d", ""), ("e", "x" * 40)])
    usual = prepare(pairs_config("a.tsv", validation=0), seq2seq, "cache")
    config = pairs_config("a.tsv", validation=0)
    generation = config.generation.model_copy(update={"start_ids": (seq2seq.eos_id, 5)})
    prepared = prepare(config.model_copy(update={"generation": generation}), seq2seq, "cache")
    assert isinstance(prepared.train, Pairs)
    assert prepared.train.start_ids == (258, 5)
    assert [prepared.train.target.document(n).tolist() for n in range(prepared.train.num_documents)] == [
        [258, 5, *b"c", 258]
    ]
    assert prepared.train.source.document(0).tolist() == [257, *b"ab", 258]
    assert len(prepared.notes) == len(usual.notes) == 2
    assert isinstance(usual.train, Pairs)
    assert usual.train.target.document(0).tolist() == [257, *b"c", 258]


def test_files_that_were_read_beside_others_are_counted_again(seq2seq: Tokenizer) -> None:
    """Each of them is in the cache, but not as a pair."""
    for name, count in (("s", 3), ("t", 3), ("u", 4), ("v", 4)):
        Path(name).write_text("x\n" * count, encoding="utf-8")
    for source, target in (("s", "t"), ("u", "v")):
        prepare(pairs_config({"source": source, "target": target}, validation=0), seq2seq, "cache")
    with pytest.raises(QkvError, match="s has 3 lines and v has 4"):
        prepare(pairs_config({"source": "s", "target": "v"}, validation=0), seq2seq, "cache")


# --- texts with a label -----------------------------------------------------------------------------------------------

REVIEWS = [("good", "pos"), ("bad", "neg"), ("fine", "pos"), ("awful", "neg"), ("so so", "mixed")]


def test_classes_are_the_labels_of_the_training_data_sorted(seq2seq: Tokenizer) -> None:
    file = write("a.tsv", REVIEWS, "text\tlabel\n")
    prepared = prepare(labels_config(file, validation=0), seq2seq, "cache")
    assert prepared.labels == ("mixed", "neg", "pos")
    assert examples_of(prepared.train, prepared, seq2seq) == REVIEWS
    assert prepare(labels_config(file, validation=0), seq2seq, "cache").reused


def test_classes_that_are_named_have_that_order(seq2seq: Tokenizer) -> None:
    file = write("a.tsv", REVIEWS[:4], "text\tlabel\n")
    prepared = prepare(labels_config(file, labels=["pos", "rare", "neg"], validation=0), seq2seq, "cache")
    assert prepared.labels == ("pos", "rare", "neg")
    assert isinstance(prepared.train, Labelled)
    assert prepared.train.labels_D.tolist() == [0, 2, 0, 2]


def test_a_label_that_is_not_known_is_named_by_file_and_line(seq2seq: Tokenizer) -> None:
    write("a.tsv", REVIEWS[:4], "text\tlabel\n")
    write("b.tsv", [("good", "pos"), ("odd", "post")], "text\tlabel\n")
    with pytest.raises(QkvError, match="the label `post` is not one of the model's: neg, pos") as caught:
        prepare(labels_config("a.tsv", validation="b.tsv"), seq2seq, "cache")
    assert (caught.value.where, caught.value.hint) == ("b.tsv:3", "`pos`")
    with pytest.raises(QkvError, match="`neg` is not one of the model's") as caught:
        prepare(labels_config("a.tsv", labels=["pos", "other"]), seq2seq, "cache")
    assert caught.value.where == "a.tsv:3"


def test_one_label_is_nothing_to_tell_apart(seq2seq: Tokenizer) -> None:
    with pytest.raises(QkvError, match="have one label only: pos") as caught:
        prepare(labels_config(write("a.tsv", [("good", "pos"), ("fine", "pos")], "text\tlabel\n")), seq2seq, "cache")
    assert caught.value.where == "a.tsv"
    with pytest.raises(QkvError, match="no example with a label"):
        prepare(labels_config(write("b.jsonl", [])), seq2seq, "cache")


def test_long_texts_are_cut_and_empty_ones_left_out_and_both_are_said(seq2seq: Tokenizer) -> None:
    rows = [*REVIEWS, ("", "pos"), ("much longer than that", "neg")]
    prepared = prepare(labels_config(write("a.tsv", rows, "text\tlabel\n"), 8, validation=0), seq2seq, "cache")
    assert prepared.notes == (
        "1 of 7 training texts are cut: they have more than 8 tokens",
        "1 of 7 training texts are left out: they are empty",
    )
    assert examples_of(prepared.train, prepared, seq2seq) == [*REVIEWS, rows[-1]]


def test_texts_are_held_out_with_their_labels(seq2seq: Tokenizer) -> None:
    rows = [(f"text {number % 50}", str(number % 2)) for number in range(200)]
    prepared = prepare(labels_config(write("a.tsv", rows, "text\tlabel\n"), validation=0.3), seq2seq, "cache")
    kept, out = (examples_of(data, prepared, seq2seq) for data in (prepared.train, prepared.validation))
    assert sorted(kept + out) == sorted(rows)
    assert out
    assert not set(kept) & set(out), "copies of a text are on one side"
    write("b.tsv", REVIEWS[:2], "text\tlabel\n")
    write("c.tsv", REVIEWS[2:4], "text\tlabel\n")
    prepared = prepare(labels_config("b.tsv", validation="c.tsv"), seq2seq, "cache")
    assert examples_of(prepared.validation, prepared, seq2seq) == REVIEWS[2:4]
