"""Whisper (Radford et al. 2022, arXiv 2212.04356): an encoder of log-mel features and a decoder of text, pre-norm, with
no bias on the keys. Sinusoidal positions in the encoder, learned ones in the decoder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from qkv.checkpoint.families import Family, bart
from qkv.checkpoint.families.marian import table
from qkv.checkpoint.mapping import Fixed, Rule
from qkv.checkpoint.published import Published, expect
from qkv.config.model import ModelConfig
from qkv.config.parts import LogMelInputConfig
from qkv.tokenizer.tokenizer import Tokenizer

_LANGUAGE = re.compile(r"<\|[a-z]{2,3}\|>")


def read(published: Published, head: str) -> dict[str, Any]:
    model = bart.read_towers(published.with_defaults({"dropout": 0.0}))
    model["norm"] = {"kind": "layernorm", "eps": 1e-5}
    model["attention"]["bias"] = "qvo"
    del model["embedding"]  # `scale_embedding` is there, and transformers never uses it
    model["encoder"] |= {
        "input": {"kind": "log-mel", "num_mels": published.whole("num_mel_bins", 80)},
        "max_seq_len": published.whole("max_source_positions", 1500),
        "position": {"kind": "sinusoidal", "layout": "tensor2tensor"},
    }
    model["decoder"] |= {
        "vocab_size": published.whole("vocab_size"),
        "max_seq_len": published.whole("max_target_positions", 448),
        "position": {"kind": "learned"},
    }
    tied = head == "language-model" and published.flag("tie_word_embeddings", True)
    return {**model, "tie_embeddings": "head" if tied else "none", "head": {"kind": head}}


def write(config: ModelConfig) -> dict[str, Any]:
    encoder, decoder = bart.sides(config)
    return {
        **bart.write_towers(config),
        "vocab_size": decoder.vocab_size,
        "num_mel_bins": expect(encoder.input, LogMelInputConfig, "model.encoder.input.kind").num_mels,
        "max_source_positions": encoder.max_seq_len,
        "max_target_positions": decoder.max_seq_len,
        "tie_word_embeddings": config.tie_embeddings == "head",
    }


def rules(config: ModelConfig) -> Sequence[Rule]:
    return (
        Rule("encoder_embedding.input.first", "model.encoder.conv1"),
        Rule("encoder_embedding.input.second", "model.encoder.conv2"),
        Rule("decoder_embedding.input", "model.decoder.embed_tokens"),
        Rule("decoder_embedding.position", "model.decoder.embed_positions"),
        *(Rule(f"{side}.final_norm", f"model.{side}.layer_norm") for side in bart.SIDES),
        *bart.layer_rules("encoder", "norm_in"),
        *bart.layer_rules("decoder", "norm_in"),
        Rule("head.weight", "proj_out.weight"),
    )


def fixed(config: ModelConfig) -> Sequence[Fixed]:
    encoder, _ = bart.sides(config)
    return [Fixed("model.encoder.embed_positions.weight", partial(table, encoder))]


def generation(config: Published, generation: Published) -> dict[str, Any]:
    """What a transcript begins with: its start, language and task where the model knows several, no timestamps.

    English is the language until another is asked for.
    """
    start = generation.whole("decoder_start_token_id", config.whole("decoder_start_token_id", None))
    silent = generation.whole("no_timestamps_token_id", None)
    if start is None or silent is None:
        return {}
    prompt = [start]
    if generation.flag("is_multilingual", False):
        prompt.append(generation.section("lang_to_id").whole("<|en|>"))
        prompt.append(generation.section("task_to_id").whole("transcribe"))
    return {"start_ids": [*prompt, silent]}


def write_generation(start_ids: Sequence[int], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The id for no timestamps; where a language and a task stand before it, those that there are."""
    silent = None if tokenizer is None else tokenizer.token_to_id("<|notimestamps|>")
    if tokenizer is None or silent is None:
        return {}
    told: dict[str, Any] = {"no_timestamps_token_id": silent}
    special = {tokenizer.id_to_token(token_id): token_id for token_id in sorted(tokenizer.special_ids)}
    tasks = {task: special[f"<|{task}|>"] for task in ("transcribe", "translate") if f"<|{task}|>" in special}
    if len(start_ids) > 2 and "<|en|>" in special and "transcribe" in tasks:
        languages = {token: token_id for token, token_id in special.items() if _LANGUAGE.fullmatch(token)}
        told |= {"is_multilingual": True, "lang_to_id": languages, "task_to_id": tasks}
    return told


FAMILY = Family(
    kind="encoder-decoder",
    model_types=("whisper",),
    architectures={"WhisperForConditionalGeneration": "language-model", "WhisperModel": "none"},
    prefix="model.",
    read=read,
    write=write,
    rules=rules,
    fixed=fixed,
    generation=generation,
    write_generation=write_generation,
)
