"""Published folders: every layout of the weights gives the same model; names, ties and tables are held to."""

from __future__ import annotations

import json
import pickle
import shutil
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import qkv
from qkv.checkpoint.load import load_model
from qkv.checkpoint.store import Pooling
from qkv.config.errors import DamagedError, NotFoundError, PermissionNeededError, QkvError, UsageError
from qkv.nn.transformer import Transformer
from qkv.tokenizer import Tokenizer

from .folders import BERT, IDS, LLAMA, change_tensors, tensors_of, write_folder

TIED = {**LLAMA, "tie_embeddings": "head"}
UP = "model.layers.1.mlp.up_proj.weight"


def change_config(folder: Path, **keys: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | keys), encoding="utf-8")


def same(folder: Path, network: Transformer, **options: Any) -> bool:
    return torch.equal(load_model(folder, **options).network.eval()(IDS), network(IDS))


def refused(path: Path, kind: type[QkvError] = DamagedError, **options: Any) -> QkvError:
    with pytest.raises(kind) as error:
        load_model(path, **options)
    return error.value


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_folder(tmp_path / "llama")
    return tmp_path / "llama"


# --- layouts ----------------------------------------------------------------------------------------------------------


def shard(folder: Path, **places: str) -> None:
    """Split the weights in two, with an index; `places`: further names in the index, and where it says they are."""
    tensors = tensors_of(folder)
    names = sorted(tensors)
    weight_map = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {**weight_map, **places}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def test_one_file_and_several_are_the_same_model(tmp_path: Path) -> None:
    network = write_folder(tmp_path / "llama")
    assert same(tmp_path / "llama", network)
    shard(tmp_path / "llama")
    assert same(tmp_path / "llama", network)


def test_a_pickle_is_read_only_when_asked_for(tmp_path: Path) -> None:
    network = write_folder(tmp_path / "llama")
    torch.save(tensors_of(tmp_path / "llama"), tmp_path / "llama" / "pytorch_model.bin")
    (tmp_path / "llama" / "model.safetensors").unlink()
    error = refused(tmp_path / "llama", PermissionNeededError)
    assert "--torch-bin" in str(error)
    assert same(tmp_path / "llama", network, torch_bin=True)


@pytest.mark.parametrize("old", [True, False])
def test_a_pickle_that_would_run_code_does_not(old: bool, folder: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (folder / "ran",))

    (folder / "model.safetensors").unlink()
    torch.save({UP: Bomb()}, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not old)
    assert "cannot be read" in refused(folder, torch_bin=True).what
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"a": 1}, protocol=2))
    refused(folder, torch_bin=True)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    "claims",
    [
        lambda tensor: torch.zeros(1).expand(tensor.shape),
        lambda tensor: tensor.to_sparse(),
        lambda tensor: tensor.to("meta"),
    ],
)
def test_a_pickled_tensor_holds_what_its_shape_claims(claims: Callable[[Tensor], Tensor], folder: Path) -> None:
    tensors = tensors_of(folder)
    torch.save({**tensors, UP: claims(tensors[UP])}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert f"`{UP}` does not hold all of its numbers" in refused(folder, torch_bin=True).what


def test_names_of_a_bare_model_and_of_a_whole_one_are_both_read(tmp_path: Path) -> None:
    """GPT-2's own file is a whole model whose names lack the prefix."""
    network = write_folder(tmp_path / "bare", {**LLAMA, "head": {"kind": "none"}})
    assert "embed_tokens.weight" in tensors_of(tmp_path / "bare")
    assert same(tmp_path / "bare", network)
    network = write_folder(tmp_path / "whole")
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors_of(tmp_path / "whole").items()}
    save_file(tensors, tmp_path / "whole" / "model.safetensors")
    assert same(tmp_path / "whole", network)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_the_precision_is_the_callers_or_the_files_own(stored: torch.dtype, tmp_path: Path) -> None:
    network = write_folder(tmp_path / "llama")
    tensors = {name: tensor.to(stored) for name, tensor in tensors_of(tmp_path / "llama").items()}
    save_file(tensors, tmp_path / "llama" / "model.safetensors")
    assert {parameter.dtype for parameter in load_model(tmp_path / "llama").network.parameters()} == {stored}
    loaded = load_model(tmp_path / "llama", dtype=torch.float32).network.eval()
    assert torch.equal(loaded(IDS), network.to(stored).float()(IDS))


