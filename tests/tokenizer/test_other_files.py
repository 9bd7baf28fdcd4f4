"""What other people's tokenizer files say is followed, and what they lack, or have too much of, is refused by name."""

from __future__ import annotations

import base64
import json
import random
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qkv.config.errors import DamagedError, NotFoundError, QkvError, UsageError
from qkv.tokenizer import Tokenizer, gguf
from qkv.tokenizer.pieces import byte_characters

from .templates import CHATML, byte_tokenizer

DataFile = Callable[[str], Path]


# --- folders ----------------------------------------------------------------------------------------------------------


def folder_of(tokenizer: Tokenizer, folder: Path, **config: Any) -> Path:
    """A Hugging Face folder with this tokenizer and this tokenizer_config.json."""
    tokenizer.save(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("config", "around"),
    [
        ({}, ([], [])),
        ({"add_bos_token": True}, ([256], [])),
        ({"add_bos_token": True, "add_eos_token": True}, ([256], [257])),
        ({"add_bos_token": False, "add_eos_token": True}, ([], [257])),
        ({"add_bos_token": None}, ([], [])),
    ],
)
def test_what_stands_around_a_text_is_what_the_folder_says(
    config: dict[str, Any], around: tuple[list[int], list[int]], tmp_path: Path
) -> None:
    folder = folder_of(byte_tokenizer(["<s>", "</s>"]), tmp_path, bos_token="<s>", eos_token="</s>", **config)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.around == around
    assert tokenizer.encode("a", add_special=True) == [*around[0], *tokenizer.encode("a"), *around[1]]
    tokenizer.save(tmp_path / "again")
    assert Tokenizer.load(tmp_path / "again").around == around


def test_what_tokenizer_json_puts_around_a_text_comes_first(
    trained: Callable[[str], Tokenizer], tmp_path: Path
) -> None:
    folder = folder_of(trained("bpe"), tmp_path, bos_token="<bos>", eos_token="<eos>", add_bos_token=False)
    assert Tokenizer.load(folder).around == trained("bpe").around


def test_older_files_beside_a_tokenizer_are_read(tmp_path: Path) -> None:
    folder = folder_of(byte_tokenizer(["<s>", "</s>"]), tmp_path, eos_token="</s>")
    (folder / "special_tokens_map.json").write_text('{"bos_token": "<s>", "eos_token": "<s>"}')
    (folder / "added_tokens.json").write_text('{"<one>": 259, "<two>": 258}')
    tokenizer = Tokenizer.load(folder)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (256, 257)
    assert tokenizer.encode("<two><one>a") == [258, 259, *tokenizer.encode("a")]


def test_tokens_that_only_the_configuration_lists_are_added(tmp_path: Path) -> None:
    added = {"257": {"content": "<tool>", "special": True}, "258": {"content": "<x>", "lstrip": True}}
    config = {"eos_token": "</s>", "additional_special_tokens": ["<tool>"], "added_tokens_decoder": added}
    tokenizer = Tokenizer.load(folder_of(byte_tokenizer(["</s>"]), tmp_path, **config))
    assert tokenizer.special_ids == {256, 257}
    assert tokenizer.encode("a <x>") == [*tokenizer.encode("a"), 258]
    assert 257 not in tokenizer.encode("<tool>")
    assert tokenizer.encode("<tool>", parse_special=True) == [257]


@pytest.mark.parametrize(
    "added", [{"300": {"content": "<x>"}}, {"x": {"content": "<x>"}}, {"257": {}}, {"257": "<x>"}, ["<x>"], 5]
)
def test_a_damaged_list_of_added_tokens_is_called_so(added: Any, tmp_path: Path) -> None:
    with pytest.raises(DamagedError, match="damaged"):
        Tokenizer.load(folder_of(byte_tokenizer(["</s>"]), tmp_path, added_tokens_decoder=added))


