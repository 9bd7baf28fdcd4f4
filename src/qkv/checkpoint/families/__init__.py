"""Published architectures: one file for each, names and shapes both ways.

A family reads a published config.json into our configuration and writes ours as theirs, and has the table of names. It
is found by the `model_type` of a config.json. Nothing here knows a file format: whatever a checkpoint's container, its
reader (see `checkpoint.load`) presents it with the names and keys of the Hugging Face format.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from qkv.checkpoint.mapping import Fixed, Rule
from qkv.checkpoint.published import Published
from qkv.config.errors import QkvError, nearest
from qkv.config.model import ModelConfig
from qkv.tokenizer.tokenizer import Tokenizer

MODULES = {
    "albert": "albert",
    "bart": "bart",
    "bert": "bert",
    "clip_text_model": "clip_text",
    "clip_vision_model": "clip_vision",
    "deepseek_v3": "deepseek_v3",
    "dinov2": "dinov2",
    "dinov2_with_registers": "dinov2_with_registers",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "gemma3_text": "gemma3",
    "gpt2": "gpt2",
    "gpt_neox": "gpt_neox",
    "gpt_oss": "gpt_oss",
    "llama": "llama",
    "m2m_100": "m2m_100",
    "marian": "marian",
    "mbart": "mbart",
    "mistral": "mistral",
    "mixtral": "mixtral",
    "olmo2": "olmo2",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe",
    "roberta": "roberta",
    "smollm3": "smollm3",
    "t5": "t5",
    "vit": "vit",
    "whisper": "whisper",
    "xlm-roberta": "roberta",
}
"""The file of each `model_type`."""


@dataclass(frozen=True)
class Family:
    """A published architecture.

    model_types: the `model_type`s it reads; the first is written. architectures: the published class of each of our
    head kinds it has, the first of each being written, such as {"LlamaForCausalLM": "language-model"}. prefix: what
    the names of the whole model start with and those of a bare one ("LlamaModel") lack. read: config.json and head kind
    to the `model` section. write: our configuration to config.json, without `architectures`. rules: the names.
    renames: what files of this architecture also call its tensors, as (regular expression for the start of a name, what
    it stands for). fixed: published tensors that are computed here. copies: published names that repeat another's
    numbers, as {copy: original}; either may be absent, and only the original is written. ignored: patterns of published
    names that hold nothing to load. left_out: patterns of those that hold what a model here has no place for, with what
    that is, which loading says. generation: what config.json and generation_config.json mean for our `generation`
    section, where that is more than the usual keys say. write_generation: (what a decoder starts from, the tokenizer)
    to such further keys of generation_config.json. kind: the family of ours that its models are of.
    """

    model_types: tuple[str, ...]
    architectures: Mapping[str, str]
    prefix: str
    read: Callable[[Published, str], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]]
    rules: Callable[[ModelConfig], Sequence[Rule]]
    renames: Sequence[tuple[str, str]] = ()
    fixed: Callable[[ModelConfig], Sequence[Fixed]] = lambda config: ()
    copies: Callable[[ModelConfig], Mapping[str, str]] = lambda config: {}
    ignored: tuple[str, ...] = ()
    left_out: Callable[[ModelConfig], Mapping[str, str]] = lambda config: {}
    generation: Callable[[Published, Published], dict[str, Any]] = lambda config, generation: {}
    write_generation: Callable[[Sequence[int], Tokenizer | None], dict[str, Any]] = lambda start_ids, tokenizer: {}
    kind: Literal["decoder", "encoder", "encoder-decoder"] = "decoder"


def family_of(published: Published) -> Family:
    """The family of a config.json. Raises QkvError naming what is supported."""
    kind = published.text("model_type")
    if kind not in MODULES:
        guess = nearest(kind, MODULES)
        raise QkvError(
            f"models of type `{kind}` are not supported",
            where=published.where,
            hint=f"{'`' + guess + '`? ' if guess else ''}supported: {', '.join(sorted(MODULES))}",
        )
    return named(kind)


def named(model_type: str) -> Family:
    """The family of a known `model_type`."""
    family: Family = importlib.import_module(f"{__name__}.{MODULES[model_type]}").FAMILY
    return family
