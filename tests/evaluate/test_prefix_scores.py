"""`qkv.evaluate.prefix_scores`: a prefix-LM on what follows a prefix."""

from __future__ import annotations

import pytest
import torch

from qkv.config.errors import UsageError
from qkv.config.objectives import PrefixObjectiveConfig
from qkv.data import validation_batches
from qkv.evaluate import prefix_scores
from qkv.evaluate.perplexity import perplexity


@pytest.fixture
def corpus(make_corpus, random_ids):
    ids = random_ids(40)
    return make_corpus(ids[:19], ids[19:24], ids[24:])


def test_what_follows_the_prefix_is_scored_and_the_prefix_read_in_both_directions(
    make_network, corpus, byte_tokenizer
) -> None:
    network = make_network(prefix=True).eval()
    losses = []
    batches = validation_batches(corpus, PrefixObjectiveConfig(), byte_tokenizer, max_seq_len=8, batch_tokens=8)
    for batch in batches:
        for row, prefix in enumerate(batch.prefix_lengths.tolist()):
            ids, labels = batch.inputs[row : row + 1], batch.labels[row]
            for slot in (labels != -100).nonzero().flatten().tolist():
                assert slot >= prefix - 1
                with torch.no_grad():
                    logits = network(ids[:, : slot + 1], prefix_lengths=torch.tensor([prefix]))[0, -1].double()
                losses.append(float(-logits.log_softmax(-1)[labels[slot]]))
    found = prefix_scores(network, corpus, byte_tokenizer)
    assert found.tokens == len(losses)
    assert found.loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert found.bits_per_byte is None
    assert prefix_scores(network, corpus, byte_tokenizer, batch_size=1).loss == pytest.approx(found.loss, rel=1e-6)


def test_each_kind_of_decoder_is_told_its_own_scores(make_network, corpus, byte_tokenizer) -> None:
    with pytest.raises(UsageError, match="a prefix-LM is scored on what follows a prefix") as error:
        perplexity(make_network(prefix=True), corpus)
    assert error.value.hint == "prefix_scores"
    with pytest.raises(UsageError, match="no prefix") as error:
        prefix_scores(make_network(), corpus, byte_tokenizer)
    assert error.value.hint == "perplexity"
    with pytest.raises(UsageError, match="at most 8"):
        prefix_scores(make_network(prefix=True), corpus, byte_tokenizer, window=9)
