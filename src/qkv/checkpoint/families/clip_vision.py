"""CLIP's model of images (see `clip`): a ViT with a norm behind its embedding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qkv.checkpoint.families import Family
from qkv.checkpoint.families.clip import IGNORED, layer_rules, read_layers, write_layers
from qkv.checkpoint.mapping import Rule
from qkv.checkpoint.published import Published, expect
from qkv.config.model import ModelConfig
from qkv.config.parts import PatchInputConfig


def read(published: Published, head: str) -> dict[str, Any]:
    defaults = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
    published = published.with_defaults(defaults)
    return {
        "family": "encoder",
        "input": {
            "kind": "patches",
            "image_size": published.whole("image_size", 224),
            "patch_size": published.whole("patch_size", 32),
            "channels": published.whole("num_channels", 3),
            "bias": False,
        },
        "embedding": {"norm": True},
        **read_layers(published, pooling="first"),
    }


def write(config: ModelConfig) -> dict[str, Any]:
    images = expect(config.input, PatchInputConfig, "model.input.kind")
    return {
        "image_size": images.image_size,
        "patch_size": images.patch_size,
        "num_channels": images.channels,
        **write_layers(config),
    }


def rules(config: ModelConfig) -> Sequence[Rule]:
    return (
        Rule("encoder_embedding.input.convolution", "vision_model.embeddings.patch_embedding"),
        Rule("encoder_embedding.input.class_token", "vision_model.embeddings.class_embedding"),
        Rule("encoder_embedding.position", "vision_model.embeddings.position_embedding"),
        Rule("encoder_embedding.norm", "vision_model.pre_layrnorm"),  # the published name
        *layer_rules("encoder", "vision_model"),
        Rule("encoder.final_norm", "vision_model.post_layernorm"),
        Rule("head.output", "visual_projection"),
    )


FAMILY = Family(
    kind="encoder",
    model_types=("clip_vision_model",),
    architectures={"CLIPVisionModelWithProjection": "embedding"},
    prefix="vision_model.",
    read=read,
    write=write,
    rules=rules,
    ignored=IGNORED,
)
