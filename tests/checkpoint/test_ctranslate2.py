"""Whisper in CTranslate2's format: as it was before it was converted, in every precision; and damaged."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import qkv
from qkv.checkpoint.load import load_model
from qkv.config.errors import DamagedError, QkvError
from qkv.nn.transformer import Transformer

from .folders import tensors_of, write_folder

WHISPER: dict[str, Any] = {
    "family": "encoder-decoder",
    "d_model": 16,
    "num_layers": 2,
    "tie_embeddings": "head",
    "norm": {"kind": "layernorm"},
    "attention": {"num_heads": 4, "bias": "qvo"},
    "feed_forward": {"kind": "gelu", "d_ff": 24, "bias": True},
    "encoder": {
        "input": {"kind": "log-mel", "num_mels": 8},
        "max_seq_len": 20,
        "position": {"kind": "sinusoidal", "layout": "tensor2tensor"},
    },
    "decoder": {"vocab_size": 40, "max_seq_len": 12, "position": {"kind": "learned"}},
}
SPECIAL = {30: "<|endoftext|>", 31: "<|startoftranscript|>", 39: "<|notimestamps|>"}
TYPES = {np.dtype("f4"): 0, np.dtype("i1"): 1, np.dtype("i2"): 2, np.dtype("i4"): 3, np.dtype("f2"): 4}

Variables = dict[str, np.ndarray[Any, Any]]


# --- writing, as CTranslate2's converter does -------------------------------------------------------------------------


def variables_of(tensors: dict[str, Tensor]) -> Variables:
    """What the converter makes of Hugging Face's tensors: q, k, v in one, no bias on k being one of zeros."""
    found: dict[str, Tensor] = {}
    for side in ("encoder", "decoder"):
        found[f"{side}/position_encodings/encodings"] = tensors[f"model.{side}.embed_positions.weight"]
        _norm(found, f"{side}/layer_norm", tensors, f"model.{side}.layer_norm")
        for layer in range(2):
            ours, theirs = f"{side}/layer_{layer}", f"model.{side}.layers.{layer}"
            _attention(found, f"{ours}/self_attention", tensors, f"{theirs}.self_attn", [("q", "k", "v"), ("out",)])
            if side == "decoder":
                stacks = [("q",), ("k", "v"), ("out",)]
                _attention(found, f"{ours}/attention", tensors, f"{theirs}.encoder_attn", stacks)
            _norm(found, f"{ours}/ffn/layer_norm", tensors, f"{theirs}.final_layer_norm")
            for number in (0, 1):
                for last in ("weight", "bias"):
                    found[f"{ours}/ffn/linear_{number}/{last}"] = tensors[f"{theirs}.fc{number + 1}.{last}"]
    for conv in ("conv1", "conv2"):
        for last in ("weight", "bias"):
            found[f"encoder/{conv}/{last}"] = tensors[f"model.encoder.{conv}.{last}"]
    found["decoder/embeddings/weight"] = tensors["model.decoder.embed_tokens.weight"]
    numbers = {f"{side}/num_heads": np.array(4, np.int16) for side in ("encoder", "decoder")}
    numbers["decoder/activation"] = np.array(3, np.int8)
    return {name: tensor.numpy() for name, tensor in found.items()} | numbers


def _norm(found: dict[str, Tensor], ours: str, tensors: dict[str, Tensor], theirs: str) -> None:
    found[f"{ours}/gamma"], found[f"{ours}/beta"] = tensors[f"{theirs}.weight"], tensors[f"{theirs}.bias"]


def _attention(
    found: dict[str, Tensor], ours: str, tensors: dict[str, Tensor], theirs: str, stacks: list[tuple[str, ...]]
) -> None:
    _norm(found, f"{ours}/layer_norm", tensors, f"{theirs}_layer_norm")
    for number, names in enumerate(stacks):
        found[f"{ours}/linear_{number}/weight"] = torch.cat([tensors[f"{theirs}.{name}_proj.weight"] for name in names])
        biases = [tensors.get(f"{theirs}.{name}_proj.bias", torch.zeros(16)) for name in names]
        found[f"{ours}/linear_{number}/bias"] = torch.cat(biases)


