"""ALBERT (Lan et al. 2019, arXiv 1909.11942): BERT whose layers are one layer, over a factorised embedding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qkv.checkpoint.families import Family, bert
from qkv.checkpoint.mapping import Rule
from qkv.checkpoint.published import Published
from qkv.config.model import ModelConfig

DEFAULTS = {"hidden_act": "gelu_new", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
"""Where they differ from BERT's."""


def read(published: Published, head: str) -> dict[str, Any]:
    published.only("num_hidden_groups", 1)
    published.only("inner_group_num", 1)
    published = published.with_defaults(DEFAULTS)
    model = bert.read(published, head)
    model["share_layers"] = True
    model["embedding"]["width"] = published.whole("embedding_size", 128)
    dropout = published.number("classifier_dropout_prob", 0.1)
    model["head"] = bert.read_head(published, head, model["feed_forward"]["kind"], dropout, pooler="pooler")
    return model


def write(config: ModelConfig) -> dict[str, Any]:
    return {
        **bert.write(config, "classifier_dropout_prob"),
        "embedding_size": config.embedding.width,
        "num_hidden_groups": 1,
        "inner_group_num": 1,
    }


def rules(config: ModelConfig) -> Sequence[Rule]:
    ours, theirs = "encoder.blocks.*", "albert.encoder.albert_layer_groups.0.albert_layers.0"
    attention = f"{ours}.self_attention.function"
    return (
        Rule("encoder_embedding.input", "albert.embeddings.word_embeddings"),
        Rule("encoder_embedding.position", "albert.embeddings.position_embeddings"),
        Rule("encoder_embedding.segments", "albert.embeddings.token_type_embeddings"),
        Rule("encoder_embedding.norm", "albert.embeddings.LayerNorm"),
        Rule("encoder_embedding.projection", "albert.encoder.embedding_hidden_mapping_in"),
        Rule(f"{attention}.query", f"{theirs}.attention.query"),
        Rule(f"{attention}.key", f"{theirs}.attention.key"),
        Rule(f"{attention}.value", f"{theirs}.attention.value"),
        Rule(f"{attention}.output", f"{theirs}.attention.dense"),
        Rule(f"{ours}.self_attention.norm_stream", f"{theirs}.attention.LayerNorm"),
        Rule(f"{ours}.feed_forward.function.up", f"{theirs}.ffn"),
        Rule(f"{ours}.feed_forward.function.down", f"{theirs}.ffn_output"),
        Rule(f"{ours}.feed_forward.norm_stream", f"{theirs}.full_layer_layer_norm"),
        Rule("head.pooler.dense", "albert.pooler"),
        Rule("head.output", "classifier"),
        Rule("head.dense", "predictions.dense"),
        Rule("head.norm", "predictions.LayerNorm"),
        *bert.vocabulary_rules(config, "predictions.decoder", "predictions.bias"),
    )


def copies(config: ModelConfig) -> Mapping[str, str]:
    return {} if bert.unties(config) else {"predictions.decoder.bias": "predictions.bias"}


FAMILY = Family(
    kind="encoder",
    model_types=("albert",),
    architectures={
        "AlbertForMaskedLM": "masked-language-model",
        "AlbertForPreTraining": "masked-language-model",
        "AlbertForSequenceClassification": "classifier",
        "AlbertModel": "none",
    },
    prefix="albert.",
    read=read,
    write=write,
    rules=rules,
    copies=copies,
    ignored=(r".*\.position_ids", r"albert\.pooler\..*", r"sop_classifier\..*"),
)
