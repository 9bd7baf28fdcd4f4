"""Gemma 2 (Gemma team 2024, arXiv 2408.00118): Gemma with norms before and after each function, softcaps on scores and
logits, and a window on every other layer, the first among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qkv.checkpoint.families import Family
from qkv.checkpoint.families.gemma import read_gemma, write_gemma
from qkv.checkpoint.families.llama import (
    ACTIVATIONS,
    COMMON_RULES,
    IGNORED,
    attention_of,
    feed_forward_of,
    per_layer,
    read_windows,
    windows_of,
    write_windows,
)
from qkv.checkpoint.families.rope import read_rope, write_rope
from qkv.checkpoint.mapping import Rule
from qkv.checkpoint.published import Published, called
from qkv.config.errors import QkvError
from qkv.config.model import ModelConfig

RULES = (
    *COMMON_RULES,
    Rule("decoder.blocks.*.self_attention.norm_in", "model.layers.*.input_layernorm"),
    Rule("decoder.blocks.*.self_attention.norm_out", "model.layers.*.post_attention_layernorm"),
    Rule("decoder.blocks.*.feed_forward.norm_in", "model.layers.*.pre_feedforward_layernorm"),
    Rule("decoder.blocks.*.feed_forward.norm_out", "model.layers.*.post_feedforward_layernorm"),
)

SIZES = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
DEFAULTS = {
    **SIZES,
    "max_position_embeddings": 8192,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
"""Which published files may leave out."""


def read(published: Published, head: str) -> dict[str, Any]:
    published = published.with_defaults(DEFAULTS)
    model = read_sandwich(published, head)
    model["attention"]["softcap"] = published.number("attn_logit_softcapping", None)
    windows = read_windows(published, published.whole("sliding_window", None), lambda layer: layer % 2 == 0)
    return per_layer({**model, **read_rope(published)}, [{"attention": {"window": window}} for window in windows])


def read_sandwich(published: Published, head: str) -> dict[str, Any]:
    """What Gemma 2 and 3 say alike: everything but positions, windows and the cap of the scores."""
    model = read_gemma(published, head)
    model["norm"]["placement"] = "sandwich"
    scalar = published.whole("query_pre_attn_scalar", least=1)
    model["attention"]["scale"] = None if scalar == model["attention"]["head_dim"] else scalar**-0.5
    model["feed_forward"]["kind"] = published.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh")
    if head == "language-model":
        model["head"]["softcap"] = published.number("final_logit_softcapping", None)
    return model


def write(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_sandwich(config),
        **write_rope(config.layers[0].position, config.max_seq_len),
        **write_windows_insisted(windows_of(config)),
        "attn_logit_softcapping": attention_of(config).softcap,
    }


def write_sandwich(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `read_sandwich`."""
    attention = attention_of(config)
    if config.d_model % attention.num_heads:
        raise QkvError(
            f"`model.d_model: {config.d_model}` has no equivalent: Gemma's is a multiple of its "
            f"{attention.num_heads} heads, whatever their width"
        )
    return {
        **write_gemma(config),
        "query_pre_attn_scalar": round(attention.scale**-2) if attention.scale else attention.head_dim,
        "hidden_activation": called(ACTIVATIONS, feed_forward_of(config).kind),
        "final_logit_softcapping": getattr(config.head, "softcap", None),
    }


def write_windows_insisted(windows: Sequence[int | None]) -> dict[str, Any]:
    """The keys for the windows, of which transformers insists on one even where no layer has it."""
    written = write_windows(windows)
    return written if any(windows) else {**written, "sliding_window": SIZES["sliding_window"]}


FAMILY = Family(
    model_types=("gemma2",),
    architectures={"Gemma2ForCausalLM": "language-model", "Gemma2Model": "none"},
    prefix="model.",
    read=read,
    write=write,
    rules=lambda config: RULES,
    ignored=IGNORED,
)
