"""Phi-3 and Phi-4 (Abdin et al. 2024, arXiv 2404.14219): LLaMA with a window on every layer or on none, LongRoPE for
long contexts, rotary positions on part of a head in some; queries, keys and values published as one, and so are gate
and up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qkv.checkpoint.families import Family
from qkv.checkpoint.families.llama import IGNORED, attention_of, feed_forward_of, read_decoder, write_decoder
from qkv.checkpoint.families.rope import ORIGINAL, write_rope
from qkv.checkpoint.mapping import Rows, Rule
from qkv.checkpoint.published import Published, expect
from qkv.config.model import ModelConfig
from qkv.config.positions import LongRopeScalingConfig, RopeConfig

DEFAULTS = {"max_position_embeddings": 4096, ORIGINAL: 4096, "rms_norm_eps": 1e-5}

EARLIER_NAMES = ("su", "yarn")
"""What files from before it was published call LongRoPE."""


def read(published: Published, head: str) -> dict[str, Any]:
    published = _with_todays_name(published.with_defaults(DEFAULTS))
    published.only("attention_bias", False)
    published.only("mlp_bias", False)
    model = read_decoder(published, head, partial=True)
    scaling = model["position"]["scaling"]
    if scaling is not None and scaling["kind"] != "longrope":
        raise published.unsupported("rope_type", scaling["kind"], "supported: default, longrope")
    model["dropout"] = published.number("resid_pdrop", 0.0)
    model["attention"]["window"] = published.whole("sliding_window", None)
    return model


def _with_todays_name(published: Published) -> Published:
    """The same with the scaling of its rope called longrope, where there is one."""
    keys = dict(published.keys)
    for section in ("rope_scaling", "rope_parameters"):
        if section in published:
            keys[section] = dict(published.section(section).keys)
            for name in ("rope_type", "type"):
                if keys[section].get(name) in EARLIER_NAMES:
                    keys[section][name] = "longrope"
    return Published(keys, published.where, published.tensors)


def write(config: ModelConfig) -> dict[str, Any]:
    rope = expect(config.layers[0].position, RopeConfig, "model.position.kind")
    original = rope.scaling.original_max_seq_len if isinstance(rope.scaling, LongRopeScalingConfig) else None
    return {
        **write_decoder(config),
        **write_rope(rope, config.max_seq_len),
        "partial_rotary_factor": rope.fraction,
        **({} if original is None else {ORIGINAL: original}),
        "sliding_window": attention_of(config).window,
        "resid_pdrop": config.dropout,
    }


def rules(config: ModelConfig) -> Sequence[Rule]:
    attention, d_ff = attention_of(config), feed_forward_of(config).d_ff or 0
    queries, keys = (
        (heads or 0) * (attention.head_dim or 0) for heads in (attention.num_heads, attention.num_kv_heads)
    )
    block, layer = "decoder.blocks.*", "model.layers.*"
    projections = tuple(f"{block}.self_attention.function.{part}" for part in ("query", "key", "value"))
    matrices = (f"{block}.feed_forward.function.gate", f"{block}.feed_forward.function.up")
    return (
        Rule("decoder_embedding.input", "model.embed_tokens"),
        Rule(projections, f"{layer}.self_attn.qkv_proj", Rows((queries, keys, keys))),
        Rule(f"{block}.self_attention.function.output", f"{layer}.self_attn.o_proj"),
        Rule(f"{block}.self_attention.norm_in", f"{layer}.input_layernorm"),
        Rule(matrices, f"{layer}.mlp.gate_up_proj", Rows((d_ff, d_ff))),
        Rule(f"{block}.feed_forward.function.down", f"{layer}.mlp.down_proj"),
        Rule(f"{block}.feed_forward.norm_in", f"{layer}.post_attention_layernorm"),
        Rule("decoder.final_norm", "model.norm"),
        Rule("head", "lm_head"),
    )


FAMILY = Family(
    model_types=("phi3",),
    architectures={"Phi3ForCausalLM": "language-model", "Phi3Model": "none"},
    prefix="model.",
    read=read,
    write=write,
    rules=rules,
    ignored=IGNORED,
)
