"""The configuration tree: what a file means, and what a mistake says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

import jsonschema
import pytest
import yaml

from qkv.config import Config, ConfigError, ModelConfig, NormConfig, NotFoundError, PermissionNeededError
from qkv.config.load import load_config, preset_names
from qkv.config.yaml_tree import dump_yaml


@pytest.fixture
def write(tmp_path: Path):
    def _write(text: str, name: str = "config.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return _write


SMALL = "model: {vocab_size: 100, d_model: 64, num_layers: 2, attention: {num_heads: 4}}\n"


# --- meaning ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_resolves_to_a_tree_that_reads_back_equal(name: str, write) -> None:
    config = Config.load(name)
    for stack in config.model.stacks.values():
        assert len(stack.layers) == stack.num_layers
    assert Config.load(write(config.to_yaml())) == config


def test_numbers_and_words_follow_yaml_1_2(write) -> None:
    path = write(SMALL + "train: {optimizer: {lr: 1e-3}}\ndata: {train: [no, on, 007, '1e3']}\n")
    with pytest.raises(ConfigError, match=r"data\.train"):  # 007 is the number 7 in the core schema, not a file name
        Config.load(path)
    config = Config.load(write(SMALL + "train: {optimizer: {lr: 1e-3}, seed: 0x10}\ndata: {train: [no, on, '007']}\n"))
    assert config.train.optimizer.lr == 0.001
    assert config.train.seed == 16
    assert config.data.train == ("no", "on", "007")


@pytest.mark.parametrize("value", ["no", "1e-3", "007", "true", "null", "~", "0x1F", "a: b", "", "中文", "1.5", "-"])
def test_dumped_text_reads_back_as_the_same_text(value: str, write) -> None:
    path = write(SMALL + dump_yaml({"data": {"train": [value]}}))
    assert Config.load(path).data.train == (value,)


def test_mappings_merge_deeply_and_lists_replace(write) -> None:
    write(SMALL + "data: {train: [a, b]}\n", "base.yaml")
    path = write("extends: base.yaml\nmodel: {attention: {bias: true}}\ndata: {train: [c]}\n")
    config = Config.load(path)
    layer = config.model.layers[0]
    assert (layer.attention.num_heads, layer.attention.bias) == (4, True)
    assert config.data.train == ("c",)


def test_a_changed_kind_replaces_the_whole_object(write) -> None:
    write(SMALL + "train: {optimizer: {kind: adamw, lr: 0.5, eps: 1e-3}}\n", "base.yaml")
    replaced = Config.load(write("extends: base.yaml\ntrain: {optimizer: {kind: muon}}\n"))
    assert replaced.train.optimizer.lr == 0.02
    kept = Config.load(write("extends: base.yaml\ntrain: {optimizer: {kind: adamw, lr: 0.1}}\n"))
    assert kept.train.optimizer.model_dump()["eps"] == 1e-3
    overridden = Config.load(write("extends: base.yaml\n"), "train.optimizer.kind=muon", "train.optimizer.momentum=0.9")
    assert overridden.train.optimizer.model_dump()["momentum"] == 0.9


def test_overrides_come_last_and_in_order(write) -> None:
    config = Config.load(write(SMALL), "model.num_layers=3", "model.num_layers=5", "train.clip=null")
    assert len(config.model.layers) == 5
    assert config.train.clip is None


def test_extends_chains_files_and_presets(write) -> None:
    write("extends: llama-tiny\nmodel: {num_layers: 3}\n", "middle.yaml")
    config = Config.load(write("extends: middle.yaml\nmodel: {d_model: 192}\n"))
    assert (config.model.num_layers, config.model.d_model, config.model.vocab_size) == (3, 192, 4096)


def test_encoder_and_decoder_override_shared_keys() -> None:
    model = ModelConfig(
        family="encoder-decoder",
        vocab_size=10,
        d_model=32,
        num_layers=2,
        attention={"num_heads": 4},
        encoder={"num_layers": 3, "attention": {"num_kv_heads": 2}},
        decoder={"d_model": 64},
    )
    encoder, decoder = model.stacks["encoder"], model.stacks["decoder"]
    assert (encoder.num_layers, encoder.d_model, encoder.layers[2].attention.num_kv_heads) == (3, 32, 2)
    assert (decoder.num_layers, decoder.d_model, decoder.layers[1].attention.num_kv_heads) == (2, 64, 4)
    assert decoder.layers[0].cross_attention.head_dim == 16
    assert encoder.layers[0].cross_attention is None


def test_a_layer_pattern_is_tiled_and_cut() -> None:
    model = ModelConfig(
        vocab_size=10,
        d_model=32,
        num_layers=7,
        attention={"num_heads": 4},
        layers=[{"repeat": 2, "attention": {"window": 5}}, {"position": {"kind": "none"}}],
    )
    assert [layer.attention.window for layer in model.layers] == [5, 5, None, 5, 5, None, 5]
    assert [layer.position.kind for layer in model.layers[:3]] == ["rope", "rope", "none"]


def test_cross_attention_is_shaped_like_self_attention_without_its_window() -> None:
    model = ModelConfig(
        family="encoder-decoder",
        vocab_size=10,
        d_model=32,
        attention={"num_heads": 4, "num_kv_heads": 2, "window": 3},
        cross_attention={"num_kv_heads": 1},
    )
    layer = model.stacks["decoder"].layers[0]
    assert (layer.cross_attention.num_heads, layer.cross_attention.num_kv_heads) == (4, 1)
    assert layer.cross_attention.window is None
    assert layer.attention.window == 3


def test_derived_sizes_are_filled_in() -> None:
    layer = ModelConfig(vocab_size=10, d_model=96, attention={"num_heads": 4}).layers[0]
    assert (layer.attention.head_dim, layer.attention.num_kv_heads) == (24, 4)
    assert layer.feed_forward.d_ff == 256
    plain = ModelConfig(vocab_size=10, d_model=96, attention={"num_heads": 4}, feed_forward={"kind": "relu"})
    assert plain.layers[0].feed_forward.d_ff == 384


def test_a_file_with_only_a_model_section_loads(write) -> None:
    config = Config.load(write(SMALL))
    assert config.objective is not None
    assert config.objective.kind == "causal"
    assert Config.load("encoder-tiny").objective.kind == "masked"


def test_json_schema_accepts_what_loads_and_names_every_kind(write) -> None:
    schema = Config.json_schema()
    text = json.dumps(schema)
    for kind in ("rmsnorm", "interleaved", "swiglu", "muon", "inverse-sqrt", "jsonl", "extends"):
        assert f'"{kind}"' in text
    for text in (
        "extends: llama-tiny\n",
        SMALL + "data: {train: a.txt}\n",
        TRANSLATE,
        "model: {}\ndata: {kind: parallel, train: {source: a, target: b}, validation: [c.tsv]}\n",
        "model: {vocab_size: 9, layers: [{repeat: 2, attention: {window: 64}}, {}]}\n",
        "model: {vocab_size: 9, norm: {kind: 'package.parts:OwnNormConfig', strength: 2}}\n",
        Config.load("encoder-decoder-tiny").to_yaml(),
    ):
        jsonschema.validate(yaml.safe_load(text), schema)
    for text in ("model: {d_modle: 3}\n", "model: {norm: {kind: rmsnrom}}\n", "train: {steps: -1}\n"):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(yaml.safe_load(text), schema)


# --- mistakes ---------------------------------------------------------------------------------------------------------


def error_of(path: Path | str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        Config.load(path, *overrides)
    return str(caught.value)


def test_an_unknown_key_names_file_line_and_nearest_key(write) -> None:
    path = write("model:\n  vocab_size: 100\n  attention:\n    num_headz: 4\n")
    message = error_of(path)
    assert f"{path}:4" in message
    assert "`num_headz`" in message
    assert "try `num_heads`" in message


def test_a_mistake_in_a_parent_names_the_parent(write) -> None:
    parent = write("model:\n  d_modle: 64\n", "parent.yaml")
    assert f"{parent}:2" in error_of(write("extends: parent.yaml\nmodel: {num_layers: 2}\n"))


def test_an_unknown_kind_names_the_nearest(write) -> None:
    message = error_of(write(SMALL + "train:\n  optimizer: {kind: adam_w}\n"))
    assert "unknown kind `adam_w`" in message
    assert "try `adamw`" in message


def test_a_wrong_type_shows_the_value_and_its_line(write) -> None:
    path = write("model:\n  vocab_size: 100\n  d_model: wide\n")
    message = error_of(path)
    assert f"{path}:3" in message
    assert "'wide'" in message


@pytest.mark.parametrize(
    ("override", "first", "second"),
    [
        ("model.attention.num_heads=5", "d_model", "attention.num_heads"),
        ("model.attention.num_kv_heads=3", "attention.num_heads", "attention.num_kv_heads"),
        ("model.attention.head_dim=15", "position.fraction", "attention.head_dim"),
        ("model.tie_embeddings=all", "family", "tie_embeddings"),
        ("model.head.kind=masked-language-model", "family", "head.kind"),
        ("model.encoder.num_layers=2", "family", "encoder"),
        ("model.cross_attention.num_heads=2", "family", "cross_attention"),
        ("objective.kind=masked", "objective.kind", "model.family"),
        ("tokenizer.vocab_size=200", "tokenizer.vocab_size", "model.vocab_size"),
        ("train.schedule.warmup=5000", "train.schedule.warmup", "train.steps"),
    ],
)
def test_a_contradiction_names_both_keys(override: str, first: str, second: str, write) -> None:
    message = error_of(write(SMALL), override)
    assert f"`{first}`" in message
    assert f"`{second}`" in message
    assert "contradict" in message


def test_one_matrix_cannot_serve_two_vocabularies() -> None:
    message = error_of("encoder-decoder-tiny", "model.encoder.vocab_size=7")
    assert "tie_embeddings" in message
    assert "encoder.vocab_size" in message


TRANSLATE = "model: {family: encoder-decoder}\ndata: {train: {source: [a.en], target: [a.de]}}\n"
CLASSIFY = "model: {family: encoder, head: {kind: classifier}}\ndata: {train: a.tsv}\n"


def test_objective_and_data_follow_from_the_model(write) -> None:
    """Kinds that are not written down are the usual ones of the family and the head."""
    found = {}
    for family in ("decoder", "encoder", "encoder-decoder"):
        config = Config.load(write(f"model: {{family: {family}}}\n"))
        found[family] = (config.objective.kind, config.data.kind)
    assert found == {
        "decoder": ("causal", "text"),
        "encoder": ("masked", "text"),
        "encoder-decoder": ("translate", "parallel"),
    }
    config = Config.load(write(CLASSIFY))
    assert (config.objective.kind, config.data.kind, config.data.train) == ("classify", "labelled", ("a.tsv",))
    config = Config.load(write(TRANSLATE), "objective.measure=chrf")
    assert (config.objective.kind, config.objective.measure) == ("translate", "chrf")
    assert (config.data.train.source, config.data.train.target) == (("a.en",), ("a.de",))
    assert Config.load(write(config.to_yaml())) == config
    for kind in ("span", "denoise"):
        assert Config.load("encoder-decoder-tiny", f"objective.kind={kind}").data.kind == "text"


@pytest.mark.parametrize(
    ("text", "override", "first", "second"),
    [
        (SMALL, "objective.kind=translate", "objective.kind", "model.family"),
        (SMALL, "objective.kind=classify", "objective.kind", "model.head.kind"),
        (SMALL, "data={kind: parallel, train: [a.tsv]}", "objective.kind", "data.kind"),
        (SMALL, "data.train={source: [a], target: [b]}", "objective.kind", "data.kind"),
        (SMALL, "data={kind: text, train: {source: [a], target: [b]}}", "data.kind", "data.train"),
        (SMALL, "data.validation={source: [a], target: [b]}", "data.kind", "data.validation"),
        (SMALL, "tokenizer={source: {kind: char}, target: {kind: char}}", "tokenizer.source", "model.family"),
        (TRANSLATE, "objective.kind=causal", "objective.kind", "model.family"),
        (TRANSLATE, "objective.kind=denoise", "objective.kind", "data.kind"),
        (TRANSLATE, "model.head.kind=classifier", "objective.kind", "model.family"),
        (TRANSLATE, "model.encoder.input={kind: features, width: 8}", "data.kind", "model.encoder.input.kind"),
        (TRANSLATE, "data.target_key=source", "data.source_key", "data.target_key"),
        (TRANSLATE, "tokenizer.source={kind: char}", "tokenizer.source", "tokenizer.target"),
        (CLASSIFY, "objective.kind=masked", "objective.kind", "model.head.kind"),
        (CLASSIFY, "data.text_key=label", "data.text_key", "data.label_key"),
        (CLASSIFY, "model.family=decoder", "model.family", "model.head.pooling"),
    ],
)
def test_what_a_model_does_not_learn_is_a_contradiction(
    text: str, override: str, first: str, second: str, write
) -> None:
    message = error_of(write(text), override)
    assert f"`{first}` and `{second}` contradict each other" in message
    assert "\n  try " in message
    assert "also:" not in message


@pytest.mark.parametrize(
    ("overrides", "first", "second"),
    [
        (("model.tie_embeddings=all",), "tokenizer.source", "model.tie_embeddings"),
        (("objective.kind=denoise", "data=null"), "tokenizer.source", "objective.kind"),
        (("model.encoder.vocab_size=50",), "tokenizer.source.vocab_size", "model.encoder.vocab_size"),
        (("model.decoder.vocab_size=69",), "tokenizer.target.vocab_size", "model.decoder.vocab_size"),
    ],
)
def test_two_tokenizers_need_two_vocabularies(overrides: tuple[str, ...], first: str, second: str, write) -> None:
    pair = "tokenizer: {source: {kind: bpe, vocab_size: 60}, target: {kind: bpe, vocab_size: 70}}\n"
    message = error_of(write(TRANSLATE + pair), *overrides)
    assert f"`{first}` and `{second}` contradict each other" in message


@pytest.mark.parametrize(
    ("override", "key", "said"),
    [
        ("data.train={source: [a]}", "data.train", "there are no target files"),
        ("data.train={target: [a]}", "data.train", "there are no source files"),
        ("data.train={}", "data.train", "there are no source files"),
        ("data.train={source: [], target: [a]}", "data.train", "there are no source files"),
        ("data.train={source: [a, b], target: c}", "data.train", "not as many source files as target files"),
        ("data.train={sorce: [a], target: [b]}", "data.train.sorce", "unknown key `sorce`"),
        ("data.train={source: [1], target: [b]}", "data.train.source.0", "valid string, got 1"),
        ("data.train=[1]", "data.train", r"expected a file or a list of files, got [1]"),
        ("data.train=null", "data.train", "expected a file or a list of files"),
        ("data.validation={target: [a]}", "data.validation", "there are no source files"),
        ("data.validation=1.5", "data.validation", "expected a fraction from 0 to below 1, or files, got 1.5"),
        ("data.validation=true", "data.validation", "or files, got true"),
        ("data.validation=[2]", "data.validation", "or files, got [2]"),
    ],
)
def test_a_mistake_in_the_files_speaks_of_what_was_meant(override: str, key: str, said: str, write) -> None:
    """One error, of the form that was tried, not one for each form that files may have."""
    message = error_of(write("model: {family: encoder-decoder}\ndata: {validation: 0}\n"), override)
    assert said in message
    assert f"at `{override}`, key `{key}`" in message
    assert "also:" not in message
    assert "SideFiles" not in message
    assert "tuple" not in message


def test_what_should_be_a_list_is_called_so(write) -> None:
    """YAML has no tuples."""
    message = error_of(write("model: {family: decoder}\n"), "train.ramp=true")
    assert "expected a list, got true\n  at `train.ramp=true`, key `train.ramp`" in message


def test_one_file_is_a_list_of_one(write) -> None:
    config = Config.load(write(TRANSLATE), "data.train={source: a, target: b}", "data.validation=c.tsv")
    assert (config.data.train.source, config.data.validation) == (("a",), ("c.tsv",))
    assert Config.load(write(TRANSLATE), "data.validation=0").data.validation == 0.0


def test_labels_are_words_however_yaml_reads_them(write) -> None:
    assert Config.load(write(CLASSIFY), "objective.labels=[0, 1, true]").objective.labels == ("0", "1", "true")
    assert "a class is named twice" in error_of(write(CLASSIFY), "objective.labels=[a, b, a]")
    assert "at least 2" in error_of(write(CLASSIFY), "objective.labels=[a]")
    config = Config.load(write(CLASSIFY), "objective.labels=[0, no]")
    assert Config.load(write(config.to_yaml())).objective.labels == ("0", "no")


def test_an_override_that_every_layer_shadows_is_refused(write) -> None:
    path = write(Config.load(write(SMALL)).to_yaml(), "resolved.yaml")
    assert "changes nothing" in error_of(path, "model.attention.bias=true")
    changed = Config.load(path, "model.layers=null", "model.attention.bias=true")
    assert all(layer.attention.bias for layer in changed.model.layers)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: {d_model: 4\n", "not valid YAML"),
        ("- a\n- b\n", "mapping"),
        ("model:\n  d_model: 4\n  d_model: 5\n", "twice"),
        ("", "there is no `model`"),
        ("model: 7\n", "model"),
        ("extends: [a]\n", "extends"),
        ("model:\n\td_model: 4\n", "not valid YAML"),
        (SMALL + "model.d_model: 3\n", "unknown key"),
        ("model: {vocab_size: 10, layers: [3]}\n", "layers"),
        ("model: {vocab_size: 10, layers: [{repeat: 0}]}\n", "repeat"),
        ("model: {vocab_size: -1}\n", "-1"),
        ("model: {vocab_size: 10, norm: rmsnorm}\n", "mapping"),
        ("model: {vocab_size: 10, dropout: .nan}\n", "dropout"),
    ],
)
def test_a_broken_file_gives_one_clear_error(text: str, said: str, write) -> None:
    assert said in error_of(write(text))


def test_extends_in_a_circle_is_named(write) -> None:
    write("extends: b.yaml\n", "a.yaml")
    assert "a.yaml -> b.yaml -> a.yaml" in error_of(write("extends: a.yaml\n", "b.yaml").with_name("a.yaml"))


def test_a_binary_file_is_not_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_bytes(b"model: \xff\xfe")
    assert "not UTF-8" in error_of(path)


@pytest.mark.parametrize("override", ["d_model", "=3", "model..d_model=3", "model.d_model = 3 4: 5"])
def test_a_malformed_override_is_refused(override: str, write) -> None:
    with pytest.raises(ConfigError):
        Config.load(write(SMALL), override)


def test_a_missing_file_suggests_the_nearest_preset() -> None:
    with pytest.raises(NotFoundError, match="`llama-tiny`"):
        Config.load("lama-tiny")


def test_a_mistake_in_a_layer_pattern_names_the_pattern(write) -> None:
    assert "model.layers.0.attention.windw" in error_of("llama-tiny", "model.layers=[{attention: {windw: 3}}]")
    path = write(SMALL + "\n", "own.yaml")
    path.write_text("model:\n  vocab_size: 9\n  layers:\n  - {}\n  - attention: {window: 0}\n", encoding="utf-8")
    assert f"{path}:5" in error_of(path)


def test_an_empty_file_is_named(write) -> None:
    path = write("")
    assert str(path) in error_of(path)


# --- third-party parts ------------------------------------------------------------------------------------------------


class ScaledNormConfig(NormConfig):
    """A third-party norm, as a user would write it."""

    factor: float = 1.0
    module: ClassVar[str] = "third_party_norm:ScaledNorm"


THIRD_PARTY = """
from typing import ClassVar
from qkv.config import NormConfig
import sys
sys.stranger_ran = True

