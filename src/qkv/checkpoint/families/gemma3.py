"""Gemma 3, text (Gemma team 2025, arXiv 2503.19786): norms with unit offset before and after each function, per-head
normalised queries and keys, five layers with a window for each one without, and a rope of its own for either kind.

Of a model that sees images too (`gemma3`) the text part is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qkv.checkpoint.families import Family
from qkv.checkpoint.families.gemma2 import RULES, SIZES, read_sandwich, write_sandwich, write_windows_insisted
from qkv.checkpoint.families.llama import FULL, IGNORED, SLIDING, per_layer, read_windows, windows_of
from qkv.checkpoint.families.rope import read_parameters, write_parameters
from qkv.checkpoint.published import Published, expect
from qkv.config.model import ModelConfig
from qkv.config.positions import RopeConfig

DEFAULTS = {**SIZES, "vocab_size": 262208, "max_position_embeddings": 131072}
"""Which published files leave out."""

THETA, LOCAL_THETA = 1e6, 1e4


def read(published: Published, head: str) -> dict[str, Any]:
    if published.text("model_type", None) == "gemma3":
        published.section("text_config").only("final_logit_softcapping", None)
        tied = {"tie_word_embeddings": published.flag("tie_word_embeddings", True)}
        text = published.section("text_config")
        published = Published({**text.keys, **tied}, text.where)
    published = published.with_defaults(DEFAULTS)
    published.only("attn_logit_softcapping", None)
    pattern = published.whole("sliding_window_pattern", 6, least=1)
    model = read_sandwich(published, head)
    model["max_seq_len"] = published.whole("max_position_embeddings")
    model["attention"]["qk_norm"] = "per-head"
    window = published.whole("sliding_window", None)
    windows = read_windows(published, window, lambda layer: (layer + 1) % pattern != 0)
    everywhere, local = _read_ropes(published)
    model["position"] = everywhere
    layers = [{"attention": {"window": window}, "position": local if window else everywhere} for window in windows]
    return per_layer(model, layers)


def _read_ropes(published: Published) -> tuple[dict[str, Any], dict[str, Any]]:
    """The `position` of layers that see all, which is the one that may be scaled, and of those with a window."""
    ropes = published.section("rope_parameters")
    found = []
    for kind, theta_key, theta in ((FULL, "rope_theta", THETA), (SLIDING, "rope_local_base_freq", LOCAL_THETA)):
        parameters = ropes.section(kind).with_defaults({"rope_theta": published.number(theta_key, theta)})
        if kind == FULL:
            scaling = published.section("rope_scaling")
            parameters = Published({**parameters.keys, **scaling.keys}, parameters.where)
        parameters.only("partial_rotary_factor", 1.0)
        found.append(read_parameters(parameters, published))
    everywhere, local = found
    return everywhere, local


def write(config: ModelConfig) -> dict[str, Any]:
    windows = windows_of(config)
    return {
        **write_sandwich(config),
        "max_position_embeddings": config.max_seq_len,
        **write_windows_insisted(windows),
        **_write_ropes(config, windows),
    }


def _write_ropes(config: ModelConfig, windows: Sequence[int | None]) -> dict[str, Any]:
    """The keys for positions and pattern, as transformers 5 reads them and as versions before it do."""
    ropes = [expect(layer.position, RopeConfig, "model.position.kind") for layer in config.layers]
    first = {window is None: layer for layer, window in reversed(list(enumerate(windows)))}
    everywhere = ropes[first[True]] if True in first else RopeConfig(theta=THETA)
    local = ropes[first[False]] if False in first else RopeConfig(theta=LOCAL_THETA)
    return {
        "rope_theta": everywhere.theta,
        "rope_local_base_freq": local.theta,
        "rope_scaling": None if everywhere.scaling is None else write_parameters(everywhere),
        "rope_parameters": {FULL: write_parameters(everywhere), SLIDING: write_parameters(local)},
        "sliding_window_pattern": 1 + first.get(True, config.num_layers),
    }


FAMILY = Family(
    model_types=("gemma3_text", "gemma3"),
    architectures={
        "Gemma3ForCausalLM": "language-model",
        "Gemma3ForConditionalGeneration": "language-model",
        "Gemma3TextModel": "none",
    },
    prefix="model.",
    read=read,
    write=write,
    rules=lambda config: RULES,
    renames=(
        (r"(model\.)?language_model\.model\.", "model."),
        (r"model\.language_model\.", "model."),
        (r"language_model\.lm_head\.", "lm_head."),
    ),
    ignored=(*IGNORED, r"(model\.)?vision_tower\..*", r"(model\.)?multi_modal_projector\..*"),
)