def test_a_named_role_is_a_special_token_whatever_the_vocabulary_says(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(["</s>"])
    tree = json.loads(tokenizer._text)
    tree["added_tokens"][0]["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree), encoding="utf-8")
    assert Tokenizer.load(tmp_path).encode("</s>") == [256]  # a token like any other
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    assert 256 not in Tokenizer.load(tmp_path).encode("</s>")


@pytest.mark.parametrize(
    ("told", "found"),
    [
        (CHATML, CHATML),
        ([{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}], CHATML),
        ([{"name": "tool_use", "template": "x"}], None),
        (None, None),
    ],
)
def test_the_default_of_several_chat_templates_is_taken(told: Any, found: str | None, tmp_path: Path) -> None:
    template = Tokenizer.load(folder_of(byte_tokenizer(["</s>"]), tmp_path, chat_template=told)).chat_template
    assert (template and template.source) == found


# --- GGUF -------------------------------------------------------------------------------------------------------------


def gguf_tokens(pre: str | None = "gpt-2", **changes: Any) -> dict[str, Any]:
    """The metadata of a GGUF file with byte-level BPE: 256 bytes, `he`, two control tokens and one of its own."""
    tokens = [*byte_characters().values(), "he", "<s>", "</s>", "<own>"]
    found: dict[str, Any] = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": np.array([1] * 257 + [3, 3, 4], np.int32),
        "merges": ["h e"],
        "bos_token_id": 257,
        "eos_token_id": 258,
    } | changes
    return {f"tokenizer.ggml.{key}": value for key, value in found.items() if value is not None}


def loaded(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer._of(gguf.from_metadata(metadata, "here"))


@pytest.mark.parametrize(
    ("pre", "flags", "around"),
    [
        ("gpt-2", {}, ([], [])),
        ("gpt-2", {"add_bos_token": True}, ([257], [])),
        ("gpt-2", {"add_eos_token": True}, ([], [258])),
        ("llama-bpe", {}, ([257], [])),
        ("llama-bpe", {"add_bos_token": False}, ([], [])),
        ("qwen2", {"bos_token_id": None, "add_bos_token": True}, ([], [])),
    ],
)
def test_a_gguf_file_says_what_stands_around_a_text(
    pre: str, flags: dict[str, Any], around: tuple[list[int], list[int]]
) -> None:
    assert loaded(gguf_tokens(pre, **flags)).around == around


def test_control_tokens_of_a_gguf_file_are_special_and_its_own_tokens_are_not() -> None:
    tokenizer = loaded(gguf_tokens())
    assert tokenizer.encode("he<own>he") == [256, 259, 256]
    assert tokenizer.special_ids == {257, 258}
    assert tokenizer.encode("<s>he", parse_special=True) == [257, 256]
    assert 257 not in tokenizer.encode("<s>he")


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "x123  y'LL", ["x", "123", " ", " y", "'", "LL"]),
        ("smollm", "x123", ["x", "1", "2", "3"]),
        ("llama-bpe", "x1234 'LL\n\n", ["x", "123", "4", " '", "LL", "\n\n"]),
        ("llama-bpe", "it'LL", ["it", "'LL"]),
        ("qwen2", "x12e\u0301", ["x", "1", "2", "é"]),
        ("tekken", "fooBar12", ["foo", "Bar", "1", "2"]),
        ("gpt-4o", "fooBar's1234", ["foo", "Bar's", "123", "4"]),
    ],
)
def test_each_known_pre_tokenizer_cuts_as_the_model_it_is_named_after(pre: str, text: str, pieces: list[str]) -> None:
    assert [piece.text for piece in loaded(gguf_tokens(pre)).explain(text).pieces] == pieces


def test_a_whole_piece_is_a_token_only_where_the_pre_tokenizer_says_so() -> None:
    tokens = [*byte_characters().values(), "he", "<s>", "</s>", "ehe"]  # which no merge makes
    changes = {"tokens": tokens, "token_type": np.array([1] * 257 + [3, 3, 1], np.int32)}
    assert loaded(gguf_tokens("llama-bpe", **changes)).encode("ehe") == [259]
    assert loaded(gguf_tokens("smaug-bpe", **changes)).encode("ehe") == [tokens.index("e"), 256]


@pytest.mark.parametrize("pre", ["quantum", "default", None])
def test_an_unknown_pre_tokenizer_is_refused_with_those_that_are_known(pre: str | None) -> None:
    with pytest.raises(QkvError, match=r"pre-tokenizer.* is not supported") as caught:
        loaded(gguf_tokens(pre))
    assert "llama-bpe" in (caught.value.hint or "")


