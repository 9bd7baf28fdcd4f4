"""M2M-100 and NLLB (Fan et al. 2020, arXiv 2010.11125; NLLB Team 2022, arXiv 2207.04672): mBART with sinusoidal
positions, counted from the padding id + 1, without a norm on its embeddings and a bias on its head.

A translation starts from the end of a sentence and the code of its language, which is the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qkv.checkpoint.families import Family, bart
from qkv.checkpoint.mapping import Rule
from qkv.checkpoint.published import Published, expect
from qkv.config.model import ModelConfig
from qkv.config.positions import SinusoidalConfig

DEFAULTS = {"activation_function": "relu", "attention_dropout": 0.1, "scale_embedding": True}


def read(published: Published, head: str) -> dict[str, Any]:
    offset = published.whole("pad_token_id", 1, least=0) + 1
    model = bart.read_towers(published.with_defaults(DEFAULTS))
    model["vocab_size"] = published.whole("vocab_size")
    model["max_seq_len"] = published.whole("max_position_embeddings", 1024)
    model["tie_embeddings"] = bart.read_tying(published, head)
    model["position"] = {"kind": "sinusoidal", "layout": "tensor2tensor", "offset": offset}
    model["norm"] = {"kind": "layernorm", "eps": 1e-5}
    model["head"] = {"kind": head}
    return model


def write(config: ModelConfig) -> dict[str, Any]:
    encoder, _ = bart.sides(config)
    position = expect(encoder.position, SinusoidalConfig, "model.encoder.position.kind")
    return {**bart.write(config), "pad_token_id": position.offset - 1}


def rules(config: ModelConfig) -> Sequence[Rule]:
    return (
        *bart.embedding_rules(config),
        *bart.layer_rules("encoder", "norm_in"),
        *bart.layer_rules("decoder", "norm_in"),
        *(Rule(f"{side}.final_norm", f"model.{side}.layer_norm") for side in bart.SIDES),
        Rule("head.weight", "lm_head.weight"),
    )


FAMILY = Family(
    kind="encoder-decoder",
    model_types=("m2m_100",),
    architectures={"M2M100ForConditionalGeneration": "language-model", "M2M100Model": "none"},
    prefix="model.",
    read=read,
    write=write,
    rules=rules,
    copies=bart.copies,
    ignored=(r"model\.(encoder|decoder)\.embed_positions\.weights",),
)
