"""Gemma 3, text (Gemma team 2025, arXiv 2503.19786): norms with unit offset before and after each function, per-head
normalised queries and keys, five layers with a window for each one without, and a rope of its own for either kind.

Of a model that sees images too (`gemma3`) the text part is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qkv.checkpoint.families import Family
from qkv.checkpoint.families.llama import (
    ACTIVATIONS,
    COMMON_RULES,
    FULL,
    IGNORED,
    SLIDING,
    attention_of,
    feed_forward_of,
    per_layer,
    read_tying,
    read_windows,
    windows_of,
    write_windows,
)
from qkv.checkpoint.families.rope import read_parameters, write_parameters
from qkv.checkpoint.mapping import Rule
from qkv.checkpoint.published import Published, called, expect
from qkv.config.errors import QkvError
from qkv.config.model import ModelConfig
from qkv.config.parts import RMSNormConfig
from qkv.config.positions import RopeConfig

RULES = (
    *COMMON_RULES,
    Rule("decoder.blocks.*.self_attention.norm_in", "model.layers.*.input_layernorm"),
    Rule("decoder.blocks.*.self_attention.norm_out", "model.layers.*.post_attention_layernorm"),
    Rule("decoder.blocks.*.feed_forward.norm_in", "model.layers.*.pre_feedforward_layernorm"),
    Rule("decoder.blocks.*.feed_forward.norm_out", "model.layers.*.post_feedforward_layernorm"),
)

DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
"""Which published files leave out."""

THETA, LOCAL_THETA = 1e6, 1e4


def read(published: Published, head: str) -> dict[str, Any]:
    if published.text("model_type", None) == "gemma3":
        published.section("text_config").only("final_logit_softcapping", None)
        tied = {"tie_word_embeddings": published.flag("tie_word_embeddings", True)}
        text = published.section("text_config")
        published = Published({**text.keys, **tied}, text.where)
    published = published.with_defaults(DEFAULTS)
    published.only("is_causal", True)
    published.only("use_bidirectional_attention", False)
    published.only("attn_logit_softcapping", None)
    head_dim, scalar = published.whole("head_dim"), published.whole("query_pre_attn_scalar", least=1)
    pattern = published.whole("sliding_window_pattern", 6, least=1)
    model = {
        "family": "decoder",
        "vocab_size": published.whole("vocab_size"),
        "max_seq_len": published.whole("max_position_embeddings"),
        "d_model": published.whole("hidden_size"),
        "num_layers": published.whole("num_hidden_layers"),
        "tie_embeddings": read_tying(published, head),
        "embedding": {"scale": "sqrt-d-model"},
        "norm": {
            "kind": "rmsnorm",
            "eps": published.number("rms_norm_eps", 1e-6),
            "placement": "sandwich",
            "unit_offset": True,
            "rounding": "after-weight",
        },
        "attention": {
            "num_heads": published.whole("num_attention_heads"),
            "num_kv_heads": published.whole("num_key_value_heads"),
            "head_dim": head_dim,
            "bias": published.flag("attention_bias", False),
            "qk_norm": "per-head",
            "scale": None if scalar == head_dim else scalar**-0.5,
            "dropout": published.number("attention_dropout", 0.0),
        },
        "feed_forward": {
            "kind": published.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh"),
            "d_ff": published.whole("intermediate_size"),
        },
        "head": {"kind": head},
    }
    if head == "language-model":
        model["head"]["softcap"] = published.number("final_logit_softcapping", None)
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
    attention, feed_forward, windows = attention_of(config), feed_forward_of(config), windows_of(config)
    if config.d_model % attention.num_heads:
        raise QkvError(
            f"`model.d_model: {config.d_model}` has no equivalent: Gemma's is a multiple of its "
            f"{attention.num_heads} heads, whatever their width"
        )
    return {
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.num_layers,
        "tie_word_embeddings": config.tie_embeddings == "head",
        "rms_norm_eps": expect(config.norm, RMSNormConfig, "model.norm.kind").eps,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "attention_bias": attention.bias is True,
        "attention_dropout": attention.dropout,
        "query_pre_attn_scalar": round(attention.scale**-2) if attention.scale else attention.head_dim,
        "hidden_activation": called(ACTIVATIONS, feed_forward.kind),
        "intermediate_size": feed_forward.d_ff,
        "final_logit_softcapping": getattr(config.head, "softcap", None),
        **write_windows(windows),
        **({} if any(windows) else {"sliding_window": DEFAULTS["sliding_window"]}),  # which transformers insists on
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
