"""RoBERTa (Liu et al. 2019, arXiv 1907.11692) and XLM-RoBERTa (Conneau et al. 2020, arXiv 1911.02116): BERT whose
positions are counted from the padding id + 1, with other names for its heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qkv.checkpoint.families import Family, bert
from qkv.checkpoint.mapping import Rule
from qkv.checkpoint.published import Published, expect
from qkv.config.model import ModelConfig
from qkv.config.parts import ClassifierHeadConfig
from qkv.config.positions import LearnedConfig


def read(published: Published, head: str) -> dict[str, Any]:
    offset = published.whole("pad_token_id", 1, least=0) + 1
    model = bert.read(published, head)
    model["max_seq_len"] = published.whole("max_position_embeddings", 512) - offset
    model["position"] = {"kind": "learned", "offset": offset}
    if head == "masked-language-model":
        model["head"]["activation"] = "gelu"
    return model


def write(config: ModelConfig) -> dict[str, Any]:
    position = expect(config.position, LearnedConfig, "model.position.kind")
    return {
        **bert.write(config),
        "max_position_embeddings": config.max_seq_len + position.offset,
        "pad_token_id": position.offset - 1,
    }


def rules(config: ModelConfig) -> Sequence[Rule]:
    classifies = isinstance(config.head, ClassifierHeadConfig)
    return (
        *bert.encoder_rules("roberta"),
        Rule("head.pooler.dense", "classifier.dense" if classifies else "roberta.pooler.dense"),
        Rule("head.output", "classifier.out_proj"),
        Rule("head.dense", "lm_head.dense"),
        Rule("head.norm", "lm_head.layer_norm"),
        *bert.vocabulary_rules(config, "lm_head.decoder", "lm_head.bias"),
    )


def copies(config: ModelConfig) -> Mapping[str, str]:
    return {} if bert.unties(config) else {"lm_head.decoder.bias": "lm_head.bias"}


FAMILY = Family(
    kind="encoder",
    model_types=("roberta", "xlm-roberta"),
    architectures={
        f"{name}For{task}": kind
        for name in ("Roberta", "XLMRoberta")
        for task, kind in (("MaskedLM", "masked-language-model"), ("SequenceClassification", "classifier"))
    }
    | {"RobertaModel": "none", "XLMRobertaModel": "none"},
    prefix="roberta.",
    read=read,
    write=write,
    rules=rules,
    copies=copies,
    ignored=(r".*\.position_ids", r"roberta\.pooler\..*"),
)
