"""Good files with bytes changed: each is read as another good one, or refused by an error of ours, quickly, in bounded
memory, and without running anything."""

from __future__ import annotations

import json
import random
import resource
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from qkv.checkpoint.load import load_model
from qkv.config.errors import QkvError
from qkv.tokenizer import Tokenizer

from .folders import LLAMA, tensors_of, write_folder
from .test_ctranslate2 import WHISPER, content_of, variables_of
from .test_ctranslate2 import write as write_ctranslate2
from .test_gguf import write_gguf

COUNT = 500
MANY = 10_000
BYTES = 1 << 26
"""What a load of these small files may take, whatever they claim."""

TINY = {**LLAMA, "num_layers": 1, "vocab_size": 32, "d_model": 16, "feed_forward": {"d_ff": 16}}
COUNTS = (
    pytest.param(COUNT, id="some"),
    pytest.param(MANY, id="many", marks=pytest.mark.slow),
)


def mutations(content: bytes, header: int, count: int) -> Iterator[bytes]:
    """`count` changes of the first `header` bytes of a file: bits, bytes, numbers, cuts, repeats and deletions."""
    draw = random.Random(0)
    for _ in range(count):
        changed = bytearray(content)
        for _ in range(draw.choice((1, 1, 1, 2, 4))):
            at = draw.randrange(min(header, len(changed)) or 1)
            match draw.randrange(7):
                case 0:
                    changed[at] ^= 1 << draw.randrange(8)
                case 1:
                    changed[at] = draw.randrange(256)
                case 2:
                    size = draw.choice((4, 8))
                    number = draw.choice((0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1, 255, 65_536))
                    changed[at : at + size] = (number % 256**size).to_bytes(size, "little")
                case 3:
                    changed = changed[: at + 1]
                case 4:
                    length = draw.randrange(1, 40)
                    changed[at:at] = changed[at : at + length]
                case 5:
                    del changed[at : at + draw.randrange(1, 40)]
                case _:
                    changed[at : at + 1] = draw.choice(
                        (b"-1", b"9" * 30, b"[", b"}", b'"', b"null", b"1e999", b"\\u0000")
                    )
        yield bytes(changed)


def peak_memory() -> int:
    """The most bytes this process has had, what torch allocates included."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def survive(path: Path, content: bytes, header: int, count: int, *, load: Callable[[], Any]) -> None:
    """Every mutation of `path` is refused as one of ours or loads, within time and memory."""
    outcomes = {True: 0, False: 0}
    resident = peak_memory()
    tracemalloc.start()
    try:
        for number, changed in enumerate(mutations(content, header, count)):
            path.write_bytes(changed)
            tracemalloc.reset_peak()
            began = time.process_time()
            try:
                load()
                told = ""
            except QkvError as error:
                told = str(error)
            outcomes[not told] += 1
            assert len(told) < 5000, number
            assert time.process_time() - began < 5, number
            assert tracemalloc.get_traced_memory()[1] < BYTES, number
    finally:
        tracemalloc.stop()
    assert peak_memory() - resident < BYTES
    assert outcomes[False] > count // 4, "or the changes were too small to hold anything"


@pytest.mark.parametrize("count", COUNTS)
def test_a_changed_safetensors_header_is_survived(count: int, tmp_path: Path) -> None:
    write_folder(tmp_path / "llama", TINY)
    file = tmp_path / "llama" / "model.safetensors"
    content = file.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    survive(file, content, header, count, load=lambda: load_model(tmp_path / "llama"))


@pytest.mark.parametrize("count", COUNTS)
def test_a_changed_gguf_header_is_survived(count: int, tmp_path: Path) -> None:
    network = write_folder(tmp_path / "llama", TINY)

    def vocabulary(writer: Any) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list([f"t{number}" for number in range(32)])
        writer.add_token_scores([float(-number) for number in range(32)])
        writer.add_token_types([1] * 32)
        writer.add_eos_token_id(2)

    file = write_gguf(tmp_path / "model.gguf", tmp_path / "llama", network.config, "llama", change=vocabulary)
    content = file.read_bytes()
    data = sum(parameter.nbytes for parameter in network.parameters())
    survive(file, content, len(content) - data, count, load=lambda: load_model(file))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_changed_json_is_survived(name: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.train("words", kind="char")
    write_folder(tmp_path / "llama", TINY, tokenizer=tokenizer)
    content = (tmp_path / "llama" / name).read_bytes()
    survive(tmp_path / "llama" / name, content, len(content), 100, load=lambda: load_model(tmp_path / "llama"))


def test_a_changed_ctranslate2_file_is_survived(tmp_path: Path) -> None:
    write_folder(tmp_path / "published", WHISPER, generation={"start_ids": [31]})
    content = content_of(variables_of(tensors_of(tmp_path / "published")))
    write_ctranslate2(tmp_path / "whisper", variables_of(tensors_of(tmp_path / "published")))
    file = tmp_path / "whisper" / "model.bin"
    survive(file, content, 200, 100, load=lambda: load_model(tmp_path / "whisper"))


def test_a_claimed_size_is_never_allocated(tmp_path: Path) -> None:
    """Of everything in a configuration that may be absurd, a terabyte of weights is the largest that is valid."""
    write_folder(tmp_path / "llama", TINY)
    path = tmp_path / "llama" / "config.json"
    keys = json.loads(path.read_text(encoding="utf-8"))
    keys |= {"hidden_size": 2**16, "intermediate_size": 2**20, "vocab_size": 2**24, "num_hidden_layers": 8}
    keys |= {"head_dim": 2**12, "num_attention_heads": 16}
    path.write_text(json.dumps(keys), encoding="utf-8")
    before = torch.get_rng_state()
    with pytest.raises(QkvError, match="missing"):
        load_model(tmp_path / "llama")
    assert torch.equal(torch.get_rng_state(), before)
