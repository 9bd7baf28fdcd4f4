"""The parts of published models in a configuration: what reads back, what contradicts itself."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from qkv.config import Config, ConfigError
from qkv.config.attention import StandardAttentionConfig
from qkv.config.model import ModelConfig
from qkv.config.positions import RopeConfig, YarnScalingConfig
from qkv.config.stack import _say_two_positions

ORIGINAL = {"original_max_seq_len": 64}
PARTS: list[dict[str, Any]] = [
    {"norm": {"kind": "rmsnorm", "unit_offset": True, "rounding": "after-weight"}},
    {"feed_forward": {"kind": "geglu_tanh"}},
    {"attention": {"scale": 1.0, "softcap": 50.0, "bias": "qvo"}},
    {"position": {"kind": "rope", "scaling": {"kind": "linear", "factor": 8.0}}},
    {"position": {"kind": "rope", "scaling": {"kind": "dynamic", "factor": 2.0, **ORIGINAL}}},
    {"position": {"kind": "rope", "scaling": {"kind": "yarn", "factor": 4.0, **ORIGINAL}}},
    {
        "position": {
            "kind": "rope",
            "scaling": {"kind": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, **ORIGINAL},
        }
    },
    {"position": {"kind": "rope", "scaling": {"kind": "llama3", "factor": 8.0, **ORIGINAL}}},
    {"position": {"kind": "sinusoidal", "layout": "tensor2tensor"}},
    {"position": {"kind": "learned", "offset": 2}},
    {"position": {"kind": "relative", "num_buckets": 16, "max_distance": 64}},
    {"parallel": "two-norms", "layers": [{}, {"parallel": "one-norm"}]},
    {"share_layers": True},
    {"head": {"kind": "language-model", "scale": "rsqrt-d-model", "softcap": 30.0}},
]


def tree(**changes: Any) -> dict[str, Any]:
    return {"vocab_size": 100, "d_model": 64, "num_layers": 2, "attention": {"num_heads": 4}} | changes


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_a_part_reads_back_as_it_was_spelled_out(part: dict[str, Any]) -> None:
    config = ModelConfig.model_validate(tree(**part))
    assert ModelConfig.model_validate(config.model_dump(mode="json")) == config
    whole = Config.load("llama-tiny", "model.attention.head_dim=16", *(f"model.{key}={part[key]}" for key in part))
    assert Config.model_validate(whole.model_dump(mode="json")) == whole


def test_scalings_differ_by_layer_and_null_takes_one_away() -> None:
    scaled = {"kind": "rope", "theta": 1e6, "scaling": {"kind": "yarn", "factor": 4.0, **ORIGINAL}}
    layers = [{"position": {"scaling": {"factor": 2.0}}}, {"position": {"theta": 1e4, "scaling": None}}]
    first, second = ModelConfig.model_validate(tree(position=scaled, layers=layers)).layers
    assert isinstance(first.position, RopeConfig)
    assert first.position.scaling == YarnScalingConfig(factor=2.0, **ORIGINAL)
    assert second.position == RopeConfig()


def test_cross_attention_has_the_scale_of_self_attention() -> None:
    config = ModelConfig.model_validate(tree(family="encoder-decoder", attention={"num_heads": 4, "scale": 1.0}))
    assert config.decoder is not None
    cross = config.decoder.layers[0].cross_attention
    assert isinstance(cross, StandardAttentionConfig)
    assert cross.scale == 1.0


@pytest.mark.parametrize("inside", ["rope", "relative", "alibi", "none"])
def test_positions_that_act_in_two_places_are_said_once(inside: str, caplog: pytest.LogCaptureFixture) -> None:
    _say_two_positions.cache_clear()
    changes = tree(position={"kind": "learned"}, layers=[{}, {"position": {"kind": inside}}])
    for _ in range(2):
        ModelConfig.model_validate(changes)
    said = f"`position.kind` is learned, added to the embedding, and `layers[].position.kind` {inside}: both act"
    assert caplog.messages == ([] if inside == "none" else [said])


SCALING = "model.position.scaling"


@pytest.mark.parametrize(
    ("overrides", "first", "second"),
    [
        ((f"{SCALING}={{kind: llama3, factor: 8, low_freq_factor: 4, original_max_seq_len: 64}}",), "low_freq", "high"),
        (
            (f"{SCALING}={{kind: longrope, short_factor: [1, 1], long_factor: [1], original_max_seq_len: 64}}",),
            "scaling.short_factor",
            "attention.head_dim",
        ),
        (
            (f"{SCALING}={{kind: dynamic, factor: 2, original_max_seq_len: 64}}", "model.attention.head_dim=2"),
            "scaling.kind",
            "attention.head_dim",
        ),
        (("model.position={kind: relative, max_distance: 16}",), "max_distance", "num_buckets"),
        (("model.position={kind: sinusoidal, layout: tensor2tensor}", "model.d_model=2"), "layout", "d_model"),
        (("model.parallel=two-norms", "model.norm.placement=post"), "parallel", "norm.placement"),
        (("model.parallel=two-norms", "model.norm.placement=output"), "parallel", "norm.placement"),
        (("model.parallel=one-norm", "model.family=encoder-decoder"), "parallel", "cross_attention"),
        (("model.residual={kind: hyper-connections, streams: 16, fractions: 8}",), "residual.streams", "fractions"),
        (("model.share_layers=true", "model.layers=[{}, {attention: {window: 3}}]"), "share_layers", "layers"),
    ],
)
def test_parts_that_cannot_be_combined_are_named(overrides: tuple[str, ...], first: str, second: str) -> None:
    heads = () if any("head_dim" in override for override in overrides) else ("model.attention.head_dim=16",)
    with pytest.raises(ConfigError, match="contradict") as refused:
        Config.load("llama-tiny", *heads, *overrides)
    assert first in str(refused.value)
    assert second in str(refused.value)


@pytest.mark.parametrize(
    "override",
    [
        f"{SCALING}={{kind: linear, factor: 0.5}}",
        f"{SCALING}={{kind: yarn, factor: 4, original_max_seq_len: 0}}",
        f"{SCALING}={{kind: longrope, short_factor: [], long_factor: [], original_max_seq_len: 64}}",
        f"{SCALING}={{kind: ntk, factor: 2}}",
        "model.position={kind: relative, num_buckets: 7}",
        "model.position={kind: relative, num_buckets: 100000000}",
        "model.position={kind: learned, offset: -1}",
        "model.position={kind: sinusoidal, layout: half}",
        "model.attention.scale=0",
        "model.attention.softcap=-1",
        "model.attention.bias=kv",
        "model.parallel=three",
        "model.head={kind: language-model, softcap: 0}",
    ],
)
def test_values_that_mean_nothing_are_refused(override: str) -> None:
    with pytest.raises(ConfigError):
        Config.load("llama-tiny", override)


def test_a_wrong_scaling_in_python_is_named() -> None:
    with pytest.raises(ValidationError, match="unknown kind `ynar`, did you mean `yarn`"):
        RopeConfig.model_validate({"scaling": {"kind": "ynar"}})
