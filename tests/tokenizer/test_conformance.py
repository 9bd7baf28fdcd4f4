"""Other people's tokenizers give the ids that their own programs give."""

from __future__ import annotations

import argparse
import gzip
import inspect
import io
import lzma
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qkv.tokenizer import Tokenizer, files, gguf
from qkv.tokenizer.sentencepiece import parse

DataFile = Callable[[str], Path]
SEPARATOR = "\n__ggml_vocab_test__\n"


def unpacked(path: Path, folder: Path) -> Path:
    """The file inside a .gz, in `folder`."""
    copy = folder / path.stem
    copy.write_bytes(gzip.decompress(path.read_bytes()))
    return copy


# --- llama.cpp's cases ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "around"),
    [("gpt-2", ([], [])), ("mpt", ([], [])), ("phi-3", ([1], [])), ("bert-bge", ([101], [102]))],
)
def test_gguf_vocabularies_give_the_ids_of_llama_cpp(
    name: str, around: tuple[list[int], list[int]], data_file: DataFile, tmp_path: Path
) -> None:
    cases = [data_file(f"tokenizers/{name}/{name}.{kind}") for kind in ("inp", "out")]
    texts = cases[0].read_bytes().decode().split(SEPARATOR)
    expected = [[int(token_id) for token_id in line.split()] for line in cases[1].read_text().split("\n")]
    path = unpacked(data_file(f"tokenizers/{name}/{name}.gguf.gz"), tmp_path)
    tokenizer = Tokenizer.load(path)
    assert len(texts) == len(expected) == 47
    assert [tokenizer.encode(text) for text in texts] == expected
    assert tokenizer.around == around
    if name != "bert-bge":
        assert [tokenizer.decode(ids) for ids in expected if ids] == [text for text in texts if text]
    tokenizer.save(tmp_path / "again")  # as a checkpoint carries it
    again = Tokenizer.load(tmp_path / "again")
    assert [again.encode(text, add_special=True) for text in texts] == [
        tokenizer.encode(text, add_special=True) for text in texts
    ]


