"""Edit distances and the rates that are made of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.config.errors import UsageError
from qkv.evaluate import edit_distance, error_rate, exact_match, pronunciation_scores

symbols = st.lists(st.integers(0, 3), max_size=12)
texts = st.lists(st.text("ab 好é\u0301", max_size=8), min_size=1, max_size=4)


def table_distance(a: list[int], b: list[int]) -> int:
    """By the definition, a row of the table at a time."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [("kitten", "sitting", 3), ("", "abc", 3), ("abc", "", 3), ("", "", 0), ("ab", "ba", 2), ("你好吗", "你好", 1)],
)
def test_the_distance_counts_insertions_deletions_and_substitutions(a, b, distance) -> None:
    assert edit_distance(a, b) == distance


@given(symbols, symbols)
def test_the_distance_is_that_of_the_table(a, b) -> None:
    assert edit_distance(a, b) == table_distance(a, b)


def test_the_distance_of_long_sequences_is_that_of_the_table() -> None:
    a, b = [i * i % 37 for i in range(200)], [i * i * i % 41 for i in range(180)]
    assert edit_distance(a, b) == table_distance(a, b)


@given(symbols, symbols)
def test_the_distance_is_symmetric_and_zero_for_equals_only(a, b) -> None:
    assert edit_distance(a, b) == edit_distance(b, a)
    assert (edit_distance(a, b) == 0) == (a == b)


@given(symbols, symbols, symbols)
def test_a_detour_is_never_shorter(a, b, c) -> None:
    assert edit_distance(a, c) <= edit_distance(a, b) + edit_distance(b, c)


def test_errors_are_summed_before_they_are_divided() -> None:
    assert error_rate(["a b c", "x"], ["a b c", "y"]) == 1 / 4
    assert error_rate(["abc", "x"], ["abc", "y"], "character") == 1 / 4
    assert error_rate([[1, 2, 3], [4]], [[1, 2, 3], [5]], "token") == 1 / 4


def test_too_much_said_gives_a_rate_above_1() -> None:
    assert error_rate(["a b c"], ["d"]) == 3


@given(texts, st.sampled_from(["word", "character", "token"]))
def test_equal_texts_have_no_errors(texts, unit) -> None:
    items = [list(text) for text in texts] if unit == "token" else texts
    if any(text if unit == "token" else text.strip() for text in texts):
        assert error_rate(items, items, unit) == 0
    assert exact_match(texts, texts) == 1


def test_words_are_what_whitespace_separates() -> None:
    assert error_rate(["a  b\tc "], ["a b c"]) == 0
    assert error_rate(["我很好"], ["我不好"]) == 1
    assert error_rate(["我很好"], ["我不好"], "character") == 1 / 3


def test_whitespace_counts_as_one_character_but_not_at_the_ends() -> None:
    assert error_rate([" a  b\n"], ["a b"], "character") == 0
    assert error_rate(["ab"], ["a b"], "character") == 1 / 3


def test_whitespace_beside_chinese_characters_does_not_count() -> None:
    assert error_rate(["我 爱\u3000你 ， Bob Dylan"], ["我爱你， Bob Dylan"], "character") == 0
    assert error_rate(["我用 Word 写信"], ["我用Word写信"], "character") == 0
    assert error_rate(["𠀀 𠀁"], ["𠀀𠀁"], "character") == 0


def test_two_spellings_of_one_character_are_equal() -> None:
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    for unit in ("word", "character"):
        assert error_rate([decomposed], [composed], unit) == 0
    assert error_rate(["cafe"], [decomposed], "character") == 1 / 4
    assert exact_match([decomposed], [composed]) == 1


def test_the_closest_reference_counts_and_of_equals_the_longest() -> None:
    assert error_rate(["a b c", "x"], [["d e f", "a b d"], "x"]) == 1 / 4
    assert error_rate(["a b"], [["a", "a b c"]]) == 1 / 3
    assert error_rate([[1, 2]], [[[1], [1, 2, 3]]], "token") == 1 / 3


def test_any_reference_is_a_match() -> None:
    assert exact_match(["a", "b", "c", "D"], [["x", "a"], "b", ["x", "y"], "d"]) == 2 / 4


@pytest.mark.parametrize("measure", [error_rate, exact_match])
def test_what_cannot_be_compared_is_refused(measure) -> None:
    with pytest.raises(UsageError, match="differ in number: 1 and 2"):
        measure(["a"], ["a", "b"])
    with pytest.raises(UsageError, match="no hypotheses"):
        measure([], [])
    with pytest.raises(UsageError, match="hypothesis 1 has no reference"):
        measure(["a"], [[]])
    with pytest.raises(UsageError, match="a list of texts"):
        measure(["a"], "a")


def test_a_rate_without_units_is_refused() -> None:
    with pytest.raises(UsageError, match="no word"):
        error_rate(["a"], [" "])
    assert error_rate(["a", "b"], ["", "b"]) == 1
    with pytest.raises(UsageError, match="`phoneme`"):
        error_rate(["a"], ["a"], "phoneme")  # type: ignore[arg-type]


def test_a_word_is_right_when_one_of_its_pronunciations_is() -> None:
    scores = pronunciation_scores(
        ["read", "cat", "dog"],
        ["R EH1 D", "K AE1 T", "D AO1 G Z"],
        [["R IY1 D", "R EH1 D"], "K AA1 T", ["D AO1 G"]],
    )
    assert scores.words == 3
    assert scores.word_error_rate == 2 / 3
    assert scores.phoneme_error_rate == 2 / 9
    assert scores.word_error_rate_without_stress == 2 / 3


def test_variants_on_lines_of_their_own_are_one_word() -> None:
    together = pronunciation_scores(["read", "cat"], ["R EH1 D", "K AE1"], [["R IY1 D", "R EH1 D"], "K AE1 T"])
    apart = pronunciation_scores(
        ["read", "cat", "read"], ["R EH1 D", "K AE1", "R EH1 D"], ["R IY1 D", "K AE1 T", "R EH1 D"]
    )
    assert apart == together
    assert together.words == 2


def test_stress_can_be_left_out_of_account() -> None:
    scores = pronunciation_scores(["permit"], ["P ER0 M IH1 T"], ["P ER1 M IH0 T"])
    assert (scores.word_error_rate, scores.phoneme_error_rate) == (1, 2 / 5)
    assert (scores.word_error_rate_without_stress, scores.phoneme_error_rate_without_stress) == (0, 0)


def test_digits_that_are_phonemes_are_not_stress() -> None:
    scores = pronunciation_scores(["eleven"], ["1 2"], ["1 1"])
    assert scores.phoneme_error_rate_without_stress == 1 / 2


def test_pronunciations_of_unequal_number_are_refused() -> None:
    with pytest.raises(UsageError, match="words and hypotheses differ in number: 1 and 2"):
        pronunciation_scores(["a"], ["AH", "B"], ["AH", "B"])
    with pytest.raises(UsageError, match="hypotheses and references differ in number: 1 and 2"):
        pronunciation_scores(["a"], ["AH"], ["AH", "B"])
    with pytest.raises(UsageError, match="no words"):
        pronunciation_scores([], [], [])
