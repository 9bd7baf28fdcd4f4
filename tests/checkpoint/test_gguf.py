"""GGUF files, written by the `gguf` library: every type and architecture gives the network they were made of."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import quantize
from torch import Tensor

import qkv
from qkv.checkpoint.load import load_model
from qkv.config.errors import DamagedError, QkvError, UsageError
from qkv.nn.quantized import FORMATS, QuantizedLinear, dequantize
from qkv.nn.transformer import Transformer

from .folders import IDS, LLAMA, tensors_of, write_folder

WIDE = {**LLAMA, "d_model": 256, "num_layers": 1, "feed_forward": {"kind": "swiglu", "d_ff": 256}}
"""Every row is a whole block, of every format."""


# --- writing ----------------------------------------------------------------------------------------------------------


def rotated_in_pairs(matrix: Tensor, heads: int) -> Tensor:
    """As llama.cpp's converter turns q and k: each head's halves interleaved."""
    return matrix.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def converted(name: str, tensor: Tensor, arch: str, heads: int, kv_heads: int) -> Tensor:
    """What llama.cpp's converter makes of a published tensor."""
    if arch in ("llama", "smollm3") and re.search(r"[qk]_proj\.", name):
        return rotated_in_pairs(tensor, heads if "q_proj" in name else kv_heads)
    if arch == "gemma3" and name.endswith("norm.weight"):
        return tensor + 1
    if arch == "gpt2" and re.search(r"c_(attn|proj|fc)\.weight", name):
        return tensor.T
    return tensor


def write_gguf(
    path: Path,
    published: Path,
    config: Any,
    arch: str,
    *,
    kind: str = "F32",
    change: Callable[[gguf.GGUFWriter], object] = lambda writer: None,
    add: dict[str, Tensor] | None = None,
) -> Path:
    """A GGUF file of the tensors in a published folder. kind: of the matrices."""
    writer = gguf.GGUFWriter(path, arch)
    attention, feed_forward = config.layers[0].attention, config.layers[0].feed_forward
    writer.add_context_length(config.max_seq_len)
    writer.add_embedding_length(config.d_model)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(feed_forward.d_ff)
    writer.add_head_count(attention.num_heads)
    if arch == "gpt2":
        writer.add_layer_norm_eps(config.norm.eps)
    else:
        writer.add_head_count_kv(attention.num_kv_heads)
        writer.add_key_length(attention.head_dim)
        writer.add_value_length(attention.head_dim)
        writer.add_layer_norm_rms_eps(config.norm.eps)
        writer.add_rope_dimension_count(attention.head_dim)
    change(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config.num_layers)
    for name, tensor in tensors_of(published).items():
        stem, _, last = name.rpartition(".")
        values = converted(name, tensor, arch, attention.num_heads, attention.num_kv_heads).contiguous().numpy()
        add_tensor(writer, f"{names.get_name(stem)}.{last}", values, kind)
    for name, tensor in (add or {}).items():
        add_tensor(writer, name, tensor.numpy(), "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tensor(writer: gguf.GGUFWriter, name: str, values: Any, kind: str) -> None:
    if values.ndim < 2 or kind == "F32":
        writer.add_tensor(name, values)
    elif kind in ("F16", "BF16"):
        raw = values.astype(np.float16) if kind == "F16" else quantize(values, gguf.GGMLQuantizationType.BF16)
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    else:
        writer.add_tensor(name, packed(values, kind), raw_dtype=gguf.GGMLQuantizationType[kind])


def packed(values: Any, kind: str) -> Any:
    """Blocks: the library's where it quantises in this format, else any that make sensible numbers."""
    form = FORMATS[kind]
    try:
        return quantize(values, gguf.GGMLQuantizationType[kind])
    except NotImplementedError:
        generator = np.random.default_rng(0)
        blocks = generator.integers(0, 256, (values.size // form.numbers, form.size), dtype=np.uint8)
        scale = np.full((len(blocks), 1), 0.002, np.float16).view(np.uint8)
        for at in {"Q6_K": (208,)}.get(kind, (0, 2)):
            blocks[:, at : at + 2] = scale
        return blocks.reshape(*values.shape[:-1], -1)


# --- types ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FORMATS)
def test_blocks_become_the_numbers_that_ggml_makes_of_them(kind: str) -> None:
    form = FORMATS[kind]
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (6, 3 * form.size), dtype=torch.uint8, generator=generator)
    for at in {"Q6_K": (208,), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,)}.get(kind, (0, 2)):
        scales = torch.randn(18, 1, generator=generator).half().view(torch.uint8)
        blocks.view(-1, form.size)[:, at : at + 2] = scales
    expected = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind])
    numbers = dequantize(blocks, kind)
    assert numbers.shape == (6, 3 * form.numbers)
    assert torch.equal(numbers, torch.from_numpy(expected))
    assert torch.equal(dequantize(blocks, kind, torch.bfloat16), numbers.bfloat16())


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Transformer]:
    folder = tmp_path_factory.mktemp("wide") / "llama"
    return folder, write_folder(folder, WIDE)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", *FORMATS])
