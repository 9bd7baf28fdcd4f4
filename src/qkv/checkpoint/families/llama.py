"""LLaMA 1 to 3.x (Touvron et al. 2023, arXiv 2302.13971; Dubey et al. 2024, arXiv 2407.21783): pre-RMSNorm, rotary
positions, grouped-query attention, SwiGLU. What Mistral, Qwen and SmolLM3 change is in their own files, and what all
these have in common here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from qkv.checkpoint.families import Family
from qkv.checkpoint.families.rope import read_rope, write_rope
from qkv.checkpoint.mapping import Rule
from qkv.checkpoint.published import Published, called, expect
from qkv.config.attention import StandardAttentionConfig
from qkv.config.errors import QkvError
from qkv.config.feed_forward import DenseFeedForwardConfig
from qkv.config.merge import merge
from qkv.config.model import ModelConfig
from qkv.config.numbers import MAX_LAYERS
from qkv.config.parts import RMSNormConfig

FRAME_RULES = (
    Rule("decoder_embedding.input", "model.embed_tokens"),
    Rule("decoder.blocks.*.feed_forward.function.gate", "model.layers.*.mlp.gate_proj"),
    Rule("decoder.blocks.*.feed_forward.function.up", "model.layers.*.mlp.up_proj"),
    Rule("decoder.blocks.*.feed_forward.function.down", "model.layers.*.mlp.down_proj"),
    Rule("decoder.final_norm", "model.norm"),
    Rule("head", "lm_head"),
)
"""All but attention and the norms of the layers."""

COMMON_RULES = (
    *FRAME_RULES,
    Rule("decoder.blocks.*.self_attention.function.query", "model.layers.*.self_attn.q_proj"),
    Rule("decoder.blocks.*.self_attention.function.key", "model.layers.*.self_attn.k_proj"),
    Rule("decoder.blocks.*.self_attention.function.value", "model.layers.*.self_attn.v_proj"),
    Rule("decoder.blocks.*.self_attention.function.output", "model.layers.*.self_attn.o_proj"),
    Rule("decoder.blocks.*.self_attention.function.query_norm", "model.layers.*.self_attn.q_norm"),
    Rule("decoder.blocks.*.self_attention.function.key_norm", "model.layers.*.self_attn.k_norm"),
)

NORM_RULES = (
    Rule("decoder.blocks.*.self_attention.norm_in", "model.layers.*.input_layernorm"),
    Rule("decoder.blocks.*.feed_forward.norm_in", "model.layers.*.post_attention_layernorm"),
)

RULES = (*COMMON_RULES, *NORM_RULES)

IGNORED = (r".*\.rotary_emb\.inv_freq",)

ACTIVATIONS = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_pytorch_tanh": "geglu_tanh",
    "gelu_new": "geglu_tanh",
}
"""`hidden_act` of a gated feed-forward."""

FULL, SLIDING = "full_attention", "sliding_attention"
"""The `layer_types`."""


def read(published: Published, head: str) -> dict[str, Any]:
    published = published.with_defaults({"max_position_embeddings": 2048})
    bias, mlp_bias = published.flag("attention_bias", False), published.flag("mlp_bias", False)
    return read_decoder(published, head, bias=bias, mlp_bias=mlp_bias)


def read_decoder(
    published: Published,
    head: str,
    *,
    theta: float = 10000.0,
    partial: bool = False,
    bias: bool | str = False,
    mlp_bias: bool = False,
) -> dict[str, Any]:
    """The `model` section of a decoder like LLaMA's. theta, partial: as for `read_rope`; bias, mlp_bias: of the
    projections."""
    published.only("is_causal", True)
    return {
        "family": "decoder",
        "vocab_size": published.whole("vocab_size"),
        "d_model": published.whole("hidden_size"),
        "num_layers": published.whole("num_hidden_layers"),
        "tie_embeddings": read_tying(published, head),
        **read_rope(published, theta, partial=partial),
        "norm": {"kind": "rmsnorm", "eps": published.number("rms_norm_eps", 1e-6)},
        "attention": {
            "num_heads": published.whole("num_attention_heads"),
            "num_kv_heads": published.whole("num_key_value_heads", None),
            "head_dim": published.whole("head_dim", None),
            "bias": bias,
            "dropout": published.number("attention_dropout", 0.0),
        },
        "feed_forward": {
            "kind": published.choice("hidden_act", ACTIVATIONS, "silu"),
            "d_ff": published.whole("intermediate_size"),
            "bias": mlp_bias,
        },
        "head": {"kind": head},
    }


def read_tying(published: Published, head: str) -> str:
    """`tie_embeddings`: a bare model has nothing to tie."""
    return "head" if head == "language-model" and published.flag("tie_word_embeddings", False) else "none"


def read_windows(published: Published, window: int | None, slides: Callable[[int], bool]) -> list[int | None]:
    """The window of each layer, None where it sees all: by `layer_types`, or where those are not told, by whether
    `slides` says so of a layer's number."""
    count = published.whole("num_hidden_layers", least=1, most=MAX_LAYERS)
    kinds = published.list("layer_types", None)
    if kinds is None:
        kinds = [SLIDING if slides(layer) else FULL for layer in range(count)]
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            raise published.unsupported("layer_types", kind, f"supported: {FULL}, {SLIDING}")
    if len(kinds) != count:
        raise QkvError(f"`layer_types` tells of {len(kinds)} layers, and there are {count}", where=published.where)
    if window is None and SLIDING in kinds:
        raise QkvError("layers have a window, and `sliding_window` is not said", where=published.where)
    return [window if kind == SLIDING else None for kind in kinds]


