"""Every kind of tokenizer: what comes back, what is special, what is unknown, and that training repeats."""

from __future__ import annotations

import gzip
import lzma
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import trainers

from qkv.config.errors import QkvError, UsageError
from qkv.tokenizer import ByteBPE, Tokenizer, training
from qkv.tokenizer import tokenizer as module

from .samples import CHINESE, KINDS, RUNS, huge_run

Trained = Callable[[str], Tokenizer]
AWKWARD = [
    "",
    " ",
    "  ",
    "\t",
    "\n",
    "\r\n",
    " !",
    " , ",
    " a",
    "a  b ",
    "\n\n x\n",
    "don't",
    "我 爱\u3000你。",
    "👩‍👩‍👧 é e\u0301",
    "\0",
]
BYTE_KINDS = ("bpe", "byte")
EXACT_KINDS = ("bpe", "byte", "char", "unigram", "word")


@pytest.mark.parametrize("kind", BYTE_KINDS)
@pytest.mark.parametrize("text", AWKWARD)
def test_byte_kinds_give_awkward_text_back(trained: Trained, kind: str, text: str) -> None:
    tokenizer = trained(kind)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode_bytes(tokenizer.encode(text)) == text.encode()


@pytest.mark.parametrize("kind", BYTE_KINDS)
@given(text=st.text(max_size=80))
@settings(max_examples=80, deadline=None)
def test_byte_kinds_give_any_text_back(trained: Trained, kind: str, text: str) -> None:
    tokenizer = trained(kind)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(tokenizer.token_bytes(token_id) for token_id in ids) == text.encode()
    assert not tokenizer.special_ids.intersection(ids)


@pytest.mark.parametrize("kind", EXACT_KINDS)
def test_known_text_comes_back_with_its_spaces(kind: str) -> None:
    text = "  the lower,  the newer !\n\tand <eos> 我爱你。 \n"
    tokenizer = Tokenizer.train([text] * 3, kind=kind, vocab_size=None if kind in ("char", "byte") else 400)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_wordpiece_marks_what_continues_a_word_and_keeps_chinese_characters_apart(trained: Trained) -> None:
    tokenizer = trained("wordpiece")
    tokens = [tokenizer.id_to_token(token_id) for token_id in tokenizer.encode("unhandled 作者")]
    assert tokens[-2:] == ["作", "者"]
    assert not tokens[0].startswith("##")
    assert all(token.startswith("##") for token in tokens[1:-2])
    assert tokenizer.decode(tokenizer.encode("the exception")) == "the exception"


@pytest.mark.parametrize("kind", KINDS)
def test_training_gives_the_same_tokenizer_in_every_process(kind: str) -> None:
    # hash seeds differ from process to process: neither ours nor the library's may matter
    code = (
        "from pydoc_data.topics import topics; from qkv.tokenizer import Tokenizer;"
        "text = [topics['strings'], topics['lambda'], '我爱你，你爱我。'];"
        f"print(Tokenizer.train(text, kind={kind!r}, vocab_size=500).fingerprint)"
    )
    prints = {
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2", "3")[: 3 if kind in ("unigram", "wordpiece") else 2]
    }
    assert len(prints) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_vocab_size_is_a_limit_that_counts_special_tokens(english: str, kind: str) -> None:
    tokenizer = Tokenizer.train(english[:30_000] + CHINESE, kind=kind, vocab_size=300)
    assert tokenizer.vocab_size == (260 if kind == "byte" else tokenizer.vocab_size)
    assert 100 < tokenizer.vocab_size <= 300
    assert {tokenizer.id_to_token(token_id) for token_id in range(tokenizer.vocab_size)}  # no gap


@pytest.mark.parametrize("kind", KINDS)
def test_a_vocabulary_that_cannot_hold_its_bytes_or_special_tokens_is_refused(kind: str) -> None:
    with pytest.raises(UsageError, match="vocab_size 4 is too small"):
        Tokenizer.train("some text", kind=kind, vocab_size=4)


def test_unigram_takes_no_more_tokens_than_with_the_library_trainer(data_file: Callable[[str], Path]) -> None:
    text = data_file("tokenizers/sentencepiece/botchan.txt").read_text(encoding="utf-8")
    tokenizer = Tokenizer.train(text, kind="unigram", vocab_size=1000)
    assert len(tokenizer.encode(text)) < 97_500  # with the library's trainer 99,483, somewhat changing


