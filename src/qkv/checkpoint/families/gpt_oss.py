"""gpt-oss (OpenAI 2025, arXiv 2508.10925): LLaMA with sinks, a window on every other layer, YaRN, and experts whose
gates are bounded; all with biases. Of all experts, gate and up are published as one, their columns taking turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qkv.checkpoint.families import Family
from qkv.checkpoint.families.experts import experts_of
from qkv.checkpoint.families.gemma2 import write_windows_insisted
from qkv.checkpoint.families.llama import (
    IGNORED,
    RULES,
    attention_of,
    per_layer,
    read_decoder,
    read_windows,
    windows_of,
    write_trunk,
)
from qkv.checkpoint.families.rope import ORIGINAL, write_rope
from qkv.checkpoint.mapping import Alternating, Chain, Rule, Transposed
from qkv.checkpoint.published import Published
from qkv.config.model import ModelConfig

DEFAULTS = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_limit": 7.0,
    "rope_parameters": {"rope_type": "yarn", "factor": 32.0, ORIGINAL: 4096, "truncate": False},
}


def read(published: Published, head: str) -> dict[str, Any]:
    published = published.with_defaults(DEFAULTS)
    published.only("hidden_act", "silu")
    published.only("swiglu_alpha", 1.702)
    model = read_decoder(published, head, theta=150000.0, bias=published.flag("attention_bias", True))
    model["norm"]["rounding"] = "after-weight"
    model["attention"]["sinks"] = True
    model["feed_forward"] = {
        "kind": "moe",
        "num_experts": published.whole("num_local_experts"),
        "top_k": published.whole("num_experts_per_tok"),
        "d_ff": published.whole("intermediate_size"),
        "expert": {"kind": "swiglu_oss", "bias": True, "limit": published.number("swiglu_limit")},
        "router": {"bias": True},
    }
    windows = read_windows(published, published.whole("sliding_window", None), lambda layer: layer % 2 == 0)
    return per_layer(model, [{"attention": {"window": window}} for window in windows])


def write(config: ModelConfig) -> dict[str, Any]:
    experts = experts_of(config)
    return {
        **write_trunk(config),
        **write_rope(config.layers[0].position, config.max_seq_len),
        **write_windows_insisted(windows_of(config)),
        "attention_bias": attention_of(config).bias is True,
        "intermediate_size": experts.d_ff,
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "swiglu_limit": experts.expert.limit,
    }


def rules(config: ModelConfig) -> Sequence[Rule]:
    attention, theirs = "decoder.blocks.*.self_attention.function", "model.layers.*.self_attn"
    ours, published = "decoder.blocks.*.feed_forward.function", "model.layers.*.mlp"
    experts, all_of = f"{ours}.experts", f"{published}.experts"
    return (
        *RULES,
        Rule(f"{attention}.sinks.weight", f"{theirs}.sinks"),
        Rule(f"{ours}.router", f"{published}.router"),
        Rule((f"{experts}.gate", f"{experts}.up"), f"{all_of}.gate_up_proj", Chain((Transposed(), Alternating()))),
        Rule((f"{experts}.gate_bias", f"{experts}.up_bias"), f"{all_of}.gate_up_proj_bias", Alternating()),
        Rule(f"{experts}.down", f"{all_of}.down_proj", Transposed()),
        Rule(f"{experts}.down_bias", f"{all_of}.down_proj_bias"),
    )


FAMILY = Family(
    model_types=("gpt_oss",),
    architectures={"GptOssForCausalLM": "language-model", "GptOssModel": "none"},
    prefix="model.",
    read=read,
    write=write,
    rules=rules,
    ignored=IGNORED,
)
