"""OLMo 2 (Team OLMo 2024, arXiv 2501.00656): LLaMA whose norms stand on the output of each function alone, with queries
and keys normalised over all heads at once."""

from __future__ import annotations

from typing import Any

from qkv.checkpoint.families import Family
from qkv.checkpoint.families.llama import COMMON_RULES, IGNORED, attention_of, read_decoder, write_decoder
from qkv.checkpoint.families.rope import write_rope
from qkv.checkpoint.mapping import Rule
from qkv.checkpoint.published import Published
from qkv.config.model import ModelConfig

RULES = (
    *COMMON_RULES,
    Rule("decoder.blocks.*.self_attention.norm_out", "model.layers.*.post_attention_layernorm"),
    Rule("decoder.blocks.*.feed_forward.norm_out", "model.layers.*.post_feedforward_layernorm"),
)

DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}


def read(published: Published, head: str) -> dict[str, Any]:
    published = published.with_defaults(DEFAULTS)
    published.only("mlp_bias", False)
    model = read_decoder(published, head, bias=published.flag("attention_bias", False))
    model["norm"] |= {"placement": "output", "rounding": "after-weight"}
    model["attention"]["qk_norm"] = "full"
    return model


def write(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_decoder(config),
        **write_rope(config.layers[0].position, config.max_seq_len),
        "attention_bias": attention_of(config).bias is True,
    }


FAMILY = Family(
    model_types=("olmo2",),
    architectures={"Olmo2ForCausalLM": "language-model", "Olmo2Model": "none"},
    prefix="model.",
    read=read,
    write=write,
    rules=lambda config: RULES,
    ignored=IGNORED,
)