# --- special tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_roles_have_ids(trained: Trained, kind: str) -> None:
    tokenizer = trained(kind)
    roles = (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.mask_id)
    assert None not in roles
    assert len({*roles}) == 4
    assert (tokenizer.unk_id is None) == (kind in BYTE_KINDS)
    assert (tokenizer.cls_id, tokenizer.sep_id) == (tokenizer.bos_id, tokenizer.eos_id)
    assert tokenizer.special_ids == {*roles, tokenizer.unk_id} - {None}
    assert tokenizer.token_to_id("<eos>") == tokenizer.eos_id
    assert tokenizer.id_to_token(tokenizer.eos_id or 0) == "<eos>"


def test_the_id_of_a_byte_is_its_value(trained: Trained) -> None:
    assert trained("byte").encode("A我") == [65, *"我".encode()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["<eos>", "a<eos>b", "<<mask>>", "<bos> <pad>", "<unk>", "x<eos"])
def test_text_that_spells_a_special_token_is_ordinary_text(trained: Trained, kind: str, text: str) -> None:
    tokenizer = Tokenizer.train(text, kind=kind, vocab_size=300) if kind in EXACT_KINDS else trained(kind)
    ids = tokenizer.encode(text)
    assert not (tokenizer.special_ids - {tokenizer.unk_id}).intersection(ids)
    assert tokenizer.encode_batch([text]) == [ids]
    if kind in EXACT_KINDS:
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_parsed_on_request(trained: Trained, kind: str) -> None:
    tokenizer = trained(kind)
    ids = tokenizer.encode("the<eos><mask>", parse_special=True)
    assert ids[-2:] == [tokenizer.eos_id, tokenizer.mask_id]
    assert tokenizer.decode(ids) == "the"
    assert tokenizer.decode(ids, skip_special=False).replace(" ", "") == "the<eos><mask>"


@pytest.mark.parametrize("kind", KINDS)
def test_training_on_spelled_special_tokens_makes_them_no_words(kind: str) -> None:
    tokenizer = Tokenizer.train("<eos>" * 500 + " eos <eos>", kind=kind, vocab_size=290)
    assert tokenizer.eos_id not in tokenizer.encode("<eos><eos> <eos>")


@pytest.mark.parametrize("kind", KINDS)
def test_there_is_one_bos_whoever_adds_it(trained: Trained, kind: str) -> None:
    tokenizer = trained(kind)
    plain = tokenizer.encode("the", add_special=True)
    assert plain == [tokenizer.bos_id, *tokenizer.encode("the"), tokenizer.eos_id]
    assert tokenizer.encode("<bos>the<eos>", add_special=True, parse_special=True) == plain
    assert tokenizer.encode_batch(["the", ""], add_special=True) == [plain, [tokenizer.bos_id, tokenizer.eos_id]]


def test_other_special_tokens_can_be_chosen() -> None:
    tokenizer = Tokenizer.train("some text", special={"eos": "<|endoftext|>", "bos": "<|endoftext|>"}, vocab_size=260)
    assert tokenizer.eos_id == tokenizer.bos_id == 0
    assert tokenizer.pad_id is None
    assert tokenizer.mask_id is None


