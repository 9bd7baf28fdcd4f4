"""`qkv data show` says what a batch contains."""

from __future__ import annotations

from typing import Any

import numpy as np

from qkv.config.objectives import (
    CausalObjectiveConfig,
    ClassifyObjectiveConfig,
    MaskedObjectiveConfig,
    TranslateObjectiveConfig,
)
from qkv.data import Labelled, Pairs, batch_json, describe_batch, validation_batches
from qkv.tokenizer import Tokenizer


def test_every_slot_shows_token_label_document_position_and_what_it_sees(make_corpus: Any, tokenizer: Any) -> None:
    corpus = make_corpus([*b"ab", 256], [*"cé".encode()])
    (batch,) = validation_batches(corpus, CausalObjectiveConfig(), tokenizer, max_seq_len=5, batch_tokens=5)
    (row,) = describe_batch(batch, tokenizer, looks_ahead=False)
    shown = [(slot.token, slot.label, slot.document, slot.position, slot.sees) for slot in row.slots]
    assert shown == [
        ("a", "b", 0, 0, (0, 0)),
        ("b", "<eos>", 0, 1, (0, 1)),
        ("c", "\\xc3", 1, 0, (2, 2)),
        ("\\xc3", "\\xa9", 1, 1, (2, 3)),
        ("\0", None, None, None, None),
    ]
    assert [slot.label_id for slot in row.slots] == [98, 256, 0xC3, 0xA9, -100]
    assert (row.source, row.label) == ([], None)


def test_a_bidirectional_slot_sees_its_whole_document(make_corpus: Any, tokenizer: Any) -> None:
    corpus = make_corpus(b"ab", b"cde")
    (batch,) = validation_batches(corpus, MaskedObjectiveConfig(), tokenizer, max_seq_len=6, batch_tokens=6)
    (row,) = describe_batch(batch, tokenizer, looks_ahead=True)
    assert [slot.sees for slot in row.slots] == [(0, 1), (0, 1), (2, 4), (2, 4), (2, 4), None]


def test_json_writes_the_defaults_out(make_corpus: Any, tokenizer: Any) -> None:
    (batch,) = validation_batches(
        make_corpus([1, 2, 3]), CausalObjectiveConfig(), tokenizer, max_seq_len=2, batch_tokens=2
    )
    assert batch_json(batch) == {
        "inputs": [[1, 2]],
        "labels": [[2, 3]],
        "documents": [[0, 0]],
        "positions": [[0, 1]],
        "lengths": [2],
    }


def test_a_pair_shows_its_source_in_the_sources_own_tokens(make_corpus: Any, seq2seq: Any) -> None:
    letters = Tokenizer.train("xyz", kind="char")
    source = make_corpus(*([letters.bos_id, *letters.encode(text), letters.eos_id] for text in ("xy", "y")))
    pairs = Pairs(source, make_corpus([257, *b"a", 258], [257, *b"bc", 258]))
    (batch,) = validation_batches(pairs, TranslateObjectiveConfig(), seq2seq, max_seq_len=8, batch_tokens=99)
    rows = describe_batch(batch, seq2seq, looks_ahead=False, source_tokenizer=letters)
    by_length = {len(row.source) - [slot.sees for slot in row.source].count(None): row for row in rows}
    assert [slot.token for slot in by_length[4].source] == ["<bos>", "x", "y", "<eos>"]
    assert [slot.sees for slot in by_length[4].source] == [(0, 3)] * 4
    assert [(slot.token, slot.sees) for slot in by_length[3].source][2:] == [("<eos>", (0, 2)), ("<pad>", None)]
    shown = [(slot.token, slot.label, slot.sees) for slot in by_length[4].slots]
    assert shown == [("<bos>", "a", (0, 0)), ("a", "<eos>", (0, 1)), ("<pad>", None, None)]
    written = batch_json(batch)
    assert sorted(zip(written["source_lengths"], written["lengths"], strict=True)) == [(3, 3), (4, 2)]
    assert written["source"][written["source_lengths"].index(3)] == [*source.document(1), 0]


def test_a_text_shows_the_name_of_its_class(make_corpus: Any, seq2seq: Any) -> None:
    data = Labelled(make_corpus([257, *b"no", 258], [257, *b"yes", 258]), np.array([1, 0]))
    (batch,) = validation_batches(data, ClassifyObjectiveConfig(), seq2seq, max_seq_len=8, batch_tokens=99)
    rows = describe_batch(batch, seq2seq, looks_ahead=True, labels=("good", "bad"))
    assert [row.label for row in rows] == ["bad", "good"]
    assert [slot.label for slot in rows[0].slots] == [None] * 5
    assert batch_json(batch)["labels"] == [1, 0]
    assert "source" not in batch_json(batch)
