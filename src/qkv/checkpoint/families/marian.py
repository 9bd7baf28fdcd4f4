"""Marian (Junczys-Dowmunt et al. 2018, arXiv 1804.00344), the OPUS-MT models: BART with sinusoidal positions, all sines
before all cosines, without a norm on the embeddings; one vocabulary, or one for each language."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qkv.checkpoint.families import Family, bart
from qkv.checkpoint.mapping import Fixed, Rule
from qkv.checkpoint.published import Published
from qkv.config.model import ModelConfig
from qkv.config.stack import StackConfig
from qkv.nn.build import Dims, build


def read(published: Published, head: str) -> dict[str, Any]:
    vocab_size = published.whole("vocab_size")
    model = bart.read_towers(published)
    model["vocab_size"] = published.whole("decoder_vocab_size", vocab_size)
    model["encoder"]["vocab_size"] = vocab_size
    model["max_seq_len"] = published.whole("max_position_embeddings", 1024)
    model["position"] = {"kind": "sinusoidal", "layout": "concatenated"}
    model["norm"] = {"kind": "layernorm", "eps": 1e-5, "placement": "post"}
    model["head"] = bart.read_head(published, head)
    model["tie_embeddings"] = bart.read_tying(published, head)
    if published.flag("share_encoder_decoder_embeddings", True):
        published.only("decoder_vocab_size", vocab_size)
    elif model["tie_embeddings"] != "none":
        model["tie_embeddings"] = "head" if head == "language-model" else "none"
    return model


def write(config: ModelConfig) -> dict[str, Any]:
    _, decoder = bart.sides(config)
    return {
        **bart.write(config),
        "decoder_vocab_size": decoder.vocab_size,
        "share_encoder_decoder_embeddings": bart.shares_all(config),
        "tie_word_embeddings": config.tie_embeddings != "none",
    }


def rules(config: ModelConfig) -> Sequence[Rule]:
    if bart.shares_all(config):
        embeddings = bart.embedding_rules(config)
    else:
        embeddings = tuple(Rule(f"{side}_embedding.input", f"model.{side}.embed_tokens") for side in bart.SIDES)
    return (
        *embeddings,
        *bart.layer_rules("encoder", "norm_stream"),
        *bart.layer_rules("decoder", "norm_stream"),
        *bart.head_rules(config),
    )


def copies(config: ModelConfig) -> Mapping[str, str]:
    if config.tie_embeddings == "head":
        return {"lm_head.weight": "model.decoder.embed_tokens.weight"}
    return bart.copies(config)


def fixed(config: ModelConfig) -> Sequence[Fixed]:
    return [
        Fixed(f"model.{side}.embed_positions.weight", partial(table, stack))
        for side, stack in zip(bart.SIDES, bart.sides(config), strict=True)
    ]


def table(stack: StackConfig) -> Tensor:
    """The sinusoids of a tower, [max_seq_len, M]."""
    found: Tensor = build(stack.position, Dims(stack.d_model)).table(torch.arange(stack.max_seq_len))
    return found


def generation(config: Published, generation: Published) -> dict[str, Any]:
    """Marian never writes its padding, which is also what it starts from."""
    pad = generation.whole("pad_token_id", config.whole("pad_token_id", None))
    return {} if pad is None else {"suppress_ids": [pad]}


FAMILY = Family(
    kind="encoder-decoder",
    model_types=("marian",),
    architectures={"MarianMTModel": "language-model", "MarianModel": "none"},
    prefix="model.",
    read=read,
    write=write,
    rules=rules,
    fixed=fixed,
    copies=copies,
    ignored=(r"model\.shared\.weight",),
    generation=generation,
)
