"""Mixtral (Jiang et al. 2024, arXiv 2401.04088): Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qkv.checkpoint.families import Family
from qkv.checkpoint.families.experts import expert_rules, experts_of
from qkv.checkpoint.families.llama import ACTIVATIONS, IGNORED, RULES, attention_of, read_decoder, write_trunk
from qkv.checkpoint.families.rope import write_rope
from qkv.checkpoint.mapping import Rule
from qkv.checkpoint.published import Published, called
from qkv.config.model import ModelConfig

DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def read(published: Published, head: str) -> dict[str, Any]:
    published = published.with_defaults(DEFAULTS)
    published.only("attention_bias", False)
    published.only("mlp_bias", False)
    model = read_decoder(published, head, theta=1e6)
    model["attention"]["window"] = published.whole("sliding_window", None)
    one = model["feed_forward"]
    model["feed_forward"] = {
        "kind": "moe",
        "num_experts": published.whole("num_local_experts"),
        "top_k": published.whole("num_experts_per_tok"),
        "d_ff": one["d_ff"],
        "expert": {"kind": one["kind"]},
    }
    return model


def write(config: ModelConfig) -> dict[str, Any]:
    experts = experts_of(config)
    return {
        **write_trunk(config),
        **write_rope(config.layers[0].position, config.max_seq_len),
        "sliding_window": attention_of(config).window,
        "hidden_act": called(ACTIVATIONS, experts.expert.kind),
        "intermediate_size": experts.d_ff,
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
    }


def rules(config: ModelConfig) -> Sequence[Rule]:
    names = {"gate": "w1", "down": "w2", "up": "w3"}
    return (*RULES, *expert_rules(config, "model.layers.*.block_sparse_moe", names))


FAMILY = Family(
    model_types=("mixtral",),
    architectures={"MixtralForCausalLM": "language-model", "MixtralModel": "none"},
    prefix="model.",
    read=read,
    write=write,
    rules=rules,
    ignored=IGNORED,
)
