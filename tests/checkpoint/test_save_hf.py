"""Hugging Face folders of our models: what is in them, whole or not at all; transformers' view is in the families'
tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import qkv
from qkv.checkpoint import save_hf as module
from qkv.checkpoint.load import load_model
from qkv.checkpoint.save_hf import save_hf
from qkv.config.errors import ConflictError, QkvError, UsageError
from qkv.tokenizer import Tokenizer

from .folders import BART, BERT, IDS, LLAMA, config_of, network_of, tensors_of, write_folder


def told(folder: Path, file: str = "config.json") -> dict[str, Any]:
    keys: dict[str, Any] = json.loads((folder / file).read_text(encoding="utf-8"))
    return keys


def test_a_folder_has_what_transformers_looks_for(tmp_path: Path) -> None:
    tokenizer = Tokenizer.train("some words", kind="char")
    write_folder(tmp_path / "llama", tokenizer=tokenizer)
    files = {path.name for path in (tmp_path / "llama").iterdir()}
    expected = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert files == expected
    assert all(path.stat().st_mode & 0o044 for path in (tmp_path / "llama").iterdir()), "others may read it"
    keys = told(tmp_path / "llama")
    assert (keys["model_type"], keys["architectures"]) == ("llama", ["LlamaForCausalLM"])
    assert (keys["torch_dtype"], keys["eos_token_id"]) == ("float32", tokenizer.eos_id)
    with safe_open(tmp_path / "llama" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize(("model", "ends"), [(LLAMA, False), (BERT, True)])
def test_what_is_written_on_from_has_no_end(model: dict[str, Any], ends: bool, tmp_path: Path) -> None:
    """Other programs give a decoder the whole of what its tokenizer makes of a prompt."""
    tokenizer = Tokenizer.train("some words", kind="char")
    write_folder(tmp_path / "model", model, tokenizer=tokenizer)
    read = Tokenizer.load(tmp_path / "model")
    assert read.encode("some") == tokenizer.encode("some")
    assert read.around == (tokenizer.around[0], tokenizer.around[1] if ends else [])
    assert read.eos_id == tokenizer.eos_id


@pytest.mark.parametrize(
    ("model", "architecture", "bare"),
    [(LLAMA, "LlamaForCausalLM", False), ({**LLAMA, "head": {"kind": "none"}}, "LlamaModel", True)],
)
def test_names_have_the_prefix_of_a_whole_model_only(
    model: dict[str, Any], architecture: str, bare: bool, tmp_path: Path
) -> None:
    write_folder(tmp_path / "llama", model)
    assert told(tmp_path / "llama")["architectures"] == [architecture]
    assert ("embed_tokens.weight" in tensors_of(tmp_path / "llama")) == bare


def test_weights_are_split_into_files_of_a_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARD_BYTES", 20_000)
    network = write_folder(tmp_path / "llama")
    shards = sorted((tmp_path / "llama").glob("*.safetensors"))
    count = len(shards)
    assert count > 2
    assert [shard.name for shard in shards] == [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    index = told(tmp_path / "llama", "model.safetensors.index.json")
    assert index["metadata"]["total_size"] == sum(parameter.nbytes for parameter in network.parameters())
    assert set(index["weight_map"].values()) == {shard.name for shard in shards}
    for shard in shards:
        with safe_open(shard, "pt") as file:
            size = sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
            assert size <= 20_000 or len(list(file.keys())) == 1
    assert torch.equal(load_model(tmp_path / "llama").network.eval()(IDS), network(IDS))


GENERATIONS: list[dict[str, Any]] = [
    {},
    {"start_ids": [5]},
    {"start_ids": [5, 7], "eos_ids": [2]},
    {"start_ids": [5, 7, 9, 11], "eos_ids": [2, 3], "suppress_ids": [8], "begin_suppress_ids": [1, 4]},
]


@pytest.mark.parametrize("generation", GENERATIONS)
def test_how_texts_begin_and_end_comes_back(generation: dict[str, Any], tmp_path: Path) -> None:
    write_folder(tmp_path / "bart", BART, generation=generation)
    loaded = load_model(tmp_path / "bart").config.generation
    assert {key: getattr(loaded, key) for key in generation} == {key: tuple(ids) for key, ids in generation.items()}


def test_the_names_of_classes_come_back(tmp_path: Path) -> None:
    labels = {"kind": "classify", "labels": ["bad", "一般", "good"]}
    write_folder(tmp_path / "bert", BERT, objective=labels)
    assert told(tmp_path / "bert")["id2label"] == {"0": "bad", "1": "一般", "2": "good"}
    assert load_model(tmp_path / "bert").config.objective.model_dump()["labels"] == ("bad", "一般", "good")


def test_a_model_that_no_architecture_is_is_refused_with_the_difference(tmp_path: Path) -> None:
    config = config_of({**LLAMA, "position": {"kind": "rope", "layout": "interleaved"}})
    with pytest.raises(UsageError, match=r"nearest is \w+: `model.position.layout` is 'interleaved'") as error:
        save_hf(tmp_path / "theirs", network_of(config), config)
    assert "--to qkv" in str(error.value)
    assert not list(tmp_path.iterdir())


def test_training_has_no_say_in_what_a_model_is(tmp_path: Path) -> None:
    model = {**LLAMA, "dropout": 0.1, "init": {"kind": "xavier"}}
    write_folder(tmp_path / "llama", model)
    assert load_model(tmp_path / "llama").config.model.attention == config_of(LLAMA).model.attention


def test_what_predicts_further_tokens_in_training_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of({**LLAMA, "mtp": {"depth": 1}})
    network = network_of(config)
    save_hf(tmp_path / "model", network, config)
    assert "multi-token prediction" in caplog.text
    loaded = load_model(tmp_path / "model").network
    assert loaded.mtp is None
    assert torch.equal(loaded(IDS), network(IDS))


def test_two_tokenizers_have_no_place_in_one_folder(tmp_path: Path) -> None:
    config = config_of(BART)
    tokenizers = [Tokenizer.train(text, kind="char") for text in ("abc", "def")]
    with pytest.raises(UsageError, match="this model has two"):
        save_hf(tmp_path / "bart", network_of(config), config, tokenizers[0], source_tokenizer=tokenizers[1])


def test_nothing_is_overwritten_and_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "llama")
    with pytest.raises(ConflictError):
        qkv.load(tmp_path / "llama", device="cpu").save_hf(tmp_path / "llama")

    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "save_file", full)
    with pytest.raises(QkvError, match="could not be written: No space left on device"):
        write_folder(tmp_path / "another")
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]


def test_a_model_read_from_one_format_can_be_written_in_the_other(tmp_path: Path) -> None:
    network = write_folder(tmp_path / "theirs")
    qkv.load(tmp_path / "theirs", device="cpu").save(tmp_path / "ours")
    qkv.load(tmp_path / "ours", device="cpu").save_hf(tmp_path / "again")
    assert torch.equal(load_model(tmp_path / "again").network.eval()(IDS), network(IDS))
    assert told(tmp_path / "again") == told(tmp_path / "theirs")
