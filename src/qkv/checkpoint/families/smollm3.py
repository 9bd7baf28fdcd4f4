"""SmolLM3 (Hugging Face 2025): LLaMA whose every fourth layer has no positions (Yang et al. 2025, arXiv 2501.18795),
and may have a window there."""

from __future__ import annotations

from typing import Any

from qkv.checkpoint.families import Family
from qkv.checkpoint.families.llama import (
    IGNORED,
    RULES,
    attention_of,
    feed_forward_of,
    per_layer,
    read_decoder,
    read_windows,
    windows_of,
    write_decoder,
    write_windows,
)
from qkv.checkpoint.families.rope import write_rope
from qkv.checkpoint.published import Published
from qkv.config.errors import QkvError
from qkv.config.model import ModelConfig
from qkv.config.numbers import MAX_LAYERS
from qkv.config.positions import RopeConfig

DEFAULTS = {"num_key_value_heads": 4, "max_position_embeddings": 32768, "tie_word_embeddings": True}


def read(published: Published, head: str) -> dict[str, Any]:
    published = published.with_defaults(DEFAULTS)
    bias, mlp_bias = published.flag("attention_bias", False), published.flag("mlp_bias", False)
    model = read_decoder(published, head, theta=2e6, bias=bias, mlp_bias=mlp_bias)
    ropes = _read_ropes(published)
    window = published.whole("sliding_window", None) if published.flag("use_sliding_window", False) else None
    windows = read_windows(published, window, lambda layer: window is not None and not ropes[layer])
    layers: list[dict[str, Any]] = [{"attention": {"window": window}} for window in windows]
    for layer, rope in zip(layers, ropes, strict=True):
        if not rope:
            layer["position"] = {"kind": "none"}
    return per_layer(model, layers)


def _read_ropes(published: Published) -> list[bool]:
    """Whether each layer has rotary positions: 1 or 0 in `no_rope_layers`, whose name says the opposite."""
    count = published.whole("num_hidden_layers", least=1, most=MAX_LAYERS)
    every = published.whole("no_rope_layer_interval", 4, least=1)
    told = published.list("no_rope_layers", None)
    if told is None:
        told = [int((layer + 1) % every != 0) for layer in range(count)]
    if len(told) < count or not all(number in (0, 1) for number in told):
        raise QkvError(f"`no_rope_layers` should be 0 or 1 for each of {count} layers", where=published.where)
    return [bool(number) for number in told[:count]]


def write(config: ModelConfig) -> dict[str, Any]:
    windows = windows_of(config)
    positions = [layer.position for layer in config.layers]
    rope = next((position for position in positions if isinstance(position, RopeConfig)), RopeConfig())
    return {
        **write_decoder(config),
        **write_rope(rope, config.max_seq_len),
        "no_rope_layers": [int(isinstance(position, RopeConfig)) for position in positions],
        "use_sliding_window": any(window is not None for window in windows),
        **write_windows(windows),
        "attention_bias": attention_of(config).bias is True,
        "mlp_bias": feed_forward_of(config).bias,
    }


FAMILY = Family(
    model_types=("smollm3",),
    architectures={"SmolLM3ForCausalLM": "language-model", "SmolLM3Model": "none"},
    prefix="model.",
    read=read,
    write=write,
    rules=lambda config: RULES,
    ignored=IGNORED,
)
