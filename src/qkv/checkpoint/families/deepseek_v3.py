"""DeepSeek-V3 and R1 (DeepSeek-AI 2024, arXiv 2412.19437): latent attention; experts chosen group by group, by
sigmoids and a correction, and a shared one, in all layers but the first few. What predicts several tokens ahead is
published as one layer more, and left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qkv.checkpoint.families import Family
from qkv.checkpoint.families.experts import MATRICES, dense_layers, dense_width, expert_rules, experts_of
from qkv.checkpoint.families.llama import (
    ACTIVATIONS,
    FRAME_RULES,
    IGNORED,
    NORM_RULES,
    per_layer,
    read_decoder,
    write_sizes,
)
from qkv.checkpoint.families.rope import write_rope
from qkv.checkpoint.mapping import HeadRows, Rule
from qkv.checkpoint.published import Published, called, expect
from qkv.config.attention import LatentAttentionConfig
from qkv.config.errors import QkvError
from qkv.config.model import ModelConfig
from qkv.config.numbers import MAX_LAYERS
from qkv.config.positions import RopeConfig

DEFAULTS = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "max_position_embeddings": 4096,
}
PLAIN = {"attention_bias": False, "mlp_bias": False, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
"""Keys that can be said in one way only."""


def read(published: Published, head: str) -> dict[str, Any]:
    published = published.with_defaults(DEFAULTS)
    for key, value in PLAIN.items():
        published.only(key, value)
    published.only("moe_layer_freq", 1)
    published.only("num_key_value_heads", published.whole("num_attention_heads"))
    model = read_decoder(published, head)
    model["position"]["layout"] = "interleaved" if published.flag("rope_interleave", True) else "half"
    model["attention"] = {
        "kind": "latent",
        "num_heads": published.whole("num_attention_heads"),
        "q_rank": published.whole("q_lora_rank", None),
        "kv_rank": published.whole("kv_lora_rank"),
        "nope_dim": published.whole("qk_nope_head_dim"),
        "rope_dim": published.whole("qk_rope_head_dim"),
        "value_dim": published.whole("v_head_dim"),
        "dropout": published.number("attention_dropout", 0.0),
    }
    dense, groups = model.pop("feed_forward"), published.whole("n_group", 1)
    width = published.whole("moe_intermediate_size")
    mixture = {
        "kind": "moe",
        "num_experts": published.whole("n_routed_experts"),
        "top_k": published.whole("num_experts_per_tok"),
        "d_ff": width,
        "expert": {"kind": dense["kind"]},
        "shared": {"d_ff": width * published.whole("n_shared_experts", least=1, most=2**13)},
        "router": {
            "score": "sigmoid",
            "normalise": published.flag("norm_topk_prob", True),
            "scale": published.number("routed_scaling_factor"),
            "num_groups": groups,
            "top_groups": published.whole("topk_group", 1),
            "group_score": "top-2-sum" if groups > 1 else "max",
            "correction_bias": True,
        },
    }
    count = published.whole("num_hidden_layers", least=1, most=MAX_LAYERS)
    first = published.whole("first_k_dense_replace", 0)
    return per_layer(model, [{"feed_forward": dense if layer < first else mixture} for layer in range(count)])


def write(config: ModelConfig) -> dict[str, Any]:
    attention, experts = latent_of(config), experts_of(config)
    rope = expect(config.layers[0].position, RopeConfig, "model.position.kind")
    if experts.shared is None or experts.d_ff is None:
        raise QkvError("`model.feed_forward.shared: null` has no equivalent in this architecture")
    return {
        **write_sizes(config),
        **write_rope(rope, config.max_seq_len),
        "rope_interleave": rope.layout == "interleaved",
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_heads,
        "q_lora_rank": attention.q_rank,
        "kv_lora_rank": attention.kv_rank,
        "qk_nope_head_dim": attention.nope_dim,
        "qk_rope_head_dim": attention.rope_dim,
        "v_head_dim": attention.value_dim,
        "attention_dropout": attention.dropout,
        "hidden_act": called(ACTIVATIONS, experts.expert.kind),
        "intermediate_size": dense_width(config),
        "moe_intermediate_size": experts.d_ff,
        "n_routed_experts": experts.num_experts,
        "n_shared_experts": max(experts.shared.d_ff // experts.d_ff, 1),
        "num_experts_per_tok": experts.top_k,
        "norm_topk_prob": experts.router.normalise,
        "routed_scaling_factor": experts.router.scale,
        "n_group": experts.router.num_groups,
        "topk_group": experts.router.top_groups,
        "first_k_dense_replace": len(dense_layers(config)),
        "num_nextn_predict_layers": 0,
        **PLAIN,
    }


def latent_of(config: ModelConfig) -> LatentAttentionConfig:
    """The first layer's attention."""
    return expect(config.layers[0].attention, LatentAttentionConfig, "model.attention.kind")


def rules(config: ModelConfig) -> Sequence[Rule]:
    ours, theirs = "decoder.blocks.*.self_attention.function", "model.layers.*.self_attn"
    experts, published = "decoder.blocks.*.feed_forward.function", "model.layers.*.mlp"
    attention = latent_of(config)
    assert attention.nope_dim is not None
    assert attention.value_dim is not None
    heads = HeadRows(attention.num_heads, (attention.nope_dim, attention.value_dim))
    return (
        *FRAME_RULES,
        *NORM_RULES,
        Rule(f"{ours}.query_down", f"{theirs}.q_a_proj"),
        Rule(f"{ours}.query_norm", f"{theirs}.q_a_layernorm"),
        Rule(f"{ours}.query_up", f"{theirs}.{'q_proj' if attention.q_rank is None else 'q_b_proj'}"),
        Rule(f"{ours}.latent_down", f"{theirs}.kv_a_proj_with_mqa"),
        Rule(f"{ours}.latent_norm", f"{theirs}.kv_a_layernorm"),
        Rule((f"{ours}.key_up", f"{ours}.value_up"), f"{theirs}.kv_b_proj", heads),
        Rule(f"{ours}.output", f"{theirs}.o_proj"),
        *expert_rules(config, published),
        Rule(f"{experts}.router.correction_bias", f"{published}.gate.e_score_correction_bias"),
        *(
            Rule(f"{experts}.shared.{matrix}", f"{published}.shared_experts.{name}")
            for matrix, name in MATRICES.items()
        ),
    )


def left_out(config: ModelConfig) -> Mapping[str, str]:
    layer = rf"model\.layers\.{config.num_layers}\..*"
    return {layer: f"multi-token prediction (`model.layers.{config.num_layers}`)"}


FAMILY = Family(
    model_types=("deepseek_v3",),
    architectures={"DeepseekV3ForCausalLM": "language-model", "DeepseekV3Model": "none"},
    prefix="model.",
    read=read,
    write=write,
    rules=rules,
    ignored=IGNORED,
    left_out=left_out,
)
