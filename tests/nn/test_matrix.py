"""Laws that every configuration obeys, over a matrix of configurations in which every two options meet.

Bit for bit where a token that may not matter is changed; otherwise within TOLERANCE of the largest logit.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from qkv.config.model import ModelConfig
from qkv.nn import IGNORE, Cache, Transformer

from .matrix import (
    AXES,
    CASES,
    CAUSAL,
    FEATURES,
    MAX_SEQ_LEN,
    RULES,
    TOLERANCE,
    Case,
    Inputs,
    assert_equal,
    assert_same,
    broken_rules,
    draw_inputs,
    in_float64,
    network_of,
    one_thread,  # noqa: F401
    other_tokens,
    possible_pairs,
    row,
    set_kernel,
    slots,
    tree_of,
    variation,
)

T, S = 11, 7
LENGTHS = torch.tensor([5, 11, 8])
SOURCE_LENGTHS = torch.tensor([7, 2, 4])

every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_packing_case = pytest.mark.parametrize("case", [case for case in CASES if case.packs], ids=str)
every_causal_case = pytest.mark.parametrize("case", CAUSAL, ids=str)


@pytest.fixture(autouse=True)
def _without_gradients(request: pytest.FixtureRequest) -> Iterator[None]:
    with torch.set_grad_enabled("gradient" in request.node.name):
        yield


def lengths_of(case: Case) -> Inputs:
    """The number of real tokens in each of three rows of T (and S) tokens."""
    return {"lengths": LENGTHS} | source_lengths_of(case)


def source_lengths_of(case: Case) -> Inputs:
    """The number of real source tokens in each of three rows; images are read whole."""
    return {"source_lengths": SOURCE_LENGTHS} if case.has_source and not case.reads_images else {}


def real_part(case: Case, inputs: Inputs, index: int) -> Inputs:
    """The real tokens of one row of three."""
    alone = slots(row(inputs, index), slice(0, int(LENGTHS[index])))
    if source_lengths_of(case):
        alone["source"] = alone["source"][:, : int(SOURCE_LENGTHS[index])]
    return alone


# --- the matrix itself ------------------------------------------------------------------------------------------------


def test_every_two_options_that_can_meet_do() -> None:
    met = {pair for case in CASES for pair in itertools.combinations(case.options.items(), 2)}
    assert possible_pairs() - met == set()
    assert len(CASES) >= 60


@pytest.mark.parametrize("why", RULES)
def test_what_the_matrix_leaves_out_is_what_the_configuration_refuses(why: str) -> None:
    draw = random.Random(0)
    refused = 0
    while refused < 5:
        options = {axis: draw.choice(values) for axis, values in AXES.items()}
        if broken_rules(options) == [why]:
            refused += 1
            with pytest.raises(ValidationError, match="contradict"):
                ModelConfig.model_validate(tree_of(options))


@every_case
def test_the_logits_vary_from_token_to_token(case: Case) -> None:
    logits = network_of(case)(**draw_inputs(case, 3, T, S, seed=10))
    assert variation(logits) > 200 * TOLERANCE
    assert 0.1 < logits.abs().max() < 1e3


# --- tokens that may not matter ---------------------------------------------------------------------------------------


@every_causal_case
def test_a_changed_future_token_changes_no_earlier_logit(case: Case) -> None:
    network, inputs = network_of(case), draw_inputs(case, 2, T, S)
    logits = network(**inputs)
    for first in (case.prefix + 1, 4, 10):
        ids = inputs["ids"].clone()
        ids[:, first:] = other_tokens(ids[:, first:])
        changed = network(**{**inputs, "ids": ids})
        assert_same(case, changed[:, :first], logits[:, :first])
        assert not torch.allclose(changed[:, first], logits[:, first], rtol=1e-3)


@every_case
def test_a_changed_padding_token_changes_no_real_logit(case: Case) -> None:
    network, inputs = network_of(case), draw_inputs(case, 3, T, S)
    real = torch.arange(T) < LENGTHS[:, None]
    logits = network(**inputs, **lengths_of(case))
    padded = dict(inputs)
    padded["ids"] = torch.where(_like(real, inputs["ids"]), inputs["ids"], other_tokens(inputs["ids"]))
    if source_lengths_of(case):
        real_source = _like(torch.arange(S) < SOURCE_LENGTHS[:, None], inputs["source"])
        padded["source"] = torch.where(real_source, inputs["source"], other_tokens(inputs["source"]))
    if case.segments:
        padded["segments"] = torch.where(real, inputs["segments"], 1 - inputs["segments"])
    changed = network(**padded, **lengths_of(case))
    assert_same(case, changed[real], logits[real])
    if case.has_source:
        other_source = {**inputs, "source": other_tokens(inputs["source"])}
        assert not torch.allclose(network(**other_source, **lengths_of(case))[real], logits[real], rtol=1e-3)


def _like(real: Tensor, tokens: Tensor) -> Tensor:
    return real if tokens.dim() == 2 else real[..., None]


@pytest.mark.parametrize("case", FEATURES, ids=str)
@pytest.mark.parametrize("rubbish", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_what_stands_in_a_padded_feature_slot_never_reaches_a_real_logit(case: Case, rubbish: float) -> None:
    network, inputs = network_of(case), draw_inputs(case, 3, T, S)
    logits = network(**inputs, **lengths_of(case))
    name, lengths = ("source", SOURCE_LENGTHS) if case.has_source else ("ids", LENGTHS)
    features = inputs[name].clone()
    features[torch.arange(features.shape[1]) >= lengths[:, None]] = rubbish
    real = torch.arange(T) < LENGTHS[:, None]
    dirty = network(**{**inputs, name: features}, **lengths_of(case))
    assert_same(case, dirty[real], logits[real])


@pytest.mark.parametrize("case", FEATURES, ids=str)
def test_what_stands_in_a_padded_feature_slot_reaches_no_gradient(case: Case) -> None:
    network, inputs = copy.deepcopy(network_of(case)).requires_grad_(True), draw_inputs(case, 3, T, S)
    name, lengths = ("source", SOURCE_LENGTHS) if case.has_source else ("ids", LENGTHS)
    gradients = []
    for rubbish in (0.0, float("nan")):
        inputs[name][torch.arange(inputs[name].shape[1]) >= lengths[:, None]] = rubbish
        network.zero_grad()
        network(**inputs, **lengths_of(case), labels=some_labels()).loss_sum.backward()
        gradients.append([parameter.grad.clone() for parameter in network.parameters()])
    for clean, dirty in zip(*gradients, strict=True):
        assert torch.equal(dirty, clean)


def some_labels() -> Tensor:
    """A target for each real token."""
    slot = torch.arange(T)
    return (LENGTHS[:, None] + slot).masked_fill(slot >= LENGTHS[:, None], IGNORE)


# --- alone, in a batch, packed ----------------------------------------------------------------------------------------


@every_case
def test_alone_equals_in_a_padded_batch(case: Case) -> None:
    network, inputs = network_of(case), draw_inputs(case, 3, T, S)
    logits = network(**inputs, **lengths_of(case))
    last = network(**inputs, **lengths_of(case), logits="last")
    for index, length in enumerate(LENGTHS):
        alone = network(**real_part(case, inputs, index))
        assert_equal(logits[index : index + 1, :length], alone)
        assert_equal(last[index], alone[0, -1:])


def pack(case: Case, parts: list[Inputs], padding: int) -> tuple[Inputs, list[slice]]:
    """Sequences as documents of one row, followed by padding; and where each is found."""
    packed: Inputs = {}
    for key in parts[0]:
        values = [part[key] for part in parts]
        packed[key] = torch.cat([*values, values[0][:, :padding]], dim=1)
        if key != "segments":
            numbers = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor([v.shape[1] for v in values]))
            documents = torch.cat([numbers, numbers.new_full((padding,), len(parts) - 1)])[None]
            packed |= {{"ids": "documents", "source": "source_documents"}[key]: documents}
            if padding:
                packed |= {{"ids": "lengths", "source": "source_lengths"}[key]: torch.tensor([len(numbers)])}
    ends = list(itertools.accumulate(part["ids"].shape[1] for part in parts))
    return packed, [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def documents_of(case: Case) -> list[Inputs]:
    """Three sequences of different lengths."""
    return [
        draw_inputs(case, 1, length, source_length, seed=length) for length, source_length in ((5, 3), (7, 6), (2, 4))
    ]


@every_packing_case
@pytest.mark.parametrize("padding", [0, 2], ids=["full", "padded"])
def test_a_packed_document_equals_the_document_alone(case: Case, padding: int) -> None:
    network, parts = network_of(case), documents_of(case)
    packed, places = pack(case, parts, padding)
    logits = network(**packed)
    for part, place in zip(parts, places, strict=True):
        assert_equal(logits[:, place], network(**part))


@every_packing_case
def test_a_changed_document_changes_no_logit_of_another(case: Case) -> None:
    network, parts = network_of(case), documents_of(case)
    packed, places = pack(case, parts, padding=2)
    logits = network(**packed)
    for changed, place in enumerate(places):
        others = [
            {key: other_tokens(value) if key != "segments" else 1 - value for key, value in part.items()}
            if index == changed
            else part
            for index, part in enumerate(parts)
        ]
        after = network(**pack(case, others, padding=2)[0])
        for index, other in enumerate(places):
            if index != changed:
                assert_same(case, after[:, other], logits[:, other])
        assert not torch.allclose(after[:, place], logits[:, place], rtol=1e-3)


# --- cached -----------------------------------------------------------------------------------------------------------


def chunkings(length: int, first: int, seed: int) -> list[list[int]]:
    """Ways to cut `length` tokens: one by one, a long prompt and single steps, and at random; with `first` tokens or
    more at the beginning."""
    draw = random.Random(seed)
    ways = [[first] + [1] * (length - first), [length - 2, 1, 1]]
    for _ in range(2):
        cuts = sorted(draw.sample(range(first, length), draw.randint(1, 4)))
        ways.append([end - start for start, end in itertools.pairwise([0, *cuts, length])])
    return ways


def new_cache(case: Case, network: Transformer, rows: int) -> Cache:
    return network.new_cache(rows, MAX_SEQ_LEN - 1 if case.options["cache"] == "static" else None)


def in_chunks(network: Transformer, inputs: Inputs, chunks: list[int], cache: Cache, **first: Any) -> Tensor:
    """The logits of all tokens, seen chunk by chunk; source and prefix are passed once, with `first`."""
    logits, start = [], 0
    for chunk in chunks:
        part = slots(inputs, slice(start, start + chunk))
        if start:
            part.pop("source", None)
            part.pop("prefix_lengths", None)
            first = {}
        logits.append(network(**part, **first, cache=cache))
        start += chunk
    return torch.cat(logits, dim=1)


@every_causal_case
def test_cached_in_any_chunks_equals_the_full_forward(case: Case) -> None:
    length = 18  # more than a growing cache starts with
    network, inputs = network_of(case), draw_inputs(case, 3, length, S)
    hidden = source_lengths_of(case)
    full = network(**inputs, **hidden)
    for chunks in chunkings(length, case.prefix or 1, seed=CASES.index(case)):
        cache = new_cache(case, network, 3)
        assert_equal(in_chunks(network, inputs, chunks, cache, **hidden), full)
        assert cache.lengths_B.tolist() == [length] * 3


@every_causal_case
def test_cached_prompts_of_unequal_length_continue_as_if_alone(case: Case) -> None:
    network, inputs = network_of(case), draw_inputs(case, 3, T, S)
    cache = new_cache(case, network, 3)
    prompt = network(**inputs, **lengths_of(case), cache=cache)
    more = draw_inputs(case, 3, 5, seed=20)
    more = {key: value for key, value in more.items() if key in ("ids", "segments")}
    # single steps, then a ragged chunk in which the first row ends, then a step of the two others
    real = [torch.ones(3, dtype=torch.long), torch.tensor([1, 3, 2]), torch.tensor([0, 1, 1])]
    steps, taken = [], [0, 0, 0]
    for lengths in real:
        width = int(lengths.max())
        columns = torch.stack([torch.arange(start, start + width).clamp(max=4) for start in taken])
        chunk = {key: value.gather(1, columns) for key, value in more.items()}
        logits = network(**chunk, cache=cache, lengths=None if (lengths == 1).all() else lengths)
        steps.append(logits)
        taken = [start + int(length) for start, length in zip(taken, lengths, strict=True)]
    for index in range(3):
        alone = real_part(case, inputs, index)
        for key in more:
            alone[key] = torch.cat([alone[key], more[key][index : index + 1, : taken[index]]], dim=1)
        full = network(**alone)
        seen = torch.cat(
            [prompt[index, : LENGTHS[index]]]
            + [logits[index, : int(lengths[index])] for logits, lengths in zip(steps, real, strict=True)]
        )
        assert_equal(seen[None], full)


@every_causal_case
def test_a_reset_cache_equals_a_fresh_one(case: Case) -> None:
    network = network_of(case)
    first, second = draw_inputs(case, 3, T, S, seed=1), draw_inputs(case, 3, 9, 3, seed=2)
    used, fresh = new_cache(case, network, 3), new_cache(case, network, 3)
    network(**first, **lengths_of(case), cache=used)
    used.reset()
    chunks = [4, 1, 1, 3]
    assert_equal(in_chunks(network, second, chunks, used), in_chunks(network, second, chunks, fresh), tolerance=1e-6)


# --- kernels ----------------------------------------------------------------------------------------------------------


@every_case
def test_all_kernels_give_the_same_logits(case: Case) -> None:
    network, inputs = copy.deepcopy(network_of(case)), draw_inputs(case, 3, T, S)
    logits = {}
    for kernel in ("math", "tiled", "sdpa"):
        set_kernel(network, kernel)
        logits[kernel] = network(**inputs, **lengths_of(case))[torch.arange(T) < LENGTHS[:, None]]
    assert_equal(logits["tiled"], logits["math"])
    assert_equal(logits["sdpa"], logits["math"])


@every_case
def test_all_kernels_give_the_same_gradient_of_every_parameter(case: Case) -> None:
    network = copy.deepcopy(network_of(case)).double().requires_grad_(True)
    inputs = in_float64(draw_inputs(case, 3, T, S))
    gradients: dict[str, dict[str, Tensor]] = {}
    for kernel in ("math", "tiled", "sdpa"):
        set_kernel(network, kernel)
        network.zero_grad()
        network(**inputs, **lengths_of(case), labels=some_labels()).loss_sum.backward()
        gradients[kernel] = {name: parameter.grad.clone() for name, parameter in network.named_parameters()}
    largest = max(float(gradient.abs().max()) for gradient in gradients["math"].values())
    for name, gradient in gradients["math"].items():
        for kernel in ("tiled", "sdpa"):
            gap = float((gradients[kernel][name] - gradient).abs().max())
            assert gap <= 1e-11 * largest, f"{kernel}, {name}: {gap:.1e} of {largest:.1e}"