def test_every_type_of_matrix_is_read(kind: str, wide: tuple[Path, Transformer], tmp_path: Path) -> None:
    published, network = wide
    file = write_gguf(tmp_path / "model.gguf", published, network.config, "llama", kind=kind)
    loaded = dict(load_model(file, dtype=torch.float32).network.named_parameters())
    read = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    up = read["blk.0.ffn_up.weight"]
    expected = torch.from_numpy(gguf.quants.dequantize(up.data, up.tensor_type).copy()).view(256, 256)
    assert up.tensor_type.name == kind
    assert torch.equal(loaded["decoder.blocks.0.feed_forward.function.up.weight"], expected)
    for name, parameter in network.named_parameters():
        if kind == "F32" or parameter.dim() == 1:
            assert torch.equal(loaded[name], parameter), name


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "Q6_K"])
def test_kept_blocks_compute_the_same_in_less_memory(kind: str, wide: tuple[Path, Transformer], tmp_path: Path) -> None:
    published, network = wide
    file = write_gguf(tmp_path / "model.gguf", published, network.config, "llama", kind=kind)
    whole, kept = qkv.load(file, device="cpu"), qkv.load(file, device="cpu", quantize="keep")
    maps = [module for module in kept.network.modules() if isinstance(module, QuantizedLinear)]
    assert len(maps) == 7
    assert torch.equal(kept.network(IDS), whole.network(IDS))
    assert maps[0].blocks.nbytes == 256 * FORMATS[kind].row_bytes(256)
    assert kind in repr(maps[0])
    assert f"{maps[0].blocks.nbytes:,} bytes" in repr(maps[0])
    with pytest.raises(UsageError, match="quantised weights are not written"):
        kept.save_hf(tmp_path / "theirs")
    with pytest.raises(UsageError, match="quantised weights are not written"):
        kept.save(tmp_path / "ours")


# --- architectures ----------------------------------------------------------------------------------------------------


