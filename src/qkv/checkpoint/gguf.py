"""GGUF files (llama.cpp's): a header with metadata, then tensors, often as blocks of few bits.

Presented in Hugging Face's keys, names and arrangement; what llama.cpp's converter changed is undone. The header is
read by `qkv.tokenizer.gguf_header`, the blocks by `qkv.nn.quantized`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qkv.checkpoint.published import Published
from qkv.checkpoint.source import Source, half_split_rows, tokenizer_of
from qkv.checkpoint.tensors import Packed, Stored, in_pieces
from qkv.config.errors import DamagedError, QkvError
from qkv.nn.quantized import FORMATS, dequantize
from qkv.tokenizer.gguf_header import Header, TensorInfo, read_header

_DENSE = {0: torch.float32, 1: torch.float16, 28: torch.float64, 30: torch.bfloat16}
_BLOCKS = {2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K"}
"""ggml's numbers for the types that are read."""

_LARGEST_TENSOR = 1 << 40  # numbers

# --- names ------------------------------------------------------------------------------------------------------------

_LLAMA = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "model.layers.*.input_layernorm",
    "attn_q": "model.layers.*.self_attn.q_proj",
    "attn_k": "model.layers.*.self_attn.k_proj",
    "attn_v": "model.layers.*.self_attn.v_proj",
    "attn_output": "model.layers.*.self_attn.o_proj",
    "attn_q_norm": "model.layers.*.self_attn.q_norm",
    "attn_k_norm": "model.layers.*.self_attn.k_norm",
    "ffn_norm": "model.layers.*.post_attention_layernorm",
    "ffn_gate": "model.layers.*.mlp.gate_proj",
    "ffn_up": "model.layers.*.mlp.up_proj",
    "ffn_down": "model.layers.*.mlp.down_proj",
}
_GEMMA = {
    **_LLAMA,
    "post_attention_norm": "model.layers.*.post_attention_layernorm",
    "ffn_norm": "model.layers.*.pre_feedforward_layernorm",
    "post_ffw_norm": "model.layers.*.post_feedforward_layernorm",
}
_GPT2 = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "attn_norm": "transformer.h.*.ln_1",
    "attn_qkv": "transformer.h.*.attn.c_attn",
    "attn_output": "transformer.h.*.attn.c_proj",
    "ffn_norm": "transformer.h.*.ln_2",
    "ffn_up": "transformer.h.*.mlp.c_fc",
    "ffn_down": "transformer.h.*.mlp.c_proj",
}

# --- architectures ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Architecture:
    """What llama.cpp made of an architecture.

    keys: its metadata as further keys of a config.json. more: metadata that only this one has (see _KNOWN). rotated:
    rows of queries and keys are ordered for rotating neighbours. norm_offset: added to norm weights. transposed:
    matrices that Hugging Face has as [in, out].
    """

    model_type: str
    published: str
    names: Mapping[str, str]
    keys: Callable[[Published], dict[str, Any]]
    more: tuple[str, ...] = ()
    rotated: bool = False
    norm_offset: float = 0.0
    transposed: tuple[str, ...] = ()


