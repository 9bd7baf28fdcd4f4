"""Hypotheses beside their references."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from qkv.config.errors import UsageError

HAN = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
"""Chinese characters, to stand in the brackets of a regular expression."""


def check_counts(**texts: Sequence[Any]) -> None:
    """Raise UsageError unless all have the same length, and one above 0."""
    for name, items in texts.items():
        if isinstance(items, str):
            raise UsageError(f"the {name} are a list of texts, not one text", hint="[text]")
    counts = {name: len(items) for name, items in texts.items()}
    if len(set(counts.values())) > 1:
        raise UsageError(f"{' and '.join(counts)} differ in number: {' and '.join(map(str, counts.values()))}")
    if not any(counts.values()):
        raise UsageError(f"there are no {next(iter(counts))} to score")


def is_text(reference: object) -> bool:
    return isinstance(reference, str)


def references_of(
    hypotheses: Sequence[Any], references: Sequence[Any], is_one: Callable[[Any], bool] = is_text
) -> list[list[Any]]:
    """The references of each hypothesis: an item that `is_one` is the only one, any other holds several.

    Raises UsageError for unequal counts, none at all, and a hypothesis without a reference.
    """
    check_counts(hypotheses=hypotheses, references=references)
    listed = [[item] if is_one(item) else list(item) for item in references]
    for number, several in enumerate(listed, 1):
        if not several:
            raise UsageError(f"hypothesis {number} has no reference")
    return listed
