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
    """Accuracies over phrases, over their characters, and over those of these that are polyphonic (None: there is
    none)."""

    phrases: int
    phrase_accuracy: float
    character_accuracy: float
    polyphonic_accuracy: float | None


def reading_scores(
    phrases: Sequence[str],
    hypotheses: Sequence[str],
    references: Sequence[Sequence[str]],
    polyphonic: Collection[str],
) -> ReadingScores:
    """Score the syllables of each phrase against its references, one syllable for each character.

    A character is right when the syllable in its place is that of a reference; a place without a syllable is wrong.

    Raises UsageError for unequal counts and nothing to score.
    """
    phrase_accuracy = exact_match(hypotheses, references)
    hits: list[bool] = []
    polyphonic_hits: list[bool] = []
    for phrase, hypothesis, several in zip(phrases, hypotheses, references, strict=True):
        syllables = [*hypothesis.split(), *[""] * len(phrase)]
        allowed = [set(readings) for readings in zip(*(one.split() for one in several), strict=True)]
        for character, syllable, readings in zip(phrase, syllables, allowed, strict=False):
            hits.append(syllable in readings)
            if character in polyphonic:
                polyphonic_hits.append(syllable in readings)
    return ReadingScores(
        len(phrases), phrase_accuracy, _share(hits), _share(polyphonic_hits) if polyphonic_hits else None
    )


def _share(hits: Sequence[bool]) -> float:
    return sum(hits) / len(hits)