def test_mixed_precisions_become_the_one_that_holds_all(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.update({UP: tensors[UP].half()}))
    assert {parameter.dtype for parameter in load_model(folder).network.parameters()} == {torch.float32}


def test_a_model_does_not_lean_on_its_file(tmp_path: Path) -> None:
    network = write_folder(tmp_path / "llama")
    loaded = load_model(tmp_path / "llama").network.eval()
    with (tmp_path / "llama" / "model.safetensors").open("r+b") as file:
        file.truncate(0)
    assert torch.equal(loaded(IDS), network(IDS))


# --- names ------------------------------------------------------------------------------------------------------------


def test_every_missing_and_unexpected_tensor_is_named(folder: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[UP], tensors["model.norm.weight"]
        tensors |= {"stranger.weight": torch.ones(2), "model.layers.2.mlp.up_proj.weight": torch.ones(2)}

    change_tensors(folder, change)
    what = refused(folder).what
    assert f"missing: {UP}, model.norm.weight" in what
    assert "unexpected: model.layers.2.mlp.up_proj.weight, stranger.weight" in what


def test_what_holds_nothing_is_passed_over(tmp_path: Path) -> None:
    network = write_folder(tmp_path / "llama")
    change_tensors(
        tmp_path / "llama",
        lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
    )
    assert same(tmp_path / "llama", network)


def test_tensorflows_names_of_a_norm_are_known(tmp_path: Path) -> None:
    network = write_folder(tmp_path / "bert", BERT)
    spelled = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = tensors_of(tmp_path / "bert")
    for ours, theirs in spelled.items():
        tensors = {name.replace(ours, theirs): tensor for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "bert" / "model.safetensors")
    assert any(name.endswith("gamma") for name in tensors)
    assert same(tmp_path / "bert", network)


def test_a_head_that_is_absent_is_the_embedding_only_when_tied(tmp_path: Path) -> None:
    network = write_folder(tmp_path / "tied", TIED)
    assert "lm_head.weight" not in tensors_of(tmp_path / "tied")
    assert same(tmp_path / "tied", network)
    write_folder(tmp_path / "untied")
    change_tensors(tmp_path / "untied", lambda tensors: tensors.pop("lm_head.weight"))
    assert "missing: lm_head.weight" in refused(tmp_path / "untied").what


def test_a_tied_head_that_is_present_must_be_the_embedding(tmp_path: Path) -> None:
    network = write_folder(tmp_path / "llama", TIED)
    embedding = tensors_of(tmp_path / "llama")["model.embed_tokens.weight"]
    change_tensors(tmp_path / "llama", lambda tensors: tensors.update({"lm_head.weight": embedding.clone()}))
    assert same(tmp_path / "llama", network)
    change_tensors(tmp_path / "llama", lambda tensors: tensors.pop("model.embed_tokens.weight"))
    assert same(tmp_path / "llama", network)
    changed = embedding.clone()
    changed[3, 4] += 0.5
    tensors = {"lm_head.weight": changed, "model.embed_tokens.weight": embedding}
    change_tensors(tmp_path / "llama", lambda all_of_them: all_of_them.update(tensors))
    assert "lm_head.weight differs from model.embed_tokens.weight" in refused(tmp_path / "llama").what


def test_shapes_and_types_are_held_to_before_anything_is_read(folder: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[UP] = tensors[UP][:40].clone()
        tensors["model.norm.weight"] = tensors["model.norm.weight"].int()

    change_tensors(folder, change)
    what = refused(folder).what
    assert f"{UP} has shape [40, 32], expected [64, 32]" in what
    assert "model.norm.weight holds torch.int32, expected floating point" in what


def test_a_published_table_is_compared_with_the_one_that_is_computed(tmp_path: Path) -> None:
    model = {
        "family": "encoder-decoder",
        "vocab_size": 40,
        "max_seq_len": 16,
        "d_model": 16,
        "num_layers": 1,
        "tie_embeddings": "all",
        "norm": {"kind": "layernorm", "placement": "post"},
        "position": {"kind": "sinusoidal", "layout": "concatenated"},
        "attention": {"num_heads": 2, "bias": True},
        "feed_forward": {"kind": "silu", "d_ff": 24, "bias": True},
        "embedding": {"scale": "sqrt-d-model"},
        "head": {"kind": "language-model", "bias": True},
    }
    write_folder(tmp_path / "marian", model, generation={"start_ids": [0]})
    table = "model.encoder.embed_positions.weight"
    loaded = load_model(tmp_path / "marian").network.eval()
    change_tensors(tmp_path / "marian", lambda tensors: tensors.update({table: tensors[table].half()}))
    again = load_model(tmp_path / "marian").network.eval()
    source = IDS % 40
    assert torch.equal(again(source, source=source), loaded(source, source=source))
    change_tensors(tmp_path / "marian", lambda tensors: tensors.pop(table))
    load_model(tmp_path / "marian")
    change_tensors(tmp_path / "marian", lambda tensors: tensors.update({table: torch.zeros(16, 16)}))
    assert f"{table} should be a table that is computed" in refused(tmp_path / "marian").what
    change_config(tmp_path / "marian", max_position_embeddings=2**31)
    assert f"{table} has shape [16, 16], expected [2147483648, 16]" in refused(tmp_path / "marian").what


# --- what else a folder says ------------------------------------------------------------------------------------------


def test_the_tokenizer_comes_along_and_may_be_absent(tmp_path: Path) -> None:
    tokenizer = Tokenizer.train("some words for a tokenizer, and some more words", kind="char")
    write_folder(tmp_path / "with", tokenizer=tokenizer)
    loaded = load_model(tmp_path / "with").tokenizer
    assert loaded is not None
    assert loaded.encode("some words") == tokenizer.encode("some words")
    assert qkv.load(write_and_name(tmp_path / "without")).tokenizer is None


def write_and_name(folder: Path) -> Path:
    write_folder(folder)
    return folder


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 2}, None, (2,)),
        ({"eos_token_id": 2}, {"eos_token_id": [3, 4]}, (3, 4)),
        ({"eos_token_id": 2}, {"eos_token_id": None}, (2,)),
        ({}, {}, None),
    ],
)
def test_what_ends_a_text_is_read_from_either_file(
    config: dict[str, Any], generation: dict[str, Any] | None, expected: Any, folder: Path
) -> None:
    change_config(folder, **config)
    (folder / "generation_config.json").unlink()
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    assert load_model(folder).config.generation.eos_ids == expected


