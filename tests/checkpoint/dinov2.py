"""A DINOv2 that was exported to ONNX, as the checkpoint it was exported from."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

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

PATCH = 14


def write_dinov2(exported: Path, folder: Path) -> None:
    """Write the encoder as the Hugging Face folder that it was exported from."""
    weights = read_encoder(exported)
    layers = 1 + max(int(found[1]) for name in weights if (found := re.match(r"encoder\.layer\.(\d+)\.", name)))
    positions = weights.pop("class_position"), weights.pop("patch_positions")
    weights["embeddings.position_embeddings"] = torch.cat(positions, dim=1)
    folder.mkdir()
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    width = weights["layernorm.weight"].shape[0]
    config = {
        "architectures": ["Dinov2Model"],
        "model_type": "dinov2",
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 6,
        "mlp_ratio": weights["encoder.layer.0.mlp.fc1.weight"].shape[0] // width,
        "image_size": PATCH * int(positions[1].shape[1] ** 0.5),
        "patch_size": PATCH,
        "layer_norm_eps": 1e-6,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


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
