"""What denoising hides can be put back, and it hides as much as it should."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.data.corruption import Corruption, Infilling, SpanCorruption

MASK = -1
SENTINELS = tuple(range(1000, 1100))
sizes = st.integers(2, 80)
rates = st.floats(0.01, 0.99)
mean_spans = st.floats(1, 12)
seeds = st.integers(0, 2**32)


def hidden(size: int, rate: float) -> int:
    return min(max(round(rate * size), 1), size - 1)


def refilled(source: list[int], size: int) -> list[int]:
    """The ids 0 to `size` - 1, some of which masks stand for."""
    whole: list[int] = []
    masks = 0
    for token in [*source, size]:
        if token == MASK:
            masks += 1
            continue
        missing = list(range(len(whole), token))
        assert masks or not missing, "ids are missing where no mask is"
        whole += [*missing, token]
        masks = 0
    return whole[:-1]


@given(size=sizes, rate=rates, mean_span=mean_spans, seed=seeds)
def test_infilling_hides_what_the_masks_stand_for_and_nothing_else(
    size: int, rate: float, mean_span: float, seed: int
) -> None:
    ids = list(range(size))
    corrupt = Infilling(rate, mean_span, MASK)
    source, target = corrupt(ids, np.random.default_rng(seed))
    assert target == ids == list(range(size))
    assert corrupt.target_size(size) == len(target)
    assert refilled(source, size) == ids
    assert size - len([token for token in source if token != MASK]) == hidden(size, rate)
    assert len(source) <= size


def test_infilled_spans_are_poisson_and_some_are_empty() -> None:
    """Lengths 0, 1, 2, ... come as often as the distribution says; the last span of a text is cut to the rate."""
    rng, corrupt = np.random.default_rng(0), Infilling(0.3, 3.0, MASK)
    found: Counter[int] = Counter()
    for _ in range(200):
        *spans, _ = corrupt._spans(300, rng)
        found.update(spans)
    for length, share in enumerate([0.0498, 0.1494, 0.2240, 0.2240, 0.1680]):
        assert found[length] / found.total() == pytest.approx(share, abs=0.015)


@given(size=sizes, rate=rates, mean_span=mean_spans, seed=seeds, sentinels=st.integers(2, 100))
def test_source_and_target_of_span_corruption_are_the_text(
    size: int, rate: float, mean_span: float, seed: int, sentinels: int
) -> None:
    ids = list(range(size))
    corrupt = SpanCorruption(rate, mean_span, SENTINELS[:sentinels])
    source, target = corrupt(ids, np.random.default_rng(seed))

    spans: dict[int, list[int]] = {}
    for token in target:
        if token in SENTINELS:
            spans[token] = []
        else:
            spans[next(reversed(spans))].append(token)
    assert [one for token in source for one in spans.get(token, [token])] == ids

    assert tuple(spans) == SENTINELS[: len(spans)]
    assert [token for token in source if token in SENTINELS] == list(spans)[:-1]
    assert not spans.pop(target[-1]), "the last sentinel ends the target"
    assert all(spans.values()), "no span is empty"
    assert source[0] == 0, "nor is the text before each"
    assert not any(one in SENTINELS and other in SENTINELS for one, other in pairwise(source))

    noise = hidden(size, rate)
    assert sum(map(len, spans.values())) == noise
    assert len(spans) == min(max(round(noise / mean_span), 1), noise, size - noise, sentinels - 1)
    assert len(target) == corrupt.target_size(size) <= size + 1
    assert len(source) <= size


def test_spans_of_t5_have_its_counts() -> None:
    """15 % of 512 tokens in spans of 3 on average: 77 of them, in 26 spans."""
    source, target = SpanCorruption(0.15, 3.0, SENTINELS)(list(range(512)), np.random.default_rng(0))
    assert (len(source), len(target)) == (512 - 77 + 26, 77 + 26 + 1)


def test_every_way_of_cutting_is_equally_likely() -> None:
    """Of 5 noise ids in 3 spans there are 6 ways."""
    rng, corrupt = np.random.default_rng(0), SpanCorruption(0.5, 5 / 3, SENTINELS)
    found: Counter[str] = Counter()
    for _ in range(3000):
        _, target = corrupt(list(range(10)), rng)
        found["".join("|" if token in SENTINELS else "x" for token in target)] += 1
    assert len(found) == 6
    assert all(count == pytest.approx(500, rel=0.2) for count in found.values())


@pytest.mark.parametrize("corrupt", [Infilling(0.3, 3.0, MASK), SpanCorruption(0.3, 3.0, SENTINELS)])
def test_a_generator_gives_the_same_damage_again(corrupt: Corruption) -> None:
    ids = list(range(40))
    one, again, other = (corrupt(ids, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert one == again
    assert one != other