@pytest.mark.parametrize("kind", ["rwkv", 5, None])
def test_an_unknown_kind_of_gguf_vocabulary_is_refused(kind: Any) -> None:
    with pytest.raises(QkvError, match="not supported"):
        loaded(gguf_tokens(model=kind))


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": None},
        {"tokens": np.zeros(3)},
        {"tokens": []},
        {"tokens": ["a", "a"]},
        {"tokens": ["a", ""]},
        {"merges": None},
        {"merges": ["h e", "he"]},
        {"merges": ["h e", "h q"]},
        {"merges": ["h e l"]},
        {"token_type": np.array([1, 2])},
        {"token_type": ["a"]},
        {"eos_token_id": 260},
        {"eos_token_id": -1},
        {"eos_token_id": 1.0},
        {"add_bos_token": 1},
        {"model": "llama"},
        {"model": "llama", "scores": np.zeros(5)},
        {"model": "t5", "scores": np.full(260, np.nan)},
        {"model": "t5", "scores": np.zeros(260), "precompiled_charsmap": np.arange(9, dtype=np.uint8)},
        {"model": "bert", "unknown_token_id": 300},
    ],
)
def test_a_damaged_gguf_vocabulary_is_called_so(changes: dict[str, Any]) -> None:
    with pytest.raises(DamagedError, match="damaged"):
        loaded(gguf_tokens(**changes))


# --- tiktoken ---------------------------------------------------------------------------------------------------------


def ranks(*tokens: bytes) -> bytes:
    """A rank file of the 256 bytes and these tokens."""
    known = [*(bytes([byte]) for byte in range(256)), *tokens]
    return b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(known))


def test_an_unknown_tiktoken_file_is_refused_until_its_encoding_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.tiktoken"
    path.write_bytes(ranks(b"he", b"ll", b"hell"))
    with pytest.raises(UsageError, match="does not say how text is cut") as caught:
        Tokenizer.load(path)
    assert "cl100k_base" in (caught.value.hint or "")
    tokenizer = Tokenizer.load(path, encoding="cl100k_base")
    assert tokenizer.encode("hello") == [258, ord("o")]
    assert tokenizer.eos_id == 100_257
    with pytest.raises(UsageError, match="no tiktoken encoding 'mine'"):
        Tokenizer.load(path, encoding="mine")


def test_a_tiktoken_file_is_known_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "o200k_base.tiktoken").write_bytes(ranks(b"he"))
    assert Tokenizer.load(tmp_path / "o200k_base.tiktoken").vocab_size == 200_019
    assert Tokenizer.load(tmp_path).vocab_size == 200_019


def test_the_rank_file_of_llama_3_is_told_from_sentencepiece(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(ranks(b"he"))
    tokenizer = Tokenizer.load(tmp_path, encoding="llama3")
    assert tokenizer.around == ([128_000], [])
    assert tokenizer.token_to_id("<|eot_id|>") == 128_009
    assert tokenizer.token_to_id("<|reserved_special_token_5|>") == 128_010


def test_an_encoding_is_for_tiktoken_files_only(tmp_path: Path) -> None:
    byte_tokenizer(["</s>"]).save(tmp_path)
    with pytest.raises(UsageError, match="only tiktoken"):
        Tokenizer.load(tmp_path, encoding="llama3")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        ranks()[:-6],
        ranks() + b"aGU=\n",
        ranks() + b"aGU= x\n",
        ranks() + b"*** 256\n",
        ranks() + b"aGU= 7\n",
        ranks() + b"aGU= 99999999999\n",
        b"AA== 0\n",
        ranks(b"he" * 100_000),
    ],
)
def test_a_damaged_tiktoken_file_is_called_so(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "cl100k_base.tiktoken").write_bytes(text)
    with pytest.raises(QkvError, match=r"damaged|not supported"):
        Tokenizer.load(tmp_path / "cl100k_base.tiktoken")


# --- SentencePiece ----------------------------------------------------------------------------------------------------


