"""How well examples are told apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size

from qkv.config.errors import UsageError, nearest, printable
from qkv.evaluate.pairs import check_counts


@dataclass(frozen=True)
class ClassScores:
    """One class against the rest; `support` is how many examples are of it. What would be 0 / 0 is 0."""

    label: str
    precision: float
    recall: float
    f1: float
    support: int


@dataclass(frozen=True)
class ClassificationScores:
    """`f1` is macro F1. `confusion[i][j]` counts the examples of class i that were taken for class j."""

    accuracy: float
    f1: float
    classes: list[ClassScores]
    confusion: list[list[int]]
    examples: int


def classification_scores(predicted: Sequence[str], true: Sequence[str], labels: Sequence[str]) -> ClassificationScores:
    """Compare predicted labels with true ones; `labels` names the classes in the order of the result.

    Macro F1 is the mean over the classes that occur, as true or as predicted, so a class that is in neither changes
    nothing. These are the figures of scikit-learn's `f1_score(average="macro", zero_division=0)`.

    Raises UsageError for unequal counts, nothing to score, and a label that is not in `labels` or is there twice.
    """
    check_counts(predictions=predicted, labels=true)
    places = {label: place for place, label in enumerate(labels)}
    if len(places) < len(labels):
        twice = next(label for label, count in Counter(labels).items() if count > 1)
        raise UsageError(f"the label `{twice}` names two classes")
    for label in (*true, *predicted):
        if label not in places:
            raise UsageError(f"there is no class `{label}`", hint=nearest(label, labels))
    confusion = [[0] * len(labels) for _ in labels]
    for is_label, as_label in zip(true, predicted, strict=True):
        confusion[places[is_label]][places[as_label]] += 1
    taken = [sum(column) for column in zip(*confusion, strict=True)]
    classes = [_class_scores(label, confusion[i][i], taken[i], sum(confusion[i])) for i, label in enumerate(labels)]
    occurring = [scores.f1 for scores, count in zip(classes, taken, strict=True) if scores.support or count]
    return ClassificationScores(
        accuracy=sum(confusion[i][i] for i in range(len(labels))) / len(true),
        f1=sum(occurring) / len(occurring),
        classes=classes,
        confusion=confusion,
        examples=len(true),
    )


def _class_scores(label: str, right: int, taken: int, support: int) -> ClassScores:
    return ClassScores(
        label=label,
        precision=right / taken if taken else 0.0,
        recall=right / support if support else 0.0,
        f1=2 * right / (taken + support) if taken + support else 0.0,
        support=support,
    )


def confusion_table(scores: ClassificationScores) -> str:
    """The confusion matrix as lines of text: a row per true class, a column per predicted one. Long labels are cut;
    columns stay straight with Chinese ones, whose characters take two places on a screen."""
    names = [_cut(scores.label) for scores in scores.classes]
    rows = [["true \\ predicted", *names]]
    rows += [[name, *map(str, counts)] for name, counts in zip(names, scores.confusion, strict=True)]
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *cells in rows:
        lines.append(name + " " * (widths[0] - cell_len(name)))
        for cell, width in zip(cells, widths[1:], strict=True):
            lines[-1] += "  " + " " * (width - cell_len(cell)) + cell
    return "\n".join(lines)


def _cut(label: str, columns: int = 16) -> str:
    text = printable(" ".join(label.split()))
    return text if cell_len(text) <= columns else set_cell_size(text, columns - 2).rstrip() + ".."
