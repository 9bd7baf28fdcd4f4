"""Batches and the network together: a packed document is worth what it is worth alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qkv.config.model import ModelConfig
from qkv.config.objectives import CausalObjectiveConfig
from qkv.data import Batch, validation_batches
from qkv.nn import Transformer


@pytest.fixture(scope="module")
def network() -> Transformer:
    layers = {"d_model": 16, "num_layers": 2, "attention": {"num_heads": 2}, "feed_forward": {"d_ff": 32}}
    config = ModelConfig.model_validate(
        {"vocab_size": 260, "max_seq_len": 12, "position": {"kind": "learned"}, **layers}
    )
    torch.manual_seed(0)
    return Transformer(config).eval()


def outputs(network: Transformer, batch: Batch) -> tuple[torch.Tensor, Any]:
    given = {"lengths": batch.lengths, "documents": batch.documents, "positions": batch.positions}
    with torch.no_grad():
        return network(batch.inputs, **given), network(batch.inputs, labels=batch.labels, **given)


def test_packed_documents_are_scored_as_if_alone(network: Transformer, make_corpus: Any, tokenizer: Any) -> None:
    """Also next to another first document, and with padding at the end of the row."""
    documents = [[1, 2, 3, 256], [4, 5, 6, 7, 256], [8, 9, 256]]
    sums = []
    for first in (documents[0], [11, 12, 13, 256]):
        corpus = make_corpus(first, *documents[1:])
        (batch,) = validation_batches(corpus, CausalObjectiveConfig(), tokenizer, max_seq_len=12, batch_tokens=12)
        logits_BTV, output = outputs(network, batch)
        assert output.target_count == batch.target_count == 9
        loss_sum, begin = 0.0, 0
        for ids in (first, *documents[1:]):
            alone_BTV = network(torch.tensor([ids[:-1]])).detach()
            end = begin + len(ids) - 1
            torch.testing.assert_close(logits_BTV[:, begin:end], alone_BTV, rtol=0, atol=1e-5)
            # each logit meets its own label: the next token, EOS at last
            log_p_TV = alone_BTV[0].log_softmax(-1)
            loss_sum -= float(log_p_TV[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].sum())
            begin = end
        assert float(output.loss_sum) == pytest.approx(loss_sum, rel=1e-5)
        sums.append(logits_BTV[:, 3:9])
    assert torch.equal(*sums), "another first document changes nothing in the others"