def string(value: str) -> bytes:
    return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"


def content_of(variables: Variables, spec: str = "WhisperSpec", version: int = 6) -> bytes:
    written = struct.pack("<I", version) + string(spec) + struct.pack("<II", 3, len(variables))
    for name, values in variables.items():
        written += string(name) + struct.pack(f"<B{values.ndim}I", values.ndim, *values.shape)
        written += struct.pack("<BI", TYPES[values.dtype], values.nbytes) + values.tobytes()
    return written + struct.pack("<I", 1) + string("decoder/projection/weight") + string("decoder/embeddings/weight")


def write(folder: Path, variables: Variables) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model.bin").write_bytes(content_of(variables))
    told = {"suppress_ids": [1, 2], "suppress_ids_begin": [3], "lang_ids": [32]}
    (folder / "config.json").write_text(json.dumps(told), encoding="utf-8")
    words = [SPECIAL.get(number, f"word{number}") for number in range(40)]
    (folder / "vocabulary.txt").write_text("\n".join(words), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> tuple[Transformer, Variables]:
    folder = tmp_path_factory.mktemp("whisper") / "published"
    network = write_folder(folder, WHISPER, generation={"start_ids": [31]})
    return network, variables_of(tensors_of(folder))


def outputs(network: Transformer) -> Tensor:
    mel = torch.randn(1, 40, 8, generator=torch.Generator().manual_seed(0))
    return network.eval()(torch.tensor([[31, 5, 6, 7]]), source=mel)


# --- reading ----------------------------------------------------------------------------------------------------------


def test_the_model_is_the_one_that_was_converted(whisper: tuple[Transformer, Variables], tmp_path: Path) -> None:
    network, variables = whisper
    write(tmp_path / "model", variables)
    for path in (tmp_path / "model", tmp_path / "model" / "model.bin"):
        loaded = load_model(path)
        assert torch.equal(outputs(loaded.network), outputs(network))
    generation = loaded.config.generation
    assert (generation.start_ids, generation.eos_ids) == ((31, 39), (30,))
    assert (generation.suppress_ids, generation.begin_suppress_ids) == ((1, 2), (3,))
    assert loaded.tokenizer is None


def test_float16_is_widened(whisper: tuple[Transformer, Variables], tmp_path: Path) -> None:
    network, variables = whisper
    halves = {name: values.astype("f2") if values.dtype == "f4" else values for name, values in variables.items()}
    loaded = qkv.load(write(tmp_path / "model", halves), device="cpu")
    assert torch.equal(outputs(loaded.network), outputs(network.half().float()))
    network.load_state_dict(load_model(write(tmp_path / "model", variables)).network.state_dict())


def test_int8_is_widened_by_the_scale_of_its_row(whisper: tuple[Transformer, Variables], tmp_path: Path) -> None:
    network, variables = whisper
    quantised: Variables = {}
    for name, values in variables.items():
        quantised[name] = values
        if values.ndim == 2 and name.endswith("weight"):
            scales = (127 / np.abs(values).max(1)).astype("f4")
            quantised |= {name: np.rint(values * scales[:, None]).astype("i1"), f"{name}_scale": scales}
    loaded = load_model(write(tmp_path / "model", quantised)).network
    mine = dict(loaded.named_parameters())
    for name, parameter in network.named_parameters():
        step = parameter.abs().amax(-1, keepdim=True) / 127
        assert ((mine[name] - parameter).abs() <= 0.51 * step + 1e-7).all(), name
    assert outputs(loaded).isfinite().all()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda v: v.pop("decoder/layer_1/ffn/linear_0/weight"), "missing: decoder/layer_1/ffn/linear_0/weight"),
        (lambda v: v.update({"stranger": np.zeros(3, "f4")}), "unexpected: stranger"),
        (lambda v: v.update({"encoder/layer_3/a": np.zeros(3, "f4")}), "not numbered 0, 1"),
        (lambda v: v.update({"encoder/num_heads": np.array(0, np.int16)}), "no model has this configuration"),
        (lambda v: v.update({"encoder/num_heads": np.array(2.5, "f4")}), "num_heads is no whole number"),
        (lambda v: v.update({"encoder/num_heads": np.zeros(2, "i4")}), "num_heads has shape [2]"),
        (lambda v: v.update({"decoder/pre_norm": np.array(0, np.int8)}), "decoder/pre_norm = 0"),
        (lambda v: v["encoder/layer_0/self_attention/linear_0/bias"].__setitem__(20, 1.0), "a bias on its keys"),
        (lambda v: v.update({"encoder/conv1/bias": np.zeros(5, "f4")}), "has shape [5], expected [16]"),
        (lambda v: v.update({"encoder/layer_norm/beta": np.zeros(16, "i2")}), "is held as int16"),
        (lambda v: v.update({"encoder/layer_0/self_attention/linear_0/bias": np.zeros(47, "f4")}), "has shape [47]"),
        (lambda v: v.update({"encoder/conv1/bias_scale": np.zeros(1, "f4")}), "has shape [16], and its scales [1]"),
    ],
)
def test_what_does_not_belong_is_named(
    change: Any, named: str, whisper: tuple[Transformer, Variables], tmp_path: Path
) -> None:
    variables = {name: values.copy() for name, values in whisper[1].items()}
    change(variables)
    write(tmp_path / "model", variables)
    with pytest.raises(QkvError) as error:
        load_model(tmp_path / "model")
    assert named in error.value.what.replace("`", "")


