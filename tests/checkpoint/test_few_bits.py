"""Weights published in few bits, with a scale for each block."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import qkv
from qkv.checkpoint.few_bits import mxfp4
from qkv.config import DamagedError, QkvError

from .folders import change_tensors, tensors_of, write_folder

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [12, 20]}
GPT_OSS: dict[str, Any] = {
    "vocab_size": 50,
    "max_seq_len": 16,
    "d_model": 64,
    "num_layers": 1,
    "norm": {"kind": "rmsnorm", "rounding": "after-weight"},
    "attention": {"num_heads": 2, "bias": True, "sinks": True},
    "feed_forward": {
        "kind": "moe",
        "num_experts": 3,
        "d_ff": 32,
        "expert": {"kind": "swiglu_oss", "bias": True, "limit": 7.0},
        "router": {"bias": True},
    },
}


def say(folder: Path, method: dict[str, Any]) -> None:
    """Have config.json tell of these quantised weights."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": method}))


def packed(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Random blocks and scales of the matrices [rows, columns] of three experts."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(118, 126, (3, rows, columns // 32), generator=generator, dtype=torch.uint8)


def parameters(folder: Path) -> dict[str, Tensor]:
    return dict(qkv.load(folder, device="cpu").network.named_parameters())


def assert_same(folder: Path, other: Path) -> None:
    ours, theirs = parameters(folder), parameters(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_mxfp4_numbers_are_those_of_transformers() -> None:
    blocks, scales = packed(6, 96)
    assert torch.equal(mxfp4(blocks, scales).mT, convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))


def test_experts_in_mxfp4_are_loaded_as_floats(tmp_path: Path) -> None:
    write_folder(tmp_path / "packed", GPT_OSS)
    write_folder(tmp_path / "floats", GPT_OSS)
    experts = "model.layers.0.mlp.experts"
    for name, rows, columns in (("gate_up_proj", 64, 64), ("down_proj", 64, 32)):
        blocks, scales = packed(rows, columns)

        def pack(tensors: dict[str, Tensor]) -> None:
            del tensors[f"{experts}.{name}"]  # noqa: B023
            tensors.update({f"{experts}.{name}_blocks": blocks, f"{experts}.{name}_scales": scales})  # noqa: B023

        change_tensors(tmp_path / "packed", pack)
        floats = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        change_tensors(tmp_path / "floats", lambda tensors: tensors.update({f"{experts}.{name}": floats}))  # noqa: B023
    say(tmp_path / "packed", MXFP4)
    assert_same(tmp_path / "packed", tmp_path / "floats")


def to_fp8(tensors: dict[str, Tensor]) -> None:
    """Every matrix of the layers as E4M3, with a scale for each 12 rows and 20 columns."""
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        rows, columns = tensors[name].shape
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.rand(-(-rows // 12), -(-columns // 20), generator=generator)


def test_matrices_in_fp8_are_loaded_as_floats(tmp_path: Path) -> None:
    for name in ("packed", "floats"):
        write_folder(tmp_path / name)
        change_tensors(tmp_path / name, to_fp8)

    def multiply(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_scale_inv")]:
            scales, own = tensors.pop(name), name.removesuffix("_scale_inv")
            rows, columns = tensors[own].shape
            tensors[own] = tensors[own].float() * torch.kron(scales, torch.ones(12, 20))[:rows, :columns]

    change_tensors(tmp_path / "floats", multiply)
    say(tmp_path / "packed", FP8)
    assert_same(tmp_path / "packed", tmp_path / "floats")
    assert qkv.load(tmp_path / "packed", device="cpu", dtype="bf16").network.head.weight.dtype == torch.bfloat16


def test_a_matrix_whose_scales_do_not_fit_is_damaged(tmp_path: Path) -> None:
    write_folder(tmp_path / "model")
    change_tensors(tmp_path / "model", to_fp8)
    say(tmp_path / "model", {**FP8, "weight_block_size": [128, 128]})
    with pytest.raises(DamagedError, match=r"proj\.weight` is missing, or does not fit"):
        qkv.load(tmp_path / "model")


def test_scales_without_their_matrix_are_damage(tmp_path: Path) -> None:
    write_folder(tmp_path / "model")
    name = next(name for name in tensors_of(tmp_path / "model") if name.endswith("q_proj.weight"))
    change_tensors(tmp_path / "model", lambda tensors: tensors.update({f"{name}_scales": tensors.pop(name)}))
    say(tmp_path / "model", MXFP4)
    with pytest.raises(DamagedError, match="_blocks` is missing"):
        qkv.load(tmp_path / "model")


def test_a_matrix_that_is_there_in_floats_too_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path / "model", GPT_OSS)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    blocks, scales = packed(64, 64)
    both = {f"{name}_blocks": blocks, f"{name}_scales": scales}
    change_tensors(tmp_path / "model", lambda tensors: tensors.update(both))
    say(tmp_path / "model", MXFP4)
    with pytest.raises(DamagedError, match=f"`{name}` is there twice, packed as `{name}_blocks` too"):
        qkv.load(tmp_path / "model")


@pytest.mark.parametrize("method", ["mxfp4", "fp8"])
def test_matrices_without_their_scales_are_damage(method: str, tmp_path: Path) -> None:
    write_folder(tmp_path / "model")
    name = next(name for name in tensors_of(tmp_path / "model") if name.endswith("q_proj.weight"))

    def pack(tensors: dict[str, Tensor]) -> None:
        weight = tensors.pop(name)
        if method == "fp8":
            tensors[name] = weight.to(torch.float8_e4m3fn)
        else:
            tensors[f"{name}_blocks"] = weight.to(torch.uint8)

    change_tensors(tmp_path / "model", pack)
    say(tmp_path / "model", FP8 if method == "fp8" else MXFP4)
    missing = f"{name}_scale_inv" if method == "fp8" else f"{name}_scales"
    with pytest.raises(DamagedError, match=f"`{missing}` is missing"):
        qkv.load(tmp_path / "model")


@pytest.mark.parametrize("changes", [{"weight_block_size": None}, {"weight_block_size": [0, 1]}, {"fmt": "e5m2"}])
def test_another_arrangement_is_refused_by_its_key(changes: dict[str, Any], tmp_path: Path) -> None:
    write_folder(tmp_path / "model")
    say(tmp_path / "model", {**FP8, **changes})
    with pytest.raises(QkvError, match=f"`{next(iter(changes))}"):
        qkv.load(tmp_path / "model")
