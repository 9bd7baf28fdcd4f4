"""A Marian folder as OPUS-MT publishes them: texts go in and come out as in transformers."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import transformers

import qkv
from qkv.model import Model

from .family_cases import Case, make

ENGLISH = ["the cat sat on the mat", "a dog and a cat", "that is the hat of the dog"] * 20
CHINESE = ["猫坐在垫子上", "一只狗和一只猫", "那是狗的帽子"] * 20
MARIAN = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 40,
    "eos_token_id": 0,
    "forced_eos_token_id": None,
}


def pieces(lines: list[str], size: int) -> tuple[bytes, list[str]]:
    """A SentencePiece model of these lines, and its pieces but for <unk>, <s>, </s>."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=written, vocab_size=size, hard_vocab_limit=False, minloglevel=2
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    return written.getvalue(), [processor.id_to_piece(number) for number in range(3, processor.get_piece_size())]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("opus-mt")
    (source, english), (target, chinese) = pieces(ENGLISH, 40), pieces(CHINESE, 30)
    tokens = ["</s>", "<unk>", *dict.fromkeys([*english, *chinese]), "<pad>"]
    pad = len(tokens) - 1
    ids = {"pad_token_id": pad, "decoder_start_token_id": pad, "bad_words_ids": [[pad]]}
    made: Any = make(Case("MarianMTModel", {**MARIAN, "vocab_size": len(tokens), **ids}))
    made.save_pretrained(path)
    (path / "source.spm").write_bytes(source)
    (path / "target.spm").write_bytes(target)
    (path / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    return path


def translated(model: Model) -> list[list[int]]:
    found = model.translate(["the cat and ☃", "猫 is a dog"], beam_size=1, max_new_tokens=12)
    return [one.token_ids for one in found]


@pytest.mark.filterwarnings("ignore:Recommended")
def test_a_text_is_translated_as_in_transformers(folder: Path) -> None:
    ours = qkv.load(folder, device="cpu")
    assert ours.tokenizer is not None
    assert list(ours.config.generation.start_ids or ()) == [ours.tokenizer.pad_id]
    tokenizer = transformers.MarianTokenizer.from_pretrained(str(folder))
    theirs: Any = transformers.MarianMTModel.from_pretrained(folder).eval()
    for text in ("the cat and ☃", "猫 is a dog"):
        start, *ids = theirs.generate(
            **tokenizer(text, return_tensors="pt"), num_beams=1, do_sample=False, max_new_tokens=12
        )[0].tolist()
        found = ours.translate(text, beam_size=1, max_new_tokens=12)
        assert start == ours.tokenizer.pad_id
        assert [one for one in found.token_ids if one] == [one for one in ids if one]
        assert found.text == tokenizer.decode(ids, skip_special_tokens=True)


def test_both_tokenizers_are_kept(folder: Path, tmp_path: Path) -> None:
    model = qkv.load(folder, device="cpu")
    model.save(tmp_path / "ours")
    again = qkv.load(tmp_path / "ours", device="cpu")
    assert translated(again) == translated(model)
    assert again.source_tokenizer is not again.tokenizer
    assert again.source_tokenizer is not None
    assert again.source_tokenizer.encode("the 猫") == tokens_of(model, "the 猫")


def tokens_of(model: Model, text: str) -> list[int]:
    assert model.source_tokenizer is not None
    return model.source_tokenizer.encode(text)
