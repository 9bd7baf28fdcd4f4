"""Penalties, temperature, filters and the draw."""

from __future__ import annotations

import math
import warnings
from collections import Counter

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from qkv.config.errors import UsageError
from qkv.generate.sampling import Sampling, choose, distribution, heat, keep_min_p, keep_top_k, keep_top_p, penalise

logit_lists = st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=12, unique=True)


def kept(logits_V: torch.Tensor) -> set[int]:
    return {index for index, value in enumerate(logits_V.tolist()) if value > -math.inf}


def probabilities(logits: list[float]) -> list[float]:
    weights = [math.exp(value - max(logits)) for value in logits]
    return [weight / math.fsum(weights) for weight in weights]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", math.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", math.nan),
        ("frequency_penalty", math.nan),
        ("presence_penalty", math.inf),
        ("presence_penalty", 100.1),
        ("frequency_penalty", -1e39),
        ("frequency_penalty", 10**400),
        ("repetition_penalty", 1e-45),
        ("repetition_penalty", 101.0),
        ("temperature", 10**400),
        ("temperature", "1"),
        ("top_p", None),
        ("top_k", True),
    ],
)
def test_a_value_that_means_nothing_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=name):
        Sampling(**{name: value})


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_prompt_and_new_tokens() -> None:
    logits = torch.tensor([2.0, -2.0, 2.0, -2.0, 0.0])
    sampling = Sampling(repetition_penalty=4.0)
    penalised = penalise(logits, sampling, prompt=[0, 0, 1], generated=[3, 3])
    assert penalised.tolist() == [0.5, -8.0, 2.0, -8.0, 0.0]
    assert logits.tolist() == [2.0, -2.0, 2.0, -2.0, 0.0]


def test_frequency_and_presence_penalties_count_generated_tokens_only() -> None:
    logits = torch.zeros(4)
    assert penalise(logits, Sampling(frequency_penalty=0.5), [0, 0], [1, 1, 1, 2]).tolist() == [0, -1.5, -0.5, 0]
    assert penalise(logits, Sampling(presence_penalty=0.5), [0, 0], [1, 1, 1, 2]).tolist() == [0, -0.5, -0.5, 0]
    both = Sampling(repetition_penalty=2.0, frequency_penalty=1.0, presence_penalty=0.25)
    assert penalise(torch.tensor([4.0, 4.0]), both, [0], [1, 1]).tolist() == [2.0, 2.0 - 2.0 - 0.25]


def test_penalties_that_are_off_change_nothing() -> None:
    logits = torch.randn(9, generator=torch.Generator().manual_seed(0))
    assert torch.equal(distribution(logits, Sampling(temperature=0), [1, 2], [3, 3]), logits)


@pytest.mark.parametrize("factor", [0.01, 100.0])
@pytest.mark.parametrize("size", [-100.0, 100.0])
def test_the_largest_penalties_keep_the_largest_logits_finite(factor: float, size: float) -> None:
    logits = torch.tensor([3e38, -3e38, 1.0])
    sampling = Sampling(repetition_penalty=factor, frequency_penalty=size, presence_penalty=size)
    assert penalise(logits, sampling, [0, 1, 2], [0, 1, 2] * 1000).isfinite().all()
    for temperature in (0.0, 1e-300, 1e300):
        one = Sampling(temperature, repetition_penalty=factor, frequency_penalty=size, top_p=0.9)
        assert choose(logits, one, seed=0, step=0, prompt=[0, 1, 2], generated=[0, 1, 2]) in (0, 1, 2)


def test_penalties_come_before_the_filters() -> None:
    """With the penalty id 0 falls behind id 1, and top_k = 1 keeps id 1."""
    logits = torch.tensor([3.0, 2.0, 1.0])
    assert kept(distribution(logits, Sampling(top_k=1, presence_penalty=2.0), [], [0])) == {1}


def test_top_p_sees_what_temperature_and_top_k_left() -> None:
    """After top_k = 2 the first token has 0.6 / 0.9, after temperature 0.5 of that 0.8: enough for 0.75 alone."""
    logits = torch.tensor([0.6, 0.3, 0.1]).log()
    assert kept(distribution(logits, Sampling(top_p=0.75))) == {0, 1}
    assert kept(distribution(logits, Sampling(top_k=2, top_p=0.65))) == {0}
    assert kept(distribution(logits, Sampling(top_p=0.65))) == {0, 1}
    assert kept(distribution(logits, Sampling(temperature=0.5, top_k=2, top_p=0.75))) == {0}


@settings(deadline=None)
@given(logit_lists, st.integers(0, 15))
def test_top_k_keeps_the_k_largest(logits: list[float], top_k: int) -> None:
    ranked = sorted(range(len(logits)), key=lambda index: -logits[index])
    expected = set(ranked[:top_k]) if top_k else set(ranked)
    assert kept(keep_top_k(torch.tensor(logits), top_k)) == expected


def test_top_k_above_the_vocabulary_is_clipped_and_ties_go_to_the_smaller_id() -> None:
    logits = torch.tensor([1.0, 2.0, 1.0, 1.0])
    assert kept(keep_top_k(logits, 1000)) == {0, 1, 2, 3}
    assert kept(keep_top_k(logits, 3)) == {0, 1, 2}


