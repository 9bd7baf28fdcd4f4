"""BART (Lewis et al. 2019, arXiv 1910.13461): a post-norm encoder-decoder with a norm on its embeddings and learned
positions, of which the first two rows are not in use. What mBART, Marian and Whisper change is in their own files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qkv.checkpoint.families import Family
from qkv.checkpoint.families.gpt2 import ACTIVATIONS
from qkv.checkpoint.mapping import Reshaped, Rule, Twice
from qkv.checkpoint.published import Published, called, expect
from qkv.config.attention import StandardAttentionConfig
from qkv.config.feed_forward import DenseFeedForwardConfig
from qkv.config.model import ModelConfig
from qkv.config.stack import StackConfig

SIDES = ("encoder", "decoder")

# --- config.json ------------------------------------------------------------------------------------------------------


def read(published: Published, head: str) -> dict[str, Any]:
    model = read_towers(published)
    model["vocab_size"] = published.whole("vocab_size")
    model["max_seq_len"] = published.whole("max_position_embeddings", 1024)
    model["tie_embeddings"] = read_tying(published, head)
    model["position"] = {"kind": "learned", "offset": 2}
    model["norm"] = {"kind": "layernorm", "eps": 1e-5, "placement": "post"}
    model["embedding"]["norm"] = True
    model["head"] = read_head(published, head)
    return model


def read_towers(published: Published) -> dict[str, Any]:
    """What all descendants of BART say alike: the sizes of both towers, and their layers."""
    scaled = published.flag("scale_embedding", False)
    towers = {
        side: {
            "num_layers": published.whole(f"{side}_layers"),
            "attention": {"num_heads": published.whole(f"{side}_attention_heads")},
            "feed_forward": {"d_ff": published.whole(f"{side}_ffn_dim")},
        }
        for side in SIDES
    }
    return {
        "family": "encoder-decoder",
        "d_model": published.whole("d_model"),
        "dropout": published.number("dropout", 0.1),
        "embedding": {"scale": "sqrt-d-model" if scaled else 1.0},
        "attention": {"bias": True, "dropout": published.number("attention_dropout", 0.0)},
        "feed_forward": {
            "kind": published.choice("activation_function", ACTIVATIONS, "gelu"),
            "bias": True,
            "dropout": published.number("activation_dropout", 0.0),
        },
        **towers,
    }


def read_tying(published: Published, head: str) -> str:
    """One matrix for source, target and head, or three."""
    if not published.flag("tie_word_embeddings", True):
        return "none"
    return "all" if head == "language-model" else "source-target"


def read_head(published: Published, head: str) -> dict[str, Any]:
    return {"kind": head, "bias": published.holds("final_logits_bias")} if head == "language-model" else {"kind": head}


def write(config: ModelConfig) -> dict[str, Any]:
    encoder, _ = sides(config)
    return {
        **write_towers(config),
        "vocab_size": encoder.vocab_size,
        "max_position_embeddings": encoder.max_seq_len,
        "tie_word_embeddings": shares_all(config),
        "scale_embedding": encoder.embedding.scale == "sqrt-d-model",
    }


def write_towers(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `read_towers`, but for the scale of the embedding."""
    keys: dict[str, Any] = {"is_encoder_decoder": True}
    for side, stack in zip(SIDES, sides(config), strict=True):
        attention = expect(stack.attention, StandardAttentionConfig, f"model.{side}.attention.kind")
        feed_forward = expect(stack.feed_forward, DenseFeedForwardConfig, f"model.{side}.feed_forward.kind")
        keys |= {
            "d_model": stack.d_model,
            "dropout": stack.dropout,
            "attention_dropout": attention.dropout,
            "activation_function": called(ACTIVATIONS, feed_forward.kind),
            "activation_dropout": feed_forward.dropout,
            f"{side}_layers": stack.num_layers,
            f"{side}_attention_heads": attention.num_heads,
            f"{side}_ffn_dim": feed_forward.d_ff,
        }
    return keys


def sides(config: ModelConfig) -> tuple[StackConfig, StackConfig]:
    """Encoder and decoder."""
    assert config.encoder is not None
    assert config.decoder is not None
    return config.encoder, config.decoder


def shares_all(config: ModelConfig) -> bool:
    """Whether one matrix serves all that has a vocabulary."""
    assert config.head is not None
    return config.tie_embeddings == ("all" if config.head.predicts_tokens else "source-target")


# --- names ------------------------------------------------------------------------------------------------------------


def layer_rules(side: str, norm: str) -> tuple[Rule, ...]:
    """The names of a tower's layers. `norm`: the slot of their norms, norm_stream (post) or norm_in (pre)."""
    ours, theirs = f"{side}.blocks.*", f"model.{side}.layers.*"
    attentions = {"self_attention": "self_attn"}
    if side == "decoder":
        attentions["cross_attention"] = "encoder_attn"
    found = [
        Rule(f"{ours}.feed_forward.function.up", f"{theirs}.fc1"),
        Rule(f"{ours}.feed_forward.function.down", f"{theirs}.fc2"),
        Rule(f"{ours}.feed_forward.{norm}", f"{theirs}.final_layer_norm"),
    ]
    for attention, name in attentions.items():
        found.append(Rule(f"{ours}.{attention}.{norm}", f"{theirs}.{name}_layer_norm"))
        for part, letter in (("query", "q"), ("key", "k"), ("value", "v")):
            found.append(Rule(f"{ours}.{attention}.function.{part}", f"{theirs}.{name}.{letter}_proj"))
        found.append(Rule(f"{ours}.{attention}.function.output", f"{theirs}.{name}.out_proj"))
    return tuple(found)


def embedding_rules(config: ModelConfig) -> tuple[Rule, ...]:
    """The names of source and target embeddings: one matrix, or two and an unused one."""
    if shares_all(config):
        return (Rule("encoder_embedding.input", "model.shared"),)
    return (
        Rule("encoder_embedding.input", ("model.encoder.embed_tokens", "model.shared"), Twice()),
        Rule("decoder_embedding.input", "model.decoder.embed_tokens"),
    )


def head_rules(config: ModelConfig) -> tuple[Rule, ...]:
    """The names of the head, whose bias is published as a matrix of one row."""
    _, decoder = sides(config)
    size = decoder.vocab_size or 0
    return (
        Rule("head.weight", "lm_head.weight"),
        Rule("head.bias", "final_logits_bias", Reshaped((size,), (1, size))),
    )


def rules(config: ModelConfig, norm: str = "norm_stream") -> Sequence[Rule]:
    """norm: as for `layer_rules`."""
    return (
        *embedding_rules(config),
        *(Rule(f"{side}_embedding.position", f"model.{side}.embed_positions") for side in SIDES),
        *(Rule(f"{side}_embedding.norm", f"model.{side}.layernorm_embedding") for side in SIDES),
        *layer_rules("encoder", norm),
        *layer_rules("decoder", norm),
        *head_rules(config),
    )


def copies(config: ModelConfig) -> Mapping[str, str]:
    if not shares_all(config):
        return {}
    return dict.fromkeys(
        ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight"),
        "model.shared.weight",
    )


FAMILY = Family(
    kind="encoder-decoder",
    model_types=("bart",),
    architectures={"BartForConditionalGeneration": "language-model", "BartModel": "none"},
    prefix="model.",
    read=read,
    write=write,
    rules=rules,
    copies=copies,
    ignored=(r"model\.(encoder|decoder)\.version",),
)