def test_what_is_never_written_is_read(folder: Path) -> None:
    told = {"suppress_tokens": [7, 8], "begin_suppress_tokens": [9], "bad_words_ids": [[5], [1, 2]]}
    (folder / "generation_config.json").write_text(json.dumps(told), encoding="utf-8")
    generation = load_model(folder).config.generation
    assert (generation.suppress_ids, generation.begin_suppress_ids) == ((7, 8, 5), (9,))


@pytest.mark.parametrize("value", ["two", [2, "x"], -1, 1.5, True])
def test_an_id_that_is_none_is_refused(value: Any, folder: Path) -> None:
    change_config(folder, eos_token_id=value)
    assert "eos_token_id" in refused(folder, QkvError).what


def sentence_transformer(folder: Path, pooling: dict[str, Any], *kinds: str) -> None:
    """Modules beside a model in the folder itself."""
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate([("Transformer", ""), ("Pooling", "1_Pooling"), *((k, k) for k in kinds)])
    ]
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling), encoding="utf-8")
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")


MEAN = {"word_embedding_dimension": 32, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}


@pytest.mark.parametrize(
    ("pooling", "kinds", "expected"),
    [
        (MEAN, ("Normalize",), Pooling("mean", normalise=True)),
        ({"pooling_mode_cls_token": True}, (), Pooling("cls", normalise=False)),
        ({"pooling_mode": "max"}, (), Pooling("max", normalise=False)),
    ],
)
def test_a_sentence_transformer_says_how_it_pools(
    pooling: dict[str, Any], kinds: tuple[str, ...], expected: Pooling, folder: Path, tmp_path: Path
) -> None:
    sentence_transformer(folder, pooling, *kinds)
    model = qkv.load(folder, device="cpu")
    assert model.pooling == expected
    for name, save in (("ours", model.save), ("theirs", model.save_hf)):
        save(tmp_path / name)
        assert qkv.load(tmp_path / name, device="cpu").pooling == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"tokenizer_config": {"model_max_length": 20}}, 20),
        ({"sentence_bert_config": {"max_seq_length": 10}, "tokenizer_config": {"model_max_length": 20}}, 10),
        ({"sentence_roberta_config": {"max_seq_length": None}, "tokenizer_config": {"model_max_length": 1e30}}, 10**30),
    ],
)
def test_a_sentence_transformer_says_where_a_text_is_cut(
    files: dict[str, Any], expected: int | None, folder: Path, tmp_path: Path
) -> None:
    sentence_transformer(folder, MEAN)
    for name, told in files.items():
        (folder / f"{name}.json").write_text(json.dumps(told))
    model = qkv.load(folder, device="cpu")
    assert model.pooling is not None
    assert model.pooling.max_seq_len == (None if expected is None else pytest.approx(expected))
    for name, save in (("ours", model.save), ("theirs", model.save_hf)):
        save(tmp_path / name)
        assert qkv.load(tmp_path / name, device="cpu").pooling == model.pooling


