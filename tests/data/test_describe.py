"""`qkv data show` says what a batch contains."""

from __future__ import annotations

from typing import Any

from qkv.config.run import CausalObjectiveConfig, MaskedObjectiveConfig
from qkv.data import batch_json, describe_batch, validation_batches


def test_every_slot_shows_token_label_document_position_and_what_it_sees(make_corpus: Any, tokenizer: Any) -> None:
    corpus = make_corpus([*b"ab", 256], [*"cé".encode()])
    (batch,) = validation_batches(corpus, CausalObjectiveConfig(), tokenizer, max_seq_len=5, batch_tokens=5)
    (row,) = describe_batch(batch, tokenizer, CausalObjectiveConfig())
    shown = [(slot.token, slot.label, slot.document, slot.position, slot.sees) for slot in row]
    assert shown == [
        ("a", "b", 0, 0, (0, 0)),
        ("b", "<eos>", 0, 1, (0, 1)),
        ("c", "\\xc3", 1, 0, (2, 2)),
        ("\\xc3", "\\xa9", 1, 1, (2, 3)),
        ("\0", None, None, None, None),
    ]
    assert [slot.label_id for slot in row] == [98, 256, 0xC3, 0xA9, -100]


def test_a_bidirectional_slot_sees_its_whole_document(make_corpus: Any, tokenizer: Any) -> None:
    corpus = make_corpus(b"ab", b"cde")
    (batch,) = validation_batches(corpus, MaskedObjectiveConfig(), tokenizer, max_seq_len=6, batch_tokens=6)
    (row,) = describe_batch(batch, tokenizer, MaskedObjectiveConfig())
    assert [slot.sees for slot in row] == [(0, 1), (0, 1), (2, 4), (2, 4), (2, 4), None]


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
