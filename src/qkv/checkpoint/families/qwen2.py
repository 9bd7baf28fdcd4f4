"""Qwen2 and Qwen2.5 (Yang et al. 2024, arXiv 2407.10671): LLaMA with biases on queries, keys and values, and windows
on the upper layers where they are wanted."""

from __future__ import annotations

from typing import Any

from qkv.checkpoint.families import Family
from qkv.checkpoint.families.llama import (
    IGNORED,
    RULES,
    per_layer,
    read_decoder,
    read_windows,
    windows_of,
    write_decoder,
    write_windows,
)
from qkv.checkpoint.families.rope import write_rope
from qkv.checkpoint.published import Published
from qkv.config.model import ModelConfig

DEFAULTS = {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096}


def read(published: Published, head: str) -> dict[str, Any]:
    published = published.with_defaults(DEFAULTS)
    published.only("mlp_bias", False)
    return per_layer(read_decoder(published, head, bias="qkv"), read_window_layers(published))


def read_window_layers(published: Published) -> list[dict[str, Any]]:
    """What each layer has of its own: a window, from layer `max_window_layers` on."""
    window = published.whole("sliding_window", None) if published.flag("use_sliding_window", False) else None
    first = published.whole("max_window_layers", 28)
    windows = read_windows(published, window, lambda layer: window is not None and layer >= first)
    return [{"attention": {"window": window}} for window in windows]


def write(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_decoder(config),
        **write_rope(config.layers[0].position, config.max_seq_len),
        **write_window_layers(config),
    }


def write_window_layers(config: ModelConfig) -> dict[str, Any]:
    """The keys for the windows; `max_window_layers` for versions that do not read `layer_types`."""
    windows = windows_of(config)
    first = next((layer for layer, window in enumerate(windows) if window is not None), None)
    return {
        "use_sliding_window": first is not None,
        "max_window_layers": config.num_layers if first is None else first,
        **write_windows(windows),
    }


FAMILY = Family(
    model_types=("qwen2",),
    architectures={"Qwen2ForCausalLM": "language-model", "Qwen2Model": "none"},
    prefix="model.",
    read=read,
    write=write,
    rules=lambda config: RULES,
    ignored=IGNORED,
)
