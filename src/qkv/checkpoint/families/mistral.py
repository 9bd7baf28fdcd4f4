"""Mistral 7B and what followed (Jiang et al. 2023, arXiv 2310.06825): LLaMA with a window on every layer, or on none,
and no biases."""

from __future__ import annotations

from typing import Any

from qkv.checkpoint.families import Family
from qkv.checkpoint.families.llama import (
    FULL,
    IGNORED,
    RULES,
    SLIDING,
    attention_of,
    read_decoder,
    write_decoder,
)
from qkv.checkpoint.families.rope import write_rope
from qkv.checkpoint.published import Published
from qkv.config.model import ModelConfig

DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}


def read(published: Published, head: str) -> dict[str, Any]:
    published = published.with_defaults(DEFAULTS)
    published.only("attention_bias", False)
    published.only("mlp_bias", False)
    window = published.whole("sliding_window", None)
    for kind in published.list("layer_types", []):
        if kind != (FULL if window is None else SLIDING):
            raise published.unsupported("layer_types", kind, "layers alike, which sliding_window speaks of")
    model = read_decoder(published, head)
    model["attention"]["window"] = window
    return model


def write(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_decoder(config),
        **write_rope(config.layers[0].position, config.max_seq_len),
        "sliding_window": attention_of(config).window,
    }


FAMILY = Family(
    model_types=("mistral",),
    architectures={"MistralForCausalLM": "language-model", "MistralModel": "none"},
    prefix="model.",
    read=read,
    write=write,
    rules=lambda config: RULES,
    ignored=IGNORED,
)