def _decoder_keys(told: Published) -> dict[str, Any]:
    heads = told.whole("attention.head_count", least=1)
    width = told.whole("attention.key_length", told.whole("embedding_length", least=1) // heads)
    told.only("attention.value_length", width)
    told.only("rope.dimension_count", width)
    return {
        "max_position_embeddings": told.whole("context_length"),
        "hidden_size": told.whole("embedding_length"),
        "intermediate_size": told.whole("feed_forward_length"),
        "num_hidden_layers": told.whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": told.whole("attention.head_count_kv", None),
        "head_dim": width,
        "rms_norm_eps": told.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": told.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(told),
        "tie_word_embeddings": not told.holds("lm_head.weight"),
    }


def _llama_keys(told: Published) -> dict[str, Any]:
    biases = {
        "attention_bias": told.holds("self_attn.q_proj.bias"),
        "mlp_bias": told.holds("mlp.up_proj.bias"),
    }
    window = told.whole("attention.sliding_window", 0)
    mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
    return {**_decoder_keys(told), **(mistral if window else biases)}


def _gemma_keys(told: Published) -> dict[str, Any]:
    keys = _decoder_keys(told)
    layers, heads, width = keys["num_hidden_layers"], keys["num_attention_heads"], keys["head_dim"]
    return {
        **keys,
        "sliding_window": told.whole("attention.sliding_window", 1024),
        "rope_local_base_freq": told.number("rope.freq_base_swa", 10000.0),
        # llama.cpp knows the 27B model, the one whose scale is of another width, by its depth
        "query_pre_attn_scalar": keys["hidden_size"] // heads if layers == 62 else width,
        "final_logit_softcapping": told.number("final_logit_softcapping", None),
    }


def _gpt2_keys(told: Published) -> dict[str, Any]:
    return {
        "n_positions": told.whole("context_length"),
        "n_embd": told.whole("embedding_length"),
        "n_inner": told.whole("feed_forward_length"),
        "n_layer": told.whole("block_count"),
        "n_head": told.whole("attention.head_count"),
        "layer_norm_epsilon": told.number("attention.layer_norm_epsilon"),
        "tie_word_embeddings": not told.holds("lm_head.weight"),
    }


_WINDOW = "attention.sliding_window"
_GEMMA_MORE = (_WINDOW, "rope.freq_base_swa", "final_logit_softcapping")
_GPT2_TRANSPOSED = ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
ARCHITECTURES = {
    "llama": _Architecture("llama", "LlamaForCausalLM", _LLAMA, _llama_keys, more=(_WINDOW,), rotated=True),
    "smollm3": _Architecture("smollm3", "SmolLM3ForCausalLM", _LLAMA, _llama_keys, rotated=True),
    "qwen2": _Architecture("qwen2", "Qwen2ForCausalLM", _LLAMA, _decoder_keys),
    "qwen3": _Architecture("qwen3", "Qwen3ForCausalLM", _LLAMA, _llama_keys),
    "gemma3": _Architecture("gemma3_text", "Gemma3ForCausalLM", _GEMMA, _gemma_keys, more=_GEMMA_MORE, norm_offset=1.0),
    "gpt2": _Architecture("gpt2", "GPT2LMHeadModel", _GPT2, _gpt2_keys, transposed=_GPT2_TRANSPOSED),
}
"""Of each `general.architecture` that is read. "llama" is Mistral's and SmolLM2's too."""

_KNOWN = {
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "block_count",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "rope.scale_linear",
}
"""What all architectures may say. Any other key may change what is computed."""


def _rope_scaling(told: Published) -> dict[str, Any] | None:
    kind = told.text("rope.scaling.type", "linear" if "rope.scale_linear" in told else "none")
    factor = told.number("rope.scaling.factor", told.number("rope.scale_linear", 1.0))
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = told.whole("rope.scaling.original_context_length")
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise told.unsupported("rope.scaling.type", kind, "supported: none, linear, yarn")


# --- the file ---------------------------------------------------------------------------------------------------------


def read_gguf(path: Path) -> Source:
    """The model in a GGUF file. Raises QkvError for what is damaged, or not supported."""
    header = read_header(path)
    metadata = Published(header.metadata, str(path))
    kind = metadata.text("general.architecture")
    if kind not in ARCHITECTURES:
        hint = f"supported: {', '.join(ARCHITECTURES)}"
        raise metadata.unsupported("general.architecture", kind, hint)
    architecture = ARCHITECTURES[kind]
    if (parts := metadata.whole("split.count", 1)) != 1:
        raise metadata.unsupported("split.count", parts, "one file, by llama-gguf-split --merge")
    own = {key.removeprefix(f"{kind}."): value for key, value in header.metadata.items() if key.startswith(f"{kind}.")}
    for key, value in sorted(own.items(), key=itemgetter(0)):
        if key not in _KNOWN and key not in architecture.more:
            raise metadata.unsupported(f"{kind}.{key}", f"{value!r:.80}", "a model without it")
        if isinstance(value, list | np.ndarray):
            raise metadata.unsupported(f"{kind}.{key}", f"{value!r:.80}", "a model with one value for all layers")
    _check_places(path, header)
    tensors = _tensors(path, header, architecture, own)
    keys = {
        "model_type": architecture.model_type,
        "architectures": [architecture.published],
        **architecture.keys(Published(own, f"{path}, {kind}", tensors)),
    }
    embedding = tensors.get(architecture.names["token_embd"] + ".weight")
    if embedding is None or len(embedding.shape) != 2:
        raise DamagedError("there is no tensor token_embd.weight of two dimensions", where=str(path))
    keys["vocab_size"] = embedding.shape[0]
    if "rope_theta" in keys and (factors := tensors.pop("rope_freqs.weight", None)):
        keys["rope_scaling"] = _llama3_scaling(factors, keys, path)
    ends = [metadata.whole(f"tokenizer.ggml.{name}_token_id", None) for name in ("eos", "eot")]
    generation = {"eos_token_id": list(dict.fromkeys(number for number in ends if number is not None)) or None}
    return Source(
        path=path,
        config=Published(keys, str(path)),
        generation=Published(generation, str(path)),
        tensors=tensors,
        weights=path,
        tokenizer=tokenizer_of(path) if "tokenizer.ggml.model" in metadata else None,
    )


def _tensors(path: Path, header: Header, architecture: _Architecture, metadata: Mapping[str, Any]) -> dict[str, Stored]:
    """The tensors under Hugging Face's names, and as it arranges them."""
    heads = metadata.get("attention.head_count")
    kv_heads = metadata.get("attention.head_count_kv", heads)
    found: dict[str, Stored] = {}
    for name, info in header.tensors.items():
        stem, number, last = _split(name)
        theirs = architecture.names.get(stem, "")
        placed = bool(theirs) and ("*" in theirs) == bool(number)  # of a layer, or of none, as llama.cpp has it
        usual = f"{theirs.replace('*', number)}.{last}" if placed else name
        if usual in found:
            raise DamagedError(f"{usual!r:.200} stands there twice, under two names", where=str(path))
        turns = {"attn_q": heads, "attn_k": kv_heads}.get(stem) if architecture.rotated else None
        if turns is not None and (not isinstance(turns, int) or turns < 1 or info.shape[0] % (2 * turns)):
            raise DamagedError(f"{name!r:.200} has {info.shape[0]} rows for {turns!r:.80} heads", where=str(path))
        rows = None if turns is None else half_split_rows(info.shape[0], turns)
        stored = _stored(path, header.data_start, name, info, rows)
        if architecture.norm_offset and stem.endswith("norm"):
            stored = _less(stored, architecture.norm_offset)
        if stem in architecture.transposed and last == "weight" and len(info.shape) == 2:
            stored = _transposed(stored)
        found[usual] = stored
    return found


def _split(name: str) -> tuple[str, str, str]:
    """blk.7.attn_q.weight -> attn_q, 7, weight."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    return (match[2], match[1] or "", match[3]) if match else ("", "", "")


def _check_places(path: Path, header: Header) -> None:
    """Refuse tensors that the file cannot hold, and any two that overlap."""
    end = path.stat().st_size - header.data_start
    taken = []
    for name, info in header.tensors.items():
        count = math.prod(info.shape)
        if not info.shape or not 1 <= count <= _LARGEST_TENSOR or min(info.shape) < 1:
            raise DamagedError(f"the tensor {name!r:.200} has shape {list(info.shape)}", where=str(path))
        if info.kind in _DENSE:
            size = count * _DENSE[info.kind].itemsize
        elif info.kind in _BLOCKS:
            form = FORMATS[_BLOCKS[info.kind]]
            if info.shape[-1] % form.numbers:
                raise DamagedError(
                    f"the tensor {name!r:.200} has rows of {info.shape[-1]} numbers in blocks of {form.numbers}",
                    where=str(path),
                )
            size = count // form.numbers * form.size
        else:
            raise QkvError(
                f"the tensor {name!r:.200} is of ggml's type {info.kind}, which is not supported",
                where=str(path),
                hint=f"supported: F32, F16, BF16, F64, {', '.join(_BLOCKS.values())}",
            )
        if info.offset + size > end:
            raise DamagedError(f"the tensor {name!r:.200} is cut off: the file ends before it does", where=str(path))
        taken.append((info.offset, info.offset + size, name))
    taken.sort()
    for (_, end, name), (start, _, other) in pairwise(taken):
        if start < end:
            raise DamagedError(f"the tensors {name!r:.200} and {other!r:.200} overlap", where=str(path))


def _stored(path: Path, start: int, name: str, info: TensorInfo, order: Tensor | None) -> Stored:
    """A tensor of the file, its rows in this order (None: as they are)."""
    shape = info.shape if len(info.shape) > 1 else (1, *info.shape)
    packed = _BLOCKS.get(info.kind)
    row = math.prod(shape[1:])
    size = row * _DENSE[info.kind].itemsize if packed is None else FORMATS[packed].row_bytes(row)

    def raw(first: int, last: int) -> Tensor:
        """The bytes of some rows, [rows, size]."""
        try:
            found = np.fromfile(path, np.uint8, (last - first) * size, offset=start + info.offset + first * size)
        except OSError as error:
            raise DamagedError(f"{name!r:.200} cannot be read: {error.strerror}", where=str(path)) from None
        if found.size != (last - first) * size:
            raise DamagedError(f"{name!r:.200} is cut off", where=str(path))
        return torch.from_numpy(found).view(-1, size)

    def ordered(tensor: Tensor) -> Tensor:
        return tensor if order is None else tensor[order]

    if packed is None:
        own = _DENSE[info.kind]

        def read(dtype: torch.dtype | None) -> Tensor:
            whole = in_pieces(shape, dtype or own, lambda first, last: raw(first, last).view(own).view(-1, *shape[1:]))
            return ordered(whole.view(info.shape))

        return Stored(info.shape, own, read)

    def dequantised(dtype: torch.dtype | None) -> Tensor:
        wanted = dtype or torch.float32
        whole = in_pieces(
            shape, wanted, lambda first, last: dequantize(raw(first, last), packed, wanted).view(-1, *shape[1:])
        )
        return ordered(whole.view(info.shape))

    return Stored(info.shape, torch.float32, dequantised, Packed(packed, lambda: ordered(raw(0, shape[0]))))


def _less(stored: Stored, offset: float) -> Stored:
    def read(dtype: torch.dtype | None) -> Tensor:
        values = stored.read(torch.float32) - offset
        return values if dtype is None else values.to(dtype)

    return replace(stored, read=read, packed=None)


def _transposed(stored: Stored) -> Stored:
    return replace(stored, shape=stored.shape[::-1], read=lambda dtype: stored.read(dtype).T, packed=None)


# --- LLaMA 3's rope ---------------------------------------------------------------------------------------------------

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What all models that scale in this way have; the file holds only what follows from it."""


def _llama3_scaling(stored: Stored, keys: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """`rope_scaling` of a file that says it as a divisor for each frequency. Raises QkvError for other divisors."""
    width = keys["head_dim"]
    other = QkvError("rope_freqs.weight are not LLaMA 3's frequencies, and no others are supported", where=str(path))
    if stored.shape != (len(range(0, width, 2)),):
        raise other
    divisors = stored.read(torch.float32)
    scaling = {"rope_type": "llama3", "factor": round(divisors.max().item(), 6), **_LLAMA3}
    wave_lengths = 2 * math.pi * keys["rope_theta"] ** (torch.arange(0, width, 2) / width)
    turns = _LLAMA3["original_max_position_embeddings"] / wave_lengths
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    expected = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    if not torch.allclose(divisors, expected, rtol=1e-3):
        raise other
    return scaling