class ScaledNormConfig(NormConfig):
    factor: float = 2.0
    module: ClassVar[str] = "{name}:ScaledNorm"

def ScaledNorm(config, dims):
    import torch
    class Scaled(torch.nn.Module):
        def forward(self, x):
            return x * config.factor
    return Scaled()
"""


def test_a_third_party_part_is_chosen_by_its_import_path(write, tmp_path: Path, monkeypatch) -> None:
    import torch

    import qkv

    write(THIRD_PARTY.format(name="stranger_norms"), "stranger_norms.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = write(SMALL + "", "own.yaml")
    config = Config.load(path, "model.norm.kind='stranger_norms:ScaledNormConfig'", "model.norm.factor=3.0")
    network = qkv.Transformer(config.model)
    assert torch.equal(network.decoder.final_norm(torch.ones(2)), torch.full((2,), 3.0))
    saved = write(config.to_yaml(), "saved.yaml")
    assert Config.load(saved) == config
    assert yaml.safe_load(saved.read_text())["model"]["norm"]["kind"] == "stranger_norms:ScaledNormConfig"


def test_a_third_party_part_derived_from_a_built_in_kind_is_a_kind_of_its_own(
    write, tmp_path: Path, monkeypatch
) -> None:
    import qkv

    derived = THIRD_PARTY.format(name="derived_norms").replace("NormConfig\n", "RMSNormConfig as NormConfig\n")
    write(derived, "derived_norms.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = write(SMALL + "", "own.yaml")
    config = Config.load(path, "model.norm={kind: derived_norms:ScaledNormConfig, eps: 0.5}")
    assert config.model.norm.kind == "derived_norms:ScaledNormConfig"
    assert config.model.norm.eps == 0.5
    assert Config.load(write(config.to_yaml(), "saved.yaml")) == config
    assert type(qkv.Transformer(config.model).decoder.final_norm).__name__ == "Scaled"


def test_a_third_party_part_whose_module_is_not_there_is_named(write, tmp_path: Path, monkeypatch) -> None:
    import qkv

    write(THIRD_PARTY.format(name="hollow_norms").replace(':ScaledNorm"', ':ScaledNrom"'), "hollow_norms.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = Config.load(write(SMALL + "", "own.yaml"), "model.norm.kind=hollow_norms:ScaledNormConfig")
    with pytest.raises(ConfigError, match="`hollow_norms:ScaledNrom`, the module of ScaledNormConfig"):
        qkv.Transformer(config.model)


def test_a_loaded_model_runs_no_strangers_code_unless_allowed(write, tmp_path: Path, monkeypatch) -> None:
    import sys

    write(THIRD_PARTY.format(name="hostile_norms"), "hostile_norms.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "stranger_ran", False, raising=False)
    path = write("model: {vocab_size: 9, norm: {kind: 'hostile_norms:ScaledNormConfig'}}\n")
    with pytest.raises(PermissionNeededError, match="not allowed"):
        load_config(path, allow=())
    assert not sys.stranger_ran
    load_config(path, allow=("hostile_norms",))
    assert sys.stranger_ran


def test_a_model_folder_runs_no_strangers_code_whatever_reads_it(tmp_path: Path, monkeypatch, capsys) -> None:
    import sys

    from qkv.cli import main

    folder = tmp_path / "stranger"
    folder.mkdir()
    (tmp_path / "evil_norms.py").write_text(THIRD_PARTY.format(name="evil_norms"), encoding="utf-8")
    text = "model: {vocab_size: 9, norm: {kind: 'evil_norms:ScaledNormConfig'}}\n"
    (folder / "config.yaml").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "stranger_ran", False, raising=False)
    for command in (["show"], ["data", "show"], ["data", "prepare"], ["generate", "--prompt", "a"], ["train"]):
        with pytest.raises(SystemExit) as stop:
            main([*command, str(folder)])
        assert stop.value.code != 0
    assert not sys.stranger_ran
    with pytest.raises(SystemExit) as stop:
        main(["show", str(folder), "--allow-package", "evil_norms"])
    assert stop.value.code == 0
    assert sys.stranger_ran


@pytest.mark.parametrize(
    ("kind", "said"),
    [("no_such_package:X", "cannot import"), ("os:path", "is not a NormConfig"), ("json:NoSuch", "cannot import")],
)
def test_a_wrong_import_path_is_explained(kind: str, said: str, write) -> None:
    assert said in error_of(write(SMALL), f"model.norm.kind='{kind}'")


def test_a_config_class_without_a_module_is_refused(write) -> None:
    assert "which module" in error_of(write(SMALL), "model.norm.kind='qkv.config.parts:NormConfig'")
