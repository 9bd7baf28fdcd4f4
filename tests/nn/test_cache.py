"""What a cache promises besides its law (any chunks give the full forward's logits: test_matrix.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qkv.config.errors import UsageError
from qkv.config.model import ModelConfig
from qkv.nn import Cache, Transformer
from qkv.nn.cache import LayerCache
from qkv.nn.mask import Causal, Documents, Padding, Prefix, Window

from .matrix import one_thread  # noqa: F401

V = 23
KINDS = pytest.mark.parametrize("capacity", [None, 20], ids=["growing", "static"])
FAMILIES = pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def network(family: str = "decoder", **changes: Any) -> Transformer:
    tree: dict[str, Any] = {
        "family": family,
        "vocab_size": V,
        "max_seq_len": 200,
        "d_model": 16,
        "num_layers": 2,
        "attention": {"num_heads": 4, "num_kv_heads": 2},
        "init": {"kind": "normal", "std": 0.3},
    }
    generator = torch.Generator().manual_seed(0)
    return Transformer(ModelConfig.model_validate(tree | changes), generator=generator).double().eval()


def ids_of(rows: int = 2, length: int = 6, seed: int = 0) -> Tensor:
    return torch.randint(0, V, (rows, length), generator=torch.Generator().manual_seed(seed))


def first_call(family: str, rows: int = 2, length: int = 6, seed: int = 0) -> dict[str, Tensor]:
    inputs = {"ids": ids_of(rows, length, seed)}
    return inputs | ({"source": ids_of(rows, 5, seed + 1)} if family == "encoder-decoder" else {})


def memory(cache: Cache) -> list[Tensor]:
    """The keys and values of all layers."""
    return [held for layer in cache.layers for held in (layer.k_BGSD, layer.v_BGSD) if held is not None]


def equal(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_the_memory_of_a_static_cache_never_grows_nor_moves() -> None:
    net = network()
    cache = net.new_cache(2, 12)
    net(ids_of(2, 3), cache=cache)
    places = [held.data_ptr() for held in memory(cache)]
    for length in (1, 1, 4, 3):
        net(ids_of(2, length), cache=cache)
        assert [held.data_ptr() for held in memory(cache)] == places
        assert {tuple(held.shape) for held in memory(cache)} == {(2, 2, 12, 4)}
    cache.reset()
    net(ids_of(2, 12), cache=cache)
    assert [held.data_ptr() for held in memory(cache)] == places


def test_the_memory_of_a_growing_cache_doubles() -> None:
    net = network(num_layers=1)
    cache = net.new_cache(1)
    sizes, moves, place = [], 0, 0
    for _ in range(130):
        net(ids_of(1, 1), cache=cache)
        (held, _) = memory(cache)
        moves += held.data_ptr() != place
        place = held.data_ptr()
        sizes.append(held.shape[2])
    assert sorted(set(sizes)) == [16, 32, 64, 128, 256]
    assert moves <= 5


@pytest.mark.parametrize("ragged", [False, True], ids=["even", "ragged"])
def test_a_cache_that_grows_keeps_what_it_held(ragged: bool) -> None:
    net, ids = network(), ids_of(2, 70)
    cache = net.new_cache(2)
    first = net(ids[:, :10], cache=cache, lengths=torch.tensor([10, 7]) if ragged else None)
    steps = [net(ids[:, slot : slot + 1], cache=cache) for slot in range(10, 40)]
    logits = torch.cat([first, *steps, net(ids[:, 40:], cache=cache)], 1)
    equal(logits[0], net(ids)[0])
    alone = torch.cat([ids[1:, :7], ids[1:, 10:]], 1) if ragged else ids[1:]
    equal(logits[1, 10:], net(alone)[0, -60:])


@KINDS
def test_memory_is_zero_where_nothing_was_written(capacity: int | None) -> None:
    net = network()
    cache = net.new_cache(2, capacity)
    net(ids_of(2, 6), cache=cache)
    net(ids_of(2, 1), cache=cache)
    for held in memory(cache):
        assert held.shape[2] > 7
        assert (held[:, :, :7] != 0).all()
        assert (held[:, :, 7:] == 0).all()
    cache.reset()
    assert all((held == 0).all() for held in memory(cache))
    assert cache.lengths_B.tolist() == [0, 0]


@KINDS
@FAMILIES
def test_what_memory_held_before_a_reset_leaves_no_trace(capacity: int | None, family: str) -> None:
    net = network(family)
    used, fresh = net.new_cache(2, capacity), net.new_cache(2, capacity)
    net(**first_call(family, seed=3), cache=used, lengths=torch.tensor([2, 6]))
    for held in memory(used):
        held.fill_(float("nan"))
    used.reset()
    for inputs in (first_call(family, length=4), {"ids": ids_of(2, 1)}, {"ids": ids_of(2, 3)}):
        assert torch.equal(net(**inputs, cache=used), net(**inputs, cache=fresh))


@KINDS
def test_what_one_row_holds_never_reaches_another(capacity: int | None) -> None:
    net = network()
    clean, dirty = net.new_cache(2, capacity), net.new_cache(2, capacity)
    for cache in (clean, dirty):
        net(ids_of(), cache=cache, lengths=torch.tensor([6, 4]))
    for held in memory(dirty):
        held[0] = float("nan")
    for seed in range(3):
        step = ids_of(2, 1, seed)
        assert torch.equal(net(step, cache=dirty)[1], net(step, cache=clean)[1])


@KINDS
def test_what_stands_in_slots_not_yet_used_is_not_seen(capacity: int | None) -> None:
    net = network()
    clean, dirty = net.new_cache(2, capacity), net.new_cache(2, capacity)
    lengths = torch.tensor([6, 2])
    for cache in (clean, dirty):
        net(ids_of(), cache=cache, lengths=lengths)
    for held in memory(dirty):
        for row, length in enumerate(lengths):
            held[row, :, length:] = 1e6
    for seed in range(3):
        step = ids_of(2, 1, seed)
        assert torch.equal(net(step, cache=dirty), net(step, cache=clean))


def test_memory_has_the_numbers_of_the_network() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        net = network().to(dtype)
        cache = net.new_cache(2, 20)
        net(ids_of(), cache=cache)
        assert {held.dtype for held in memory(cache)} == {dtype}


# --- writing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [None, 9], ids=["growing", "static"])
def test_new_keys_and_values_are_written_at_their_slots(capacity: int | None) -> None:
    layer, generator = LayerCache(capacity), torch.Generator().manual_seed(0)
    expected = torch.zeros(2, 2, 3, 9, 4)  # of keys and values, [B, G, S, D] each
    for slots, end in ((torch.arange(3), 3), (torch.tensor([[3, 4], [1, 2]]), 5), (torch.tensor([[7], [8]]), 9)):
        new = torch.randn(2, 2, 3, slots.shape[-1], 4, generator=generator)
        for row in range(2):
            own = slots if slots.dim() == 1 else slots[row]
            for index, slot in enumerate(own.tolist()):
                expected[:, row, :, slot] = new[:, row, :, index]
        k, v = layer.append(new[0], new[1], slots, end)
        length = capacity or end
        assert torch.equal(k, expected[0, :, :, :length])
        assert torch.equal(v, expected[1, :, :, :length])


@KINDS
def test_every_row_continues_at_its_own_length(capacity: int | None) -> None:
    net = network()
    cache = net.new_cache(3, capacity)
    prompt, lengths = ids_of(3, 6), torch.tensor([6, 0, 3])
    net(prompt, cache=cache, lengths=lengths)
    assert cache.lengths_B.tolist() == [6, 0, 3]
    steps = [ids_of(3, 2, seed=1), ids_of(3, 1, seed=2)]
    logits = torch.cat([net(step, cache=cache) for step in steps], 1)
    assert cache.lengths_B.tolist() == [9, 3, 6]
    for row, length in enumerate(lengths):
        alone = torch.cat([prompt[row, :length], *(step[row] for step in steps)])[None]
        equal(logits[row], net(alone)[0, -3:])
    net(ids_of(3, 6), cache=cache, lengths=torch.tensor([0, 6, 3]))
    assert cache.lengths_B.tolist() == [9, 9, 9]
    even = net(ids_of(3, 1), cache=cache)
    again = torch.cat([prompt[1, :0], *(step[1] for step in steps), ids_of(3, 6)[1], ids_of(3, 1)[1]])[None]
    equal(even[1], net(again)[0, -1:])


@KINDS
def test_given_positions_are_used_with_a_cache(capacity: int | None) -> None:
    net = network(position={"kind": "learned"})
    ids, positions = ids_of(2, 6), torch.tensor([[3, 4, 5, 9, 10, 30], [0, 7, 8, 9, 2, 1]])
    full = net(ids, positions=positions)
    cache = net.new_cache(2, capacity)
    parts = [net(ids[:, part], positions=positions[:, part], cache=cache) for part in (slice(0, 4), slice(4, 6))]
    equal(torch.cat(parts, 1), full)


# --- the source -------------------------------------------------------------------------------------------------------


def calls_of(modules: list[nn.Module]) -> list[int]:
    """Counts of calls, one per module, that keep counting."""
    counts = [0] * len(modules)
    for index, module in enumerate(modules):

        def count(*_: Any, index: int = index) -> None:
            counts[index] += 1

        module.register_forward_hook(count)
    return counts


@KINDS
def test_the_source_is_read_once(capacity: int | None) -> None:
    net = network("encoder-decoder")
    cross = [block.cross_attention.function for block in net.decoder.blocks]
    of_source = calls_of([net.encoder, *(part for one in cross for part in (one.key, one.value))])
    of_target = calls_of([one.query for one in cross])
    ids, source = ids_of(2, 6), ids_of(2, 5, seed=1)
    lengths = torch.tensor([5, 3])
    cache = net.new_cache(2, capacity)
    logits = [net(ids[:, :3], source=source, source_lengths=lengths, cache=cache)]
    logits += [net(ids[:, slot : slot + 1], cache=cache) for slot in (3, 4, 5)]
    assert of_source == [1] * 5
    assert of_target == [4] * 2
    equal(torch.cat(logits, 1), net(ids, source=source, source_lengths=lengths))


@KINDS
def test_a_second_source_is_refused_until_the_cache_is_reset(capacity: int | None) -> None:
    net, inputs = network("encoder-decoder"), first_call("encoder-decoder")
    cache = net.new_cache(2, capacity)
    net(**inputs, cache=cache)
    with pytest.raises(UsageError, match="source"):
        net(**inputs, cache=cache)
    cache.reset()
    other = first_call("encoder-decoder", seed=8)
    equal(net(**other, cache=cache), net(**other))


def test_an_empty_cache_still_needs_a_source() -> None:
    net = network("encoder-decoder")
    with pytest.raises(UsageError, match="source"):
        net(ids_of(), cache=net.new_cache(2))


# --- rows that move, multiply and leave -------------------------------------------------------------------------------


@KINDS
@FAMILIES
@pytest.mark.parametrize("rows", [[2, 0, 1], [1, 1, 1, 2, 0], [2], [0, 2], [1, 1]])
@pytest.mark.parametrize("ragged", [False, True], ids=["even", "ragged"])
def test_selected_rows_go_on_as_if_they_had_always_stood_there(
    capacity: int | None, family: str, rows: list[int], ragged: bool
) -> None:
    net, inputs, step = network(family), first_call(family, rows=3), ids_of(len(rows), 2, seed=9)
    hidden = {}
    if ragged:
        hidden["lengths"] = torch.tensor([4, 6, 2])
        if family == "encoder-decoder":
            hidden["source_lengths"] = torch.tensor([5, 2, 3])
    moved, placed = net.new_cache(3, capacity), net.new_cache(len(rows), capacity)
    net(**inputs, **hidden, cache=moved)
    net(**{name: value[rows] for name, value in (inputs | hidden).items()}, cache=placed)
    moved.select(rows)
    assert (moved.batch, moved.longest, moved.even) == (placed.batch, placed.longest, placed.even)
    assert torch.equal(moved.lengths_B, placed.lengths_B)
    equal(net(step[:, :1], cache=moved), net(step[:, :1], cache=placed))
    equal(net(step[:, 1:], cache=moved), net(step[:, 1:], cache=placed))
    moved.reset()
    again = first_call(family, rows=len(rows), seed=4)
    equal(net(**again, cache=moved), net(**again))


@KINDS
def test_rows_that_share_a_source_equal_rows_that_have_one_each(capacity: int | None) -> None:
    net, inputs = network("encoder-decoder"), first_call("encoder-decoder", rows=3)
    lengths = {"source_lengths": torch.tensor([5, 2, 3])}
    shared, apart = net.new_cache(3, capacity), net.new_cache(3, capacity)
    for cache in (shared, apart):
        net(**inputs, **lengths, cache=cache)
    for rows, sources in (([0, 0, 1, 1, 2, 2], 3), ([1, 0, 2, 2, 5, 4], 3), ([4, 4, 1, 0], 2), ([3, 2], 1)):
        shared.select(rows, 2)
        apart.select(rows)
        for length in (1, 2):
            step = ids_of(len(rows), length, seed=length)
            equal(net(step, cache=shared), net(step, cache=apart))
        assert {len(cross.k_BGSD) for cross in shared.cross} == {sources}
        assert {len(cross.k_BGSD) for cross in apart.cross} == {len(rows)}
    shared.reset()
    again = first_call("encoder-decoder", seed=4)
    equal(net(**again, cache=shared), net(**again))


def test_what_is_held_of_a_source_is_not_copied_while_the_sources_stay() -> None:
    net = network("encoder-decoder")
    cache = net.new_cache(2)
    net(**first_call("encoder-decoder"), cache=cache)
    places = [cross.k_BGSD.data_ptr() for cross in cache.cross]
    for rows in ([0, 0, 1, 1], [1, 0, 3, 3]):
        cache.select(rows, 2)
        net(ids_of(4, 1), cache=cache)
        assert [cross.k_BGSD.data_ptr() for cross in cache.cross] == places


def test_rows_of_different_sources_cannot_share_one() -> None:
    net = network("encoder-decoder")
    cache = net.new_cache(2)
    net(**first_call("encoder-decoder"), cache=cache)
    for rows in ([0, 1], [0, 0, 1], [0, 0, 1, 0]):
        with pytest.raises(UsageError, match="share a source"):
            cache.select(rows, 2)
    equal(net(ids_of(2, 1), cache=cache), net(ids_of(2, 1), cache=cache_after(net, first_call("encoder-decoder"))))


def cache_after(net: Transformer, inputs: dict[str, Tensor]) -> Cache:
    cache = net.new_cache(2)
    net(**inputs, cache=cache)
    return cache


def test_every_rule_can_be_selected() -> None:
    """Whatever a cache keeps of its source's rule, nested or not."""
    q_BT1, k_11S = torch.arange(4)[None, :, None], torch.arange(6)[None, None]
    documents = Documents(ids_of(3, 4) % 2, ids_of(3, 6, seed=1) % 2)
    rule = Causal() & Window(3) | Prefix(torch.tensor([1, 3, 2])) | (documents & Padding(torch.tensor([6, 2, 4])))
    rows = torch.tensor([2, 0, 0, 1])
    assert torch.equal(rule.select(rows).allow(q_BT1, k_11S), rule.allow(q_BT1, k_11S)[rows])


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_static_cache_can_be_filled_to_its_last_slot() -> None:
    net = network()
    cache = net.new_cache(2, 6)
    equal(torch.cat([net(ids_of()[:, part], cache=cache) for part in (slice(0, 5), slice(5, 6))], 1), net(ids_of()))
    with pytest.raises(UsageError, match=r"6 tokens.* 7 "):
        net(ids_of(2, 1), cache=cache)


@FAMILIES
@pytest.mark.parametrize("fault", ["id", "room", "rows", "documents"])
def test_a_refused_call_leaves_the_cache_as_it_was(family: str, fault: str) -> None:
    net, inputs = network(family), first_call(family)
    cache = net.new_cache(2, 8)
    bad = dict(inputs)
    if fault == "id":
        bad["ids"] = inputs["ids"] + V
    if fault == "room":
        bad["ids"] = ids_of(2, 9)
    if fault == "rows":
        bad = first_call(family, rows=3)
    if fault == "documents":
        bad["documents"] = torch.zeros_like(inputs["ids"])
        if family == "encoder-decoder":
            bad["source_documents"] = torch.zeros_like(inputs["source"])
    with pytest.raises(UsageError):
        net(**bad, cache=cache)
    assert cache.lengths_B.tolist() == [0, 0]
    equal(net(**inputs, cache=cache), net(**inputs))
