"""DINOv2 (Oquab et al. 2023, arXiv 2304.07193): a ViT whose sublayers are scaled per channel, without a pooler. The
largest has SwiGLU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qkv.checkpoint.families import Family, vit
from qkv.checkpoint.families.gpt2 import ACTIVATIONS
from qkv.checkpoint.mapping import Reshaped, Rows, Rule
from qkv.checkpoint.published import Published, called, expect
from qkv.config.feed_forward import DenseFeedForwardConfig
from qkv.config.model import ModelConfig
from qkv.config.residuals import LayerScaleConfig


def read(published: Published, head: str) -> dict[str, Any]:
    width = published.whole("hidden_size", least=1)
    d_ff, kind = width * published.whole("mlp_ratio", 4, least=1), published.choice("hidden_act", ACTIVATIONS, "gelu")
    if published.flag("use_swiglu_ffn", False):
        d_ff, kind = swiglu_width(d_ff), "swiglu"
    return {
        **vit.read_encoder(published, patch_size=14, eps=1e-6),
        "feed_forward": {"kind": kind, "d_ff": d_ff, "bias": True},
        "residual": {"kind": "layerscale", "start": published.number("layerscale_value", 1.0)},
        "head": {"kind": head},
    }


def swiglu_width(d_ff: int) -> int:
    """Two thirds of the usual width, rounded up to a multiple of 8: as many parameters with three matrices."""
    return (2 * d_ff // 3 + 7) // 8 * 8


def write(config: ModelConfig) -> dict[str, Any]:
    feed_forward = expect(config.feed_forward, DenseFeedForwardConfig, "model.feed_forward.kind")
    residual = expect(config.residual, LayerScaleConfig, "model.residual.kind")
    gated = feed_forward.kind == "swiglu"
    assert feed_forward.d_ff is not None
    return {
        **vit.write_encoder(config),
        "hidden_act": "gelu" if gated else called(ACTIVATIONS, feed_forward.kind),
        "use_swiglu_ffn": gated,
        "mlp_ratio": max(round(feed_forward.d_ff * (1.5 if gated else 1) / config.d_model), 1),
        "layerscale_value": residual.start,
        "use_mask_token": False,
    }


def rules(config: ModelConfig) -> Sequence[Rule]:
    width = config.d_model
    positions = Reshaped((config.max_seq_len, width), (1, config.max_seq_len, width))
    return (Rule("encoder_embedding.position.weight", "embeddings.position_embeddings", positions), *encoder(config))


def encoder(config: ModelConfig) -> Sequence[Rule]:
    """All but the positions."""
    ours, theirs = "encoder.blocks.*", "encoder.layer.*"
    attention, feed_forward, width = f"{ours}.self_attention.function", f"{ours}.feed_forward.function", config.d_model
    d_ff = expect(config.feed_forward, DenseFeedForwardConfig, "model.feed_forward.kind").d_ff
    assert d_ff is not None
    gated = config.feed_forward.kind == "swiglu"
    mlp = (
        (
            Rule((f"{feed_forward}.gate", f"{feed_forward}.up"), f"{theirs}.mlp.weights_in", Rows((d_ff, d_ff))),
            Rule(f"{feed_forward}.down", f"{theirs}.mlp.weights_out"),
        )
        if gated
        else (
            Rule(f"{feed_forward}.up", f"{theirs}.mlp.fc1"),
            Rule(f"{feed_forward}.down", f"{theirs}.mlp.fc2"),
        )
    )
    return (
        Rule("encoder_embedding.input.convolution", "embeddings.patch_embeddings.projection"),
        Rule("encoder_embedding.input.class_token", "embeddings.cls_token", Reshaped((width,), (1, 1, width))),
        Rule(f"{attention}.query", f"{theirs}.attention.attention.query"),
        Rule(f"{attention}.key", f"{theirs}.attention.attention.key"),
        Rule(f"{attention}.value", f"{theirs}.attention.attention.value"),
        Rule(f"{attention}.output", f"{theirs}.attention.output.dense"),
        Rule(f"{ours}.self_attention.site.write.scale", f"{theirs}.layer_scale1.lambda1"),
        Rule(f"{ours}.feed_forward.site.write.scale", f"{theirs}.layer_scale2.lambda1"),
        Rule(f"{ours}.self_attention.norm_in", f"{theirs}.norm1"),
        Rule(f"{ours}.feed_forward.norm_in", f"{theirs}.norm2"),
        *mlp,
        Rule("encoder.final_norm", "layernorm"),
    )


FAMILY = Family(
    kind="encoder",
    model_types=("dinov2",),
    architectures={"Dinov2Model": "none"},
    prefix="",
    read=read,
    write=write,
    rules=rules,
    ignored=(r"embeddings\.mask_token",),
)
