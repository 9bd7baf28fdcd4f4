"""Classifying texts: each as if alone, cut as in training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from qkv.config.errors import QkvError, UsageError
from qkv.config.objectives import ClassifyObjectiveConfig
from qkv.config.run import Config
from qkv.data.prepare import Corpus, Labelled
from qkv.evaluate.tasks import predictions
from qkv.model import Model

from .tiny import CONTEXT, byte_tokenizer, model, network

TEXTS = ["so good", "", "a much longer text, which is not so good", "x", "我"]
LABELS = ("bad", "neutral", "good")


def classifier(labels: tuple[str, ...] | None = LABELS, seed: int = 0, **changes: Any) -> Model:
    made = network(seed, family="encoder", head={"kind": "classifier", "num_classes": 3, "pooling": "mean"}, **changes)
    config = Config(model=made.config, objective=ClassifyObjectiveConfig(labels=labels))
    return Model(made, byte_tokenizer(), config)


@pytest.mark.parametrize("batch_size", [1, 2, 100])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head": {"kind": "classifier", "num_classes": 3, "pooling": "first"}, "position": {"kind": "learned"}},
        {"head": {"kind": "classifier", "num_classes": 3, "pooling": "last"}, "family": "decoder"},
    ],
)
def test_each_text_is_classified_as_if_alone_and_in_order(batch_size: int, changes: dict[str, Any]) -> None:
    made = network(**{"family": "encoder", "head": {"kind": "classifier", "num_classes": 3}, **changes})
    classify = Model(made, byte_tokenizer(), Config(model=made.config)).classify
    for text, found in zip(TEXTS, classify(TEXTS, batch_size=batch_size), strict=True):
        with torch.no_grad():
            p = made(torch.tensor([[257, *text.encode(), 258]]))[0].softmax(-1)
        assert found.label == str(int(p.argmax()))
        assert found.probability == pytest.approx(float(p.max()), abs=1e-5)
        assert found.probabilities == pytest.approx({str(i): float(p[i]) for i in range(3)}, abs=1e-5)
        assert list(found.probabilities.values()) == sorted(found.probabilities.values(), reverse=True)


def test_a_text_gives_one_and_a_list_a_list() -> None:
    made = classifier()
    assert made.classify(["x"]) == [made.classify("x")]
    assert made.classify([]) == []
    assert made.classify([257, 120, 258]) == made.classify("x")
    assert made.classify(" \n") == made.classify("")  # as training reads it


def test_classes_are_called_by_their_labels_and_otherwise_by_their_numbers() -> None:
    named, numbered = classifier().classify("x"), classifier(None).classify("x")
    assert named.label == LABELS[int(numbered.label)]
    assert named.probabilities == {LABELS[int(number)]: p for number, p in numbered.probabilities.items()}


def test_top_keeps_the_likeliest() -> None:
    made = classifier()
    assert made.classify("x", top=2).probabilities == dict(list(made.classify("x").probabilities.items())[:2])
    assert len(made.classify("x", top=9).probabilities) == 3


def test_a_long_text_is_cut_as_in_training() -> None:
    made = classifier(seed=1)
    texts = ["a" * 200 + "b", "b" * (CONTEXT - 2), "b" * (CONTEXT - 1), "c" * 70]
    assert made.classify(texts[2]) == made.classify([257, *b"b" * (CONTEXT - 2), 258])
    ids = [[257, *text.encode(), 258] for text in texts]
    edges = np.cumsum([0, *map(len, ids)])
    corpus = Corpus(np.concatenate(ids).astype(np.uint32), edges[:-1], edges[1:])
    data = Labelled(corpus, np.arange(4))  # the class is the text's number: predictions come in another order
    objective = ClassifyObjectiveConfig(labels=LABELS)
    predicted, order = predictions(made.network, data, objective, byte_tokenizer())
    found = made.classify(texts)
    assert [LABELS[number] for number in predicted] == [found[number].label for number in order]


def test_the_mode_of_training_is_kept_and_dropout_is_off() -> None:
    made = classifier(dropout=0.5)
    made.network.train()
    assert made.classify("x") == made.classify("x")
    assert made.network.training


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        (3, {}, "not 3"),
        (["a", 3], {}, "text is wanted|neither a text"),
        ([260], {}, "260"),
        ([[]], {}, "text 0 is empty"),
        ("x", {"top": 0}, "top"),
        ("x", {"top": 1.5}, "top"),
        ("x", {"batch_size": 0}, "batch_size"),
    ],
)
def test_what_cannot_be_meant_is_refused(text: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        classifier().classify(text, **options)


@pytest.mark.parametrize("family", ["decoder", "encoder", "encoder-decoder"])
def test_a_model_without_a_classifier_is_refused_by_name(family: str) -> None:
    with pytest.raises(UsageError, match=f"family {family} with a head of kind .*language-model does not classify"):
        model(family=family).classify("x")


def test_labels_that_are_not_those_of_the_head_are_refused() -> None:
    with pytest.raises(UsageError, match="3 classes apart, and its configuration names 2"):
        classifier(("bad", "good")).classify("x")


def test_probabilities_that_are_not_finite_are_an_error() -> None:
    made = classifier()
    with torch.no_grad():
        next(made.network.parameters()).fill_(float("nan"))
    with pytest.raises(QkvError, match="not finite"):
        made.classify("x")
