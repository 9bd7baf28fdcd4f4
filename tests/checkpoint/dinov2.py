"""A DINOv2 that was exported to ONNX, as the ViT that computes the same.

Two things are not ViT's. LayerScale multiplies what a sublayer gives by a vector, which its last matrix and bias can do
themselves; and the positions of the images in training are interpolated to those of smaller ones.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from qkv.tokenizer.protobuf import fields

Weights = dict[str, Tensor]

# numbers of fields in onnx.proto
GRAPH, NODE, INITIALIZER = 7, 1, 5
NODE_INPUT, NODE_OUTPUT, NODE_OPERATOR = 1, 2, 4
TENSOR_DIMS, TENSOR_NAME, TENSOR_DATA = 1, 8, 9

POSITIONS = {
    "/backbone/embeddings/Concat_6_output_0": "backbone.class_position",
    "/backbone/embeddings/Reshape_1_output_0": "backbone.patch_positions",
}
"""Where the positions are first used."""

RENAMED = {
    "norm1": "layernorm_before",
    "norm2": "layernorm_after",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}
SCALED = {"attention.output.dense": "layer_scale1", "output.dense": "layer_scale2"}


def write_vit(exported: Path, folder: Path, image_size: int, patch_size: int) -> None:
    """Write the encoder as a Hugging Face folder of a ViT for images of this size."""
    weights = read_encoder(exported)
    layers = 1 + max(int(found[1]) for name in weights if (found := re.match(r"encoder\.layer\.(\d+)\.", name)))
    for layer in (f"encoder.layer.{number}" for number in range(layers)):
        for theirs, ours in RENAMED.items():
            for kind in ("weight", "bias"):
                weights[f"{layer}.{ours}.{kind}"] = weights.pop(f"{layer}.{theirs}.{kind}")
        for matrix, scale in SCALED.items():
            factor = weights.pop(f"{layer}.{scale}.lambda1")
            weights[f"{layer}.{matrix}.weight"] *= factor[:, None]
            weights[f"{layer}.{matrix}.bias"] *= factor
    weights["embeddings.position_embeddings"] = positions(weights, image_size // patch_size)
    folder.mkdir()
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    config = {
        "architectures": ["ViTModel"],
        "model_type": "vit",
        "hidden_size": weights["layernorm.weight"].shape[0],
        "num_hidden_layers": layers,
        "num_attention_heads": 6,
        "intermediate_size": weights["encoder.layer.0.intermediate.dense.weight"].shape[0],
        "image_size": image_size,
        "patch_size": patch_size,
        "layer_norm_eps": 1e-6,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def positions(weights: Weights, side: int) -> Tensor:
    """[1, 1 + side^2, M] of those that were trained, the class token's unchanged."""
    first, others = weights.pop("class_position"), weights.pop("patch_positions")
    trained = int(others.shape[1] ** 0.5)
    grid = others.unflatten(1, (trained, trained)).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, size=(side, side), mode="bicubic", align_corners=False)
    return torch.cat((first, grid.flatten(2).transpose(1, 2)), dim=1)


def read_encoder(exported: Path) -> Weights:
    """The encoder's weights. What lost its name in the export is called after where it is used."""
    graph = dict(fields(exported.read_bytes()))[GRAPH]
    assert isinstance(graph, bytes)
    messages = [(number, message) for number, message in fields(graph) if isinstance(message, bytes)]
    used: dict[str, str] = {}
    for number, message in messages:
        if number == NODE:
            inputs, (output,), (operator,) = (
                texts(message, wanted) for wanted in (NODE_INPUT, NODE_OUTPUT, NODE_OPERATOR)
            )
            if operator == "MatMul":
                used[inputs[1]] = output.replace("/MatMul_output_0", ".weight").strip("/").replace("/", ".")
            elif output in POSITIONS:
                used[inputs[0]] = POSITIONS[output]
    found: Weights = {}
    for number, message in messages:
        if number == INITIALIZER:
            (name,), tensor = texts(message, TENSOR_NAME), read_tensor(message)
            turned = used.get(name, "").endswith(".weight")
            found[used.get(name, name)] = tensor.T if turned else tensor
    return {name.removeprefix("backbone."): tensor for name, tensor in found.items() if name.startswith("backbone.")}


def texts(message: bytes, number: int) -> list[str]:
    """The fields of this number, which are texts."""
    return [value.decode() for field, value in fields(message) if field == number and isinstance(value, bytes)]


def read_tensor(message: bytes) -> Tensor:
    shape = [value for field, value in fields(message) if field == TENSOR_DIMS and isinstance(value, int)]
    data = next(value for field, value in fields(message) if field == TENSOR_DATA and isinstance(value, bytes))
    return torch.frombuffer(bytearray(data), dtype=torch.float32).view(shape)
