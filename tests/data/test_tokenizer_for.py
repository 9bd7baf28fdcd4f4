"""The tokenizer that a configuration asks for."""

from __future__ import annotations

import json

import pytest

from qkv.config.errors import ConfigError, NotFoundError, QkvError, UsageError
from qkv.config.run import Config
from qkv.data.tokenizers import tokenizer_for
from qkv.tokenizer.tokenizer import Tokenizer

TEXT = "the lowest owls know the low owl and the lower one " * 20


LETTERS = [("ab", "xy"), ("ba", "yx"), ("aab", "xxy")]


def config_of(tokenizer, train=(), vocab_size=None, **data) -> Config:
    files = [str(file) for file in train]
    return Config.model_validate(
        {"model": {"vocab_size": vocab_size}, "tokenizer": tokenizer, "data": {"train": files, **data}}
    )


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def count_training(monkeypatch) -> list[str]:
    """The kinds that were trained."""
    trained: list[str] = []
    train = Tokenizer.train.__func__

    def counting(cls, source, *, kind="bpe", **options):
        trained.append(kind)
        return train(cls, source, kind=kind, **options)

    monkeypatch.setattr(Tokenizer, "train", classmethod(counting))
    return trained


def test_a_tokenizer_is_trained_once_and_then_found(corpus, tmp_path, count_training) -> None:
    config = config_of({"kind": "bpe", "vocab_size": 300}, [corpus])
    first = tokenizer_for(config, tmp_path / "cache")
    second = tokenizer_for(config, tmp_path / "cache")
    assert count_training == ["bpe"]
    assert first.vocab_size <= 300
    assert second.fingerprint == first.fingerprint
    assert second.encode(TEXT) == first.encode(TEXT)


@pytest.mark.parametrize("kind", ["bpe", "unigram", "wordpiece", "word", "char"])
def test_every_kind_can_be_kept(corpus, tmp_path, kind: str) -> None:
    config = config_of({"kind": kind, "vocab_size": 290}, [corpus])
    assert tokenizer_for(config, tmp_path).fingerprint == tokenizer_for(config, tmp_path).fingerprint


def test_another_text_another_size_or_another_kind_is_another_tokenizer(corpus, tmp_path, count_training) -> None:
    cache = tmp_path / "cache"
    tokenizer_for(config_of({"kind": "bpe", "vocab_size": 300}, [corpus]), cache)
    tokenizer_for(config_of({"kind": "bpe", "vocab_size": 290}, [corpus]), cache)
    tokenizer_for(config_of({"kind": "char"}, [corpus]), cache)
    corpus.write_text(TEXT + "more", encoding="utf-8")
    tokenizer_for(config_of({"kind": "bpe", "vocab_size": 300}, [corpus]), cache)
    assert len(count_training) == 4


def test_the_same_text_elsewhere_is_the_same_tokenizer(corpus, tmp_path, count_training) -> None:
    config = config_of({"kind": "char"}, [corpus])
    tokenizer_for(config, tmp_path / "cache")
    moved = corpus.rename(tmp_path / "moved.txt")
    tokenizer_for(config_of({"kind": "char"}, [moved]), tmp_path / "cache")
    assert len(count_training) == 1


def test_a_damaged_folder_is_made_anew(corpus, tmp_path) -> None:
    config = config_of({"kind": "char"}, [corpus])
    first = tokenizer_for(config, tmp_path / "cache")
    (folder,) = (tmp_path / "cache/tokenizers").iterdir()
    (folder / "tokenizer.json").write_text("{", encoding="utf-8")
    assert tokenizer_for(config, tmp_path / "cache").fingerprint == first.fingerprint
    assert Tokenizer.load(folder).fingerprint == first.fingerprint


def test_without_a_size_the_vocabulary_fits_the_model(corpus, tmp_path) -> None:
    assert tokenizer_for(config_of({"kind": "bpe"}, [corpus], vocab_size=280), tmp_path).vocab_size <= 280


def test_bytes_need_no_text(tmp_path) -> None:
    assert tokenizer_for(config_of({"kind": "byte"}), tmp_path).encode("é") == list("é".encode())
    assert not list(tmp_path.iterdir())


def test_a_path_is_loaded_and_not_trained(corpus, tmp_path, count_training) -> None:
    Tokenizer.train(TEXT, kind="char").save(tmp_path / "mine")
    count_training.clear()
    tokenizer = tokenizer_for(config_of({"path": str(tmp_path / "mine")}, [corpus]), tmp_path / "cache")
    assert tokenizer.kind == "char"
    assert count_training == []


def test_it_learns_from_the_text_the_model_sees(tmp_path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"id": "ZZZ", "text": "ab\r\n"}) + "\n", encoding="utf-8")
    tokenizer = tokenizer_for(config_of({"kind": "char"}, [path], kind="jsonl"), tmp_path / "cache")
    assert sorted(
        {tokenizer.id_to_token(i) for i in range(tokenizer.vocab_size)}
        - {tokenizer.id_to_token(i) for i in tokenizer.special_ids}
    ) == ["\n", "a", "b"]


