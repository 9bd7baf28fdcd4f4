"""DINOv2 as published: the same values from the same files, with registers too, and for images of another size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import qkv
from qkv.checkpoint.families import named
from qkv.checkpoint.published import Published
from qkv.config import QkvError, UsageError

from .family_cases import Case, Pair, assert_close, make_pair, values, written

DINO = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 12, "patch_size": 4}
CASES = {
    "dinov2": Case("Dinov2Model", {**DINO, "mlp_ratio": 3, "num_channels": 1, "hidden_act": "gelu_new"}),
    "dinov2-swiglu": Case("Dinov2Model", {**DINO, "use_swiglu_ffn": True, "layer_norm_eps": 1e-3}),
    "registers": Case("Dinov2WithRegistersModel", {**DINO, "num_register_tokens": 3}),
}


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(request.param, tmp_path_factory.mktemp("published"))


def images(pair: Pair, height: int = 12, width: int = 12) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, pair.ours.network.config.input.channels, height, width, generator=generator)


def test_the_values_are_those_of_transformers(pair: Pair) -> None:
    with torch.no_grad():
        assert_close(pair.ours.network(images(pair)), values(pair.theirs, pixel_values=images(pair)))


def test_transformers_opens_what_is_written(pair: Pair, tmp_path: Path) -> None:
    again = written(pair.ours, tmp_path / "written")
    assert_close(values(again, pixel_values=images(pair)), values(pair.theirs, pixel_values=images(pair)))


@pytest.mark.parametrize("size", [(8, 20), 16])
def test_positions_for_another_image_size_are_those_of_transformers(size: Any, tmp_path: Path) -> None:
    pair = make_pair(CASES["dinov2"], tmp_path)
    ours = qkv.load(tmp_path, device="cpu", image_size=size)
    assert ours.config.model == ours.network.config
    given = images(pair, *(size if isinstance(size, tuple) else (size, size)))
    with torch.no_grad():
        assert_close(ours.network(given), values(pair.theirs, pixel_values=given))


def test_a_size_that_does_not_divide_and_a_model_of_texts_are_refused(tmp_path: Path) -> None:
    make_pair(CASES["dinov2"], tmp_path / "images")
    with pytest.raises(UsageError, match="patches of 4, not 13"):
        qkv.load(tmp_path / "images", image_size=13)
    texts = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    transformers.BertModel(texts).save_pretrained(tmp_path / "texts")
    with pytest.raises(UsageError, match="read images"):
        qkv.load(tmp_path / "texts", image_size=12)


@pytest.mark.parametrize("keys", [{"qkv_bias": False}, {"patch_size": [4, 6]}, {"hidden_act": "mish"}])
def test_an_option_that_is_not_supported_is_refused_by_name(keys: dict[str, Any]) -> None:
    (key,) = keys
    with pytest.raises(QkvError, match=f"`{key}: "):
        named("dinov2").read(Published({**DINO, **keys}, "config.json"), "none")
