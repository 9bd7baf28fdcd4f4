"""Every rule against its definition, written as a loop over rows, queries and keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qkv.nn.mask import And, Causal, Documents, Mask, Or, Padding, Prefix, Rule, Window

from .matrix import one_thread  # noqa: F401

Allows = Callable[[int, int, int], bool]
"""(row, query slot, key slot) -> may attend."""

quickly = settings(max_examples=60, deadline=None)


def causal() -> tuple[Rule, Allows]:
    return Causal(), lambda b, q, k: k <= q


def window(size: int) -> tuple[Rule, Allows]:
    return Window(size), lambda b, q, k: q - size < k < q + size


def prefix(lengths: list[int]) -> tuple[Rule, Allows]:
    return Prefix(torch.tensor(lengths)), lambda b, q, k: q < lengths[b] and k < lengths[b]


def padding(lengths: list[int]) -> tuple[Rule, Allows]:
    return Padding(torch.tensor(lengths)), lambda b, q, k: k < lengths[b]


def documents(query: list[list[int]], key: list[list[int]]) -> tuple[Rule, Allows]:
    return Documents(torch.tensor(query), torch.tensor(key)), lambda b, q, k: query[b][q] == key[b][k]


@st.composite
def calls(draw: st.DrawFn) -> tuple[Mask, Allows]:
    """An attention call: its mask, and what each rule in it means."""
    rows, queries, keys = draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.integers(1, 8))
    lengths = st.lists(st.integers(0, keys), min_size=rows, max_size=rows)
    width = max(queries, keys)
    numbers = st.lists(st.lists(st.integers(0, 2), min_size=width, max_size=width), min_size=rows, max_size=rows)
    simple = st.one_of(
        st.just(causal()),
        st.builds(window, st.integers(1, 4)),
        st.builds(prefix, lengths),
        st.builds(padding, lengths),
        st.builds(documents, numbers, numbers),
    )

    def joined(parts: st.SearchStrategy[tuple[Rule, Allows]]) -> st.SearchStrategy[tuple[Rule, Allows]]:
        return st.one_of(
            st.builds(lambda a, b: (a[0] & b[0], lambda *at: a[1](*at) and b[1](*at)), parts, parts),
            st.builds(lambda a, b: (a[0] | b[0], lambda *at: a[1](*at) or b[1](*at)), parts, parts),
        )

    rule, allows = draw(st.recursive(simple, joined, max_leaves=4))
    if draw(st.booleans()):
        last = st.integers(0, width - queries)
        first = torch.tensor(draw(st.lists(last, min_size=rows, max_size=rows)))
        return Mask(rule, first[:, None] + torch.arange(queries), keys, aligned=False), allows
    aligned = queries <= keys and draw(st.booleans())
    first = keys - queries if aligned else draw(st.integers(0, width - queries))
    return Mask(rule, first + torch.arange(queries), keys, aligned=aligned), allows


def brute_force(mask: Mask, allows: Allows, rows: int) -> Tensor:
    slots = mask.q_slots if mask.q_slots.dim() == 2 else mask.q_slots.expand(rows, -1)
    return torch.tensor(
        [[[[allows(b, int(q), k) for k in range(mask.num_keys)] for q in slots[b]]] for b in range(rows)]
    )


@quickly
@given(calls())
def test_a_rule_allows_what_its_definition_says(call: tuple[Mask, Allows]) -> None:
    mask, allows = call
    tensor = mask.tensor()
    assert tensor.dtype == torch.bool
    assert tensor.shape[1:] == (1, mask.num_queries, mask.num_keys)
    assert torch.equal(tensor, brute_force(mask, allows, tensor.shape[0]))


@quickly
@given(calls(), st.data())
def test_a_tile_is_a_slice_of_the_tensor(call: tuple[Mask, Allows], data: st.DataObject) -> None:
    mask, _ = call
    ends = [data.draw(st.tuples(*2 * [st.integers(0, size)])) for size in (mask.num_queries, mask.num_keys)]
    q, k = (slice(min(pair), max(pair)) for pair in ends)
    assert torch.equal(mask.tile(q, k), mask.tensor()[:, 0, q, k])


@quickly
@given(calls())
def test_a_mask_calls_itself_everything_or_causal_only_when_it_is(call: tuple[Mask, Allows]) -> None:
    mask, _ = call
    if mask.everything:
        assert mask.tensor().all()
    if mask.square_causal:
        assert torch.equal(mask.tensor()[0, 0], torch.ones(mask.num_keys, mask.num_keys).tril().bool())


def test_the_plain_cases_are_recognised_and_nothing_else() -> None:
    def flags(rule: Rule | None, slots: range, keys: int, *, aligned: bool = True) -> tuple[bool, bool]:
        mask = Mask(rule, torch.tensor(slots), keys, aligned=aligned)
        return mask.everything, mask.square_causal

    assert flags(None, range(5), 5) == (True, False)
    assert flags(None, range(3), 5, aligned=False) == (True, False)
    assert flags(Causal(), range(5), 5) == (False, True)
    assert flags(Causal(), range(3, 5), 5) == (False, False)
    assert flags(Causal(), range(4, 5), 5) == (True, False)
    assert flags(Causal(), range(2, 3), 5, aligned=False) == (False, False)
    assert flags(Causal() & Window(2), range(5), 5) == (False, False)
    assert flags(Causal() | Prefix(torch.tensor([2])), range(5), 5) == (False, False)
    assert flags(Padding(torch.tensor([5])), range(5), 5) == (False, False)


def test_no_rule_allows_everything() -> None:
    mask = Mask(None, torch.arange(2), 5, aligned=False)
    assert mask.tensor().shape == (1, 1, 2, 5)
    assert mask.tensor().all()


def test_the_tensor_is_built_once() -> None:
    mask = Mask.square(Causal(), 4, torch.device("cpu"))
    assert mask.tensor() is mask.tensor()


def test_a_window_of_one_is_the_token_itself() -> None:
    mask = Mask.square(Window(1), 4, torch.device("cpu"))
    assert torch.equal(mask.tensor()[0, 0], torch.eye(4).bool())


@pytest.mark.parametrize(
    "rule",
    [Documents(torch.tensor([[0, 0, 1, 1]]), torch.tensor([[0, 1, 1, 0]])), Padding(torch.tensor([3])), Causal()],
    ids=["documents", "padding", "causal"],
)
def test_a_rule_of_one_row_speaks_for_all_rows(rule: Rule) -> None:
    slots = torch.tensor([[0, 1], [2, 3], [1, 2]])
    tensor = Mask(rule, slots, 4, aligned=False).tensor()
    for row, own in enumerate(slots):
        alone = Mask(rule, own, 4, aligned=False).tensor()
        assert torch.equal(tensor.expand(3, -1, -1, -1)[row], alone[0])


def test_only_padding_that_always_holds_declares_slots_empty() -> None:
    x_BGSD = torch.ones(2, 1, 4, 3)
    lengths, shorter = torch.tensor([1, 3]), torch.tensor([4, 2])

    def kept(rule: Rule) -> list[int]:
        (cleaned,) = Mask.square(rule, 4, torch.device("cpu")).without_padding(x_BGSD)
        return [int(row[0, :, 0].sum()) for row in cleaned]

    assert kept(Padding(lengths)) == [1, 3]
    assert kept(Causal() & Padding(lengths)) == [1, 3]
    assert kept(Causal() & Padding(lengths) & (Window(2) & Padding(shorter))) == [1, 2]
    assert kept(Causal() | Padding(lengths)) == [4, 4]
    assert kept(Prefix(lengths)) == [4, 4]


@pytest.mark.parametrize("rule", [Window(2), Padding(torch.tensor([1])), And((Causal(),)), Or((Causal(),))], ids=str)
def test_a_rule_cannot_be_changed(rule: Any) -> None:
    name = dataclasses.fields(rule)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(rule, name, None)
