"""Reading phrases aloud: what counts as polyphonic, as usual, and as right."""

from __future__ import annotations

import pytest

from qkv.config.errors import UsageError
from qkv.evaluate.readings import Readings, reading_scores

ENTRIES = [("银行", "yín háng"), ("行人", "xíng rén"), ("行走", "xíng zǒu"), ("人行道", "rén xíng dào")]


def test_a_character_with_two_readings_is_polyphonic() -> None:
    assert Readings(ENTRIES).polyphonic == {"行"}


def test_the_usual_reading_is_the_most_frequent_whatever_the_context() -> None:
    assert Readings(ENTRIES).usual("银行人") == "yín xíng rén"
    assert Readings(ENTRIES).usual("新人") == "? rén"


def test_characters_are_scored_in_their_places_and_polyphonic_ones_apart() -> None:
    scores = reading_scores(
        ["银行", "行人", "人行道"],
        ["yín háng", "háng rén", "rén"],
        [["yín háng"], ["xíng rén"], ["rén xíng dào"]],
        polyphonic={"行"},
    )
    assert scores.phrases == 3
    assert scores.phrase_accuracy == pytest.approx(1 / 3)
    assert scores.character_accuracy == pytest.approx(4 / 7)
    assert scores.polyphonic_accuracy == pytest.approx(1 / 3)


def test_any_of_several_references_will_do() -> None:
    scores = reading_scores(["朝阳"], ["cháo yáng hǎo"], [["zhāo yáng", "cháo yáng"]], polyphonic={"朝"})
    assert (scores.character_accuracy, scores.polyphonic_accuracy, scores.phrase_accuracy) == (1.0, 1.0, 0.0)
    assert reading_scores(["朝阳"], [""], [["zhāo yáng"]], polyphonic=()).polyphonic_accuracy == 0.0


def test_nothing_to_score_is_refused() -> None:
    with pytest.raises(UsageError, match="to score"):
        reading_scores([], [], [], polyphonic=())
