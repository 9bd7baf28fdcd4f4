"""BERT (Devlin et al. 2018, arXiv 1810.04805): a post-norm encoder with learned positions and token types.

Heads: masked words, one class per text, or the hidden vectors, with or without the pooler. The next-sentence head that
pretraining leaves in a file is not loaded. What RoBERTa and ALBERT change is in their own files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qkv.checkpoint.families import Family
from qkv.checkpoint.families.gpt2 import ACTIVATIONS
from qkv.checkpoint.mapping import Rule, Twice
from qkv.checkpoint.published import Published, called, expect
from qkv.config.attention import StandardAttentionConfig
from qkv.config.feed_forward import DenseFeedForwardConfig
from qkv.config.model import ModelConfig
from qkv.config.parts import ClassifierHeadConfig, HeadConfig, LayerNormConfig

# --- config.json ------------------------------------------------------------------------------------------------------


def read(published: Published, head: str) -> dict[str, Any]:
    published.only("position_embedding_type", "absolute")
    published.only("is_decoder", False)
    published.only("add_cross_attention", False)
    activation = published.choice("hidden_act", ACTIVATIONS, "gelu")
    dropout = published.number("hidden_dropout_prob", 0.1)
    tied = head == "masked-language-model" and published.flag("tie_word_embeddings", True)
    return {
        "family": "encoder",
        "vocab_size": published.whole("vocab_size"),
        "max_seq_len": published.whole("max_position_embeddings", 512),
        "d_model": published.whole("hidden_size"),
        "num_layers": published.whole("num_hidden_layers"),
        "dropout": dropout,
        "tie_embeddings": "head" if tied else "none",
        "embedding": {"norm": True, "num_segments": max(1, published.whole("type_vocab_size", 2))},
        "position": {"kind": "learned"},
        "norm": {"kind": "layernorm", "eps": published.number("layer_norm_eps", 1e-12), "placement": "post"},
        "attention": {
            "num_heads": published.whole("num_attention_heads"),
            "bias": True,
            "dropout": published.number("attention_probs_dropout_prob", 0.1),
        },
        "feed_forward": {"kind": activation, "d_ff": published.whole("intermediate_size"), "bias": True},
        "head": read_head(published, head, activation, published.number("classifier_dropout", dropout)),
    }


def read_head(published: Published, head: str, activation: str, dropout: float, pooler: str = "pooler.dense") -> Any:
    """The `head` section. `pooler`: the name of its tensors, which tell whether a bare model has it."""
    if head == "masked-language-model":
        return {"kind": head, "activation": activation}
    if head == "classifier":
        return {"kind": head, "num_classes": num_classes(published), "dropout": dropout}
    return {"kind": head, "pooler": published.holds(f"{pooler}.weight")}


def num_classes(published: Published) -> int:
    """How many classes a classifier tells apart. Raises QkvError for one that does something else."""
    published.only("problem_type", "single_label_classification")
    count: int = len(published.section("id2label").keys) or published.whole("num_labels", 2)
    if count == 1:
        raise published.unsupported("num_labels", 1, "a classifier of two classes or more, not a regression")
    return count


def write(config: ModelConfig, head_dropout: str = "classifier_dropout") -> dict[str, Any]:
    norm = expect(config.norm, LayerNormConfig, "model.norm.kind")
    attention = expect(config.attention, StandardAttentionConfig, "model.attention.kind")
    feed_forward = expect(config.feed_forward, DenseFeedForwardConfig, "model.feed_forward.kind")
    return {
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.num_layers,
        "hidden_dropout_prob": config.dropout,
        "tie_word_embeddings": not unties(config),
        "type_vocab_size": config.embedding.num_segments,
        "layer_norm_eps": norm.eps,
        "num_attention_heads": attention.num_heads,
        "attention_probs_dropout_prob": attention.dropout,
        "hidden_act": called(ACTIVATIONS, feed_forward.kind),
        "intermediate_size": feed_forward.d_ff,
        **write_classes(config.head, head_dropout),
    }


def write_classes(head: HeadConfig | None, dropout: str | None = None) -> dict[str, Any]:
    """What config.json says of a classifier, and nothing of other heads. `dropout`: the key of the head's own."""
    if not isinstance(head, ClassifierHeadConfig):
        return {}
    names = {str(number): f"LABEL_{number}" for number in range(head.num_classes or 0)}
    classes = {"id2label": names, "label2id": {name: int(number) for number, name in names.items()}}
    return {**classes, dropout: head.dropout} if dropout else classes


