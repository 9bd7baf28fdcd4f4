"""Stop strings, in pieces."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.config.errors import UsageError
from qkv.generate import StopStrings

letters = st.text(alphabet="ab你", max_size=14)


def cut(text: str, stops: list[str]) -> str:
    """The oracle: search all of the text at once."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


@settings(max_examples=400, deadline=None)
@given(letters, st.lists(letters.filter(bool), max_size=3), st.lists(st.integers(0, 14), max_size=5))
def test_any_split_into_pieces_gives_what_searching_all_at_once_gives(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    edges = [0, *sorted(min(at, len(text)) for at in cuts), len(text)]
    stopper = StopStrings(stops)
    shown = "".join(stopper.push(text[start:end]) for start, end in itertools.pairwise(edges))
    assert cut(text, stops).startswith(shown)  # never shown too much, at any time
    shown += stopper.finish()
    assert shown == cut(text, stops)
    assert stopper.found == (shown != text)
    assert not stopper.found or stopper.push("more") + stopper.finish() == ""


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    stopper = StopStrings("END")
    assert [stopper.push(piece) for piece in ("a", "bE", "N", "x", "E")] == ["a", "b", "", "ENx", ""]
    assert stopper.finish() == "E"


def test_nothing_is_held_back_without_stop_strings() -> None:
    stopper = StopStrings()
    assert stopper.push("abc") == "abc"
    assert not stopper.found


def test_a_stop_string_inside_the_beginning_of_another_waits_for_it() -> None:
    stopper = StopStrings(["abcd", "c"])
    assert [stopper.push(piece) for piece in ("xab", "c")] == ["x", ""]
    assert not stopper.found
    assert stopper.push("d") == ""
    assert stopper.found
    other = StopStrings(["abcd", "c"])
    assert [other.push(piece) for piece in ("xab", "c", "e")] == ["x", "", "ab"]
    assert other.found


@pytest.mark.parametrize("stops", ["", ["a", ""], [1], None, 5, b"a", {"a": 1}])
def test_what_is_no_stop_string_is_refused(stops) -> None:
    with pytest.raises(UsageError, match="stop string"):
        StopStrings(stops)