QK_NORM = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "qk_norm": "per-head"}
GEMMA_LAYER = {"attention": {"window": 4}, "position": {"kind": "rope", "theta": 10000.0}}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any], Callable[[gguf.GGUFWriter], object]]] = {
    "llama": ("llama", LLAMA, lambda writer: None),
    "tied": ("llama", {**LLAMA, "tie_embeddings": "head"}, lambda writer: None),
    "biased": (
        "llama",
        {**LLAMA, "attention": {**LLAMA["attention"], "bias": True}},
        lambda writer: writer.add_rope_freq_base(10000.0),
    ),
    "linear": (
        "llama",
        {**LLAMA, "position": {"kind": "rope", "theta": 500.0, "scaling": {"kind": "linear", "factor": 4.0}}},
        lambda writer: (
            writer.add_rope_freq_base(500.0),
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR),
            writer.add_rope_scaling_factor(4.0),
        ),
    ),
    "mistral": (
        "llama",
        {**LLAMA, "attention": {**LLAMA["attention"], "window": 5}},
        lambda writer: writer.add_sliding_window(5),
    ),
    "qwen2": ("qwen2", {**LLAMA, "attention": {**LLAMA["attention"], "bias": "qkv"}}, lambda writer: None),
    "qwen3": ("qwen3", {**LLAMA, "attention": QK_NORM}, lambda writer: None),
    "smollm3": (
        "smollm3",
        {**LLAMA, "num_layers": 4, "layers": [{"repeat": 3}, {"position": {"kind": "none"}}]},
        lambda writer: None,
    ),
    "gemma3": (
        "gemma3",
        {
            **LLAMA,
            "num_layers": 6,
            "tie_embeddings": "head",
            "embedding": {"scale": "sqrt-d-model"},
            "norm": {"kind": "rmsnorm", "placement": "sandwich", "unit_offset": True, "rounding": "after-weight"},
            "attention": QK_NORM,
            "feed_forward": {"kind": "geglu_tanh", "d_ff": 64},
            "layers": [
                {"repeat": 5, **GEMMA_LAYER},
                {"position": {"kind": "rope", "theta": 1e6}},
            ],
        },
        lambda writer: (writer.add_sliding_window(4), writer.add_rope_freq_base(1e6)),
    ),
    "gpt2": (
        "gpt2",
        {
            **LLAMA,
            "tie_embeddings": "head",
            "norm": {"kind": "layernorm"},
            "position": {"kind": "learned"},
            "attention": {"num_heads": 4, "bias": True},
            "feed_forward": {"kind": "gelu_tanh", "d_ff": 64, "bias": True},
        },
        lambda writer: None,
    ),
}