@pytest.mark.parametrize("limit", [0, -5, "10"])
def test_an_absurd_length_of_texts_is_refused(limit: Any, folder: Path) -> None:
    sentence_transformer(folder, MEAN)
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": limit}))
    assert "max_seq_length" in refused(folder, QkvError).what


@pytest.mark.parametrize(
    ("pooling", "kinds", "named"),
    [
        (MEAN, ("Dense",), "Dense"),
        ({"pooling_mode_weightedmean_tokens": True}, (), "pooling_mode_weightedmean_tokens"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, (), "pooling_mode_mean_tokens"),
        ({}, (), "pooling_mode"),
    ],
)
def test_a_sentence_transformer_of_other_parts_is_refused_by_name(
    pooling: dict[str, Any], kinds: tuple[str, ...], named: str, folder: Path
) -> None:
    sentence_transformer(folder, pooling, *kinds)
    assert named in refused(folder, QkvError).what


# --- tokenizers that cannot be built ----------------------------------------------------------------------------------


def test_a_model_whose_tokenizer_is_not_supported_is_loaded_without_it(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "sentencepiece.bpe.model").write_bytes(b"")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "CamembertTokenizer"}')
    model = qkv.load(folder, device="cpu")
    assert "Camembert tokenizer is not supported" in caplog.text
    assert model.tokenizer is None
    assert model.generate([1, 2], max_new_tokens=2, temperature=0).token_ids
    with pytest.raises(UsageError, match="no tokenizer"):
        model.generate("text")


def test_a_damaged_tokenizer_is_called_so(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    assert "damaged" in refused(folder).what


# --- what is no model, or none that is supported ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"model_type": "mamba"}, "models of type `mamba` are not supported"),
        ({"model_type": "lama"}, "models of type `lama` are not supported"),
        ({"model_type": None}, "`model_type` is missing"),
        ({"architectures": ["LlamaForTokenClassification"]}, "models of class `LlamaForTokenClassification`"),
        ({"architectures": None}, "`architectures` is missing"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised by `awq`"),
        ({"hidden_act": "swish-7"}, "`hidden_act: swish-7` is not supported"),
        ({"hidden_size": "32"}, "`hidden_size` should be a whole number"),
    ],
)
def test_what_is_not_supported_is_named_with_what_is(keys: dict[str, Any], named: str, folder: Path) -> None:
    change_config(folder, **keys)
    error = refused(folder, QkvError)
    assert named in error.what
    assert not isinstance(error, DamagedError)
    assert str(folder / "config.json") in str(error.where)


def test_a_zip_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "model.zip", "w") as file:
        file.writestr("config.json", "{}")
    assert "unpacking it" in str(refused(tmp_path / "model.zip", UsageError))


def test_a_file_or_folder_that_is_no_model_is_refused(folder: Path, tmp_path: Path) -> None:
    assert "this file by itself" in refused(folder / "model.safetensors", UsageError).what
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", NotFoundError)
    refused(tmp_path / "nowhere", NotFoundError)
    assert "name too long" in refused(tmp_path / ("x" * 5000), QkvError).what.lower()
    (folder / "model.safetensors").unlink()
    assert "the weights are missing" in refused(folder, NotFoundError).what


