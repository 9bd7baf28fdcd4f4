"""Tokenizer folders: what is saved comes back, foreign files keep their ways, damaged ones are called so."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from qkv.config.errors import NotFoundError, QkvError
from qkv.tokenizer import Tokenizer, files

from .samples import KINDS

Trained = Callable[[str], Tokenizer]
TEXT = "the newer, <eos> 我爱你！\n  🙂"


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_tokenizer_comes_back_the_same(trained: Trained, kind: str, tmp_path: Path) -> None:
    tokenizer = trained(kind)
    tokenizer.save(tmp_path / "new" / "folder")
    for path in (tmp_path / "new/folder", tmp_path / "new/folder/tokenizer.json"):
        loaded = Tokenizer.load(path)
        assert loaded.fingerprint == tokenizer.fingerprint
        assert (loaded.kind, loaded.roles) == (kind, tokenizer.roles)
        assert loaded.encode(TEXT) == tokenizer.encode(TEXT)
    assert sorted(path.name for path in (tmp_path / "new/folder").iterdir()) == [
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_fingerprints_tell_tokenizers_apart(trained: Trained, tmp_path: Path) -> None:
    tokenizer = trained("bpe")
    tokenizer.save(tmp_path)
    text = (tmp_path / "tokenizer.json").read_text(encoding="utf-8")
    assert Tokenizer(text, kind="bpe", roles=tokenizer.roles).fingerprint == tokenizer.fingerprint
    other_roles = Tokenizer(text, kind="bpe", roles={"eos": "<eos>"})
    assert len({tokenizer.fingerprint, other_roles.fingerprint, trained("char").fingerprint}) == 3


def test_a_tokenizer_beside_a_checkpoint_is_found(trained: Trained, tmp_path: Path) -> None:
    trained("char").save(tmp_path / "tokenizer")
    assert Tokenizer.load(tmp_path).fingerprint == trained("char").fingerprint


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_reads_our_folders(trained: Trained, kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = trained(kind)
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = TEXT.replace("<eos>", "")
    assert theirs(text, add_special_tokens=False).input_ids == tokenizer.encode(text)
    assert (theirs.pad_token_id, theirs.eos_token_id, theirs.mask_token_id) == (
        tokenizer.pad_id,
        tokenizer.eos_id,
        tokenizer.mask_id,
    )


def test_an_interrupted_save_leaves_the_old_tokenizer(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained("char").save(tmp_path)

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full_disk)
    with pytest.raises(QkvError, match="No space left"):
        trained("bpe").save(tmp_path)
    assert Tokenizer.load(tmp_path).fingerprint == trained("char").fingerprint
    assert len(list(tmp_path.iterdir())) == 2


# --- foreign files ----------------------------------------------------------------------------------------------------


def bert() -> tokenizers.Tokenizer:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "do", "not", "low", "##er", "##s", ".", "'", "我", "[", "]"]
    backend = tokenizers.Tokenizer(models.WordPiece({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=True)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    backend.add_special_tokens(words[:5])
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    return backend


def llama() -> tokenizers.Tokenizer:
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "l",
        "o",
        "w",
        "lo",
        "low",
        "▁low",
    ]
    merges = [("l", "o"), ("lo", "w"), ("▁", "low")]
    backend = tokenizers.Tokenizer(
        models.BPE({piece: n for n, piece in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def t5() -> tokenizers.Tokenizer:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), ("▁low", -3.0), ("er", -3.0), ("<", -4.0)]
    pieces += [(character, -5.0) for character in "lowers/>我"]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, 2, False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<pad>", "</s>", "<unk>"])
    return backend


def gpt(split: str = r"\p{N}{1,3}|[^\p{N}]+") -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: n for n, token in enumerate([*alphabet, "12", "23", "123"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("1", "2"), ("2", "3"), ("12", "3")], dropout=0.9))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>"])
    backend.add_tokens([AddedToken("é 2", normalized=False)])
    return backend


def load(backend: tokenizers.Tokenizer, folder: Path, config: dict[str, Any] | None = None) -> Tokenizer:
    backend.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return Tokenizer.load(folder)


@pytest.mark.parametrize(
    ("make", "text"),
    [(bert, "do not lowers. low' 我"), (llama, "low low我 \n"), (t5, "lower  low我"), (gpt, "1234 a我 é 2\n")],
)
def test_foreign_tokenizers_encode_and_decode_as_the_library_does(
    make: Callable[[], tokenizers.Tokenizer], text: str, tmp_path: Path
) -> None:
    backend = make()
    tokenizer = load(backend, tmp_path)
    backend.no_truncation()
    backend.no_padding()
    if backend.model.__class__ is models.BPE:
        backend.model.dropout = None
    ids = backend.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text) == ids
    assert tokenizer.encode(text, add_special=True) == backend.encode(text).ids
    assert tokenizer.decode(ids) == backend.decode(ids)
    saved = tmp_path / "again"
    tokenizer.save(saved)
    assert Tokenizer.load(saved).encode(text) == ids


def test_added_tokens_are_found_as_their_file_says(tmp_path: Path) -> None:
    backend = llama()
    backend.add_tokens([AddedToken("<l>", lstrip=True), AddedToken("<r>", rstrip=True, normalized=False)])
    backend.add_tokens([AddedToken("lo", single_word=True), AddedToken("w ow", normalized=True)])
    backend.add_special_tokens([AddedToken("<s>", rstrip=True), AddedToken("</s>", lstrip=True, normalized=True)])
    tokenizer = load(backend, tmp_path)
    for text in ("low  <l>  low <r>  low", "lo low", "low ow", "<s>  low </s> <s><r>"):
        assert tokenizer.encode(text, parse_special=True) == backend.encode(text, add_special_tokens=False).ids
        backend.encode_special_tokens = True
        assert tokenizer.encode(text) == backend.encode(text, add_special_tokens=False).ids
        backend.encode_special_tokens = False


def test_a_file_keeps_its_own_splitting(tmp_path: Path) -> None:
    # the same vocabulary, another splitting: other ids
    assert load(gpt(), tmp_path).encode("1223") != load(gpt(r"\p{N}"), tmp_path).encode("1223")
    assert [piece.text for piece in load(gpt(), tmp_path).explain("12345a").pieces] == ["123", "45", "a"]


def test_roles_are_read_from_the_config_beside_the_file(tmp_path: Path) -> None:
    config = {
        "eos_token": {"content": "</s>", "special": True},
        "pad_token": "<s>",
        "bos_token": None,
        "mask_token": "[M]",
    }
    tokenizer = load(llama(), tmp_path, config)
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.bos_id, tokenizer.mask_id) == (2, 1, None, None)


def test_roles_are_guessed_by_usual_names_without_a_config(tmp_path: Path) -> None:
    tokenizer = load(bert(), tmp_path)
    assert (tokenizer.pad_id, tokenizer.unk_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id) == (
        0,
        1,
        2,
        3,
        4,
    )
    assert load(llama(), tmp_path).bos_id == 1
    assert load(gpt(), tmp_path).eos_id == 259


@pytest.mark.parametrize(
    ("make", "text"), [(t5, "low</s><pad>"), (bert, "low [MASK] [SEP]"), (llama, "</s>"), (gpt, "<|endoftext|>")]
)
def test_foreign_special_tokens_are_ordinary_text_too(
    make: Callable[[], tokenizers.Tokenizer], text: str, tmp_path: Path
) -> None:
    tokenizer = load(make(), tmp_path)
    assert not (tokenizer.special_ids - {tokenizer.unk_id}).intersection(tokenizer.encode(text))
    assert (tokenizer.special_ids - {tokenizer.unk_id}).intersection(tokenizer.encode(text, parse_special=True))


def test_a_template_is_found_without_the_letter_a(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.BPE({"我": 0, "你": 1, "<s>": 2, "</s>": 3}, []))
    backend.decoder = decoders.Fuse()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1", special_tokens=[("<s>", 2), ("</s>", 3)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    assert load(backend, tmp_path).encode("你我", add_special=True) == [2, 1, 0, 3]


def test_vocab_size_covers_added_tokens(tmp_path: Path) -> None:
    assert load(gpt(), tmp_path).vocab_size == 261


# --- refused ----------------------------------------------------------------------------------------------------------

GOOD = '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"model": {"type": "BPE"}}',
        GOOD,
        GOOD.replace('"a": 0', '"a": -1') + "}",
        GOOD.replace('"a": 0', '"a": 4000000000') + "}",
        GOOD.replace("[]", '[["a", "b"]]') + "}",
        GOOD.replace('"a": 0', "") + "}",
        '{"a":' * 100_000,
        GOOD
        + ', "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": false}}',
    ],
)
def test_damaged_files_are_called_damaged(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    with pytest.raises(QkvError, match="damaged") as caught:
        Tokenizer.load(tmp_path)
    assert "tokenizer.json" in (caught.value.where or "")


@pytest.mark.parametrize("part", ["model", "normalizer", "pre_tokenizer", "decoder"])
def test_unknown_parts_are_called_unsupported(part: str, tmp_path: Path) -> None:
    tree = json.loads(gpt().to_str())
    tree[part] = {**(tree[part] or {}), "type": "CTC" if part == "decoder" else "Quantum"}
    tree[part] |= {"pad_token": "", "word_delimiter_token": "", "cleanup": False} if part == "decoder" else {}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree), encoding="utf-8")
    with pytest.raises(QkvError, match="not supported"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer", "a.txt.gz"])
def test_other_formats_are_refused_with_what_is_supported(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"something")
    with pytest.raises(QkvError, match="not supported") as caught:
        Tokenizer.load(tmp_path / name)
    assert "tokenizer.json" in (caught.value.hint or "")


@pytest.mark.parametrize("make", [bert, llama, t5, gpt])
def test_no_change_of_a_value_does_more_than_fail(make: Callable[[], tokenizers.Tokenizer], tmp_path: Path) -> None:
    chance, good = random.Random(0), make().to_str()
    odd = [None, 5, -1, 1e300, 2**32, "", "x", "$A", [], {}, True, [["a", "b"]], {"type": "ByteLevel"}]
    for _ in range(100):
        tree = json.loads(good)
        part, key = chance.choice(list(places(tree)))
        part[key] = chance.choice(odd)
        (tmp_path / "tokenizer.json").write_text(json.dumps(tree), encoding="utf-8")
        with suppress(QkvError):
            tokenizer = Tokenizer.load(tmp_path)
            tokenizer.decode(tokenizer.encode("low <s> 我", add_special=True))


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """(list or dict, index or key) of every value in a JSON tree."""
    for key in tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield tree, key
        yield from places(tree[key])


def test_json_that_is_no_tokenizer_is_told_apart(tmp_path: Path) -> None:
    for text in ("[]", '{"d_model": 64}'):
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
        with pytest.raises(QkvError, match="not a tokenizer"):
            Tokenizer.load(tmp_path / "config.json")


def test_what_does_not_exist_is_not_found(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(NotFoundError):
            Tokenizer.load(path)


def test_a_config_of_another_tokenizer_is_noticed(trained: Trained, tmp_path: Path) -> None:
    trained("char").save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    for change, message in (({"eos_token": "<end>"}, "no token '<end>'"), ({"qkv": {"format_version": 9}}, "format 9")):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | change), encoding="utf-8")
        with pytest.raises(QkvError, match=message):
            Tokenizer.load(tmp_path)