@pytest.mark.parametrize("case", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_every_architecture_is_read(case: Any, tmp_path: Path) -> None:
    arch, model, change = case
    network = write_folder(tmp_path / "published", model)
    file = write_gguf(tmp_path / "model.gguf", tmp_path / "published", network.config, arch, change=change)
    loaded = load_model(file, dtype=torch.float32)
    assert loaded.config.model.vocab_size == 96
    logits = network(IDS)
    assert (loaded.network.eval()(IDS) - logits).abs().max() <= 1e-5 * logits.abs().max()


def test_llama_3s_frequencies_are_recognised(tmp_path: Path) -> None:
    scaling = {
        "kind": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_seq_len": 8192,
    }
    model = {**LLAMA, "max_seq_len": 40_000, "position": {"kind": "rope", "theta": 500_000.0, "scaling": scaling}}
    network = write_folder(tmp_path / "published", {**model, "d_model": 64})
    turns = 8192 * 500_000.0 ** -(torch.arange(0, 16, 2) / 16) / (2 * torch.pi)
    smooth = ((turns - 1) / 3).clamp(0, 1)
    factors = 1 / ((1 - smooth) / 32 + smooth)
    assert factors.min() == 1
    assert 1 < factors.unique()[1] < 32 == factors.max(), "or there is nothing between"

    def write(factors: Tensor, width: int = 16) -> Path:
        def change(writer: gguf.GGUFWriter) -> None:
            writer.add_rope_freq_base(500_000.0)
            for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
                writer.kv_data[0][f"llama.{key}"].value = width

        file, published = tmp_path / "model.gguf", tmp_path / "published"
        return write_gguf(file, published, network.config, "llama", change=change, add={"rope_freqs.weight": factors})

    position = load_model(write(factors)).config.model.position
    assert position == network.config.position
    with pytest.raises(QkvError, match="not LLaMA 3's frequencies"):
        load_model(write(factors * torch.linspace(1, 1.1, 8)))
    with pytest.raises(QkvError, match="not LLaMA 3's frequencies"):  # a terabyte of them, if the header were believed
        load_model(write(factors, width=2**31))


def test_what_ends_a_text_is_read(wide: tuple[Path, Transformer], tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_eos_token_id(7)
        writer.add_eot_token_id(9)

    file = write_gguf(tmp_path / "model.gguf", wide[0], wide[1].config, "llama", change=change)
    loaded = load_model(file)
    assert loaded.config.generation.eos_ids == (7, 9)
    assert loaded.tokenizer is None


# --- refusals ---------------------------------------------------------------------------------------------------------


def refused(file: Path, kind: type[QkvError] = QkvError) -> QkvError:
    with pytest.raises(kind) as error:
        load_model(file)
    assert len(str(error.value)) < 3000
    return error.value


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda writer: writer.add_expert_count(8), "`llama.expert_count: 8`"),
        (lambda writer: writer.add_logit_scale(2.0), "llama.logit_scale"),
        (lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "rope.scaling.type"),
        (lambda writer: writer.add_uint16("split.count", 3), "split.count"),
        (lambda writer: writer.add_array("split.count", [1, 1]), "split.count"),
        (lambda writer: writer.add_array("llama.rope.scaling.factor", [1.0, 1.0]), "llama.rope.scaling.factor"),
        (lambda writer: writer.add_final_logit_softcapping(3.0), "llama.final_logit_softcapping"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused_by_name(
    change: Any, named: str, wide: tuple[Path, Transformer], tmp_path: Path
) -> None:
    error = refused(write_gguf(tmp_path / "model.gguf", wide[0], wide[1].config, "llama", change=change))
    assert named in error.what
    assert not isinstance(error, DamagedError)


def header(num_tensors: int = 0, num_keys: int = 0, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + rest


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: bytes, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


LLAMA_KEY = key(b"general.architecture", 8, text(b"llama"))
HUGE = 1 << 62


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"GGUF", "bytes more are claimed"),
        (header()[:20], "bytes more are claimed"),
        (header(num_keys=HUGE), "at most"),
        (header(num_tensors=HUGE), "at most"),
        (header(num_keys=9), "bytes more are claimed"),
        (header(num_keys=1, rest=struct.pack("<Q", HUGE)), "bytes more are claimed"),
        (header(num_keys=1, rest=key(b"a", 9, struct.pack("<IQ", 4, HUGE))), "bytes more are claimed"),
        (header(num_keys=1, rest=key(b"a", 9, struct.pack("<IQ", 8, HUGE))), "texts are claimed"),
        (header(num_keys=1, rest=key(b"a", 9, struct.pack("<IQ", 9, 1))), "no arrays of value type 9"),
        (header(num_keys=1, rest=key(b"a", 99, b"")), "no value type 99"),
        (header(num_keys=1, rest=key(b"\xff", 4, b"0000")), "not UTF-8"),
        (header(num_keys=2, rest=2 * key(b"a", 4, b"0000")), "the key 'a' stands there twice"),
        (header(num_keys=1, rest=key(b"general.alignment", 4, b"\0\0\0\0")), "an alignment of 0"),
        (header(num_keys=1, rest=key(b"general.alignment", 8, text(b"8"))), "an alignment of '8'"),
        (header(1, 1, LLAMA_KEY + tensor(b"a", (4,) * 5)), "5 where at most 4"),
        (header(1, 1, LLAMA_KEY + tensor(b"a", ()) + b"\0" * 64), "has shape []"),
        (header(1, 1, LLAMA_KEY + tensor(b"a", (0, 4)) + b"\0" * 64), "has shape [4, 0]"),
        (header(1, 1, LLAMA_KEY + tensor(b"a", (HUGE, HUGE)) + b"\0" * 64), "has shape"),
        (header(1, 1, LLAMA_KEY + tensor(b"a", (1 << 30,)) + b"\0" * 64), "cut off"),
        (header(1, 1, LLAMA_KEY + tensor(b"a", (4,), 0, HUGE) + b"\0" * 64), "cut off"),
        (header(1, 1, LLAMA_KEY + tensor(b"a", (33,), 8) + b"\0" * 64), "rows of 33 numbers in blocks of 32"),
        (header(2, 1, LLAMA_KEY + 2 * tensor(b"a", (4,)) + b"\0" * 64), "the tensor 'a' stands there twice"),
        (header(2, 1, LLAMA_KEY + tensor(b"a", (4,)) + tensor(b"b", (4,), 0, 8) + b"\0" * 99), "'a' and 'b' overlap"),
        (header(0, 1, LLAMA_KEY), "`attention.head_count` is missing"),
    ],
)
def test_a_damaged_header_is_a_clear_error(content: bytes, named: str, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    assert named in refused(tmp_path / "model.gguf").what


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (header(version=1), "version 1 is not supported"),
        (header(version=4), "version 4 is not supported"),
        (header(version=3 << 24), "big-endian files are not supported"),
        (header(), "`general.architecture` is missing"),
        (header(0, 1, key(b"general.architecture", 8, text(b"mamba"))), "`general.architecture: mamba`"),
        (header(1, 1, LLAMA_KEY + tensor(b"a", (256,), 10) + b"\0" * 99), "ggml's type 10"),
    ],
)
def test_what_is_not_supported_is_told_from_damage(content: bytes, named: str, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    error = refused(tmp_path / "model.gguf")
    assert named in error.what
    assert not isinstance(error, DamagedError)


def test_missing_and_unexpected_tensors_are_named(wide: tuple[Path, Transformer], tmp_path: Path) -> None:
    add = {"blk.0.ffn_stranger.weight": torch.ones(3)}
    file = write_gguf(tmp_path / "model.gguf", wide[0], wide[1].config, "llama", add=add)
    assert "unexpected: blk.0.ffn_stranger.weight" in refused(file, DamagedError).what


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model.norm.weight", "'model.norm.weight' stands there twice"),
        ("blk.0.output_norm.weight", "unexpected: blk.0.output_norm.weight"),
    ],
)
def test_no_tensor_takes_another_ones_place(
    name: str, said: str, wide: tuple[Path, Transformer], tmp_path: Path
) -> None:
    add = {name: torch.zeros(wide[1].config.d_model)}
    file = write_gguf(tmp_path / "model.gguf", wide[0], wide[1].config, "llama", add=add)
    assert said in refused(file, DamagedError).what