def field(number: int, value: bytes | int | float) -> bytes:
    """A field of a protocol buffer."""
    if isinstance(value, bytes):
        return bytes([number << 3 | 2, *varint(len(value))]) + value
    if isinstance(value, float):
        return bytes([number << 3 | 5]) + struct.pack("<f", value)
    return bytes(varint(number << 3)) + bytes(varint(value))


def varint(number: int) -> list[int]:
    return [number] if number < 128 else [number & 127 | 128, *varint(number >> 7)]


def piece(text: str, score: float = -1.0, kind: int = 1) -> bytes:
    return field(1, field(1, text.encode()) + field(2, score) + field(3, kind))


def model(*pieces: bytes, kind: int = 1, trainer: bytes = b"", normalizer: bytes = b"") -> bytes:
    """A SentencePiece model of <unk>, <s>, </s> and these pieces."""
    control = piece("<unk>", 0.0, 2) + piece("<s>", 0.0, 3) + piece("</s>", 0.0, 3)
    return control + b"".join(pieces) + field(2, field(3, kind) + trainer) + field(3, normalizer)


def charsmap(*units: int, replacements: bytes = b"x\0") -> bytes:
    return struct.pack("<I", 4 * len(units)) + struct.pack(f"<{len(units)}I", *units) + replacements


LEADS_TO_9999 = [0] * 256  # the key "a": from the root to unit 97, and from there to its value, at 96
LEADS_TO_9999[97], LEADS_TO_9999[96] = 1 << 10 | 0x100 | 97, 0x8000_0000 | 9999


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (model(piece("a"), kind=3), "kind word"),
        (model(piece("a"), kind=4), "kind char"),
        (model(piece("a"), trainer=field(24, 1)), "spaces after words"),
        (model(piece("a"), normalizer=field(5, 0)), "keeps spaces"),
        (model(piece("a")) + field(5, field(2, b"map")), "while decoding"),
    ],
)
def test_what_is_not_done_with_a_sentencepiece_model_is_said(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "spm.model").write_bytes(data)
    with pytest.raises(QkvError, match=f"{message}.* is not supported"):
        Tokenizer.load(tmp_path / "spm.model")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x0a",
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"\x00\x00",
        b"\x0b",
        piece("a", kind=9),
        model(piece("a"), piece("a")),
        model(piece("")),
        model(piece("a", float("nan"))),
        model(field(1, 5)),
        model(field(1, field(1, b"\xff"))),
        piece("a") + field(2, field(3, 1)),
        model(piece("a"), normalizer=field(2, b"abc")),
        model(piece("a"), normalizer=field(2, charsmap(0))),
        model(piece("a"), normalizer=field(2, charsmap(*[0xFFFFFFFF] * 256))),
        model(piece("a"), normalizer=field(2, charsmap(*LEADS_TO_9999))),
        model(piece("a"), normalizer=field(2, charsmap(*[0] * 256, replacements=b"\xff\0"))),
    ],
)
def test_a_damaged_sentencepiece_model_is_called_so(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "spm.model").write_bytes(data)
    with pytest.raises(DamagedError, match="damaged"):
        Tokenizer.load(tmp_path / "spm.model")


