"""How fast models read and write, and what the machine reaches."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from qkv.config import Config
from qkv.config.errors import UsageError
from qkv.evaluate import limits
from qkv.evaluate import speed as speed_module
from qkv.evaluate.limits import count_reads, matrix_rate, memory_rate
from qkv.evaluate.speed import measure_decode, measure_prefill
from qkv.inspect.summary import sized, summarise
from qkv.nn.transformer import Transformer

CPU = torch.device("cpu")
SMALL = ("model.num_layers=1", "model.max_seq_len=32", "model.d_model=32")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_SECONDS_EACH", 0.001)


def network(preset: str, *overrides: str) -> Transformer:
    model = sized(Config.load(preset, *overrides))[0]
    return Transformer(model, generator=torch.Generator().manual_seed(0)).eval()


# --- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "overrides", "tokens"),
    [
        ("decoder-tiny", SMALL, 32),
        ("decoder-tiny", (*SMALL, "objective.kind=prefix"), 32),
        ("encoder-tiny", SMALL, 32),
        ("encoder-decoder-tiny", SMALL, 32),
        ("vit-tiny", ("model.num_layers=1",), 17),
        ("speech-tiny", ("model.encoder.num_layers=1", "model.decoder.num_layers=1"), None),
        ("caption-tiny", ("model.encoder.num_layers=1", "model.decoder.num_layers=1"), None),
    ],
)
def test_every_family_reads(preset: str, overrides: tuple[str, ...], tokens: int | None) -> None:
    net = network(preset, *overrides)
    speed = measure_prefill(net, batch_size=2, turns=2)
    first = next(iter(net.config.stacks.values()))
    assert speed.prompt_tokens == (first.max_seq_len if tokens is None else tokens)
    assert len(speed.seconds) == 2
    assert speed.tokens_per_second == [2 * speed.prompt_tokens / seconds for seconds in speed.seconds]
    assert speed.ratio is not None
    assert speed.matrix_rate is not None
    assert speed.ratio == pytest.approx(speed.flops_per_second / speed.matrix_rate)
    assert speed.peak_memory is None or speed.peak_memory > 1e7


def test_flops_of_reading_are_those_that_show_tells_but_for_the_head_of_the_last_token_alone() -> None:
    net = network("decoder-tiny", *SMALL)
    told = summarise(net.config).flops_per_token_forward
    spared = 2 * net.head.weight.numel() * 31
    assert measure_prefill(net, batch_size=3, turns=1).flops == 3 * (32 * told - spared)


# --- writing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["decoder-tiny", "encoder-decoder-tiny", "mla-tiny", "gemma-tiny"])
def test_models_that_write_are_measured(preset: str) -> None:
    speed = measure_decode(network(preset, SMALL[1]), batch_size=2, turns=2)
    room = 32 if preset == "encoder-decoder-tiny" else 32 - 15 - 1
    assert (speed.new_tokens, speed.prompt_tokens, len(speed.seconds)) == (15, room, 2)
    assert speed.tokens_per_second == pytest.approx([2e3 / ms for ms in speed.milliseconds_per_token])
    assert speed.weight_bytes is not None
    assert speed.cache_bytes is not None
    median = sum(speed.milliseconds_per_token) / 2
    assert speed.bytes_per_second == pytest.approx(1e3 * (speed.weight_bytes + speed.cache_bytes) / median)
    assert speed.memory_rate is not None
    assert speed.ratio == pytest.approx(speed.bytes_per_second / speed.memory_rate)


def cached(net: Transformer, length: int) -> int:
    return 4 * sum(layer.attention.cached(length) for layer in net.config.stacks["decoder"].layers)


@pytest.mark.parametrize("overrides", [(), ("model.attention.window=8",), ("model.tie_embeddings=none",)])
def test_a_step_of_a_decoder_reads_its_matrices_and_the_cache(overrides: tuple[str, ...]) -> None:
    net = network("decoder-tiny", *SMALL, *overrides)
    speed = measure_decode(net, prompt_tokens=20, new_tokens=4, batch_size=3, turns=1)
    embedding = net.decoder_embedding.input.weight
    rows = 3 * 32 * 4  # the embeddings of the tokens
    weights = sum(p.nbytes for p in net.parameters() if p is not embedding or p is net.head.weight)
    buffers = sum(b.nbytes for b in net.buffers())
    assert weights + rows <= speed.weight_bytes <= weights + rows + buffers
    assert speed.cache_bytes == 3 * cached(net, 20 + 2 + 2)


def test_a_step_reads_the_experts_of_its_token_alone() -> None:
    net = network("moe-tiny", "model.num_layers=1", "model.max_seq_len=32")
    speed = measure_decode(net, turns=1)
    (experts,) = [module for module in net.modules() if hasattr(module, "matrices")]
    all_of_them = sum(part.nbytes for part in experts.matrices)
    read = all_of_them * experts.top_k // len(experts.up)
    embedding = net.decoder_embedding.input.weight
    others = sum(p.nbytes for p in net.parameters()) - all_of_them
    others -= embedding.nbytes if embedding is not net.head.weight else 0
    assert read < all_of_them
    assert speed.weight_bytes == pytest.approx(others + read, rel=0.01)


def test_a_step_of_an_encoder_decoder_reads_neither_the_encoder_nor_what_made_the_cache() -> None:
    net = network("encoder-decoder-tiny", *SMALL)
    speed = measure_decode(net, prompt_tokens=30, new_tokens=4, turns=1)
    cross = net.decoder.blocks[0].attention("cross")
    kept = sum(p.nbytes for part in (cross.key, cross.value) for p in part.parameters())
    decoder = sum(p.nbytes for p in net.decoder.parameters()) - kept
    head = net.head.weight.nbytes
    assert decoder + head <= speed.weight_bytes <= (decoder + head) * 1.02
    source = 4 * sum(layer.cross_attention.cache_width * 30 for layer in net.config.stacks["decoder"].layers)
    assert speed.cache_bytes == source + cached(net, 1 + 2 + 2)


# --- what is refused, and Ctrl-C --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "options", "words"),
    [
        ("encoder-tiny", {}, "family encoder with a head of kind masked-language-model does not decode"),
        ("decoder-tiny", {"prompt_tokens": 25, "new_tokens": 8}, "leaves room for 23 beside the new ones"),
        ("decoder-tiny", {"new_tokens": 31}, "31 new tokens do not fit the model's context of 32"),
        ("decoder-tiny", {"prompt_tokens": 0}, "prompt_tokens is a whole number from 1"),
        ("decoder-tiny", {"batch_size": 0}, "batch_size is a whole number from 1"),
        ("decoder-tiny", {"turns": True}, "turns is a whole number from 1"),
        ("encoder-decoder-tiny", {"prompt_tokens": 33}, "prompts of 33 tokens do not fit"),
    ],
)
def test_what_cannot_be_written_is_refused(preset: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        measure_decode(network(preset, *SMALL), **options)


def test_a_context_without_room_is_refused() -> None:
    with pytest.raises(UsageError, match="a context of 2 has no room"):
        measure_decode(network("decoder-tiny", *SMALL, "model.max_seq_len=2"))
    assert measure_decode(network("decoder-tiny", *SMALL, "model.max_seq_len=3"), turns=1).new_tokens == 1


def test_images_are_read_whole() -> None:
    with pytest.raises(UsageError, match="images are read whole, as 17 tokens, not 5"):
        measure_prefill(network("vit-tiny", "model.num_layers=1"), prompt_tokens=5)


@pytest.mark.parametrize("measure", [measure_prefill, measure_decode])
def test_ctrl_c_keeps_the_turns_that_were_measured(monkeypatch: pytest.MonkeyPatch, measure: Any) -> None:
    told: list[str] = []

    def tell(text: str) -> None:
        told.append(text)
        if "turn   2" in text:
            raise KeyboardInterrupt

    speed = measure(network("decoder-tiny", *SMALL), turns=9, tell=tell)
    assert (speed.interrupted, len(speed.seconds), speed.ratio) == (True, 2, None)
    assert "device cpu" in told[0]


@pytest.mark.parametrize("measure", [measure_prefill, measure_decode])
def test_ctrl_c_before_the_first_turn_is_passed_on(monkeypatch: pytest.MonkeyPatch, measure: Any) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(speed_module, "seconds_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure(network("decoder-tiny", *SMALL))


# --- limits -----------------------------------------------------------------------------------------------------------


def test_the_matrix_rate_is_that_of_the_shapes() -> None:
    many = matrix_rate(Counter({(256, 256, 256): 3}), torch.float32, CPU, backward=True)
    few = matrix_rate(Counter({(2, 2, 2): 3}), torch.float32, CPU)
    assert many > 10 * few


def test_the_memory_rate_is_of_no_more_bytes_than_a_stream_has(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *shape, **options: sizes.append(shape) or ones(*shape, **options))
    monkeypatch.setattr(limits, "LARGEST_STREAM", 2**20)
    assert memory_rate(2**40, CPU) > memory_rate(10, CPU) > 0
    assert sizes == [(256, 1024), (1024,), (1, 1024), (1024,)]


def test_what_is_read_counts_once_and_of_a_table_the_rows_looked_up() -> None:
    table, matrix, row = torch.ones(100, 4), torch.ones(4, 6), torch.ones(1, 6)

    def forward() -> None:
        x = torch.nn.functional.embedding(torch.tensor([3, 3, 5]), table)
        _ = x @ matrix + x @ matrix + row.expand(3, 6)
        matrix[:, :2].sum()
        row.zero_()

    assert count_reads(forward, lambda: ([table], [matrix], [row])) == [3 * 4 * 4, (24 + 8) * 4, 6 * 4]
