"""Data as the tokenizers of this package make it."""

from __future__ import annotations

from pathlib import Path

import pytest

from qkv.config.data import TextDataConfig
from qkv.config.objectives import CausalObjectiveConfig, MaskedObjectiveConfig
from qkv.config.run import Config
from qkv.data import BatchLoader, describe_batch, documents, prepare, read_pieces, tokenizers
from qkv.data.tokenizers import tokenizer_for
from qkv.tokenizer import Tokenizer

KINDS = ["bpe", "unigram", "wordpiece", "word", "char", "byte"]
TEXT = (
    "It's 2024, and the dog's 12345.67 bones -- \"all\" of them! -- are (still) buried.\n\n\tSo  it  goes…  \n"
    "In the middle of the night: 一只狗在花园里跑，它很高兴。我们看见了它！ x=3; y = x+1\r\n"
) * 20


@pytest.fixture(scope="module", params=KINDS)
def trained(request: pytest.FixtureRequest) -> Tokenizer:
    size = None if request.param in ("char", "byte") else 400
    return Tokenizer.train(TEXT, kind=request.param, vocab_size=size)


def config(folder: Path, text: str, **data: object) -> Config:
    (folder / "a.txt").write_bytes(text.encode())
    return Config.model_validate({"model": {}, "data": {"train": str(folder / "a.txt"), "validation": 0, **data}})


def test_cutting_a_document_changes_no_id(trained: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_bytes(TEXT.encode())
    (whole,) = read_pieces([tmp_path / "a.txt"], TextDataConfig())
    monkeypatch.setattr(documents, "PIECE_CHARACTERS", 60)
    pieces = [piece.text for piece in read_pieces([tmp_path / "a.txt"], TextDataConfig())]
    assert len(pieces) > 50
    assert [id for ids in trained.encode_batch(pieces) for id in ids] == trained.encode(whole.text)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_learns_from_the_pieces_that_training_tokenises(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a configuration's own tokenizer and of one trained on the same file, once, in one go."""
    monkeypatch.setattr(documents, "PIECE_CHARACTERS", 60)
    data = config(tmp_path, "\ufeff" + TEXT).data
    pieces = [piece.text for piece in read_pieces(data.train, data)]
    assert len(pieces) > 50
    size = None if kind in ("char", "byte") else 400
    expected = Tokenizer.train(pieces, kind=kind, vocab_size=size).fingerprint
    wanted = {"model": {}, "data": data.model_dump(), "tokenizer": {"kind": kind, "vocab_size": size}}
    assert tokenizer_for(Config.model_validate(wanted), tmp_path).fingerprint == expected
    assert Tokenizer.train(tmp_path / "a.txt", kind=kind, vocab_size=size).fingerprint == expected


@pytest.mark.parametrize("kind", ["unigram", "wordpiece"])
def test_a_kind_that_learns_in_two_passes_reads_the_files_twice(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds no corpus in memory."""
    readings: list[object] = []
    monkeypatch.setattr(tokenizers, "read_pieces", lambda *of: readings.append(of) or read_pieces(*of))
    wanted = {"model": {}, "data": config(tmp_path, TEXT).data.model_dump(), "tokenizer": {"kind": kind}}
    tokenizer_for(Config.model_validate(wanted), tmp_path)
    assert len(readings) == 3  # the first for its beginning only: is there any text?


def test_a_document_is_bos_ids_eos_and_special_text_is_text(trained: Tokenizer, tmp_path: Path) -> None:
    prepared = prepare(config(tmp_path, "a dog <eos><mask>\nbones", split="lines"), trained, tmp_path / "cache")
    assert prepared.train.num_documents == 2
    for index in range(2):
        begin, *ids, end = prepared.train.document(index).tolist()
        assert (begin, end) == (trained.bos_id, trained.eos_id)
        assert not trained.special_ids - {trained.unk_id} & set(ids)


def test_training_data_pass_from_text_to_batches(trained: Tokenizer, tmp_path: Path) -> None:
    data = prepare(config(tmp_path, TEXT), trained, tmp_path / "cache").train
    options = {"max_seq_len": 32, "batch_tokens": 64}
    (batch,) = next(BatchLoader(data, CausalObjectiveConfig(), trained, **options))
    assert batch.inputs.shape == (2, 32)
    assert batch.inputs[:, 1:].equal(batch.labels[:, :-1])
    (batch,) = next(BatchLoader(data, MaskedObjectiveConfig(), trained, **options))
    assert 0 < batch.target_count < 20
    shown = [slot for row in describe_batch(batch, trained, looks_ahead=True) for slot in row.slots]
    assert "<mask>" in {slot.token for slot in shown}
    assert sum(slot.label is not None for slot in shown) == batch.target_count