def test_phi_3_control_tokens_take_the_white_space_after_them(data_file: DataFile, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(unpacked(data_file("tokenizers/phi-3/phi-3.gguf.gz"), tmp_path))
    ids = tokenizer.encode_chat([{"role": "user", "content": "Hello"}])
    shown = [tokenizer.id_to_token(token_id) for token_id in ids]
    assert shown == ["<s>", "<|user|>", "▁Hello", "<|end|>", "<|assistant|>"]


@pytest.mark.parametrize("name", ["gpt-2/gpt-2.gguf.gz", "cl100k/cl100k_base.tiktoken.gz"])
def test_a_large_vocabulary_loads_quickly(name: str, data_file: DataFile, tmp_path: Path) -> None:
    path = unpacked(data_file(f"tokenizers/{name}"), tmp_path)
    started = time.process_time()
    Tokenizer.load(path)
    assert time.process_time() - started < 1.5  # half of that on an idle machine


def test_llama2c_tokenizers_give_the_ids_of_its_program(data_file: DataFile) -> None:
    tokenizer = Tokenizer.load(data_file("weights-stories260k/tok512.bin"))
    text = "Once upon a time, é 我"
    assert tokenizer.encode(text, add_special=True) == [1, 403, 407, 261, 378, 432, 410, 485, 410, 233, 139, 148]
    assert tokenizer.decode(tokenizer.encode(text)) == text


# --- tiktoken ---------------------------------------------------------------------------------------------------------


def megabyte(data_file: DataFile) -> str:
    """English, Chinese, code, emoji, and white space of every kind: a million bytes."""
    english = gzip.decompress(data_file("tiny-shakespeare/input.txt.gz").read_bytes()).decode()[:250_000]
    chinese = lzma.decompress(data_file("zh-classics/hongloumeng.txt.xz").read_bytes()).decode()[:90_000]
    code = "".join(inspect.getsource(module) for module in (inspect, random, argparse))[:330_000]
    chance = random.Random(0)
    faces = [
        chr(chance.randrange(0x1F300, 0x1FAFF)) + chance.choice(["", "\ufe0f", "\u200d", " "]) for _ in range(40_000)
    ]
    spaces = ["".join(chance.choices(" \t\n\r\u3000\xa0x1'", k=chance.randrange(12))) for _ in range(6000)]
    return "".join([english, chinese, code, *faces, *spaces, "\n \n  "])


def test_cl100k_gives_the_ids_of_tiktoken_on_a_megabyte(
    data_file: DataFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    public = pytest.importorskip("tiktoken_ext.openai_public")
    path = unpacked(data_file("tokenizers/cl100k/cl100k_base.tiktoken.gz"), tmp_path)
    ranks = tiktoken.load.load_tiktoken_bpe
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    monkeypatch.setattr(public, "load_tiktoken_bpe", lambda url, expected_hash: ranks(str(path), expected_hash))
    theirs = tiktoken.Encoding(**public.cl100k_base())
    tokenizer = Tokenizer.load(path)
    text = megabyte(data_file)
    assert len(text.encode()) > 1_000_000
    ids = theirs.encode_ordinary(text)
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode("a<|endoftext|>", parse_special=True) == theirs.encode(
        "a<|endoftext|>", allowed_special="all"
    )
    for end in ("x\n  ", "x  \n", "x\r\n\r\n", "x \n ", "  ", "\n", " \n", "x\t"):
        assert tokenizer.encode(end) == theirs.encode_ordinary(end)


# --- SentencePiece ----------------------------------------------------------------------------------------------------

ODD = [
    "",
    " ",
    "   ",
    "  Hello   world  ",
    "ｆｕｌｌ　ｗｉｄｔｈ ﬁne ½ ①…",
    "a\tb\nc\r\nd",
    "▁x ▁ ▁▁y▁",
    "日本語 ｶ 한글 \u1112\u1161\u11ab हिन्दी",
    "e\u0301 é ǆ \u0000 \u200b \u00a0nbsp",
    "🙂😶‍🌫️<table>cell<table> <sep>x <sep> ab abab",
    "<0x41> <0x0A>",
    "word" * 50,
]


def botchan(data_file: DataFile) -> list[str]:
    return data_file("tokenizers/sentencepiece/botchan.txt").read_text(encoding="utf-8").split("\n")


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_sentencepiece_models_give_the_ids_of_its_library(kind: str, data_file: DataFile) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    path = data_file(f"tokenizers/sentencepiece/botchan_en_{kind}_1000.model")
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(path))
    tokenizer = Tokenizer.load(path)
    lines = botchan(data_file)
    texts = [*lines, *ODD, "\n".join(lines)]
    assert [tokenizer.encode(text) for text in texts] == theirs.encode(texts)
    known = [ids for ids in theirs.encode(lines) if tokenizer.unk_id not in ids]
    assert [tokenizer.decode(ids) for ids in known] == theirs.decode(known)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id, tokenizer.pad_id) == (
        theirs.bos_id(),
        theirs.eos_id(),
        theirs.unk_id(),
        None,
    )


SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "bpe",
        "normalization_rule_name": "identity",
        "byte_fallback": True,
        "remove_extra_whitespaces": False,
    },
    "gemma": {
        "model_type": "bpe",
        "normalization_rule_name": "identity",
        "byte_fallback": True,
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
        "user_defined_symbols": ["\n", "▁▁", "▁▁▁", "<table>", "abab", "ab"],
    },
    "bpe": {"model_type": "bpe", "user_defined_symbols": ["<sep>", "ell"]},
    "t5": {"model_type": "unigram", "bos_id": -1, "pad_id": 0, "eos_id": 1, "unk_id": 2},
    "unigram": {"model_type": "unigram", "byte_fallback": True, "user_defined_symbols": ["<sep>", "ell", "ello"]},
    "plain unigram": {
        "model_type": "unigram",
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
    },
    "case-folding": {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc_cf"},
}


