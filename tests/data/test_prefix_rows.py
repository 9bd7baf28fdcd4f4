"""Rows of a prefix-LM: what is read in both directions, and what is predicted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qkv.config.objectives import PrefixObjectiveConfig
from qkv.data import Batch, BatchLoader, validation_batches
from qkv.data.describe import batch_json, describe_batch

DOCUMENTS = [range(10), [20, 21], [30], range(40, 45)]


def rows_of(corpus: Any, tokenizer: Any, max_seq_len: int = 4) -> Batch:
    """All validation rows of a corpus in one batch."""
    (batch,) = validation_batches(
        corpus, PrefixObjectiveConfig(), tokenizer, max_seq_len=max_seq_len, batch_tokens=1000
    )
    return batch


def test_every_token_but_a_documents_first_is_predicted_unless_it_is_in_the_prefix(
    make_corpus: Any, tokenizer: Any
) -> None:
    batch = rows_of(make_corpus(*DOCUMENTS), tokenizer)
    assert batch.lengths is not None
    assert batch.prefix_lengths is not None
    targets = []
    for ids, labels, length, prefix in zip(
        batch.inputs.tolist(), batch.labels.tolist(), batch.lengths.tolist(), batch.prefix_lengths.tolist(), strict=True
    ):
        assert 1 <= prefix <= length
        assert labels[: prefix - 1] == [-100] * (prefix - 1)
        assert labels[prefix - 1 : length] == [ids[0] + slot for slot in range(prefix, length + 1)]
        assert labels[length:] == [-100] * (4 - length)
        targets += range(ids[0] + 1, ids[0] + length + 1)
    assert sorted(targets) == [*range(1, 10), 21, *range(41, 45)]
    assert batch.target_count == int((batch.labels != -100).sum())
    assert set(batch.arguments) == {"lengths", "prefix_lengths"}


def test_prefixes_are_of_every_length_and_differ_between_epochs_only(make_corpus: Any, tokenizer: Any) -> None:
    corpus = make_corpus(*[range(9)] * 200)

    def prefixes(epoch: int) -> torch.Tensor:
        loader = BatchLoader(corpus, PrefixObjectiveConfig(), tokenizer, max_seq_len=8, batch_tokens=1600)
        loader.load_state_dict({"epoch": epoch, "index": 0})
        (batch,) = next(loader)
        assert batch.prefix_lengths is not None
        return batch.prefix_lengths

    counts = prefixes(0).bincount(minlength=9).tolist()
    assert counts[0] == 0
    assert min(counts[1:]) > 10
    assert torch.equal(prefixes(0), prefixes(0))
    assert not torch.equal(prefixes(0).sort().values, prefixes(1).sort().values)


def test_validation_prefixes_never_change(make_corpus: Any, tokenizer: Any) -> None:
    corpus = make_corpus(*[range(9)] * 20)
    assert torch.equal(rows_of(corpus, tokenizer, 8).labels, rows_of(corpus, tokenizer, 8).labels)


@pytest.mark.parametrize("row", range(3))
def test_what_is_shown_of_a_row_says_what_each_slot_sees(make_corpus: Any, tokenizer: Any, row: int) -> None:
    batch = rows_of(make_corpus(*[range(60, 66)] * 3), tokenizer, 8)
    assert batch.prefix_lengths is not None
    prefix = int(batch.prefix_lengths[row])
    slots = describe_batch(batch, tokenizer, looks_ahead=False)[row].slots
    assert [slot.sees for slot in slots] == [(0, max(number, prefix - 1)) for number in range(5)]
    assert batch_json(batch)["prefix_lengths"] == batch.prefix_lengths.tolist()
