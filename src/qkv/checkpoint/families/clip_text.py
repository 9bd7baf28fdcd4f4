"""CLIP's model of texts (see `clip`): a decoder whose last token's vector is the text's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qkv.checkpoint.families import Family
from qkv.checkpoint.families.clip import IGNORED, layer_rules, read_layers, write_layers
from qkv.checkpoint.mapping import Rule
from qkv.checkpoint.published import Published
from qkv.config.model import ModelConfig


def read(published: Published, head: str) -> dict[str, Any]:
    defaults = {"vocab_size": 49408, "hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8}
    published = published.with_defaults(defaults)
    return {
        "family": "decoder",
        "vocab_size": published.whole("vocab_size"),
        "max_seq_len": published.whole("max_position_embeddings", 77),
        **read_layers(published, pooling="last"),
    }


def write(config: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len,
        **write_layers(config),
    }


def rules(config: ModelConfig) -> Sequence[Rule]:
    return (
        Rule("decoder_embedding.input", "text_model.embeddings.token_embedding"),
        Rule("decoder_embedding.position", "text_model.embeddings.position_embedding"),
        *layer_rules("decoder", "text_model"),
        Rule("decoder.final_norm", "text_model.final_layer_norm"),
        Rule("head.output", "text_projection"),
    )


FAMILY = Family(
    model_types=("clip_text_model",),
    architectures={"CLIPTextModelWithProjection": "embedding"},
    prefix="text_model.",
    read=read,
    write=write,
    rules=rules,
    ignored=IGNORED,
)