@pytest.fixture(scope="module")
def trained_model(data_file: DataFile) -> Callable[[str], bytes]:
    """`trained_model(name)`: a SentencePiece model of some 500 pieces with one of the settings above."""
    sentencepiece = pytest.importorskip("sentencepiece")
    lines = botchan(data_file)[:800]
    made: dict[str, bytes] = {}

    def get(name: str) -> bytes:
        if name not in made:
            written = io.BytesIO()
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(lines),
                model_writer=written,
                vocab_size=500,
                minloglevel=2,
                num_threads=1,
                **SETTINGS[name],
            )
            made[name] = written.getvalue()
        return made[name]

    return get


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_of_sentencepiece_is_followed(
    name: str, trained_model: Callable[[str], bytes], data_file: DataFile, tmp_path: Path
) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    path = tmp_path / "tokenizer.model"
    path.write_bytes(trained_model(name))
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(path))
    tokenizer = Tokenizer.load(tmp_path)
    chance = random.Random(0)
    letters = " \n▁<>abelostx0é我🙂Ａ"
    texts = [*ODD, *botchan(data_file)[800:900], *("".join(chance.choices(letters, k=30)) for _ in range(200))]
    if tokenizer.kind == "unigram":  # where a text spells a control piece, pieces are sought on either side of its <
        texts = [text for text in texts if not any(control in text for control in ("<unk>", "<s>", "</s>"))]
    for text in texts:
        assert tokenizer.encode(text) == theirs.encode(text), text
    for ids in theirs.encode(texts):
        if tokenizer.unk_id not in ids:
            assert tokenizer.decode(ids) == theirs.decode(ids)
    tokenizer.save(tmp_path / "again")
    again = Tokenizer.load(tmp_path / "again")
    assert [again.encode(text) for text in texts] == [tokenizer.encode(text) for text in texts]


@pytest.mark.parametrize("name", ["llama", "t5", "plain unigram"])
def test_the_same_vocabulary_in_a_gguf_file_gives_the_same_ids(
    name: str, trained_model: Callable[[str], bytes], tmp_path: Path
) -> None:
    model = parse(trained_model(name), "here")
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "llama" if model.kind == "bpe" else "t5",
        "tokenizer.ggml.tokens": [piece.text for piece in model.pieces],
        "tokenizer.ggml.scores": np.array([piece.score for piece in model.pieces], np.float32),
        "tokenizer.ggml.token_type": np.array([piece.type for piece in model.pieces], np.int32),
        "tokenizer.ggml.precompiled_charsmap": np.frombuffer(model.normalization.charsmap, np.uint8),
        "tokenizer.ggml.add_space_prefix": model.normalization.dummy_prefix,
        "tokenizer.ggml.remove_extra_whitespaces": model.normalization.collapse_spaces,
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if role in model.roles:
            place = [piece.text for piece in model.pieces].index(model.roles[role])
            metadata[f"tokenizer.ggml.{key}_token_id"] = place
    (tmp_path / "tokenizer.model").write_bytes(trained_model(name))
    expected = Tokenizer.load(tmp_path / "tokenizer.model")
    found = Tokenizer._of(gguf.from_metadata(metadata, "here"))
    assert [found.encode(text) for text in ODD] == [expected.encode(text) for text in ODD]


def test_a_folder_of_t5_has_its_sentinels_and_ends_texts(trained_model: Callable[[str], bytes], tmp_path: Path) -> None:
    (tmp_path / "spiece.model").write_bytes(trained_model("t5"))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "T5Tokenizer", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}'
    )
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.vocab_size == 600
    assert tokenizer.sentinel_ids[:2] == (599, 598)
    assert tokenizer.encode("the", add_special=True)[-1:] == [tokenizer.eos_id] == [1]
    assert files.read(tmp_path).kind == "unigram"
