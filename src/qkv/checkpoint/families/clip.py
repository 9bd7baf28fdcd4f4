"""CLIP (Radford et al. 2021, arXiv 2103.00020): two pre-norm models, of texts and of images, whose vectors are
compared by their cosine. That of texts reads from left to right and takes its last token's vector, that of images is a
ViT with one more norm behind its embedding; each has a matrix to the width that both share.

Each is a model by itself here (`clip_text`, `clip_vision`). A published folder holds both, and `#text` or `#image`
behind its name says which. The factor on the cosines, `logit_scale`, belongs to neither and is not read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qkv.checkpoint.families.gpt2 import ACTIVATIONS
from qkv.checkpoint.families.llama import attention_of, feed_forward_of
from qkv.checkpoint.mapping import Rule
from qkv.checkpoint.published import Published, called, expect
from qkv.checkpoint.source import Source
from qkv.config.errors import NotFoundError, UsageError
from qkv.config.model import ModelConfig
from qkv.config.parts import EmbeddingHeadConfig, LayerNormConfig

BOTH = "clip"
"""The `model_type` of a folder with both."""

SIDES = {
    "text": ("text", ("text_model.", "text_projection."), "CLIPTextModelWithProjection"),
    "image": ("vision", ("vision_model.", "visual_projection."), "CLIPVisionModelWithProjection"),
}
"""What each of the two is called, what the names of its tensors start with, and its class where it is alone."""

WIDTH = 512
"""`projection_dim` where it is not said."""


def one_side(source: Source, side: str | None) -> Source:
    """That of the two models in a folder, as it is published alone. Raises UsageError where none is chosen, and
    NotFoundError for one without tensors."""
    there = [name for name, (_, starts, _) in SIDES.items() if any(key.startswith(starts) for key in source.tensors)]
    which = " or ".join(f"{source.path}#{name}" for name in there) or None
    if side not in SIDES:
        raise UsageError("the folder is of two models, of texts and of images", where=str(source.path), hint=which)
    if side not in there:
        names = " or ".join(f"`{start}*`" for start in SIDES[side][1])
        raise NotFoundError(
            f"the model of {side}s is missing: no tensor is called {names}", where=str(source.weights), hint=which
        )
    source.config.only("architectures", ["CLIPModel"])
    kind, _, architecture = SIDES[side]
    (other,) = SIDES.keys() - {side}
    # older files have both sections, and `config_dict` is the one that is believed
    own = [source.config.section(f"{kind}_{key}") for key in ("config_dict", "config")]
    section = own[0] if own[0].keys else own[1]
    keys = {
        **section.keys,
        "model_type": f"clip_{kind}_model",
        "architectures": [architecture],
        "projection_dim": source.config.whole("projection_dim", WIDTH),
    }
    tensors = {
        name: stored
        for name, stored in source.tensors.items()
        if not name.startswith(SIDES[other][1]) and name != "logit_scale"
    }
    return replace(source, config=Published(keys, section.where, tensors), tensors=tensors)


# --- config.json ------------------------------------------------------------------------------------------------------


def read_layers(published: Published, *, pooling: str) -> dict[str, Any]:
    """What both say alike. pooling: of the head."""
    return {
        "d_model": published.whole("hidden_size"),
        "num_layers": published.whole("num_hidden_layers", 12),
        "position": {"kind": "learned"},
        "norm": {"kind": "layernorm", "eps": published.number("layer_norm_eps", 1e-5)},
        "attention": {
            "num_heads": published.whole("num_attention_heads"),
            "bias": True,
            "dropout": published.number("attention_dropout", 0.0),
        },
        "feed_forward": {
            "kind": published.choice("hidden_act", ACTIVATIONS, "quick_gelu"),
            "d_ff": published.whole("intermediate_size"),
            "bias": True,
        },
        "head": {"kind": "embedding", "width": published.whole("projection_dim", WIDTH), "pooling": pooling},
    }


def write_layers(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `read_layers`."""
    attention, feed_forward = attention_of(config), feed_forward_of(config)
    assert config.head is not None
    return {
        "hidden_size": config.d_model,
        "num_hidden_layers": config.num_layers,
        "layer_norm_eps": expect(config.norm, LayerNormConfig, "model.norm.kind").eps,
        "num_attention_heads": attention.num_heads,
        "attention_dropout": attention.dropout,
        "hidden_act": called(ACTIVATIONS, feed_forward.kind),
        "intermediate_size": feed_forward.d_ff,
        "projection_dim": expect(config.head, EmbeddingHeadConfig, "model.head.kind").width,
    }


# --- names ------------------------------------------------------------------------------------------------------------


def layer_rules(stack: str, prefix: str) -> tuple[Rule, ...]:
    """The names in the layers of our `stack`, those of which start with `prefix`."""
    ours, theirs = f"{stack}.blocks.*", f"{prefix}.encoder.layers.*"
    attention = f"{ours}.self_attention.function"
    return (
        Rule(f"{attention}.query", f"{theirs}.self_attn.q_proj"),
        Rule(f"{attention}.key", f"{theirs}.self_attn.k_proj"),
        Rule(f"{attention}.value", f"{theirs}.self_attn.v_proj"),
        Rule(f"{attention}.output", f"{theirs}.self_attn.out_proj"),
        Rule(f"{ours}.self_attention.norm_in", f"{theirs}.layer_norm1"),
        Rule(f"{ours}.feed_forward.norm_in", f"{theirs}.layer_norm2"),
        Rule(f"{ours}.feed_forward.function.up", f"{theirs}.mlp.fc1"),
        Rule(f"{ours}.feed_forward.function.down", f"{theirs}.mlp.fc2"),
    )


IGNORED = (r".*\.position_ids",)
