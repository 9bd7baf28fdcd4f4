"""T5 (Raffel et al. 2019, arXiv 1910.10683): a pre-norm encoder-decoder without biases, with relative positions and
scores that are not scaled. Version 1.0 has ReLU and one matrix for all vocabularies, with which the head's input is
scaled; 1.1 (and Flan-T5) has GEGLU and a head of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qkv.checkpoint.families import Family, bart
from qkv.checkpoint.mapping import Rule
from qkv.checkpoint.published import Published, called, expect
from qkv.config.attention import StandardAttentionConfig
from qkv.config.feed_forward import DenseFeedForwardConfig
from qkv.config.model import ModelConfig
from qkv.config.parts import LanguageModelHeadConfig, RMSNormConfig
from qkv.config.positions import RelativeConfig
from qkv.config.stack import StackConfig

ACTIVATIONS = {"relu": "relu", "gated-gelu": "geglu_tanh", "gated-silu": "swiglu", "gelu_new": "gelu_tanh"}
"""`feed_forward_proj`."""


# --- config.json ------------------------------------------------------------------------------------------------------


def read(published: Published, head: str) -> dict[str, Any]:
    num_layers = published.whole("num_layers")
    predicts = head == "language-model"
    dropout = published.number("dropout_rate", 0.1)
    scaled = published.flag("scale_decoder_outputs", published.flag("tie_word_embeddings", True))
    # transformers 5 writes tie_word_embeddings=true whether or not the head has a matrix of its own
    tied = predicts and (scaled or not published.holds("lm_head.weight"))
    return {
        "family": "encoder-decoder",
        "vocab_size": published.whole("vocab_size"),
        "max_seq_len": published.whole("n_positions", 512),
        "d_model": published.whole("d_model"),
        "dropout": dropout,
        "tie_embeddings": "all" if tied else "source-target",
        "position": {
            "kind": "relative",
            "num_buckets": published.whole("relative_attention_num_buckets", 32),
            "max_distance": published.whole("relative_attention_max_distance", 128),
        },
        "norm": {"kind": "rmsnorm", "eps": published.number("layer_norm_epsilon", 1e-6)},
        "attention": {
            "num_heads": published.whole("num_heads"),
            "head_dim": published.whole("d_kv"),
            "scale": 1.0,
            "dropout": dropout,
        },
        "feed_forward": {
            "kind": published.choice("feed_forward_proj", ACTIVATIONS, "relu"),
            "d_ff": published.whole("d_ff"),
            "dropout": dropout,
        },
        "encoder": {"num_layers": num_layers},
        "decoder": {"num_layers": published.whole("num_decoder_layers", num_layers)},
        "head": {"kind": head, "scale": "rsqrt-d-model" if scaled else 1.0} if predicts else {"kind": head},
    }


def write(config: ModelConfig) -> dict[str, Any]:
    encoder, decoder = bart.sides(config)
    norm = expect(encoder.norm, RMSNormConfig, "model.encoder.norm.kind")
    position = expect(encoder.position, RelativeConfig, "model.encoder.position.kind")
    attention = expect(encoder.attention, StandardAttentionConfig, "model.encoder.attention.kind")
    feed_forward = expect(encoder.feed_forward, DenseFeedForwardConfig, "model.encoder.feed_forward.kind")
    scaled = isinstance(config.head, LanguageModelHeadConfig) and config.head.scale == "rsqrt-d-model"
    return {
        "is_encoder_decoder": True,
        "vocab_size": encoder.vocab_size,
        "n_positions": encoder.max_seq_len,
        "d_model": encoder.d_model,
        "num_layers": encoder.num_layers,
        "num_decoder_layers": decoder.num_layers,
        "dropout_rate": encoder.dropout,
        "scale_decoder_outputs": scaled,
        "tie_word_embeddings": scaled,  # which is how transformers asked for the factor before it had a key
        "relative_attention_num_buckets": position.num_buckets,
        "relative_attention_max_distance": position.max_distance,
        "layer_norm_epsilon": norm.eps,
        "num_heads": attention.num_heads,
        "d_kv": attention.head_dim,
        "feed_forward_proj": called(ACTIVATIONS, feed_forward.kind),
        "d_ff": feed_forward.d_ff,
    }


# --- names ------------------------------------------------------------------------------------------------------------


def rules(config: ModelConfig) -> Sequence[Rule]:
    return (
        Rule("encoder_embedding.input", "shared"),
        Rule("head.weight", "lm_head.weight"),
        *(
            rule
            for side, stack in zip(bart.SIDES, bart.sides(config), strict=True)
            for rule in tower_rules(side, stack)
        ),
    )


def tower_rules(side: str, stack: StackConfig) -> list[Rule]:
    """The names of a tower. Its table of relative positions stands in its first layer."""
    ours, theirs = f"{side}.blocks.*", f"{side}.block.*.layer"
    attentions = {"self_attention": "SelfAttention"}
    if side == "decoder":
        attentions["cross_attention"] = "EncDecAttention"
    last = len(attentions)
    found = [
        Rule(f"{side}.positions.0.table", f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias"),
        Rule(f"{side}.final_norm", f"{side}.final_layer_norm"),
        Rule(f"{ours}.feed_forward.norm_in", f"{theirs}.{last}.layer_norm"),
        Rule(f"{ours}.feed_forward.function.down", f"{theirs}.{last}.DenseReluDense.wo"),
    ]
    gated = expect(stack.feed_forward, DenseFeedForwardConfig, f"model.{side}.feed_forward.kind").gated
    matrices = {"gate": "wi_0", "up": "wi_1"} if gated else {"up": "wi"}
    for part, name in matrices.items():
        found.append(Rule(f"{ours}.feed_forward.function.{part}", f"{theirs}.{last}.DenseReluDense.{name}"))
    for place, (attention, name) in enumerate(attentions.items()):
        found.append(Rule(f"{ours}.{attention}.norm_in", f"{theirs}.{place}.layer_norm"))
        for part in ("query", "key", "value", "output"):
            found.append(Rule(f"{ours}.{attention}.function.{part}", f"{theirs}.{place}.{name}.{part[0]}"))
    return found


def copies(config: ModelConfig) -> Mapping[str, str]:
    names = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
    if config.tie_embeddings == "all":
        names.append("lm_head.weight")
    return dict.fromkeys(names, "shared.weight")


FAMILY = Family(
    kind="encoder-decoder",
    model_types=("t5",),
    architectures={
        "T5ForConditionalGeneration": "language-model",
        "T5WithLMHeadModel": "language-model",
        "T5Model": "none",
    },
    prefix="",
    read=read,
    write=write,
    rules=rules,
    copies=copies,
    # of the first files, in which cross-attention had positions that nothing used
    ignored=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
)
