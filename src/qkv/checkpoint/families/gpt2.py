"""GPT-2 (Radford et al. 2019): pre-LayerNorm, learned positions, GELU, biases everywhere; matrices published as
[in, out], and queries, keys and values as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qkv.checkpoint.families import Family
from qkv.checkpoint.families.llama import attention_of, feed_forward_of, read_tying
from qkv.checkpoint.mapping import Chain, Rows, Rule, Transposed
from qkv.checkpoint.published import Published, called, expect
from qkv.config.model import ModelConfig
from qkv.config.parts import LayerNormConfig
from qkv.config.positions import LearnedConfig

ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
"""The activation of a feed-forward without a gate."""

DEFAULTS = {
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "tie_word_embeddings": True,
}


def read(published: Published, head: str) -> dict[str, Any]:
    published = published.with_defaults(DEFAULTS)
    published.only("is_causal", True)
    published.only("scale_attn_by_inverse_layer_idx", False)
    published.only("add_cross_attention", False)
    d_model = published.whole("n_embd")
    return {
        "family": "decoder",
        "vocab_size": published.whole("vocab_size"),
        "max_seq_len": published.whole("n_positions"),
        "d_model": d_model,
        "num_layers": published.whole("n_layer"),
        "tie_embeddings": read_tying(published, head),
        "dropout": published.number("resid_pdrop"),
        "embedding": {"dropout": published.number("embd_pdrop")},
        "position": {"kind": "learned"},
        "norm": {"kind": "layernorm", "eps": published.number("layer_norm_epsilon", 1e-5)},
        "attention": {
            "num_heads": published.whole("n_head"),
            "bias": True,
            "scale": None if published.flag("scale_attn_weights", True) else 1.0,
            "dropout": published.number("attn_pdrop"),
        },
        "feed_forward": {
            "kind": published.choice("activation_function", ACTIVATIONS, "gelu_new"),
            "d_ff": published.whole("n_inner", 4 * d_model),
            "bias": True,
        },
        "head": {"kind": head},
    }


def write(config: ModelConfig) -> dict[str, Any]:
    attention, feed_forward = attention_of(config), feed_forward_of(config)
    expect(config.position, LearnedConfig, "model.position.kind")
    return {
        "vocab_size": config.vocab_size,
        "n_positions": config.max_seq_len,
        "n_embd": config.d_model,
        "n_layer": config.num_layers,
        "n_head": attention.num_heads,
        "n_inner": feed_forward.d_ff,
        "activation_function": called(ACTIVATIONS, feed_forward.kind),
        "layer_norm_epsilon": expect(config.norm, LayerNormConfig, "model.norm.kind").eps,
        "scale_attn_weights": attention.scale is None,
        "tie_word_embeddings": config.tie_embeddings == "head",
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout if config.embedding.dropout is None else config.embedding.dropout,
        "attn_pdrop": attention.dropout,
    }


def rules(config: ModelConfig) -> Sequence[Rule]:
    attention, ours = "decoder.blocks.*.self_attention", "decoder.blocks.*.self_attention.function"
    return (
        Rule("decoder_embedding.input", "transformer.wte"),
        Rule("decoder_embedding.position", "transformer.wpe"),
        Rule(f"{attention}.norm_in", "transformer.h.*.ln_1"),
        Rule(
            (f"{ours}.query", f"{ours}.key", f"{ours}.value"),
            "transformer.h.*.attn.c_attn",
            Chain((Transposed(), Rows((config.d_model,) * 3))),
        ),
        Rule(f"{ours}.output", "transformer.h.*.attn.c_proj", Transposed()),
        Rule("decoder.blocks.*.feed_forward.norm_in", "transformer.h.*.ln_2"),
        Rule("decoder.blocks.*.feed_forward.function.up", "transformer.h.*.mlp.c_fc", Transposed()),
        Rule("decoder.blocks.*.feed_forward.function.down", "transformer.h.*.mlp.c_proj", Transposed()),
        Rule("decoder.final_norm", "transformer.ln_f"),
        Rule("head", "lm_head"),
    )


FAMILY = Family(
    model_types=("gpt2",),
    architectures={"GPT2LMHeadModel": "language-model", "GPT2Model": "none"},
    prefix="transformer.",
    read=read,
    write=write,
    rules=rules,
    ignored=(r".*\.attn\.(masked_)?bias",),
)
