"""A step ahead: the same steps, states and errors as without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from qkv.config.errors import QkvError
from qkv.config.objectives import CausalObjectiveConfig
from qkv.config.training import RampStageConfig
from qkv.data import Batch, BatchLoader
from qkv.data.prefetch import Prefetched

RAMP = (RampStageConfig(steps=3, max_seq_len=2), RampStageConfig(steps=2, batch_tokens=4))


@pytest.fixture
def new(make_corpus: Any, tokenizer: Any) -> Any:
    corpus = make_corpus(range(41))
    return lambda: BatchLoader(corpus, CausalObjectiveConfig(), tokenizer, max_seq_len=4, batch_tokens=8, ramp=RAMP)


def ids(step: list[Batch]) -> list[list[list[int]]]:
    return [torch.stack((batch.inputs, batch.labels)).tolist() for batch in step]


def test_steps_and_states_are_those_of_the_loader(new: Any) -> None:
    plain, ahead = new(), Prefetched(new())
    assert ahead.state_dict() == plain.state_dict()
    for _ in range(30):
        assert ids(next(ahead)) == ids(next(plain))
        assert ahead.state_dict() == plain.state_dict()


@pytest.mark.parametrize("passed", [(0,), (2,), (2, 3), (4, 5, 9)])
def test_a_step_that_is_passed_over_is_one_for_the_loader_too(new: Any, passed: tuple[int, ...]) -> None:
    plain, ahead = new(), Prefetched(new())
    for number in range(14):
        assert ids(next(ahead)) == ids(next(plain))
        if number in passed:
            plain.pass_over()
            ahead.pass_over()
            assert ahead.state_dict() == plain.state_dict()


@pytest.mark.parametrize("taken", range(8))
def test_it_goes_on_from_any_state_whatever_it_made_ahead(new: Any, taken: int) -> None:
    plain = new()
    for _ in range(taken):
        next(plain)
    state = plain.state_dict()
    expected = [ids(next(plain)) for _ in range(9)]
    ahead = Prefetched(new())
    for _ in range(5):
        next(ahead)
    ahead.load_state_dict(state)
    assert ahead.state_dict() == state
    assert [ids(next(ahead)) for _ in range(9)] == expected


def test_what_goes_wrong_is_raised_when_its_step_is_asked_for(new: Any) -> None:
    class Faulty(BatchLoader):
        def __iter__(self) -> Iterator[list[Batch]]:
            return self

        def __next__(self) -> list[Batch]:
            if self.state_dict()["step"] == 2:
                raise QkvError("a picture cannot be read")
            return super().__next__()

    faulty = new()
    faulty.__class__ = Faulty
    ahead = Prefetched(faulty)
    next(ahead)
    next(ahead)
    assert ahead.state_dict()["step"] == 2
    with pytest.raises(QkvError, match="a picture cannot be read"):
        next(ahead)
    assert ahead.state_dict()["step"] == 2