def unties(config: ModelConfig) -> bool:
    """Whether the head has a vocabulary matrix of its own."""
    assert config.head is not None
    return config.head.predicts_tokens and config.tie_embeddings == "none"


# --- names ------------------------------------------------------------------------------------------------------------


def encoder_rules(prefix: str) -> tuple[Rule, ...]:
    """The names of all but the head, for BERT and RoBERTa."""
    ours, theirs = "encoder.blocks.*", f"{prefix}.encoder.layer.*"
    attention = f"{ours}.self_attention.function"
    return (
        Rule("encoder_embedding.input", f"{prefix}.embeddings.word_embeddings"),
        Rule("encoder_embedding.position", f"{prefix}.embeddings.position_embeddings"),
        Rule("encoder_embedding.segments", f"{prefix}.embeddings.token_type_embeddings"),
        Rule("encoder_embedding.norm", f"{prefix}.embeddings.LayerNorm"),
        Rule(f"{attention}.query", f"{theirs}.attention.self.query"),
        Rule(f"{attention}.key", f"{theirs}.attention.self.key"),
        Rule(f"{attention}.value", f"{theirs}.attention.self.value"),
        Rule(f"{attention}.output", f"{theirs}.attention.output.dense"),
        Rule(f"{ours}.self_attention.norm_stream", f"{theirs}.attention.output.LayerNorm"),
        Rule(f"{ours}.feed_forward.function.up", f"{theirs}.intermediate.dense"),
        Rule(f"{ours}.feed_forward.function.down", f"{theirs}.output.dense"),
        Rule(f"{ours}.feed_forward.norm_stream", f"{theirs}.output.LayerNorm"),
    )


def vocabulary_rules(config: ModelConfig, decoder: str, bias: str) -> tuple[Rule, ...]:
    """The names of a masked-word head's last layer. Its bias stands in the file twice; the decoder's is in use, and
    the other is written alone where the two are tied."""
    one, twice = Rule("head.bias", bias), Rule("head.bias", (f"{decoder}.bias", bias), Twice())
    return (Rule("head.weight", f"{decoder}.weight"), twice if unties(config) else one)


def rules(config: ModelConfig) -> Sequence[Rule]:
    return (
        *encoder_rules("bert"),
        Rule("head.pooler.dense", "bert.pooler.dense"),
        Rule("head.output", "classifier"),
        Rule("head.dense", "cls.predictions.transform.dense"),
        Rule("head.norm", "cls.predictions.transform.LayerNorm"),
        *vocabulary_rules(config, "cls.predictions.decoder", "cls.predictions.bias"),
    )


def copies(config: ModelConfig) -> Mapping[str, str]:
    return {} if unties(config) else {"cls.predictions.decoder.bias": "cls.predictions.bias"}


FAMILY = Family(
    kind="encoder",
    model_types=("bert",),
    architectures={
        "BertForMaskedLM": "masked-language-model",
        "BertForPreTraining": "masked-language-model",
        "BertForSequenceClassification": "classifier",
        "BertModel": "none",
    },
    prefix="bert.",
    read=read,
    write=write,
    rules=rules,
    copies=copies,
    ignored=(r".*\.position_ids", r"bert\.pooler\..*", r"cls\.seq_relationship\..*"),
)