def per_layer(model: Mapping[str, Any], layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A `model` section with what each layer has of its own; what all have alike becomes the model's."""
    if all(layer == layers[0] for layer in layers):
        return merge(model, layers[0])
    return {**model, "layers": layers}


def write(config: ModelConfig) -> dict[str, Any]:
    attention, feed_forward = attention_of(config), feed_forward_of(config)
    if config.d_model % attention.num_heads:
        raise QkvError(
            f"`model.d_model: {config.d_model}` has no equivalent: LLaMA's is a multiple of its "
            f"{attention.num_heads} heads, whatever their width"
        )
    return {
        **write_decoder(config),
        **write_rope(config.layers[0].position, config.max_seq_len),
        "attention_bias": attention.bias is True,
        "mlp_bias": feed_forward.bias,
    }


def write_decoder(config: ModelConfig) -> dict[str, Any]:
    """What all decoders like LLaMA's say, besides positions and biases."""
    feed_forward = feed_forward_of(config)
    return {
        **write_trunk(config),
        "hidden_act": called(ACTIVATIONS, feed_forward.kind),
        "intermediate_size": feed_forward.d_ff,
    }


def write_trunk(config: ModelConfig) -> dict[str, Any]:
    """The same without the feed-forward."""
    attention = attention_of(config)
    return {
        **write_sizes(config),
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "attention_dropout": attention.dropout,
    }


def write_sizes(config: ModelConfig) -> dict[str, Any]:
    """The same without attention."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.num_layers,
        "tie_word_embeddings": config.tie_embeddings == "head",
        "rms_norm_eps": expect(config.norm, RMSNormConfig, "model.norm.kind").eps,
    }


def attention_of(config: ModelConfig, layer: int = 0) -> StandardAttentionConfig:
    """A layer's attention, of the kind that all families have."""
    return expect(config.layers[layer].attention, StandardAttentionConfig, "model.attention.kind")


def feed_forward_of(config: ModelConfig) -> DenseFeedForwardConfig:
    """The first layer's feed-forward, of the kind that all families have."""
    return expect(config.layers[0].feed_forward, DenseFeedForwardConfig, "model.feed_forward.kind")


def windows_of(config: ModelConfig) -> list[int | None]:
    """The window of each layer."""
    return [attention_of(config, layer).window for layer in range(config.num_layers)]


def write_windows(windows: Sequence[int | None]) -> dict[str, Any]:
    """The first layer's window that has one stands for all: reading back tells where others differ."""
    return {
        "sliding_window": next((window for window in windows if window is not None), None),
        "layer_types": [FULL if window is None else SLIDING for window in windows],
    }


FAMILY = Family(
    model_types=("llama",),
    architectures={"LlamaForCausalLM": "language-model", "LlamaModel": "none"},
    prefix="model.",
    read=read,
    write=write,
    rules=lambda config: RULES,
    ignored=IGNORED,
)
