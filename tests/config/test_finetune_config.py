"""What a run may say about a model that is trained already, and that it reaches every layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qkv.config.errors import ConfigError
from qkv.config.finetune import finetune_config, folded
from qkv.config.load import load_config, preset_names
from qkv.config.model import ModelConfig
from qkv.config.run import Config

PATTERN = "model.layers=[{attention: {window: 4}}, {position: {kind: none}}]"
UNLIKE_SIDES = (
    "model.tie_embeddings=none",
    "model.encoder={d_model: 64, input: {kind: features, width: 7}}",
    "model.decoder.cross_attention={dropout: 0.3, num_heads: 2}",
    "model.decoder.layers=[{attention: {window: 4}}, {dropout: 0.2, cross_attention: {dropout: 0.1}}]",
)


def models() -> list[tuple[str, ModelConfig]]:
    """Every preset, and models whose layers and sides differ."""
    cases = [(name, load_config(name).model) for name in preset_names()]
    cases.append(("pattern", load_config("decoder-tiny", [PATTERN]).model))
    cases.append(("unlike sides", load_config("encoder-decoder-tiny", UNLIKE_SIDES).model))
    return [*cases, ("two vocabularies", load_config("g2p").model.with_vocab_size(7, 8))]


def told(model: ModelConfig) -> dict[str, Any]:
    """All that says what is built: of cross-attention only what the layers have."""
    tree = model.model_dump(mode="json")
    for stack in (tree, tree["encoder"], tree["decoder"]):
        if stack:
            del stack["cross_attention"]
    return tree


def tuned(trained: Config, text: str, *overrides: str, allow: tuple[str, ...] | None = None) -> Config:
    Path("tune.yaml").write_text(text, encoding="utf-8")
    return finetune_config("tune.yaml", overrides, trained, "the model runs/a", allow)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("model", [model for _, model in models()], ids=[name for name, _ in models()])
def test_a_folded_model_spells_out_to_itself(model: ModelConfig) -> None:
    assert told(ModelConfig.model_validate(folded(model))) == told(model)


def test_a_folded_model_says_shared_keys_once() -> None:
    assert folded(load_config("gpt2").model)["layers"] is None
    pattern = folded(load_config("decoder-tiny", [PATTERN]).model)["layers"]
    assert pattern == [{"attention": {"window": 4}}, {"position": {"kind": "none"}}] * 2
    translator = folded(load_config("transformer-tiny-mt").model)
    assert translator["encoder"].keys() | translator["decoder"].keys() == {"input", "layers", "cross_attention"}


def test_a_dropout_reaches_every_layer_and_nothing_else_changes() -> None:
    trained = load_config("transformer-tiny-mt")
    config = tuned(trained, "model: {dropout: 0.35}", "model.attention.dropout=0.2", "model.decoder.dropout=0.4")
    stacks = config.model.stacks
    assert {layer.dropout for layer in stacks["encoder"].layers} == {0.35}
    assert {layer.dropout for layer in stacks["decoder"].layers} == {0.4}
    cross = [layer.cross_attention for layer in stacks["decoder"].layers]
    attention = [layer.attention for stack in stacks.values() for layer in stack.layers]
    assert {one.dropout for one in (*cross, *attention) if one is not None} == {0.2}
    assert config.model.tie_embeddings == trained.model.tie_embeddings
    assert config.train != trained.train


def test_a_layer_keeps_what_is_its_own() -> None:
    config = tuned(load_config("decoder-tiny", [PATTERN]), "", "model.attention.dropout=0.2")
    assert [layer.attention.model_dump()["window"] for layer in config.model.layers] == [4, None, 4, None]
    assert [layer.position.kind for layer in config.model.layers] == ["rope", "none", "rope", "none"]
    assert {layer.attention.model_dump()["dropout"] for layer in config.model.layers} == {0.2}


def test_a_run_says_its_own_objective_data_and_training() -> None:
    trained = load_config("bert-small", ["train.steps=70", "data.train=[a.txt]", "generation.eos_ids=[5]"])
    config = tuned(trained, "data: {train: [b.txt]}")
    assert (config.objective.kind, config.train.steps, config.data.train) == ("masked", 1000, ("b.txt",))
    assert config.tokenizer == trained.tokenizer
    assert config.generation.eos_ids == (5,)


def test_the_preset_makes_a_classifier_of_a_pretrained_encoder() -> None:
    config = finetune_config("sentiment-finetune", ["data.train=[a.tsv]"], load_config("bert-small"), "bert")
    assert (config.objective.kind, config.data.kind, config.model.head.kind) == ("classify", "labelled", "classifier")
    assert {layer.dropout for layer in config.model.layers} == {0.2}


def test_saying_what_the_model_is_already_is_no_change() -> None:
    text = Path(load_config.__code__.co_filename).parent.joinpath("presets/bert-small.yaml").read_text(encoding="utf-8")
    trained = load_config("bert-small")
    assert tuned(trained, text).model == trained.model


@pytest.mark.parametrize(
    ("text", "said", "line"),
    [
        ("model:\n  d_model: 256", r"`model\.d_model` is 192 in the model, and may not become 256", 2),
        ("model: {norm: {kind: layernorm}}", r'`model\.norm\.kind` is "rmsnorm" in the model', 1),
        ("model:\n  attention:\n    window: 8", r"`model\.attention\.window` is null .* may not become 8", 3),
        ("model: {layers: [{feed_forward: {kind: relu}}, {}]}", r"`model\.layers\.0\.feed_forward\.kind`", 1),
        ("model: {tie_embeddings: head, family: decoder}", r'`model\.family` is "encoder" in the model', 1),
        ("tokenizer: {kind: char}", r'`tokenizer\.kind` is "bpe" in the model, and may not become "char"', 1),
        ("tokenizer: {path: other}", r"`tokenizer\.vocab_size` is 2048|`tokenizer\.path` is null", 1),
    ],
)
def test_another_shape_is_refused_naming_the_key_both_values_and_the_line(text: str, said: str, line: int) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        tuned(load_config("bert-small"), text)
    assert f"/tune.yaml:{line}" in (caught.value.where or "")


def test_further_tokens_may_count_otherwise_but_be_no_more() -> None:
    trained = load_config("gpt2", ["model.mtp.depth=1"])
    assert tuned(trained, "model: {mtp: {weight: 0.1}}").model.mtp.weight == 0.1
    with pytest.raises(ConfigError, match=r"`model\.mtp\.depth` is 1 in the model, and may not become 2"):
        tuned(trained, "model: {mtp: {depth: 2}}")


def test_matrices_may_be_untied_but_not_tied() -> None:
    assert tuned(load_config("gpt2"), "model: {tie_embeddings: none}").model.tie_embeddings == "none"
    with pytest.raises(ConfigError, match=r'`model\.tie_embeddings` is "none" in the model'):
        tuned(load_config("gpt-small-code"), "model: {tie_embeddings: head}")


def test_a_mistake_is_told_with_the_place_where_it_was_written() -> None:
    with pytest.raises(ConfigError, match="unknown key `dropuot`") as caught:
        tuned(load_config("gpt2"), "model:\n  dropuot: 0.1")
    assert "/tune.yaml:2" in (caught.value.where or "")
    for nothing in ("model: 5", "model: [1]", "model:", "model: {family: [1]}"):
        with pytest.raises(ConfigError):
            tuned(load_config("gpt2"), nothing)
    with pytest.raises(ConfigError, match=r"`tie_embeddings` and `head\.kind` contradict") as caught:
        tuned(load_config("gpt2"), "model: {head: {kind: classifier}}")
    assert caught.value.hint == "tie_embeddings=none"


def test_images_are_read_as_the_trained_model_is_used_to() -> None:
    trained = load_config("vit-tiny", ["model.head.num_classes=2", "data.mean=0.2", "data.fit=stretch"])
    files = "data: {train: [a.tsv]}\n"
    data = tuned(trained, files).data
    assert (data.mean, data.fit, data.shift, data.train) == (0.2, "stretch", 0, ("a.tsv",))
    assert tuned(trained, files, "data.mean=0.4").data.mean == 0.4