def test_other_models_are_told_from_damage(whisper: tuple[Transformer, Variables], tmp_path: Path) -> None:
    write(tmp_path / "model", whisper[1])
    for spec, version in (("TransformerSpec", 6), ("WhisperSpec", 99)):
        (tmp_path / "model" / "model.bin").write_bytes(content_of(whisper[1], spec, version))
        with pytest.raises(QkvError, match=f"{spec}' of version {version} is not supported") as error:
            load_model(tmp_path / "model")
        assert not isinstance(error.value, DamagedError)


@pytest.mark.parametrize("share", [0.0005, 0.01, 0.3, 0.9999])
def test_a_file_cut_off_is_called_damaged(share: float, whisper: tuple[Transformer, Variables], tmp_path: Path) -> None:
    write(tmp_path / "model", whisper[1])
    content = content_of(whisper[1])
    (tmp_path / "model" / "model.bin").write_bytes(content[: max(math.floor(len(content) * share), 20)])
    with pytest.raises(DamagedError, match=r"cut off"):
        load_model(tmp_path / "model")


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        (struct.pack("<I", 2**32 - 1), "at most"),
        (struct.pack("<I", 1) + string("a") + b"\xff", "at most"),
        (struct.pack("<I", 1) + string("a") + struct.pack("<BIIBI", 2, 2**31, 2**31, 0, 4), "has 4 bytes"),
        (struct.pack("<I", 1) + string("a") + struct.pack("<BIBI", 1, 2**30, 0, 2**32 - 4), "has 4,294,967,292 bytes"),
        (struct.pack("<I", 1) + string("a") + struct.pack("<BIBI", 1, 2**29, 0, 2**31), "cut off"),
        (struct.pack("<I", 1) + string("a") + struct.pack("<BIBI", 1, 1, 9, 4), "a type that there is not"),
        (struct.pack("<I", 2) + 2 * (string("a") + struct.pack("<BIBIf", 1, 1, 0, 4, 0.0)), "stands there twice"),
    ],
)
def test_absurd_counts_are_a_clear_error(variables: bytes, named: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    start = struct.pack("<I", 6) + string("WhisperSpec") + struct.pack("<I", 3)
    (tmp_path / "model" / "model.bin").write_bytes(start + variables)
    with pytest.raises(DamagedError) as error:
        load_model(tmp_path / "model")
    assert named in error.value.what