def test_what_cannot_be_is_refused(corpus, tmp_path) -> None:
    with pytest.raises(ConfigError, match="no text to train"):
        tokenizer_for(config_of({"kind": "bpe"}), tmp_path)
    with pytest.raises(NotFoundError):
        tokenizer_for(config_of({"kind": "bpe"}, [tmp_path / "gone.txt"]), tmp_path)
    with pytest.raises(NotFoundError):
        tokenizer_for(config_of({"path": str(tmp_path / "gone")}), tmp_path)
    with pytest.raises(UsageError, match="too small"):
        tokenizer_for(config_of({"kind": "bpe", "vocab_size": 5}, [corpus]), tmp_path)
    (tmp_path / "blank.txt").write_text(" \n", encoding="utf-8")
    with pytest.raises(QkvError, match="hold no text to train a tokenizer on") as caught:
        tokenizer_for(config_of({"kind": "bpe"}, [tmp_path / "blank.txt"]), tmp_path)
    assert caught.value.where == str(tmp_path / "blank.txt")
    assert not list(tmp_path.rglob("*.partial"))


# --- pairs, labels, sentinels -----------------------------------------------------------------------------------------


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"{source}\t{target}\n" for source, target in LETTERS), encoding="utf-8")
    return str(path)


def pairs_config(tokenizer, train, **data) -> Config:
    model = {"family": "encoder-decoder", "encoder": {"vocab_size": 20}, "decoder": {"vocab_size": 30}}
    return Config.model_validate({"model": model, "tokenizer": tokenizer, "data": {"train": train, **data}})


def letters_of(tokenizer: Tokenizer) -> str:
    ids = set(range(tokenizer.vocab_size)) - tokenizer.special_ids
    return "".join(sorted(tokenizer.id_to_token(token_id) for token_id in ids))


def test_one_tokenizer_learns_from_both_sides(pairs, tmp_path) -> None:
    config = pairs_config({"kind": "char"}, pairs)
    assert letters_of(tokenizer_for(config, tmp_path)) == "abxy"
    assert tokenizer_for(config, tmp_path, "source").fingerprint == tokenizer_for(config, tmp_path).fingerprint


def test_each_side_can_have_its_own(pairs, tmp_path, count_training) -> None:
    both = {"source": {"kind": "char"}, "target": {"kind": "char"}}
    config = pairs_config(both, pairs)
    assert letters_of(tokenizer_for(config, tmp_path, "source")) == "ab"
    assert letters_of(tokenizer_for(config, tmp_path, "target")) == "xy"
    assert letters_of(tokenizer_for(config, tmp_path)) == "xy"
    assert len(count_training) == 2
    assert letters_of(tokenizer_for(pairs_config(both, pairs, reverse=True), tmp_path, "source")) == "xy"


def test_each_side_fits_the_vocabulary_of_its_own_stack(tmp_path) -> None:
    letters = "".join(map(chr, range(0x4E00, 0x4E64)))
    (tmp_path / "a.tsv").write_text(f"{letters}\t{letters}\n", encoding="utf-8")
    config = pairs_config({"source": {"kind": "char"}, "target": {"kind": "char"}}, str(tmp_path / "a.tsv"))
    assert [tokenizer_for(config, tmp_path, side).vocab_size for side in ("source", "target")] == [20, 30]


def test_a_side_may_be_loaded_and_the_other_trained(pairs, tmp_path) -> None:
    Tokenizer.train("pq", kind="char").save(tmp_path / "mine")
    config = pairs_config({"source": {"path": str(tmp_path / "mine")}, "target": {"kind": "char"}}, pairs)
    assert letters_of(tokenizer_for(config, tmp_path, "source")) == "pq"
    assert letters_of(tokenizer_for(config, tmp_path)) == "xy"


def test_pairs_that_are_none_are_refused_before_anything_is_learnt(tmp_path, count_training) -> None:
    for name, text in (("a", "x\n"), ("b", "x\ny\n")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    config = pairs_config({"kind": "char"}, {"source": str(tmp_path / "a"), "target": str(tmp_path / "b")})
    with pytest.raises(QkvError, match="do not belong together"):
        tokenizer_for(config, tmp_path)
    assert not list(tmp_path.glob("tokenizers/*"))


def test_of_texts_with_a_label_only_the_texts_are_learnt(tmp_path) -> None:
    (tmp_path / "a.tsv").write_text("text\tlabel\nab\tX\nba\tY\n", encoding="utf-8")
    model = {"family": "encoder", "head": {"kind": "classifier"}}
    data = {"train": str(tmp_path / "a.tsv")}
    config = Config.model_validate({"model": model, "tokenizer": {"kind": "char"}, "data": data})
    assert letters_of(tokenizer_for(config, tmp_path)) == "ab"


@pytest.mark.parametrize("kind", ["bpe", "char", "byte"])
def test_the_objective_span_gets_sentinels_and_no_other_does(kind: str, corpus, tmp_path) -> None:
    model = {"family": "encoder-decoder"}
    tree = {"model": model, "tokenizer": {"kind": kind}, "data": {"kind": "text", "train": str(corpus)}}
    found = {}
    for objective in ("span", "denoise"):
        config = Config.model_validate({**tree, "objective": {"kind": objective}})
        found[objective] = tokenizer_for(config, tmp_path)
    assert [len(tokenizer.sentinel_ids) for tokenizer in found.values()] == [100, 0]
    assert found["span"].id_to_token(found["span"].sentinel_ids[7]) == "<extra_id_7>"
