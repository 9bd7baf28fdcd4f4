"""The readable byte pair encoding: the same merges and ids as the `tokenizers` library, in linear time."""

from __future__ import annotations

import gzip
import itertools
import json
import lzma
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers

from qkv.tokenizer import ByteBPE
from qkv.tokenizer.bpe import byte_alphabet
from qkv.tokenizer.pieces import character_bytes, split

from .samples import RUNS, huge_run


def library(texts: Sequence[str], vocab_size: int, special: Sequence[str] = ()) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=alphabet, special_tokens=list(special), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def spelled(token: str) -> bytes:
    return bytes(character_bytes()[character] for character in token)


def assert_same(texts: Sequence[str], vocab_size: int, special: Sequence[str] = ()) -> None:
    theirs = library(texts, vocab_size, special)
    ours = ByteBPE.train(texts, vocab_size - len(special), first_id=len(special))
    merges = json.loads(theirs.to_str())["model"]["merges"]
    assert ours.merges == [(spelled(left), spelled(right)) for left, right in merges]
    assert ours.vocab == {spelled(token): n for token, n in theirs.get_vocab().items() if token not in special}
    for text in texts:
        assert ours.encode(text) == theirs.encode(text).ids
        assert ours.decode_bytes(ours.encode(text)) == text.encode()


def test_merges_and_ids_equal_the_library(english: str) -> None:
    assert_same([english], 1500, ["<pad>", "<eos>"])


def test_merges_and_ids_equal_the_library_on_shakespeare(data_file: Callable[[str], Path]) -> None:
    text = gzip.decompress(data_file("tiny-shakespeare/input.txt.gz").read_bytes()).decode()
    assert_same([text[:300_000]], 2048)


def test_merges_and_ids_equal_the_library_on_a_chinese_novel(data_file: Callable[[str], Path]) -> None:
    text = lzma.decompress(data_file("zh-classics/hongloumeng.txt.xz").read_bytes()).decode()
    assert_same([text[:60_000]], 3000)


@given(st.text("ab c\n!1我", min_size=1, max_size=200), st.integers(0, 80))
@settings(max_examples=60, deadline=None)
def test_merges_and_ids_equal_the_library_on_repetitive_text(text: str, merges: int) -> None:
    # few letters make many ties, overlaps (aaaa), and tokens that two merges can spell
    assert_same([text], 256 + merges)


def test_of_equally_frequent_pairs_the_one_with_smaller_ids_is_joined_first() -> None:
    forwards, backwards = (ByteBPE.train(texts, 258).merges for texts in (["cd", "ab"], ["ab", "cd"]))
    assert forwards == backwards == [(b"a", b"b"), (b"c", b"d")]


@given(st.text(max_size=60))
@settings(max_examples=60, deadline=None)
def test_no_pair_that_could_be_merged_is_left(text: str) -> None:
    bpe = ByteBPE.train(["the lower the newer 我爱你 我爱她\n\n  and so on, and on"], 300)
    pairs = set(bpe.merges)
    for piece in split(text):
        tokens = [bpe.tokens[token_id] for token_id in bpe.encode_piece(piece)]
        assert not pairs.intersection(itertools.pairwise(tokens))


def test_steps_show_what_words_share() -> None:
    bpe = ByteBPE.train(["lower newer wider lower newer wider, never her"], 262)
    lower, newer = list(bpe.steps(b"lower")), list(bpe.steps(b"newer"))
    assert lower[0].tokens == (b"l", b"o", b"w", b"er")
    assert newer[0].tokens == (b"n", b"e", b"w", b"er")
    assert (lower[0].rank, lower[0].left, lower[0].right) == (0, b"e", b"r")
    assert [step.rank for step in lower] == sorted(step.rank for step in lower)


@pytest.mark.parametrize("name", RUNS)
def test_work_grows_about_linearly_with_an_unbroken_run(name: str) -> None:
    bpe = ByteBPE.train([huge_run(name, 400), "a" * 64, "^" * 64], 400)
    work = []
    for length in (25_000, 100_000):
        before = bpe.work
        bpe.encode(huge_run(name, length))
        work.append(bpe.work - before)
    assert work[1] <= 5 * work[0] + 1000  # quadratic would be 16 times


def test_training_keeps_distinct_pieces_not_the_corpus() -> None:
    def corpus(times: int) -> ByteBPE:
        return ByteBPE.train(("to be or not to be" for _ in range(times)), 265)

    # the same merges, whatever the length: only the counts differ, and they are not kept
    assert corpus(1).merges == corpus(1000).merges


def test_the_first_ids_are_the_bytes_in_the_order_of_the_file_format() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    assert byte_alphabet() == [spelled(character) for character in alphabet]
    assert len(set(byte_alphabet())) == 256
