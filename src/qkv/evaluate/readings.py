"""Phrases read aloud, a syllable for each character: how many are right, and how many are without context."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from qkv.evaluate.error_rates import exact_match


class Readings:
    """How often each character has which reading in (phrase, syllables with spaces between them)."""

    def __init__(self, entries: Iterable[tuple[str, str]]) -> None:
        self._counts: dict[str, Counter[str]] = defaultdict(Counter)
        for phrase, syllables in entries:
            for character, reading in zip(phrase, syllables.split(), strict=True):
                self._counts[character][reading] += 1

    @property
    def polyphonic(self) -> frozenset[str]:
        """The characters with more than one reading. Tone sandhi and neutral tones count, where they are written."""
        return frozenset(character for character, counts in self._counts.items() if len(counts) > 1)

    def usual(self, phrase: str) -> str:
        """The most frequent reading of every character, whatever stands beside it; "?" for one that was never read."""
        counts = [self._counts.get(character) for character in phrase]
        return " ".join(max(known, key=lambda reading: known[reading]) if known else "?" for known in counts)


@dataclass(frozen=True)
class ReadingScores:
    """Accuracies over phrases, over their characters, and over those of these that are polyphonic. What would be 0 / 0
    is 0."""

    phrases: int
    phrase_accuracy: float
    character_accuracy: float
    polyphonic_accuracy: float


def reading_scores(
    phrases: Sequence[str],
    hypotheses: Sequence[str],
    references: Sequence[Sequence[str]],
    polyphonic: Collection[str],
) -> ReadingScores:
    """Score the syllables of each phrase against its references, which have one for each character.

    A character is right when the syllable in its place is that of a reference; a place without a syllable is wrong.

    Raises UsageError for unequal counts, nothing to score, and a phrase without a reference.
    """
    phrase_accuracy = exact_match(hypotheses, references)
    right: dict[bool, list[bool]] = {True: [], False: []}  # of polyphonic characters, and of the others
    for phrase, hypothesis, several in zip(phrases, hypotheses, references, strict=True):
        syllables = [*hypothesis.split(), *[""] * len(phrase)]
        readings = zip(*(reference.split() for reference in several), strict=True)
        for character, syllable, allowed in zip(phrase, syllables, readings, strict=False):
            right[character in polyphonic].append(syllable in allowed)
    return ReadingScores(len(phrases), phrase_accuracy, _share([*right[True], *right[False]]), _share(right[True]))


def _share(right: Sequence[bool]) -> float:
    return sum(right) / len(right) if right else 0.0
