"""Qwen3, dense (Yang et al. 2025, arXiv 2505.09388): LLaMA with queries and keys normalised per head, a head width of
its own, and Qwen2's windows."""

from __future__ import annotations

from typing import Any

from qkv.checkpoint.families import Family
from qkv.checkpoint.families.llama import IGNORED, RULES, attention_of, per_layer, read_decoder, write_decoder
from qkv.checkpoint.families.qwen2 import DEFAULTS, read_window_layers, write_window_layers
from qkv.checkpoint.families.rope import write_rope
from qkv.checkpoint.published import Published
from qkv.config.model import ModelConfig


def read(published: Published, head: str) -> dict[str, Any]:
    published = published.with_defaults({**DEFAULTS, "head_dim": 128})
    published.only("mlp_bias", False)
    model = read_decoder(published, head, bias=published.flag("attention_bias", False))
    model["attention"]["qk_norm"] = "per-head"
    return per_layer(model, read_window_layers(published))


def write(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_decoder(config),
        **write_rope(config.layers[0].position, config.max_seq_len),
        **write_window_layers(config),
        "attention_bias": attention_of(config).bias is True,
    }


FAMILY = Family(
    model_types=("qwen3",),
    architectures={"Qwen3ForCausalLM": "language-model", "Qwen3Model": "none"},
    prefix="model.",
    read=read,
    write=write,
    rules=lambda config: RULES,
    ignored=IGNORED,
)
