"""What a layer with a window keeps: the last tokens that the window lets later ones see."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from qkv.config.model import ModelConfig
from qkv.inspect.summary import summarise
from qkv.nn import Cache, Transformer, use_kernel
from qkv.nn.cache import LayerCache, RollingCache

from .matrix import one_thread  # noqa: F401

V, W = 23, 5
KINDS = pytest.mark.parametrize("capacity", [None, 40], ids=["growing", "static"])


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def network(attention: dict[str, Any] | None = None, **changes: Any) -> Transformer:
    tree: dict[str, Any] = {
        "vocab_size": V,
        "max_seq_len": 64,
        "d_model": 16,
        "num_layers": 2,
        "attention": {"num_heads": 4, "num_kv_heads": 2, "window": W} if attention is None else attention,
        "init": {"kind": "normal", "std": 0.3},
    }
    generator = torch.Generator().manual_seed(0)
    return Transformer(ModelConfig.model_validate(tree | changes), generator=generator).double().eval()


def ids_of(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, V, (rows, length), generator=torch.Generator().manual_seed(seed))


def equal(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


def held(cache: Cache) -> list[Tensor]:
    return [part for layer in cache.layers for part in (layer.k_BGSD, layer.v_BGSD) if part is not None]


def in_chunks(net: Transformer, ids: Tensor, chunks: tuple[int, ...], cache: Cache) -> Tensor:
    ends = list(itertools.accumulate(chunks))
    parts = [slice(start, end) for start, end in itertools.pairwise([0, *ends])]
    return torch.cat([net(ids[:, part], cache=cache) for part in parts], 1)


@KINDS
@pytest.mark.parametrize("position", ["rope", "alibi", "relative"])
@pytest.mark.parametrize("chunks", [(1,) * 33, (13, *(1,) * 20), (4, 9, 1, 6, 5, 5, 2, 1), (33,)], ids=str)
def test_any_chunks_equal_the_full_forward_past_several_windows(
    capacity: int | None, position: str, chunks: tuple[int, ...]
) -> None:
    net, ids = network(position={"kind": position}), ids_of(2, 33)
    equal(in_chunks(net, ids, chunks, net.new_cache(2, capacity)), net(ids))


@KINDS
@pytest.mark.parametrize("kernel", ["math", "tiled", "sdpa"])
def test_windowed_and_global_layers_share_a_cache(capacity: int | None, kernel: str) -> None:
    layers = [{"attention": {"window": W}}, {}, {"attention": {"window": 3}, "position": {"kind": "alibi"}}]
    net = network({"num_heads": 4, "num_kv_heads": 2}, num_layers=4, layers=layers, position={"kind": "alibi"})
    use_kernel(net, kernel)  # type: ignore[arg-type]
    ids, cache = ids_of(2, 20), net.new_cache(2, capacity)
    assert [type(layer) for layer in cache.layers] == [RollingCache, LayerCache, RollingCache, RollingCache]
    equal(in_chunks(net, ids, (4, 1, 1, 7, 1, 6), cache), net(ids))


@KINDS
def test_rows_of_any_length_go_on_and_move(capacity: int | None) -> None:
    """Padding of a short row overwrites nothing that its next tokens see."""
    net, cache = network(), network().new_cache(3, capacity)
    texts: list[list[Tensor]] = [[], [], []]
    for number, lengths in enumerate([[9, 2, 6], [1, 8, 0], [1, 1, 1], [0, 1, 1], [3, 7, 5], [1, 1, 1]]):
        ids = ids_of(3, max(lengths), seed=number)
        logits = net(ids, cache=cache, lengths=torch.tensor(lengths))
        for row, length in enumerate(lengths):
            texts[row].append(ids[row, :length])
            equal(logits[row, :length], net(torch.cat(texts[row])[None])[0, -length:] if length else logits[row, :0])
        order = [2, 0, 1]
        cache.select(order)
        texts = [list(texts[row]) for row in order]


@KINDS
def test_memory_never_exceeds_the_window(capacity: int | None) -> None:
    net = network()
    cache = net.new_cache(2, capacity)
    for length in (1, 1, 12, 1, 1, 7):
        net(ids_of(2, length), cache=cache)
        assert all(part.shape[2] <= W for part in held(cache))
    places = [part.data_ptr() for part in held(cache)]
    net(ids_of(2, 9), cache=cache)
    net(ids_of(2, 1), cache=cache)
    assert [part.data_ptr() for part in held(cache)] == places


def test_a_window_that_the_cache_never_fills_needs_no_ring() -> None:
    net = network()
    assert all(type(layer) is LayerCache for layer in net.new_cache(1, W).layers)
    assert all(type(layer) is RollingCache for layer in net.new_cache(1, W + 1).layers)


@KINDS
@pytest.mark.parametrize("length", [1, 4], ids=["one", "several"])
def test_a_call_that_breaks_off_leaves_the_cache_as_it_was(capacity: int | None, length: int) -> None:
    net, ids = network(), ids_of(2, 20)
    cache = net.new_cache(2, capacity)
    in_chunks(net, ids, (8, 1), cache)

    def fail(*_: Any) -> None:
        raise RuntimeError("no more")

    hook = net.decoder.final_norm.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="no more"):
        net(ids_of(2, length, seed=7), cache=cache)
    hook.remove()
    steps = [net(ids[:, part], cache=cache) for part in (slice(9, 10), slice(10, 14), slice(14, 20))]
    equal(torch.cat(steps, 1), net(ids)[:, 9:])


@KINDS
def test_a_reset_leaves_no_trace(capacity: int | None) -> None:
    net = network()
    used, fresh = net.new_cache(2, capacity), net.new_cache(2, capacity)
    in_chunks(net, ids_of(2, 12), (7, 1, 4), used)
    for part in held(used):
        part.fill_(float("nan"))
    used.reset()
    ids = ids_of(2, 9, seed=1)
    assert torch.equal(in_chunks(net, ids, (1, 3, 1, 4), used), in_chunks(net, ids, (1, 3, 1, 4), fresh))


@KINDS
def test_a_prefix_reads_ahead_within_its_window(capacity: int | None) -> None:
    net, ids, prefix = network(prefix=True), ids_of(2, 20), torch.tensor([11, 3])
    cache = net.new_cache(2, capacity)
    steps = [net(ids[:, :12], prefix_lengths=prefix, cache=cache)]
    steps += [net(ids[:, slot : slot + 1], cache=cache) for slot in range(12, 20)]
    equal(torch.cat(steps, 1), net(ids, prefix_lengths=prefix))


ATTENTIONS = {
    "mha": ({"num_heads": 4}, 2 * 16),
    "gqa": ({"num_heads": 4, "num_kv_heads": 2}, 2 * 8),
    "mqa": ({"num_heads": 4, "num_kv_heads": 1}, 2 * 4),
    "latent": ({"kind": "latent", "num_heads": 4, "kv_rank": 10, "rope_dim": 4}, 14),
    "window": ({"num_heads": 4, "window": 16}, 2 * 16 / 4),
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_bytes_per_token_are_those_held_at_the_full_context(name: str) -> None:
    attention, numbers = ATTENTIONS[name]
    net = network(attention)
    cache = net.new_cache(1)
    net(ids_of(1, 64), cache=cache)
    assert sum(part.numel() for part in held(cache)) == 64 * 2 * numbers
    assert summarise(net.config, cache_dtype="fp32").kv_cache_bytes_per_token == 2 * numbers * 4
