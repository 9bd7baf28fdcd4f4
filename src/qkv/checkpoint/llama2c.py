"""The `.bin` files of llama2.c (https://github.com/karpathy/llama2.c), of its first version: seven whole numbers, then
float32 matrices one after the other; a LLaMA, with queries and keys arranged as Meta has them."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from qkv.checkpoint.published import Published
from qkv.checkpoint.source import Source, half_split_rows, tokenizer_of
from qkv.checkpoint.tensors import Stored
from qkv.config.errors import DamagedError
from qkv.config.numbers import MAX_LAYERS, MAX_VOCAB

_HEADER = struct.Struct("<7i")
_ITEM = 4  # bytes
_LARGEST = 1 << 20  # of every number in the header but the vocabulary's


def is_ours(path: Path) -> bool:
    """Whether the file begins like one of llama2.c, whatever its size."""
    try:
        _read_header(path)
    except DamagedError:
        return False
    return True


def read(path: Path) -> Source:
    """The model in the file. Its tokenizer stands beside it, as tokN.bin for N pieces, or there is none."""
    dim, hidden, layers, heads, kv_heads, vocab, length, tied = _read_header(path)
    width, kv_width = dim // heads, dim // heads * kv_heads
    plan: list[tuple[str, tuple[int, ...], int]] = [("model.embed_tokens", (vocab, dim), 0)]
    layer_plan: list[tuple[str, tuple[int, ...], int]] = [
        ("input_layernorm", (dim,), 0),
        ("self_attn.q_proj", (dim, dim), heads),
        ("self_attn.k_proj", (kv_width, dim), kv_heads),
        ("self_attn.v_proj", (kv_width, dim), 0),
        ("self_attn.o_proj", (dim, dim), 0),
        ("post_attention_layernorm", (dim,), 0),
        ("mlp.gate_proj", (hidden, dim), 0),
        ("mlp.down_proj", (dim, hidden), 0),
        ("mlp.up_proj", (hidden, dim), 0),
    ]
    for name, shape, turns in layer_plan:
        plan += [(f"model.layers.{layer}.{name}", shape, turns) for layer in range(layers)]
    plan += [("model.norm", (dim,), 0), ("", (2, length, width // 2), 0)]  # the latter: cosines and sines
    if not tied:
        plan.append(("lm_head", (vocab, dim), 0))
    tensors: dict[str, Stored] = {}
    at = _HEADER.size
    for name, shape, turns in plan:
        if name:
            tensors[f"{name}.weight"] = Stored(shape, torch.float32, _reader(path, at, shape, turns))
        at += math.prod(shape) * _ITEM
    size = path.stat().st_size
    if size != at:
        raise DamagedError(f"the file has {size:,} bytes, and its header tells of {at:,}", where=str(path))
    keys = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": dim,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": length,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
    }
    return Source(
        path=path,
        config=Published(keys, str(path)),
        generation=Published({}, str(path)),
        tensors=tensors,
        weights=path,
        tokenizer=tokenizer_of(path.with_name(f"tok{vocab}.bin")),
    )


def _read_header(path: Path) -> tuple[int, int, int, int, int, int, int, bool]:
    """dim, hidden dim, layers, heads, key/value heads, pieces, length, and whether the head is the embedding."""
    with path.open("rb") as file:
        start = file.read(_HEADER.size)
    if len(start) < _HEADER.size:
        raise DamagedError("the file ends within its header", where=str(path))
    dim, hidden, layers, heads, kv_heads, vocab, length = _HEADER.unpack(start)
    if not all(1 <= number <= _LARGEST for number in (dim, hidden, layers, heads, kv_heads, length)):
        raise DamagedError("the header's numbers are those of no model", where=str(path))
    if layers > MAX_LAYERS or not 1 <= abs(vocab) <= MAX_VOCAB or dim % heads or dim // heads % 2 or heads % kv_heads:
        raise DamagedError("the header's numbers are those of no model", where=str(path))
    return dim, hidden, layers, heads, kv_heads, abs(vocab), length, vocab > 0


def _reader(path: Path, at: int, shape: tuple[int, ...], turns: int) -> Callable[[torch.dtype | None], Tensor]:
    """turns: the number of heads whose rows rotate in pairs of neighbours, 0 where none do."""

    def read(dtype: torch.dtype | None) -> Tensor:
        count = math.prod(shape)
        values = torch.from_numpy(np.fromfile(path, "<f4", count, offset=at)).view(shape)
        if turns:
            values = values[half_split_rows(shape[0], turns)]
        return values if dtype is None else values.to(dtype)

    return read