def test_keeping_blocks_is_for_files_that_have_some(folder: Path, tmp_path: Path) -> None:
    assert "no quantised weights" in refused(folder, UsageError, quantize="keep").what
    qkv.load(folder, device="cpu").save(tmp_path / "ours")
    assert "no quantised weights" in refused(tmp_path / "ours", UsageError, quantize="keep").what
    assert "int4" in refused(folder, UsageError, quantize="int4").what


# --- folders that mean harm -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..\\x", "..", ""])
def test_shards_stay_in_their_folder(place: str, folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder.parent / "secret.safetensors")
    shard(folder, **{"more.weight": place})
    assert "outside its folder" in refused(folder).what


def test_a_tensor_in_two_shards_is_damage(folder: Path) -> None:
    shard(folder)
    first, second = sorted(folder.glob("model-*.safetensors"))
    shutil.copy(first, second)
    assert "stands in two files" in refused(folder).what


@pytest.mark.parametrize("path", ["../elsewhere", "/tmp", "a/../../b"])
def test_modules_stay_in_their_folder(path: str, folder: Path) -> None:
    modules = [{"path": path, "type": "sentence_transformers.models.Transformer"}]
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    assert "outside its own" in refused(folder).what


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "3", "{", "{" * 100_000, '{"a": 1, "a": 2}', "\x00", '{"a": ' + "9" * 5000 + "}", "\ud800"],
)
def test_json_that_is_no_object_is_called_damaged(text: str, file: str, folder: Path) -> None:
    if file.startswith("model"):
        (folder / "model.safetensors").unlink()
    (folder / file).write_text(text, encoding="utf-8", errors="surrogatepass")
    assert file in refused(folder).what


HUGE = 10**18


@pytest.mark.parametrize(
    "keys",
    [
        {"num_attention_heads": 0},
        {"num_attention_heads": -4},
        {"num_key_value_heads": 0},
        {"num_key_value_heads": 3},
        {"num_hidden_layers": 0},
        {"num_hidden_layers": HUGE},
        {"num_hidden_layers": 4096},
        {"hidden_size": 0},
        {"hidden_size": HUGE},
        {"vocab_size": HUGE},
        {"vocab_size": -1},
        {"intermediate_size": HUGE},
        {"head_dim": 0},
        {"head_dim": HUGE},
        {"head_dim": 7},
        {"max_position_embeddings": 0},
        {"max_position_embeddings": HUGE},
        {"rms_norm_eps": -1.0},
        {"rms_norm_eps": float("nan")},
        {"rope_parameters": {"rope_theta": 0.0}},
        {"rope_parameters": {"rope_theta": float("inf")}},
        {"rope_parameters": {"rope_type": "import os"}},
        {"rope_parameters": {"rope_type": "linear", "factor": 1e308}},
        {"rope_parameters": [1]},
        {"tie_word_embeddings": "yes"},
        {"attention_dropout": 7.0},
        {"model_type": "os:system"},
        {"model_type": ["llama"]},
        {"architectures": "LlamaForCausalLM"},
        {"architectures": [["LlamaForCausalLM"]]},
        {"id2label": [1]},
    ],
)
def test_an_absurd_configuration_is_a_clear_error(keys: dict[str, Any], folder: Path) -> None:
    change_config(folder, **keys)
    if "id2label" in keys:
        change_config(folder, architectures=["LlamaForSequenceClassification"])
    began = time.process_time()
    error = refused(folder, QkvError)
    assert time.process_time() - began < 2
    assert error.where is not None
    assert len(str(error)) < 2000


# --- names that lead nowhere ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "meant"), [("smolm2", "`smollm2`"), ("my-run2", "`my-run`"), ("modell.gguf", "`model.gguf`")]
)
def test_the_nearest_model_is_named(name: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-run").mkdir()
    (tmp_path / "model.gguf").touch()
    assert refused(Path(name), NotFoundError).hint == meant


def test_a_name_that_is_like_none_has_no_guess(tmp_path: Path) -> None:
    for name in ("other.gguf", "notes.txt"):
        (tmp_path / name).touch()
    for name in ("abc.gguf", "note.txt", "nowhere"):
        assert refused(tmp_path / name, NotFoundError).hint == "`qkv runs` for the list"