@pytest.mark.parametrize(
    ("special", "message"),
    [({"eos": "end"}, "word of the text"), ({"eos": "^"}, "too short"), ({"end": "<eos>"}, "no role 'end'")],
)
def test_special_tokens_that_text_could_be_are_refused(special: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Tokenizer.train("some text", special=special)


# --- what is unknown --------------------------------------------------------------------------------------------------


def test_an_unseen_character_is_unknown_or_named(trained: Trained) -> None:
    tokenizer = trained("char")
    ids = tokenizer.encode("aאb")
    assert ids[1] == tokenizer.unk_id
    assert tokenizer.decode(ids) == "a<unk>b"  # something is missing, and one sees it
    with pytest.raises(
        UsageError, match=r"'א' \(U\+05D0\) is not in the vocabulary of Tokenizer\(kind='char'"
    ) as caught:
        tokenizer.encode("aאb", strict=True)
    assert caught.value.where == "character 1"


@pytest.mark.parametrize("wrong", [-1, 260, 10**12])
def test_an_id_outside_the_vocabulary_is_named_with_its_size(trained: Trained, wrong: int) -> None:
    tokenizer = trained("byte")
    for use in (
        lambda: tokenizer.decode([1, wrong]),
        lambda: tokenizer.token_bytes(wrong),
        lambda: tokenizer.stream().push(wrong),
    ):
        with pytest.raises(UsageError, match=f"token id {wrong} is not in the vocabulary: ids are 0 to 259"):
            use()


@pytest.mark.parametrize("kind", KINDS)
def test_half_a_surrogate_pair_is_refused_with_its_place(trained: Trained, kind: str) -> None:
    tokenizer = trained(kind)
    for use in (
        lambda: tokenizer.encode("ab\ud800"),
        lambda: tokenizer.encode_batch(["ab\ud800"]),
        lambda: tokenizer.explain("ab\ud800"),
    ):
        with pytest.raises(UsageError, match="U\\+D800") as caught:
            use()
        assert caught.value.where == "character 2 of the text"


def test_no_text_is_refused() -> None:
    for kind in ("bpe", "unigram", "wordpiece", "word", "char"):
        with pytest.raises(QkvError, match="there is no text") as caught:
            Tokenizer.train([""], kind=kind)
        assert caught.value.exit_code == 1  # the command was written well


@pytest.mark.parametrize("kind", KINDS)
def test_a_vocabulary_that_no_memory_holds_is_refused(kind: str) -> None:
    for size in (training.MAX_VOCAB_SIZE + 1, 10**9):
        with pytest.raises(UsageError, match="vocab_size is at most 16,777,216"):
            Tokenizer.train("some text", kind=kind, vocab_size=size)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", [list, iter])
def test_a_trainer_is_asked_for_no_more_than_the_text_can_give(
    english: str, kind: str, source: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = english[:3000]
    asked = []
    for name in ("BpeTrainer", "WordPieceTrainer", "WordLevelTrainer"):
        make = getattr(trainers, name)
        monkeypatch.setattr(
            trainers, name, lambda *, make=make, **given: asked.append(given["vocab_size"]) or make(**given)
        )
    expected = Tokenizer.train([text], kind=kind, vocab_size=training._SMALL_VOCAB_SIZE)
    huge = Tokenizer.train(source([text]), kind=kind, vocab_size=training.MAX_VOCAB_SIZE)
    assert huge.fingerprint == expected.fingerprint
    assert max(asked, default=0) <= 2 * training._SMALL_VOCAB_SIZE


@pytest.mark.parametrize(
    "use",
    [
        lambda made: made.encode(None),
        lambda made: made.encode(b"text"),
        lambda made: made.encode_batch("text"),
        lambda made: made.encode_batch(["text", 5]),
        lambda made: made.explain(None),
        lambda made: made.token_to_id(5),
        lambda made: made.decode(1.5),
        lambda made: made.decode("a"),
        lambda made: made.decode(b"a"),
        lambda made: made.decode(5),
        lambda made: made.decode(None),
        lambda made: made.decode([1.5]),
        lambda made: made.decode([True]),
        lambda made: made.stream().push("a"),
        lambda made: made.stats([5]),
        lambda made: made.train([5]),
        lambda made: made.train(5),
        lambda made: made.train(None),
        lambda made: made.train(b"text"),
        lambda made: made.train("text", vocab_size="5"),
        lambda made: made.train("text", vocab_size=500.0),
        lambda made: made.train("text", vocab_size=True),
        lambda made: made.train("text", special=["<eos>"]),
        lambda made: made.train("text", special={"eos": 5}),
    ],
)
def test_an_argument_of_a_wrong_type_is_refused(trained: Trained, use: Callable[[Tokenizer], object]) -> None:
    for kind in ("bpe", "byte", "unigram"):
        with pytest.raises(UsageError):
            use(trained(kind))


def test_a_file_name_given_as_text_is_noticed(tmp_path: Path) -> None:
    assert (
        Tokenizer.train(["\0" * 9, "a"], kind="char").vocab_size
        == Tokenizer.train("我" * 999 + "a", kind="char").vocab_size
    )
    (tmp_path / "corpus.txt").write_text("some text", encoding="utf-8")
    with pytest.raises(UsageError, match="a file has this name"):
        Tokenizer.train(str(tmp_path / "corpus.txt"))


# --- long texts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RUNS)
def test_a_huge_unbroken_run_is_encoded(trained: Trained, kind: str, name: str) -> None:
    text = huge_run(name, 200_000)
    tokenizer = trained(kind)
    ids = tokenizer.encode(text)
    assert ids
    if kind in BYTE_KINDS:
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_can_be_trained_on_a_huge_unbroken_run(kind: str) -> None:
    tokenizer = Tokenizer.train(huge_run("base64", 100_000), kind=kind, vocab_size=300)
    assert tokenizer.vocab_size <= 300


@pytest.mark.parametrize("kind", KINDS)
def test_long_text_is_encoded_in_parts_with_the_same_ids(
    trained: Trained, kind: str, english: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (english[:20_000] + CHINESE + " \n\t x" * 3 + "a" * 700 + CHINESE.replace("\n", "") + "  ") * 2
    whole = trained(kind).encode(text)
    monkeypatch.setattr(module, "_LONG_TEXT", 300)
    assert trained(kind).encode(text) == whole
    assert trained(kind).encode_batch([text, "x"]) == [whole, trained(kind).encode("x")]


# --- the rest of the face ---------------------------------------------------------------------------------------------


def test_bpe_equals_the_readable_one_on_real_files(data_file: Callable[[str], Path]) -> None:
    path = data_file("zh-classics/hongloumeng.txt.xz")
    text = lzma.decompress(path.read_bytes()).decode()[:40_000]
    tokenizer = Tokenizer.train(text, vocab_size=1500)
    readable = ByteBPE.train([text], 1500 - 4, first_id=4)
    assert tokenizer.encode(text) == readable.encode(text)


def test_files_train_like_their_text(tmp_path: Path, english: str) -> None:
    text = english[:20_000]
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "b.txt").write_bytes(CHINESE.encode())
    files = [tmp_path / "a.txt.gz", tmp_path / "b.txt"]
    assert (
        Tokenizer.train(files, vocab_size=400).fingerprint
        == Tokenizer.train([text, CHINESE], vocab_size=400).fingerprint
    )


@pytest.mark.parametrize("kind", ["bpe", "unigram", "wordpiece"])
def test_an_iterator_trains_like_a_list(kind: str) -> None:
    texts = ["the lower", "the newer", "我爱你"]
    from_iterator = Tokenizer.train(iter(texts), kind=kind, vocab_size=300)
    assert from_iterator.fingerprint == Tokenizer.train(texts, kind=kind, vocab_size=300).fingerprint


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_in_another_process_is_the_same(trained: Trained, kind: str) -> None:
    copy = pickle.loads(pickle.dumps(trained(kind)))
    assert copy.fingerprint == trained(kind).fingerprint
    assert copy.encode("the <eos> 我") == trained(kind).encode("the <eos> 我")


def test_ids_may_be_numpy_numbers(trained: Trained) -> None:
    tokenizer = trained("bpe")
    assert tokenizer.decode(np.array(tokenizer.encode("the newer"), dtype=np.uint16)) == "the newer"


@pytest.mark.parametrize("kind", KINDS)
def test_explain_gives_the_ids_of_encode(trained: Trained, kind: str) -> None:
    text = "the newer values, 我爱你 🙂"
    explanation = trained(kind).explain(text)
    assert [token_id for piece in explanation.pieces for token_id in piece.ids] == trained(kind).encode(text)
    assert any(piece.steps for piece in explanation.pieces) == (kind == "bpe")
    assert str(explanation)


def test_explain_ends_each_piece_in_its_tokens(trained: Trained) -> None:
    tokenizer = trained("bpe")
    for piece in tokenizer.explain("the newer values").pieces:
        if piece.steps:
            assert piece.steps[-1].tokens == tuple(tokenizer.token_bytes(token_id) for token_id in piece.ids)


def test_stats_count_chinese_apart_from_other_text(trained: Trained) -> None:
    figures = trained("byte").stats("ab我爱，c🙂").to_dict()
    assert figures["chinese"] == {
        "characters": 3,
        "bytes": 9,
        "tokens": 9,
        "tokens_per_character": 3,
        "bytes_per_token": 1,
    }
    assert figures["other"]["bytes"] == 3 + 4
    assert figures["characters"] == 7
    assert figures["tokens"] == 16
    assert trained("char").stats("我א").unknown == 2


def test_stats_of_a_part_that_is_absent_are_none(trained: Trained) -> None:
    assert trained("bpe").stats("only English").chinese.tokens_per_character is None


def test_unknown_kinds_and_other_errors_are_qkv_errors() -> None:
    with pytest.raises(QkvError, match="no tokenizer kind 'bpee'"):
        Tokenizer.train("text", kind="bpee")


def test_importing_the_room_imports_no_torch() -> None:
    code = "import sys, qkv.tokenizer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
