"""Encoders as published: the same values from the same files, and back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import qkv
from qkv import Config, Model, Transformer
from qkv.checkpoint.families import named
from qkv.checkpoint.published import Published
from qkv.config import QkvError

from .dinov2 import write_dinov2
from .family_cases import VOCAB, Case, Pair, assert_close, make_pair, mask_of, random_ids, values, written

LENGTH, SHORT = 12, 7

BERT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 20,
}
ALBERT = {**BERT, "embedding_size": 12, "max_position_embeddings": 12}
VIT = {
    **{key: BERT[key] for key in BERT if key.startswith(("hidden", "num", "inter"))},
    "image_size": 12,
    "patch_size": 4,
}

CASES = {
    "bert": Case("BertForMaskedLM", {**BERT, "hidden_act": "gelu_new", "layer_norm_eps": 1e-3}),
    "bert-untied": Case("BertForMaskedLM", {**BERT, "tie_word_embeddings": False, "type_vocab_size": 1}),
    "bert-pretraining": Case("BertForPreTraining", {**BERT, "hidden_act": "relu"}),
    "bert-bare": Case("BertModel", {**BERT, "type_vocab_size": 5}),
    "bert-classifier": Case("BertForSequenceClassification", {**BERT, "num_labels": 5}),
    "roberta": Case("RobertaForMaskedLM", {**BERT, "hidden_act": "relu", "type_vocab_size": 1}),
    "roberta-untied": Case("RobertaForMaskedLM", {**BERT, "tie_word_embeddings": False, "pad_token_id": 3}),
    "roberta-bare": Case("RobertaModel", BERT),
    "roberta-classifier": Case("RobertaForSequenceClassification", BERT),
    "xlm-roberta": Case("XLMRobertaForMaskedLM", BERT),
    "xlm-roberta-classifier": Case("XLMRobertaForSequenceClassification", {**BERT, "num_labels": 3}),
    "albert": Case("AlbertForMaskedLM", ALBERT),
    "albert-untied": Case("AlbertForMaskedLM", {**ALBERT, "tie_word_embeddings": False, "hidden_act": "gelu"}),
    "albert-pretraining": Case("AlbertForPreTraining", ALBERT),
    "albert-bare": Case("AlbertModel", {**ALBERT, "embedding_size": 32}),
    "albert-silu": Case("AlbertForMaskedLM", {**ALBERT, "hidden_act": "silu"}),
    "albert-classifier": Case("AlbertForSequenceClassification", {**ALBERT, "num_labels": 4}),
    "vit": Case("ViTModel", VIT),
    "vit-oblong": Case("ViTModel", {**VIT, "image_size": [8, 12], "num_channels": 1, "hidden_act": "gelu_new"}),
    "vit-classifier": Case("ViTForImageClassification", {**VIT, "num_labels": 6, "layer_norm_eps": 1e-3}),
}


TEXT = [name for name in CASES if not name.startswith("vit")]
BARE = [name for name, case in CASES.items() if case.architecture.endswith("Model")]


def only(names: list[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("pair", [CASES[name] for name in names], ids=names, indirect=True)


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(request.param, tmp_path_factory.mktemp("published"))


def examples(pair: Pair) -> tuple[Tensor, dict[str, Tensor]]:
    """Texts or images, and their segments where the model has any."""
    config = pair.ours.network.config
    if config.input.kind == "patches":
        generator = torch.Generator().manual_seed(1)
        return torch.randn(2, *config.input.axes[1:], generator=generator), {}
    ids = random_ids(2, LENGTH)
    return ids, {"segments": ids % config.embedding.num_segments}


def test_the_values_are_those_of_transformers(pair: Pair) -> None:
    given, also = examples(pair)
    theirs = {pair.theirs.main_input_name: given}
    if also:
        theirs["token_type_ids"] = also["segments"]
    with torch.no_grad():
        assert_close(pair.ours.network(given, **also), values(pair.theirs, **theirs))


@only(TEXT)
def test_a_padded_text_is_the_text_alone(pair: Pair) -> None:
    network, ids, lengths = pair.ours.network, random_ids(2, LENGTH), torch.tensor([LENGTH, SHORT])
    theirs = values(pair.theirs, input_ids=ids, attention_mask=mask_of(lengths, LENGTH))
    with torch.no_grad():
        ours = network(ids, lengths=lengths)
        for row, length in enumerate(lengths.tolist()):
            alone = network(ids[row : row + 1, :length])[0]
            real = slice(length) if network.head.per_token else slice(None)
            assert_close(alone, theirs[row][real])
            assert_close(ours[row][real], alone)


@only(BARE)
def test_a_bare_model_brings_its_pooler(pair: Pair) -> None:
    given, _ = examples(pair)
    with torch.no_grad():
        theirs = pair.theirs(given).pooler_output
        ours = pair.ours.network.head.pooler(pair.ours.network(given)[:, 0])
    assert_close(ours, theirs)


def test_transformers_opens_what_is_written(pair: Pair, tmp_path: Path) -> None:
    again = written(pair.ours, tmp_path / "written")
    given, _ = examples(pair)
    name = again.main_input_name
    assert_close(values(again, **{name: given}), values(pair.theirs, **{name: given}))


@pytest.mark.parametrize(("architecture", "keys"), [("BertModel", BERT), ("ViTModel", VIT)])
def test_a_bare_model_may_have_no_pooler(architecture: str, keys: dict[str, Any], tmp_path: Path) -> None:
    kind = getattr(transformers, architecture)
    kind(kind.config_class(**keys), add_pooling_layer=False).save_pretrained(tmp_path)
    assert qkv.load(tmp_path, device="cpu").network.head.pooler is None


@pytest.mark.parametrize(
    ("model_type", "keys", "told"),
    [
        ("bert", {"position_embedding_type": "relative_key"}, "`position_embedding_type: relative_key`"),
        ("bert", {"is_decoder": True}, "`is_decoder: True`"),
        ("bert", {"add_cross_attention": True}, "`add_cross_attention: True`"),
        ("bert", {"hidden_act": "mish"}, "`hidden_act: mish`"),
        ("bert", {"num_labels": 1}, "`num_labels: 1`"),
        ("roberta", {"problem_type": "multi_label_classification"}, "`problem_type: multi_label_classification`"),
        ("albert", {"num_hidden_groups": 2}, "`num_hidden_groups: 2`"),
        ("albert", {"inner_group_num": 2}, "`inner_group_num: 2`"),
        ("vit", {"qkv_bias": False}, "`qkv_bias: False`"),
        ("vit", {"pooler_act": "relu"}, "`pooler_act: relu`"),
        ("vit", {"pooler_output_size": 16}, "`pooler_output_size: 16`"),
        ("vit", {"patch_size": [4, 6]}, "`patch_size: [4, 6]`"),
    ],
)
def test_an_option_that_is_not_supported_is_refused_by_name(model_type: str, keys: dict[str, Any], told: str) -> None:
    with pytest.raises(QkvError, match="is not supported") as refused:
        named(model_type).read(Published({**BERT, **keys}, "config.json"), "classifier")
    assert refused.value.what.startswith(told)


def test_transformers_opens_a_bert_made_here(tmp_path: Path) -> None:
    small = ("model.d_model=32", "model.num_layers=2", "model.attention.num_heads=2", "model.vocab_size=97")
    config = Config.load("bert-base", *small, "tokenizer.vocab_size=97")
    ours = Model(Transformer(config.model, generator=torch.Generator().manual_seed(0)).eval(), None, config)
    ids = random_ids(2, LENGTH)
    with torch.no_grad():
        assert_close(ours.network(ids), values(written(ours, tmp_path / "written"), input_ids=ids))


def test_minilm_gives_the_golden_vectors(
    data_file: Callable[[str], Path], published_model: Callable[[str], Path]
) -> None:
    golden = json.loads(data_file("golden/minilm.json").read_text(encoding="utf-8"))["cases"]
    model = qkv.load(published_model("minilm"), device="cpu", dtype="fp32")
    assert [model.tokenizer.encode(case["text"], add_special=True) for case in golden] == [
        case["ids"] for case in golden
    ]
    found = torch.from_numpy(model.embed([case["text"] for case in golden]))
    assert (found - torch.tensor([case["embedding"] for case in golden])).abs().max() < 1e-4


def test_a_real_dinov2_gives_the_golden_vectors(
    data_file: Callable[[str], Path], published_model: Callable[[str], Path], tmp_path: Path
) -> None:
    golden = json.loads(data_file("golden/vit_dinov2_small.json").read_text(encoding="utf-8"))["backbone_output"]
    write_dinov2(published_model("dinov2-small") / "vit_s_focus.onnx", tmp_path / "dinov2")
    model = qkv.load(tmp_path / "dinov2", device="cpu", image_size=224)  # trained on larger images
    line, row = torch.arange(224) / 15, torch.arange(224)[:, None] / 20
    image = torch.stack([(channel * row).sin() + line.cos() for channel in (1, 2, 3)])
    with torch.no_grad():
        found = model.network(image[None])[0]
    assert list(found[None].shape) == golden["shape"]
    assert found[0, :8].tolist() == pytest.approx(golden["cls_first8"], abs=2e-3)
    assert found[1, :8].tolist() == pytest.approx(golden["token1_first8"], abs=2e-3)
    assert (found.mean().item(), found.std().item()) == pytest.approx((golden["mean"], golden["std"]), abs=1e-4)
