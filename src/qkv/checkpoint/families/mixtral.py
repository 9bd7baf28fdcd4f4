"""Mixtral (Jiang et al. 2024, arXiv 2401.04088): Mistral with a mixture of experts in every layer, whose matrices are
published one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qkv.checkpoint.families import Family
from qkv.checkpoint.families.llama import ACTIVATIONS, IGNORED, RULES, attention_of, read_decoder, write_trunk
from qkv.checkpoint.families.rope import write_rope
from qkv.checkpoint.mapping import Rule, Stacked
from qkv.checkpoint.published import Published, called, expect
from qkv.config.feed_forward import MixtureOfExpertsConfig
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
    model["feed_forward"] = {
        "kind": "moe",
        "num_experts": published.whole("num_local_experts"),
        "top_k": published.whole("num_experts_per_tok"),
        "d_ff": published.whole("intermediate_size"),
        "expert": {"kind": published.choice("hidden_act", ACTIVATIONS, "silu")},
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


def experts_of(config: ModelConfig) -> MixtureOfExpertsConfig:
    """The experts of the first layer that has any."""
    kinds = [layer.feed_forward for layer in config.layers]
    mixed = next((kind for kind in kinds if isinstance(kind, MixtureOfExpertsConfig)), kinds[0])
    return expect(mixed, MixtureOfExpertsConfig, "model.feed_forward.kind")


def expert_rules(config: ModelConfig, place: str, names: Mapping[str, str]) -> tuple[Rule, ...]:
    """The names of a mixture in a layer at `place`. `names`: of an expert's matrices, by ours."""
    ours = "decoder.blocks.*.feed_forward.function"
    count = experts_of(config).num_experts
    return (
        Rule(f"{ours}.router", f"{place}.gate"),
        *(
            Rule(
                f"{ours}.experts.{matrix}", tuple(f"{place}.experts.{e}.{name}.weight" for e in range(count)), Stacked()
            )
            for matrix, name in names.items()
        ),
    )


def rules(config: ModelConfig) -> Sequence[Rule]:
    place = "model.layers.*.block_sparse_moe"
    return (*RULES, *expert_rules(config, place, {"gate": "w1", "down": "w2", "up": "w3"}))


FAMILY = Family(
    model_types=("mixtral",),
    architectures={"MixtralForCausalLM": "language-model", "MixtralModel": "none"},
    prefix="model.",
    read=read,
    write=write,
    rules=rules,
    ignored=IGNORED,
)
