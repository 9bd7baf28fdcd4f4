"""Gemma (Gemma team 2024, arXiv 2403.08295): LLaMA with the embedding times sqrt(d_model), a unit offset in its norms,
GEGLU and heads whose width is their own. What Gemma 2 and 3 change is in their own files, and what all three have in
common here."""

from __future__ import annotations

from typing import Any

from qkv.checkpoint.families import Family
from qkv.checkpoint.families.llama import (
    ACTIVATIONS,
    IGNORED,
    RULES,
    attention_of,
    feed_forward_of,
    read_tying,
    write_trunk,
)
from qkv.checkpoint.families.rope import read_rope, write_rope
from qkv.checkpoint.published import Published, called
from qkv.config.model import ModelConfig

GELU_MEANS_TANH = {"gelu_pytorch_tanh": "geglu_tanh", **ACTIVATIONS, "gelu": "geglu_tanh"}
"""`hidden_act`: the first files say gelu, and were trained with its approximation."""

DEFAULTS = {
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
"""Which published files may leave out."""


def read(published: Published, head: str) -> dict[str, Any]:
    published = published.with_defaults(DEFAULTS)
    model = read_gemma(published, head)
    model["feed_forward"]["kind"] = published.choice("hidden_act", GELU_MEANS_TANH, "gelu_pytorch_tanh")
    return {**model, **read_rope(published)}


def read_gemma(published: Published, head: str) -> dict[str, Any]:
    """What all Gemmas say alike: everything but the positions and the kind of the feed-forward."""
    published.only("is_causal", True)
    published.only("use_bidirectional_attention", False)
    return {
        "family": "decoder",
        "vocab_size": published.whole("vocab_size"),
        "d_model": published.whole("hidden_size"),
        "num_layers": published.whole("num_hidden_layers"),
        "tie_embeddings": read_tying(published, head),
        "embedding": {"scale": "sqrt-d-model"},
        "norm": {
            "kind": "rmsnorm",
            "eps": published.number("rms_norm_eps", 1e-6),
            "unit_offset": True,
            "rounding": "after-weight",
        },
        "attention": {
            "num_heads": published.whole("num_attention_heads"),
            "num_kv_heads": published.whole("num_key_value_heads"),
            "head_dim": published.whole("head_dim"),
            "bias": published.flag("attention_bias", False),
            "dropout": published.number("attention_dropout", 0.0),
        },
        "feed_forward": {"d_ff": published.whole("intermediate_size")},
        "head": {"kind": head},
    }


def write(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_gemma(config),
        **write_rope(config.layers[0].position, config.max_seq_len),
        "hidden_act": called(GELU_MEANS_TANH, feed_forward_of(config).kind),
    }


def write_gemma(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `read_gemma`."""
    return {
        **write_trunk(config),
        "attention_bias": attention_of(config).bias is True,
        "intermediate_size": feed_forward_of(config).d_ff,
    }


FAMILY = Family(
    model_types=("gemma",),
    architectures={"GemmaForCausalLM": "language-model", "GemmaModel": "none"},
    prefix="model.",
    read=read,
    write=write,
    rules=lambda config: RULES,
    ignored=IGNORED,
)
