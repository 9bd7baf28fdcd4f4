"""How much must change to make an answer right. Texts are compared after NFC: é is one é, however it is spelled."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from unicodedata import normalize

from qkv.config.errors import UsageError
from qkv.evaluate.pairs import HAN, check_counts, is_text, references_of

Unit = Literal["word", "character", "token"]

_SPACE_BESIDE_HAN = re.compile(rf"(?<=[{HAN}]) | (?=[{HAN}])")
_DIGIT_AT_END = re.compile(r"(?<=\w)\d\b")


def edit_distance(hypothesis: Sequence[Hashable], reference: Sequence[Hashable]) -> int:
    """The least number of insertions, deletions and substitutions that make one sequence the other (Levenshtein 1966).

    Of the table of distances between all prefixes, neighbours differ by -1, 0 or 1. A column of it is kept as the bits
    of integers, and the next takes a few operations on them (Myers 1999). The names are those of Hyyrö 2003: vp and vn
    are the steps of +1 and -1 down a column, hp and hn those across to the next, d0 the diagonal steps of 0.
    """
    length = len(reference)
    if length == 0:
        return len(hypothesis)
    places: dict[Hashable, int] = {}
    for row, symbol in enumerate(reference):
        places[symbol] = places.get(symbol, 0) | 1 << row
    last, everywhere = 1 << length - 1, (1 << length) - 1
    vp, vn, distance = everywhere, 0, length
    for symbol in hypothesis:
        equal = places.get(symbol, 0)
        d0 = (((equal & vp) + vp) ^ vp) | equal | vn
        hp, hn = vn | ~(d0 | vp), d0 & vp
        distance += bool(hp & last) - bool(hn & last)
        hp, hn = hp << 1 | 1, hn << 1
        vp, vn = (hn | ~(d0 | hp)) & everywhere, d0 & hp & everywhere
    return distance


def error_rate(
    hypotheses: Sequence[str] | Sequence[Sequence[Hashable]],
    references: Sequence[str] | Sequence[Sequence[Any]],
    unit: Unit = "word",
) -> float:
    """Edits per unit: the sum of edit distances over the sum of reference lengths; above 1 where too much was said.

    A `word` is what stands between whitespace, so that Chinese wants `character`. A `character` is a code point; a run
    of whitespace counts as one, but not at the ends or beside a Chinese character, where it separates nothing. With
    `token` the items are not texts but sequences of symbols, ids for example.

    A hypothesis has one reference or a list of several. The closest counts: that of the smallest distance, and of
    equals the longest.

    Raises UsageError for unequal counts, nothing to score, an unknown unit, and references that are all empty.
    """
    if unit not in _SPLIT:
        raise UsageError(f"there is no error rate per `{unit}`", hint=", ".join(_SPLIT))
    split = _SPLIT[unit]
    listed = references_of(hypotheses, references, _is_sequence_of_symbols if unit == "token" else is_text)
    pairs = zip(hypotheses, listed, strict=True)
    return _rate([_closest(split(hypothesis), map(split, several)) for hypothesis, several in pairs], unit)


def exact_match(hypotheses: Sequence[str], references: Sequence[str] | Sequence[Sequence[str]]) -> float:
    """The share of hypotheses that equal a reference of theirs. Raises UsageError as `error_rate` does."""
    listed = references_of(hypotheses, references)
    right = [
        normalize("NFC", hypothesis) in [normalize("NFC", reference) for reference in several]
        for hypothesis, several in zip(hypotheses, listed, strict=True)
    ]
    return sum(right) / len(right)


@dataclass(frozen=True)
class PronunciationScores:
    """Error rates over distinct `words`. A word is wrong unless it matches one of its pronunciations; phonemes are
    counted against the closest. Without stress, digits at the end of phonemes are left out, as in most publications on
    CMUdict."""

    words: int
    word_error_rate: float
    phoneme_error_rate: float
    word_error_rate_without_stress: float
    phoneme_error_rate_without_stress: float


def pronunciation_scores(
    words: Sequence[str], hypotheses: Sequence[str], references: Sequence[str] | Sequence[Sequence[str]]
) -> PronunciationScores:
    """Score pronunciations, written as phonemes with spaces between them: `K AE1 T`.

    An item has one reference or a list of several. Where a word comes again, as in a file with a line for each variant,
    all its references are variants of one word, and its first hypothesis counts.

    Raises UsageError for unequal counts, nothing to score, and references that are all empty.
    """
    check_counts(words=words, hypotheses=hypotheses)
    first: dict[str, str] = {}
    variants: dict[str, list[str]] = {}
    for word, hypothesis, several in zip(words, hypotheses, references_of(hypotheses, references), strict=True):
        first.setdefault(word, hypothesis)
        variants.setdefault(word, []).extend(several)

    def rates(split: Callable[[str], list[str]]) -> tuple[float, float]:
        found = [_closest(split(first[word]), map(split, variants[word])) for word in first]
        return sum(distance > 0 for distance, _ in found) / len(found), _rate(found, "phoneme")

    word_rate, phoneme_rate = rates(_words)
    word_rate_plain, phoneme_rate_plain = rates(lambda text: _words(_DIGIT_AT_END.sub("", text)))
    return PronunciationScores(len(first), word_rate, phoneme_rate, word_rate_plain, phoneme_rate_plain)


def _words(text: str) -> list[str]:
    return normalize("NFC", text).split()


def _characters(text: str) -> list[str]:
    return list(_SPACE_BESIDE_HAN.sub("", " ".join(_words(text))))


_SPLIT: dict[str, Callable[[Any], list[Any]]] = {"word": _words, "character": _characters, "token": list}


def _is_sequence_of_symbols(reference: Sequence[Any]) -> bool:
    """Whether this is one reference, and not several."""
    return not reference or not isinstance(reference[0], list | tuple)


def _closest(hypothesis: Sequence[Hashable], references: Iterable[Sequence[Hashable]]) -> tuple[int, int]:
    """Distance to and length of the closest reference."""
    distance, minus_length = min((edit_distance(hypothesis, reference), -len(reference)) for reference in references)
    return distance, -minus_length


def _rate(found: list[tuple[int, int]], unit: str) -> float:
    length = sum(length for _, length in found)
    if not length:
        raise UsageError(f"the references hold no {unit}, and errors are counted per {unit}")
    return sum(distance for distance, _ in found) / length
