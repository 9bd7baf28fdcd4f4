"""Qwen3, mixtures of experts (Yang et al. 2025, arXiv 2505.09388): Qwen3 with experts in all layers but those named,
and a window on every layer or on none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qkv.checkpoint.families import Family
from qkv.checkpoint.families.experts import dense_layers, dense_width, expert_rules, experts_of
from qkv.checkpoint.families.llama import (
    ACTIVATIONS,
    IGNORED,
    RULES,
    attention_of,
    per_layer,
    read_decoder,
    write_trunk,
)
from qkv.checkpoint.families.rope import write_rope
from qkv.checkpoint.mapping import Rule
from qkv.checkpoint.published import Published, called
from qkv.config.model import ModelConfig
from qkv.config.numbers import MAX_LAYERS

DEFAULTS = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}


def read(published: Published, head: str) -> dict[str, Any]:
    published = published.with_defaults(DEFAULTS)
    published.only("mlp_bias", False)
    model = read_decoder(published, head, bias=published.flag("attention_bias", False))
    model["attention"]["qk_norm"] = "per-head"
    if published.flag("use_sliding_window", False):
        model["attention"]["window"] = published.whole("sliding_window", None)
    dense = model.pop("feed_forward")
    mixture = {
        "kind": "moe",
        "num_experts": published.whole("num_experts", published.whole("num_local_experts", 128)),
        "top_k": published.whole("num_experts_per_tok"),
        "d_ff": published.whole("moe_intermediate_size"),
        "expert": {"kind": dense["kind"]},
        "router": {"normalise": published.flag("norm_topk_prob", False)},
    }
    count = published.whole("num_hidden_layers", least=1, most=MAX_LAYERS)
    every, without = published.whole("decoder_sparse_step", 1, least=1), published.list("mlp_only_layers", [])
    mixed = [layer not in without and (layer + 1) % every == 0 for layer in range(count)]
    return per_layer(model, [{"feed_forward": mixture if is_mixed else dense} for is_mixed in mixed])


def write(config: ModelConfig) -> dict[str, Any]:
    attention, experts = attention_of(config), experts_of(config)
    return {
        **write_trunk(config),
        **write_rope(config.layers[0].position, config.max_seq_len),
        "attention_bias": attention.bias is True,
        "use_sliding_window": attention.window is not None,
        "sliding_window": attention.window,
        "hidden_act": called(ACTIVATIONS, experts.expert.kind),
        "intermediate_size": dense_width(config),
        "moe_intermediate_size": experts.d_ff,
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "norm_topk_prob": experts.router.normalise,
        "mlp_only_layers": list(dense_layers(config)),
    }


def rules(config: ModelConfig) -> Sequence[Rule]:
    return (*RULES, *expert_rules(config, "model.layers.*.mlp"))


FAMILY = Family(
    model_types=("qwen3_moe",),
    architectures={"Qwen3MoeForCausalLM": "language-model", "Qwen3MoeModel": "none"},
    prefix="model.",
    read=read,
    write=write,
    rules=rules,
    ignored=IGNORED,
)
