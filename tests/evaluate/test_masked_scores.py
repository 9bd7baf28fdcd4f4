"""`qkv.evaluate.masked_scores`: an encoder on masked tokens."""

from __future__ import annotations

import pytest
import torch

from qkv.config.errors import QkvError, UsageError
from qkv.config.objectives import MaskedObjectiveConfig
from qkv.data import validation_batches
from qkv.evaluate import masked_scores


@pytest.fixture
def encoder(make_network):
    return make_network(family="encoder", position={"kind": "learned"}).eval()


@pytest.fixture
def corpus(make_corpus, random_ids):
    ids = random_ids(90)
    return make_corpus(ids[:30], ids[30:35], ids[35:])


def test_masked_scores_are_those_of_the_masked_tokens_alone(encoder, corpus, byte_tokenizer) -> None:
    batches = validation_batches(corpus, MaskedObjectiveConfig(rate=0.3), byte_tokenizer, max_seq_len=8, batch_tokens=8)
    losses, right = [], 0
    for batch in batches:
        with torch.no_grad():
            logits = encoder(batch.inputs, documents=batch.documents, positions=batch.positions, lengths=batch.lengths)
        for slot in (batch.labels[0] != -100).nonzero().flatten().tolist():
            label = batch.labels[0, slot]
            losses.append(float(-logits[0, slot].double().log_softmax(-1)[label]))
            right += int(logits[0, slot].argmax() == label)
    scores = masked_scores(encoder, corpus, byte_tokenizer, rate=0.3)
    assert scores.tokens == len(losses)
    assert scores.loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert scores.accuracy == right / len(losses)
    assert scores.bits_per_byte is None


def test_masks_are_the_same_in_every_call_and_batch_size(encoder, corpus, byte_tokenizer) -> None:
    first = masked_scores(encoder, corpus, byte_tokenizer, batch_size=1)
    torch.manual_seed(123)
    for batch_size in (None, 2, 100):
        again = masked_scores(encoder, corpus, byte_tokenizer, batch_size=batch_size)
        assert again.loss == pytest.approx(first.loss, rel=1e-6)
        assert again.tokens == first.tokens


def test_masked_scores_refuse_what_cannot_be(encoder, network, make_corpus, corpus, byte_tokenizer) -> None:
    with pytest.raises(UsageError, match="only an encoder"):
        masked_scores(network, corpus, byte_tokenizer)
    with pytest.raises(UsageError, match="at most 8"):
        masked_scores(encoder, corpus, byte_tokenizer, window=9)
    with pytest.raises(UsageError, match="batch_size"):
        masked_scores(encoder, corpus, byte_tokenizer, batch_size=0)
    with pytest.raises(QkvError, match="special tokens only"):
        masked_scores(encoder, make_corpus([byte_tokenizer.bos_id] * 3), byte_tokenizer)
