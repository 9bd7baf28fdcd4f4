"""Text as it comes: characters over several tokens, stop strings, streams equal to the whole."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.config.errors import UsageError

from .tiny import model, same, scripted

SCRIPT = "héllo 你好, wörld 🙂 END 你好 bye"


def test_the_text_holds_no_eos_and_the_ids_do() -> None:
    found = scripted("bye").generate("p")
    assert (found.text, found.token_ids, found.finish_reason) == ("bye", [*b"bye", 258], "stop")
    assert found.completion_tokens == 4


def test_the_text_ends_before_the_earliest_stop_string_even_across_tokens() -> None:
    made = scripted(SCRIPT)
    found = made.generate("p", stop=["bye", "END", "好 b"])
    assert (found.text, found.finish_reason) == ("héllo 你好, wörld 🙂 ", "stop")
    assert found.token_ids == list("héllo 你好, wörld 🙂 END".encode())
    assert made.generate("p", stop="no such text").text == SCRIPT
    assert made.generate("p", stop="h").text == ""


def test_a_stop_string_completed_by_the_last_token_is_a_stop() -> None:
    found = scripted("abcdef").generate("p", stop="cd", max_new_tokens=4)
    assert (found.text, found.finish_reason) == ("ab", "stop")
    found = scripted("abcdef").generate("p", stop="cd", max_new_tokens=3)
    assert (found.text, found.finish_reason) == ("abc", "length")


def test_a_stop_string_that_waited_for_a_longer_one_ends_the_text_after_all() -> None:
    """Whether the text ends by itself or by its length, "c" was met and "abcd" was not."""
    for options in ({}, {"max_new_tokens": 4}):
        found = scripted("xabc").generate("p", stop=["abcd", "c"], **options)
        assert (found.text, found.finish_reason) == ("xab", "stop")


def test_a_row_that_met_its_stop_string_does_not_end_its_neighbours() -> None:
    made = scripted(SCRIPT)
    first, second = made.generate(["p", "q"], stop="END")
    assert first.text == second.text == "héllo 你好, wörld 🙂 "
    prompts = ["p", "pp"]  # the second skips the first byte of the script
    assert [found.text for found in made.generate(prompts, stop="h")] == ["", SCRIPT[1:]]


def test_an_incomplete_character_waits_and_ends_as_a_replacement() -> None:
    made = scripted("a你b")
    assert list(made.stream("p")) == ["a", "你", "b"]
    assert list(made.stream("p", max_new_tokens=3)) == ["a", "\ufffd"]
    assert made.generate("p", max_new_tokens=3).text == "a\ufffd"


def test_a_stream_never_shows_the_beginning_of_a_stop_string() -> None:
    pieces = scripted("one ENx two END three").stream("p", stop="END")
    shown = ""
    for piece in pieces:
        shown += piece
        assert "one ENx two ".startswith(shown)
    assert shown == "one ENx two "
    assert pieces.generation.text == shown
    assert pieces.generation.finish_reason == "stop"


@settings(max_examples=60, deadline=None)
@given(
    st.text(alphabet="ab 你🙂", max_size=12),
    st.lists(st.text(alphabet="ab 你🙂", min_size=1, max_size=5), max_size=3),
    st.integers(0, 40),
)
def test_streamed_pieces_add_up_to_the_whole_text(script: str, stops: list[str], count: int) -> None:
    made = scripted(script)
    options = {"stop": stops, "max_new_tokens": count, "temperature": 0.0}
    whole = made.generate("p", **options)
    stream = made.stream("p", **options)
    assert "".join(stream) == whole.text
    assert same(stream.generation, whole)
    written = script.encode()[:count].decode("utf-8", "replace")
    assert whole.text == written[: min((at for s in stops if (at := written.find(s)) >= 0), default=len(written))]


def test_a_stream_refuses_what_it_cannot_do_at_once() -> None:
    made = model()
    with pytest.raises(UsageError, match="one prompt"):
        made.stream(["a", "b"])
    with pytest.raises(UsageError, match="temperature"):
        made.stream("a", temperature=-1)
    assert made.stream("a").generation is None


def test_log_probabilities_name_tokens_and_add_up_to_the_score() -> None:
    made = model()
    found = made.generate("abc", max_new_tokens=5, temperature=0, logprobs=3)
    assert [entry.token_id for entry in found.logprobs] == found.token_ids
    assert all(entry.top[0].token_id == entry.token_id for entry in found.logprobs)  # greedy
    assert scripted("é").generate("p", logprobs=1).logprobs[0].token == "\ufffd"
    assert [entry.token for entry in scripted("ab").generate("p", logprobs=1).logprobs] == ["a", "b", "<eos>"]
