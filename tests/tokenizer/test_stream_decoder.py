"""Streaming: pieces join to the whole, characters wait for their bytes, wrong bytes do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.tokenizer import Tokenizer

from .samples import KINDS

Trained = Callable[[str], Tokenizer]


def streamed(tokenizer: Tokenizer, ids: Sequence[int], *, skip_special: bool = True) -> list[str]:
    decoder = tokenizer.stream(skip_special=skip_special)
    return [*(decoder.push(token_id) for token_id in ids), decoder.finish()]


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(st.sampled_from("ab ,.\n的我爱🙂é"), max_size=40))
@settings(max_examples=40, deadline=None)
def test_pieces_join_to_the_whole(trained: Trained, kind: str, text: str) -> None:
    tokenizer = trained(kind)
    ids = tokenizer.encode(text)
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip_special", [True, False])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_pieces_of_any_ids_join_to_the_whole(
    trained: Trained, kind: str, skip_special: bool, data: st.DataObject
) -> None:
    tokenizer = trained(kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    whole = tokenizer.decode(ids, skip_special=skip_special)
    assert "".join(streamed(tokenizer, ids, skip_special=skip_special)) == whole


def test_a_character_over_several_tokens_waits(trained: Trained) -> None:
    tokenizer = trained("byte")
    assert streamed(tokenizer, tokenizer.encode("a爱🙂")) == ["a", "", "", "爱", "", "", "", "🙂", ""]


@pytest.mark.parametrize(
    ("data", "pieces"),
    [
        (b"\xffa", ["\ufffd", "a", ""]),  # never a character
        (b"\xe7\x88a", ["", "", "\ufffda", ""]),  # interrupted: one sign for the bytes that belonged together
        (b"\xe0\x80", ["", "\ufffd\ufffd", ""]),  # an overlong form is known to be wrong at its second byte
        (b"\xe7\x88", ["", "", "\ufffd"]),  # the end comes first
        (b"\xed\xa0\x80", ["", "\ufffd\ufffd", "\ufffd", ""]),  # half a surrogate pair
    ],
)
def test_a_wrong_byte_becomes_a_sign_at_once(trained: Trained, data: bytes, pieces: list[str]) -> None:
    tokenizer = trained("byte")
    assert streamed(tokenizer, [*data]) == pieces
    assert tokenizer.decode([*data]) == "".join(pieces) == data.decode(errors="replace")


def test_a_special_token_does_not_complete_a_character(trained: Trained) -> None:
    tokenizer = trained("byte")
    first, *rest = "爱".encode()
    assert tokenizer.eos_id is not None
    assert "".join(streamed(tokenizer, [first, tokenizer.eos_id, *rest])) == "爱"  # left out, as if it were not there
    shown = streamed(tokenizer, [first, tokenizer.eos_id, *rest], skip_special=False)
    assert "".join(shown) == "\ufffd<eos>\ufffd\ufffd"


def test_a_decoder_starts_afresh_after_finish(trained: Trained) -> None:
    tokenizer = trained("wordpiece")
    ids = tokenizer.encode("the value")
    decoder = tokenizer.stream()
    for _ in range(2):
        assert "".join(map(decoder.push, ids)) + decoder.finish() == "the value"
