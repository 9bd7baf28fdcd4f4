"""GPT-NeoX and Pythia (Black et al. 2022, arXiv 2204.06745): attention and feed-forward beside each other, each with a
LayerNorm of its own; rotary positions on part of a head; queries, keys and values published as one, head by head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qkv.checkpoint.families import Family
from qkv.checkpoint.families.gpt2 import ACTIVATIONS
from qkv.checkpoint.families.llama import IGNORED, attention_of, feed_forward_of, read_tying
from qkv.checkpoint.families.rope import read_rope, write_rope
from qkv.checkpoint.mapping import HeadRows, Rule
from qkv.checkpoint.published import Published, called, expect
from qkv.config.model import ModelConfig
from qkv.config.parts import LayerNormConfig
from qkv.config.positions import RopeConfig

DEFAULTS = {
    "vocab_size": 50432,
    "max_position_embeddings": 2048,
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "num_hidden_layers": 44,
    "num_attention_heads": 64,
    "rotary_emb_base": 10000.0,
    "rotary_pct": 0.25,
}


def read(published: Published, head: str) -> dict[str, Any]:
    published = published.with_defaults(DEFAULTS)
    published.only("is_causal", True)
    rope = {"rope_theta": published.number("rotary_emb_base"), "partial_rotary_factor": published.number("rotary_pct")}
    dropout = published.number("hidden_dropout", 0.0)
    return {
        "family": "decoder",
        "vocab_size": published.whole("vocab_size"),
        "d_model": published.whole("hidden_size"),
        "num_layers": published.whole("num_hidden_layers"),
        "tie_embeddings": read_tying(published, head),
        "dropout": dropout,
        **read_rope(Published({**published.keys, **rope}, published.where), partial=True),
        "norm": {"kind": "layernorm", "eps": published.number("layer_norm_eps", 1e-5)},
        "parallel": "two-norms" if published.flag("use_parallel_residual", True) else "none",
        "attention": {
            "num_heads": published.whole("num_attention_heads"),
            "bias": published.flag("attention_bias", True),
            "dropout": published.number("attention_dropout", 0.0),
        },
        "feed_forward": {
            "kind": published.choice("hidden_act", ACTIVATIONS, "gelu"),
            "d_ff": published.whole("intermediate_size"),
            "bias": True,
        },
        "head": {"kind": head},
    }


def write(config: ModelConfig) -> dict[str, Any]:
    attention, feed_forward = attention_of(config), feed_forward_of(config)
    rope = expect(config.layers[0].position, RopeConfig, "model.position.kind")
    keys = write_rope(rope, config.max_seq_len)
    partial = {"partial_rotary_factor": rope.fraction}
    return {
        **keys,
        "rope_parameters": {**keys["rope_parameters"], **partial},
        "rotary_emb_base": rope.theta,
        "rotary_pct": rope.fraction,
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": feed_forward.d_ff,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": attention.num_heads,
        "attention_bias": attention.bias is True,
        "hidden_act": called(ACTIVATIONS, feed_forward.kind),
        "layer_norm_eps": expect(config.norm, LayerNormConfig, "model.norm.kind").eps,
        "use_parallel_residual": config.layers[0].parallel == "two-norms",
        "tie_word_embeddings": config.tie_embeddings == "head",
        "hidden_dropout": config.dropout,
        "attention_dropout": attention.dropout,
    }


def rules(config: ModelConfig) -> Sequence[Rule]:
    block, layer = "decoder.blocks.*", "gpt_neox.layers.*"
    heads = attention_of(config)
    assert heads.head_dim is not None
    if config.layers[0].parallel == "none":
        norms = (f"{block}.self_attention.norm_in", f"{block}.feed_forward.norm_in")
        attention, feed_forward = f"{block}.self_attention.function", f"{block}.feed_forward.function"
    else:
        norms = (f"{block}.parallel.norm_in", f"{block}.parallel.norm_feed_forward")
        attention, feed_forward = f"{block}.parallel.attention", f"{block}.parallel.feed_forward"
    return (
        Rule("decoder_embedding.input", "gpt_neox.embed_in"),
        Rule(norms[0], f"{layer}.input_layernorm"),
        Rule(norms[1], f"{layer}.post_attention_layernorm"),
        Rule(
            (f"{attention}.query", f"{attention}.key", f"{attention}.value"),
            f"{layer}.attention.query_key_value",
            HeadRows(heads.num_heads, (heads.head_dim,) * 3),
        ),
        Rule(f"{attention}.output", f"{layer}.attention.dense"),
        Rule(f"{feed_forward}.up", f"{layer}.mlp.dense_h_to_4h"),
        Rule(f"{feed_forward}.down", f"{layer}.mlp.dense_4h_to_h"),
        Rule("decoder.final_norm", "gpt_neox.final_layer_norm"),
        Rule("head", "embed_out"),
    )


FAMILY = Family(
    model_types=("gpt_neox",),
    architectures={"GPTNeoXForCausalLM": "language-model", "GPTNeoXModel": "none"},
    prefix="gpt_neox.",
    read=read,
    write=write,
    rules=rules,
    renames=((r"lm_head\.", "embed_out."),),
    ignored=(*IGNORED, r".*\.attention\.(masked_)?bias"),
)