def test_a_file_cut_off_is_called_damaged(wide: tuple[Path, Transformer], tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", wide[0], wide[1].config, "llama")
    with file.open("r+b") as whole:
        whole.truncate(file.stat().st_size - 100)
    assert "is cut off" in refused(file, DamagedError).what


# --- a real one -------------------------------------------------------------------------------------------------------

PEAK = """
import resource, sys, torch, qkv.model
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
network = qkv.load(sys.argv[1], device="cpu", dtype=sys.argv[2]).network
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print((peak - before) * 1024 / sum(parameter.nbytes for parameter in network.parameters()))
"""


@pytest.mark.parametrize("quantize", [None, "keep"])
def test_smollm2_is_what_it_is_elsewhere(
    quantize: str | None, published_model: Callable[[str], Path], data_file: Callable[[str], Path]
) -> None:
    golden = json.loads(data_file("golden/smollm2.json").read_text(encoding="utf-8"))
    (file,) = published_model("smollm2").glob("*.gguf")
    model = qkv.load(file, device="cpu", quantize=quantize)
    for case in golden["cases"]:
        assert model.tokenizer is not None
        assert model.tokenizer.encode(case["prompt"], parse_special=True) == case["prompt_ids"]
        with torch.no_grad():
            logits = model.network(torch.tensor([case["prompt_ids"]]), logits="last")[0, 0]
        for number, value in case["last_logits_top5"]:
            assert abs(logits[number].item() - value) < 2e-3
        told = model.generate(case["prompt_ids"], max_new_tokens=len(case["greedy_ids"]), temperature=0)
        assert told.token_ids == case["greedy_ids"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is counted in KiB on Linux")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_loading_takes_little_more_than_the_model(dtype: str, published_model: Callable[[str], Path]) -> None:
    (file,) = published_model("smollm2").glob("*.gguf")
    told = subprocess.run([sys.executable, "-c", PEAK, file, dtype], check=True, capture_output=True, text=True)
    assert float(told.stdout) <= 1.3