def test_a_character_map_that_leads_outside_itself_is_found_in_tokenizer_json_too(tmp_path: Path) -> None:
    tree = json.loads(byte_tokenizer(["</s>"])._text)
    broken = base64.b64encode(charsmap(*[0xFFFFFFFF] * 256)).decode()
    tree["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Precompiled", "precompiled_charsmap": broken}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree), encoding="utf-8")
    with pytest.raises(DamagedError, match="character map"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_no_change_of_a_byte_of_a_sentencepiece_model_does_more_than_fail(
    kind: str, data_file: DataFile, tmp_path: Path
) -> None:
    good = data_file(f"tokenizers/sentencepiece/botchan_en_{kind}_1000.model").read_bytes()
    path = tmp_path / "spm.model"
    chance = random.Random(0)
    for _ in range(60):
        data = bytearray(good)
        for _ in range(chance.randrange(1, 4)):
            # the character map is most of the file, the rest stands at either end
            data[chance.choice([chance.randrange(20_000), chance.randrange(len(data))])] = chance.randrange(256)
        path.write_bytes(data[: chance.choice([len(data), len(data), chance.randrange(len(data))])])
        with suppress(QkvError):
            Tokenizer.load(path).encode("Ｈello é  world")


def test_a_model_whose_ids_others_give_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "sentencepiece.bpe.model").write_bytes(model(piece("a")))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "CamembertTokenizer"}')
    with pytest.raises(QkvError, match=r"of a Camembert tokenizer is not supported"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("config", "around"),
    [
        (None, ([1], [])),
        ({"tokenizer_class": "LlamaTokenizer"}, ([1], [])),
        ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": False, "add_eos_token": True}, ([], [2])),
        ({"tokenizer_class": "T5Tokenizer", "extra_ids": 0}, ([], [2])),
    ],
)
def test_the_folder_of_a_sentencepiece_model_says_what_stands_around_a_text(
    config: dict[str, Any] | None, around: tuple[list[int], list[int]], tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(model(piece("a"), kind=2))
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.load(tmp_path).around == around


# --- vocab.txt and llama2.c -------------------------------------------------------------------------------------------

BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "##s", "world", "é", "e", "我", "!"]


def vocab_txt(folder: Path, words: list[str], config: dict[str, Any] | None = None) -> Tokenizer:
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.load(folder)


def test_a_vocab_txt_is_a_bert_tokenizer(tmp_path: Path) -> None:
    tokenizer = vocab_txt(tmp_path, BERT)
    assert tokenizer.encode("HELLOS, é我!", add_special=True) == [2, 5, 6, 1, 9, 10, 11, 3]
    assert tokenizer.decode(tokenizer.encode("hellos world!")) == "hellos world!"
    assert (tokenizer.pad_id, tokenizer.unk_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id) == (
        0,
        1,
        2,
        3,
        4,
    )
    assert tokenizer.encode("[MASK]", parse_special=True) == [4]
    assert 4 not in tokenizer.encode("[MASK]")


def test_text_keeps_its_case_where_the_vocabulary_has_capitals_or_the_folder_says_so(tmp_path: Path) -> None:
    assert vocab_txt(tmp_path, BERT).encode("HELLO") == [5]
    assert vocab_txt(tmp_path, [*BERT, "Hello"]).encode("Hello") == [12]
    assert vocab_txt(tmp_path, [*BERT, "Hello"], {"do_lower_case": True}).encode("Hello") == [5]
    assert vocab_txt(tmp_path, BERT, {"do_lower_case": False}).encode("é hello Hello") == [8, 5, 1]
    assert vocab_txt(tmp_path, BERT, {"strip_accents": False}).encode("É") == [8]


@pytest.mark.parametrize("words", [[""], ["a", "a", "[UNK]"], ["a"], ["[UNK]", ""]])
def test_a_damaged_vocab_txt_is_called_so(words: list[str], tmp_path: Path) -> None:
    with pytest.raises(DamagedError, match="damaged"):
        vocab_txt(tmp_path, words)


def test_vocab_txt_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(QkvError, match="BertJapanese tokenizer is not supported"):
        vocab_txt(tmp_path, BERT, {"tokenizer_class": "BertJapaneseTokenizer"})


@pytest.mark.parametrize("change", ["cut", "length", "longest", "empty", "order"])
def test_a_damaged_file_of_llama2c_is_called_so(change: str, data_file: DataFile, tmp_path: Path) -> None:
    data = bytearray(data_file("weights-stories260k/tok512.bin").read_bytes())
    if change == "cut":
        data = data[:-1]
    elif change == "empty":
        data = data[:0]
    elif change == "order":
        data[13:16] = b"one"
    else:
        data[{"length": 8, "longest": 0}[change] : 12 if change == "length" else 4] = b"\xff\xff\xff\x7f"
    (tmp_path / "tokenizer.bin").write_bytes(data)
    with pytest.raises(DamagedError, match="damaged"):
        Tokenizer.load(tmp_path)


def test_a_folder_without_a_tokenizer_is_not_found(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(NotFoundError, match="no tokenizer"):
        Tokenizer.load(tmp_path)
