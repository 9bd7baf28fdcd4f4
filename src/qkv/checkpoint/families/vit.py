"""ViT (Dosovitskiy et al. 2020, arXiv 2010.11929): a pre-norm encoder of image patches with a class token and learned
positions; its head classifies by the class token's vector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qkv.checkpoint.families import Family, bert
from qkv.checkpoint.families.gpt2 import ACTIVATIONS
from qkv.checkpoint.mapping import Reshaped, Rule
from qkv.checkpoint.published import Published, called, expect
from qkv.config.attention import StandardAttentionConfig
from qkv.config.feed_forward import DenseFeedForwardConfig
from qkv.config.model import ModelConfig
from qkv.config.parts import LayerNormConfig, PatchInputConfig


def read(published: Published, head: str) -> dict[str, Any]:
    published.only("pooler_act", "tanh")
    published.only("pooler_output_size", published.whole("hidden_size"))
    return {
        **read_encoder(published, patch_size=16, eps=1e-12),
        "feed_forward": {
            "kind": published.choice("hidden_act", ACTIVATIONS, "gelu"),
            "d_ff": published.whole("intermediate_size"),
            "bias": True,
        },
        "head": read_head(published, head),
    }


def read_encoder(published: Published, *, patch_size: int, eps: float) -> dict[str, Any]:
    """What all encoders of images say, besides the feed-forward and the head. patch_size, eps: where it is not said."""
    published.only("qkv_bias", True)
    side = read_size(published, "patch_size", patch_size)
    if isinstance(side, list):
        raise published.unsupported("patch_size", side, "square patches")
    return {
        "family": "encoder",
        "d_model": published.whole("hidden_size"),
        "num_layers": published.whole("num_hidden_layers"),
        "dropout": published.number("hidden_dropout_prob", 0.0),
        "input": {
            "kind": "patches",
            "image_size": read_size(published, "image_size", 224),
            "patch_size": side,
            "channels": published.whole("num_channels", 3),
        },
        "position": {"kind": "learned"},
        "norm": {"kind": "layernorm", "eps": published.number("layer_norm_eps", eps)},
        "attention": {
            "num_heads": published.whole("num_attention_heads"),
            "bias": True,
            "dropout": published.number("attention_probs_dropout_prob", 0.0),
        },
    }


def read_size(published: Published, key: str, default: int) -> Any:
    """One number for a square, or [height, width]."""
    size = published.keys.get(key)
    if not isinstance(size, list):
        return published.whole(key, default)
    return size[0] if size and size.count(size[0]) == len(size) else size


def read_head(published: Published, head: str) -> dict[str, Any]:
    if head == "classifier":
        return {"kind": head, "num_classes": bert.num_classes(published), "pooler": False}
    return {"kind": head, "pooler": published.holds("pooler.dense.weight")}


def write(config: ModelConfig) -> dict[str, Any]:
    feed_forward = expect(config.feed_forward, DenseFeedForwardConfig, "model.feed_forward.kind")
    return {
        **write_encoder(config),
        "hidden_act": called(ACTIVATIONS, feed_forward.kind),
        "intermediate_size": feed_forward.d_ff,
        **bert.write_classes(config.head),
    }


def write_encoder(config: ModelConfig) -> dict[str, Any]:
    """What all encoders of images say, besides the feed-forward."""
    norm = expect(config.norm, LayerNormConfig, "model.norm.kind")
    images = expect(config.input, PatchInputConfig, "model.input.kind")
    attention = expect(config.attention, StandardAttentionConfig, "model.attention.kind")
    return {
        "hidden_size": config.d_model,
        "num_hidden_layers": config.num_layers,
        "hidden_dropout_prob": config.dropout,
        "image_size": images.image_size if isinstance(images.image_size, int) else list(images.image_size),
        "patch_size": images.patch_size,
        "num_channels": images.channels,
        "layer_norm_eps": norm.eps,
        "num_attention_heads": attention.num_heads,
        "attention_probs_dropout_prob": attention.dropout,
    }


def rules(config: ModelConfig) -> Sequence[Rule]:
    ours, theirs = "encoder.blocks.*", "vit.encoder.layer.*"
    attention, width = f"{ours}.self_attention.function", config.d_model
    class_token = Reshaped((width,), (1, 1, width))
    positions = Reshaped((config.max_seq_len, width), (1, config.max_seq_len, width))
    return (
        Rule("encoder_embedding.input.convolution", "vit.embeddings.patch_embeddings.projection"),
        Rule("encoder_embedding.input.class_token", "vit.embeddings.cls_token", class_token),
        Rule("encoder_embedding.position.weight", "vit.embeddings.position_embeddings", positions),
        Rule(f"{attention}.query", f"{theirs}.attention.attention.query"),
        Rule(f"{attention}.key", f"{theirs}.attention.attention.key"),
        Rule(f"{attention}.value", f"{theirs}.attention.attention.value"),
        Rule(f"{attention}.output", f"{theirs}.attention.output.dense"),
        Rule(f"{ours}.self_attention.norm_in", f"{theirs}.layernorm_before"),
        Rule(f"{ours}.feed_forward.norm_in", f"{theirs}.layernorm_after"),
        Rule(f"{ours}.feed_forward.function.up", f"{theirs}.intermediate.dense"),
        Rule(f"{ours}.feed_forward.function.down", f"{theirs}.output.dense"),
        Rule("encoder.final_norm", "vit.layernorm"),
        Rule("head.pooler.dense", "vit.pooler.dense"),
        Rule("head.output", "classifier"),
    )


FAMILY = Family(
    kind="encoder",
    model_types=("vit",),
    architectures={"ViTModel": "none", "ViTForImageClassification": "classifier"},
    prefix="vit.",
    read=read,
    write=write,
    rules=rules,
    ignored=(r"vit\.pooler\..*", r"vit\.embeddings\.mask_token"),
)
