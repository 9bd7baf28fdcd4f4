"""Accuracy, F1 and the confusion matrix."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.config.errors import UsageError
from qkv.evaluate import classification_scores, confusion_table

TRUE = ["cat", "cat", "cat", "cat", "dog", "dog", "fox", "fox", "fox", "fox"]
PREDICTED = ["cat", "cat", "cat", "dog", "dog", "fox", "fox", "fox", "cat", "cat"]
labels = st.sampled_from(["a", "b", "c"])


def test_the_figures_are_those_of_the_definitions() -> None:
    scores = classification_scores(PREDICTED, TRUE, ["cat", "dog", "fox"])
    assert scores.examples == 10
    assert scores.accuracy == 6 / 10
    assert scores.confusion == [[3, 1, 0], [0, 1, 1], [2, 0, 2]]
    cat, dog, fox = scores.classes
    assert (cat.label, cat.precision, cat.recall, cat.support) == ("cat", 3 / 5, 3 / 4, 4)
    assert (dog.label, dog.precision, dog.recall, dog.support) == ("dog", 1 / 2, 1 / 2, 2)
    assert (fox.label, fox.precision, fox.recall, fox.support) == ("fox", 2 / 3, 2 / 4, 4)
    assert (cat.f1, dog.f1, fox.f1) == pytest.approx((2 / 3, 1 / 2, 4 / 7))
    assert scores.f1 == pytest.approx((2 / 3 + 1 / 2 + 4 / 7) / 3)


def test_a_class_that_is_never_predicted_has_zeros_and_counts() -> None:
    scores = classification_scores(["a", "a"], ["a", "b"], ["a", "b"])
    assert (scores.classes[1].precision, scores.classes[1].recall, scores.classes[1].f1) == (0, 0, 0)
    assert scores.f1 == pytest.approx((2 / 3) / 2)


def test_a_class_that_is_never_true_has_zeros_and_counts_where_predicted() -> None:
    scores = classification_scores(["a", "b"], ["a", "a"], ["a", "b"])
    assert (scores.classes[1].recall, scores.classes[1].support) == (0, 0)
    assert scores.f1 == pytest.approx((2 / 3) / 2)


def test_a_class_that_does_not_occur_changes_nothing() -> None:
    with_it = classification_scores(PREDICTED, TRUE, ["cat", "cow", "dog", "fox"])
    assert with_it.f1 == classification_scores(PREDICTED, TRUE, ["cat", "dog", "fox"]).f1
    assert with_it.classes[1].f1 == 0
    assert with_it.confusion[1] == [0, 0, 0, 0]


@given(st.lists(labels, min_size=1))
def test_perfect_predictions_score_1(true) -> None:
    scores = classification_scores(true, true, ["a", "b", "c"])
    assert (scores.accuracy, scores.f1) == (1, 1)


@given(st.lists(st.tuples(labels, labels), min_size=1))
def test_the_confusion_matrix_holds_every_example(pairs) -> None:
    predicted, true = zip(*pairs, strict=True)
    scores = classification_scores(predicted, true, ["a", "b", "c"])
    assert sum(map(sum, scores.confusion)) == len(pairs)
    assert [sum(row) for row in scores.confusion] == [true.count(label) for label in "abc"]
    assert [sum(column) for column in zip(*scores.confusion, strict=True)] == [predicted.count(x) for x in "abc"]
    assert 0 <= scores.f1 <= 1


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(UsageError, match="differ in number: 1 and 2"):
        classification_scores(["a"], ["a", "b"], ["a", "b"])
    with pytest.raises(UsageError, match="no predictions"):
        classification_scores([], [], ["a"])
    with pytest.raises(UsageError, match="no class `positiv`") as caught:
        classification_scores(["positiv"], ["positive"], ["negative", "positive"])
    assert caught.value.hint == "positive"
    with pytest.raises(UsageError, match="`a` names two classes"):
        classification_scores(["a"], ["a"], ["a", "b", "a"])


def test_the_table_has_a_row_per_true_class() -> None:
    table = confusion_table(classification_scores(PREDICTED, TRUE, ["cat", "dog", "fox"]))
    assert table.splitlines() == [
        "true \\ predicted  cat  dog  fox",
        "cat                 3    1    0",
        "dog                 0    1    1",
        "fox                 2    0    2",
    ]


def test_columns_stay_straight_with_chinese_labels() -> None:
    table = confusion_table(classification_scores(["好评", "差评"], ["好评", "好评"], ["差评", "好评"]))
    assert table.splitlines() == [
        "true \\ predicted  差评  好评",
        "差评                 0     0",
        "好评                 1     1",
    ]


def test_a_long_or_hostile_label_leaves_the_table_in_shape() -> None:
    hostile = "\x1b[2Jred\nblue"
    table = confusion_table(classification_scores([hostile], ["很" * 20], ["很" * 20, hostile]))
    assert table.splitlines() == [
        "true \\ predicted  很很很很很很很..  \\x1b[2Jred blue",
        "很很很很很很很..                 0                1",
        "\\x1b[2Jred blue                  0                0",
    ]
