"""Tiny published folders for the tests of their containers, written by us: that transformers agrees is shown by the
tests of the families."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qkv.checkpoint.save_hf import save_hf
from qkv.config.run import Config
from qkv.nn.transformer import Transformer
from qkv.tokenizer import Tokenizer

LLAMA = {
    "vocab_size": 96,
    "max_seq_len": 64,
    "d_model": 32,
    "num_layers": 2,
    "attention": {"num_heads": 4, "num_kv_heads": 2},
    "feed_forward": {"kind": "swiglu", "d_ff": 64},
}
BART: dict[str, Any] = {
    "family": "encoder-decoder",
    "vocab_size": 96,
    "max_seq_len": 20,
    "d_model": 16,
    "num_layers": 1,
    "tie_embeddings": "all",
    "embedding": {"norm": True},
    "norm": {"kind": "layernorm", "placement": "post"},
    "position": {"kind": "learned", "offset": 2},
    "attention": {"num_heads": 2, "bias": True},
    "feed_forward": {"kind": "gelu", "d_ff": 24, "bias": True},
    "head": {"kind": "language-model", "bias": True},
}
BERT: dict[str, Any] = {
    "family": "encoder",
    "vocab_size": 96,
    "max_seq_len": 20,
    "d_model": 16,
    "num_layers": 1,
    "embedding": {"norm": True, "num_segments": 2},
    "norm": {"kind": "layernorm", "placement": "post", "eps": 1e-12},
    "position": {"kind": "learned"},
    "attention": {"num_heads": 2, "bias": True},
    "feed_forward": {"kind": "gelu", "d_ff": 24, "bias": True},
    "head": {"kind": "classifier", "num_classes": 3, "dropout": 0.0},
}
IDS = torch.randint(0, 96, (2, 9), generator=torch.Generator().manual_seed(0))


def config_of(model: dict[str, Any], **sections: Any) -> Config:
    return Config.model_validate({"model": model, **sections})


def network_of(config: Config) -> Transformer:
    """Weights far from what they start as, norms and biases too, so that a misplaced one shows."""
    network = Transformer(config.model, generator=torch.Generator().manual_seed(0)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += torch.empty_like(parameter).normal_(0, 0.2, generator=generator)
    return network


def write_folder(
    folder: Path, model: dict[str, Any] | None = None, *, tokenizer: Tokenizer | None = None, **sections: Any
) -> Transformer:
    """A Hugging Face folder of a model with these keys (default: a small LLaMA), and the network in it."""
    config = config_of(model or LLAMA, **sections)
    network = network_of(config)
    save_hf(folder, network, config, tokenizer)
    return network


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = tensors_of(folder)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