@settings(deadline=None)
@given(logit_lists, st.floats(0.01, 1.0))
def test_top_p_keeps_the_smallest_set_that_reaches_p(logits: list[float], top_p: float) -> None:
    p = probabilities(logits)
    ranked = sorted(range(len(p)), key=lambda index: -p[index])
    sums = [math.fsum(p[index] for index in ranked[:size]) for size in range(1, len(p) + 1)]
    assume(top_p == 1.0 or all(abs(total - top_p) > 1e-9 for total in sums))
    size = len(p) if top_p == 1.0 else next(n for n, total in enumerate(sums, 1) if total >= top_p or n == len(p))
    assert kept(keep_top_p(torch.tensor(logits, dtype=torch.float64), top_p)) == set(ranked[:size])


@settings(deadline=None)
@given(logit_lists, st.floats(0.0, 1.0))
def test_min_p_keeps_what_is_likely_enough_beside_the_best(logits: list[float], min_p: float) -> None:
    p = probabilities(logits)
    assume(all(abs(value - min_p * max(p)) > 1e-9 or value == max(p) for value in p))
    expected = {index for index, value in enumerate(p) if value >= min_p * max(p)}
    assert kept(keep_min_p(torch.tensor(logits, dtype=torch.float64), min_p)) == expected


def test_the_most_likely_token_survives_the_strictest_filters() -> None:
    logits = torch.tensor([-1e30, 5.0, 1e30, 2.0])
    assert kept(distribution(logits, Sampling(top_k=1, top_p=1e-12, min_p=1.0))) == {2}


@settings(max_examples=30, deadline=None)
@given(logit_lists, st.integers(0, 2**64 - 1))
def test_temperature_0_takes_the_largest_whatever_the_seed(logits: list[float], seed: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chosen = choose(torch.tensor(logits), Sampling(temperature=0), seed=seed, step=0)
    assert logits[chosen] == max(logits)


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-40, 1e-6])
def test_tiny_temperatures_do_not_overflow(temperature: float) -> None:
    logits = torch.tensor([60000.0, 59000.0, -60000.0, 60001.0])
    assert not heat(logits, temperature).isnan().any()
    for seed in range(20):
        assert choose(logits, Sampling(temperature=temperature), seed=seed, step=0) == 3


def test_a_high_temperature_flattens_and_a_low_one_sharpens() -> None:
    logits = torch.tensor([1.0, 0.0])
    first, cool, hot = (heat(logits, temperature).softmax(0)[0].item() for temperature in (1.0, 0.5, 10.0))
    assert first == pytest.approx(1 / (1 + math.exp(-1)))
    assert cool == pytest.approx(1 / (1 + math.exp(-2)))
    assert hot == pytest.approx(1 / (1 + math.exp(-0.1)))


def chi_square(counts: Counter[int], expected: dict[int, float], draws: int) -> float:
    assert set(counts) <= set(expected)
    return sum((counts[index] - draws * p) ** 2 / (draws * p) for index, p in expected.items())


@pytest.mark.parametrize("across", ["seeds", "steps"])
def test_draws_have_the_probabilities_of_the_softmax(across: str) -> None:
    p = [0.4, 0.25, 0.15, 0.1, 0.06, 0.04]
    logits, draws = torch.tensor(p).log(), 6000
    counts = Counter(
        choose(logits, Sampling(), seed=number if across == "seeds" else 7, step=0 if across == "seeds" else number)
        for number in range(draws)
    )
    assert chi_square(counts, dict(enumerate(p)), draws) < 20.5  # the 99.9 % quantile for 5 degrees of freedom


def test_draws_after_filters_have_the_renormalised_probabilities() -> None:
    logits, draws = torch.tensor([0.4, 0.3, 0.2, 0.1]).log(), 4000
    sampling = Sampling(top_k=3, temperature=0.5)
    total = 0.4**2 + 0.3**2 + 0.2**2
    counts = Counter(choose(logits, sampling, seed=seed, step=3) for seed in range(draws))
    assert chi_square(counts, {0: 0.16 / total, 1: 0.09 / total, 2: 0.04 / total}, draws) < 13.8  # 2 degrees


def test_neighbouring_seeds_and_steps_draw_independently() -> None:
    """Pairs (step 0, step 1) and (seed n, seed n + 1) of a fair coin are all equally frequent."""
    coin, draws = torch.zeros(2), 2000
    toss = {(s, t): choose(coin, Sampling(), seed=s, step=t) for s in range(draws + 1) for t in (0, 1)}
    for pairs in (
        Counter((toss[s, 0], toss[s, 1]) for s in range(draws)),
        Counter((toss[s, 0], toss[s + 1, 0]) for s in range(draws)),
    ):
        assert sum((count - draws / 4) ** 2 / (draws / 4) for count in pairs.values()) < 16.3  # 3 degrees


def test_a_draw_survives_the_last_digit_of_the_logits() -> None:
    """Logits in a batch differ from those alone by rounding; of 300 draws from 5,000 tokens none may change."""
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 3
    other = logits * (1 + 3e-7 * torch.randn(5000, generator=torch.Generator().manual_seed(1)).clamp(-1, 1))
    for step in range(300):
        assert choose(logits, Sampling(), seed=3, step=step) == choose(other, Sampling(), seed=3, step=step)
