"""llama2.c's `.bin` files: a real one, one written here, and damaged ones."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import qkv
from qkv.checkpoint.load import load_model
from qkv.config.errors import DamagedError, QkvError, UsageError

from .folders import IDS, LLAMA, tensors_of, write_folder


def test_stories260k_is_what_llama2c_makes_of_it(data_file: Callable[[str], Path], tmp_path: Path) -> None:
    golden = json.loads(data_file("golden/stories260k.json").read_text(encoding="utf-8"))
    for file in ("stories260K.bin", "tok512.bin"):
        shutil.copy(data_file(f"weights-stories260k/{file}"), tmp_path)
    model = qkv.load(tmp_path / "stories260K.bin", device="cpu")
    logits = model.network(torch.tensor([[golden["start_token"]]]))[0, 0]
    for number, value in golden["first_logits_top5"]:
        assert abs(logits[number].item() - value) < 2e-3
    told = model.generate([golden["start_token"]], max_new_tokens=len(golden["greedy_ids"]), temperature=0)
    assert told.token_ids == golden["greedy_ids"]
    assert told.text.strip() == golden["greedy_text"].strip()


def in_pairs(matrix: Tensor, heads: int) -> Tensor:
    """Halves of each head interleaved, as Meta has them."""
    return matrix.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A file of a small LLaMA, with a head of its own."""
    write_folder(tmp_path / "published")
    tensors = tensors_of(tmp_path / "published")
    layers = [
        [tensors[f"model.layers.{layer}.{name}.weight"] for layer in range(2)]
        for name in (
            "input_layernorm",
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.o_proj",
            "post_attention_layernorm",
            "mlp.gate_proj",
            "mlp.down_proj",
            "mlp.up_proj",
        )
    ]
    layers[1] = [in_pairs(tensor, 4) for tensor in layers[1]]
    layers[2] = [in_pairs(tensor, 2) for tensor in layers[2]]
    parts = [
        tensors["model.embed_tokens.weight"],
        *(tensor for group in layers for tensor in group),
        tensors["model.norm.weight"],
        torch.zeros(2 * 64 * 4),
        tensors["lm_head.weight"],
    ]
    content = struct.pack("<7i", 32, 64, 2, 4, 2, -96, 64)
    (tmp_path / "model.bin").write_bytes(content + b"".join(part.contiguous().numpy().tobytes() for part in parts))
    return tmp_path / "model.bin"


def test_a_head_of_its_own_is_told_by_a_negative_vocabulary(written: Path) -> None:
    theirs = load_model(written.parent / "published").network.eval()
    loaded = load_model(written)
    assert loaded.config.model.tie_embeddings == "none"
    # the epsilon of these files is fixed, and 1e-5
    assert torch.allclose(loaded.network.eval()(IDS), theirs(IDS), rtol=1e-3, atol=1e-3)
    assert {name: p.shape for name, p in loaded.network.named_parameters()} == {
        name: p.shape for name, p in theirs.named_parameters()
    }
    assert all(torch.equal(p, dict(theirs.named_parameters())[name]) for name, p in loaded.network.named_parameters())
    assert loaded.tokenizer is None
    assert loaded.config.model.d_model == LLAMA["d_model"]


@pytest.mark.parametrize("size", [1, 27, 28, 5000, -1])
def test_a_file_of_another_size_is_refused(size: int, written: Path) -> None:
    content = written.read_bytes()
    written.write_bytes(content[:size])
    with pytest.raises(QkvError) as error:
        load_model(written)
    assert size < 28 or f"{len(content):,}" in error.value.what
    written.write_bytes(content + b"more")
    with pytest.raises(DamagedError, match=f"its header tells of {len(content):,}"):
        load_model(written)


@pytest.mark.parametrize(
    "numbers",
    [
        (0, 64, 2, 4, 2, 96, 64),
        (32, -1, 2, 4, 2, 96, 64),
        (32, 64, 2**31 - 1, 4, 2, 96, 64),
        (32, 64, 2, 0, 2, 96, 64),
        (32, 64, 2, 4, 3, 96, 64),
        (32, 64, 2, 5, 5, 96, 64),
        (32, 64, 2, 4, 2, 0, 64),
        (32, 64, 2, 4, 2, -(2**31), 64),
        (2**20, 2**20, 4096, 2**19, 1, 2**24, 2**20),
    ],
)
def test_absurd_numbers_are_a_clear_error(numbers: tuple[int, ...], written: Path) -> None:
    written.write_bytes(struct.pack("<7i", *numbers) + written.read_bytes()[28:])
    with pytest.raises((DamagedError, UsageError)):
        load_model(written)
