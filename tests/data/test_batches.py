"""Rows, labels, order and resume, on the side of the data."""

from __future__ import annotations

import random
import time
from collections import Counter
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qkv.config.errors import ConfigError, QkvError
from qkv.config.objectives import (
    CausalObjectiveConfig,
    ClassifyObjectiveConfig,
    DenoiseObjectiveConfig,
    MaskedObjectiveConfig,
    ObjectiveConfig,
    SpanObjectiveConfig,
    TranslateObjectiveConfig,
)
from qkv.config.training import RampStageConfig
from qkv.data import Batch, BatchLoader, Corpus, Labelled, Pairs, validation_batches

CAUSAL, MASKED, TRANSLATE = CausalObjectiveConfig(), MaskedObjectiveConfig(), TranslateObjectiveConfig()
EOS = 256

sizes = st.lists(st.integers(0, 12), min_size=1, max_size=8)
fixtures_are_factories = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def numbered(sizes: list[int]) -> list[list[int]]:
    """Documents whose ids are all different."""
    ids = iter(range(10_000))
    return [[next(ids) for _ in range(size)] for size in sizes]


def loader(corpus: Corpus, tokenizer: Any, objective: ObjectiveConfig = CAUSAL, **options: Any) -> BatchLoader:
    return BatchLoader(corpus, objective, tokenizer, **{"max_seq_len": 4, "batch_tokens": 8} | options)


def assert_equal(first: Batch, second: Batch) -> None:
    assert first.target_count == second.target_count
    for name in ("inputs", "labels", "documents", "positions", "lengths", "source", "source_lengths"):
        one, other = getattr(first, name), getattr(second, name)
        assert (one is None) == (other is None), name
        assert one is None or torch.equal(one, other), name


def segments(batch: Batch) -> list[list[tuple[list[int], list[int]]]]:
    """Per row, the inputs and labels of each document, as the ids and lengths of the batch divide it."""
    rows, width = batch.inputs.shape
    documents = torch.zeros(rows, width, dtype=torch.long) if batch.documents is None else batch.documents
    lengths = [width] * rows if batch.lengths is None else batch.lengths.tolist()
    table = []
    for row, length in enumerate(lengths):
        numbers = documents[row, :length].tolist()
        assert numbers == sorted(numbers)
        assert set(numbers) == set(range(max(numbers) + 1))
        picks = [[slot for slot in range(length) if numbers[slot] == number] for number in range(max(numbers) + 1)]
        table.append([(batch.inputs[row, pick].tolist(), batch.labels[row, pick].tolist()) for pick in picks])
    return table


# --- windows of one long document -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 1, 4])
def test_fewer_than_a_window_is_an_error_with_both_numbers(make_corpus: Any, tokenizer: Any, tokens: int) -> None:
    with pytest.raises(QkvError, match=rf"^{tokens} training tokens .* window of 4 takes 5\n") as caught:
        loader(make_corpus(range(tokens)), tokenizer)
    assert caught.value.where == "data.train"


def test_block_plus_one_tokens_are_one_window(make_corpus: Any, tokenizer: Any) -> None:
    batches = loader(make_corpus([1, 2, 3, 4, 5]), tokenizer, batch_tokens=4)
    assert batches.rows_per_epoch == 1
    (batch,) = next(batches)
    assert batch.inputs.tolist() == [[1, 2, 3, 4]]
    assert batch.labels.tolist() == [[2, 3, 4, 5]]
    assert (batch.documents, batch.positions, batch.lengths, batch.target_count) == (None, None, None, 4)


def test_no_corpus_without_documents(make_corpus: Any, tokenizer: Any) -> None:
    with pytest.raises(QkvError, match=r"^0 training tokens .* takes 5\n"):
        loader(make_corpus(), tokenizer)
    with pytest.raises(QkvError, match=r"^6 training tokens .* window of 4 takes 10 from 6 documents\n"):
        loader(make_corpus([1], [2], [3], [4], [5], [6]), tokenizer)


def test_windows_of_one_document_are_contiguous(make_corpus: Any, tokenizer: Any) -> None:
    (batch,) = validation_batches(make_corpus(range(11)), CAUSAL, tokenizer, max_seq_len=4, batch_tokens=100)
    assert batch.inputs.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 0]]
    assert batch.labels.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, -100, -100]]
    assert batch.lengths is not None
    assert batch.lengths.tolist() == [4, 4, 2]
    assert batch.documents is None
    assert batch.target_count == 10


# --- packing ----------------------------------------------------------------------------------------------------------


def test_packed_documents_are_told_apart(make_corpus: Any, tokenizer: Any) -> None:
    """The second document does not fit and continues in the next row, there a document of its own."""
    corpus = make_corpus([1, 2, EOS], [3, 4, 5, 6, EOS], [7], [8, EOS])
    (batch,) = validation_batches(corpus, CAUSAL, tokenizer, max_seq_len=4, batch_tokens=100)
    assert batch.documents is not None
    assert batch.positions is not None
    assert batch.lengths is not None
    assert batch.inputs.tolist() == [[1, 2, 3, 4], [5, 6, 8, 0]]
    assert batch.labels.tolist() == [[2, EOS, 4, 5], [6, EOS, EOS, -100]]
    assert batch.documents.tolist() == [[0, 0, 1, 1], [0, 0, 1, 2]]
    assert batch.positions.tolist() == [[0, 1, 0, 1], [0, 1, 0, 0]]
    assert batch.lengths.tolist() == [4, 3]


@fixtures_are_factories
@given(sizes=sizes, length=st.integers(1, 9), rows=st.integers(1, 4))
def test_labels_are_next_tokens_of_the_same_document(
    make_corpus: Any, tokenizer: Any, sizes: list[int], length: int, rows: int
) -> None:
    """Every token is a target exactly once, except the first of each document; no label crosses a boundary."""
    documents = numbered(sizes)
    next_of = {a: b for document in documents for a, b in pairwise(document)}
    corpus = make_corpus(*documents)
    if not next_of:
        with pytest.raises(QkvError, match="hold no target"):
            validation_batches(corpus, CAUSAL, tokenizer, max_seq_len=length, batch_tokens=length * rows)
        return
    targets: list[int] = []
    for batch in validation_batches(corpus, CAUSAL, tokenizer, max_seq_len=length, batch_tokens=length * rows):
        assert batch.inputs.shape == batch.labels.shape
        assert batch.inputs.dtype == batch.labels.dtype == torch.int64
        assert len(batch.inputs) <= rows
        assert batch.inputs.shape[1] == length
        found = [pair for row in segments(batch) for pair in row]
        for inputs, labels in found:
            assert labels == [next_of[token] for token in inputs]
            assert inputs[1:] == labels[:-1], "one stretch of one document"
        ours = [label for _, labels in found for label in labels]
        assert batch.target_count == len(ours) == int((batch.labels != -100).sum()), "padding has no label"
        targets += ours
    assert Counter(targets) == Counter(next_of.values())


@fixtures_are_factories
@given(sizes=sizes, length=st.integers(1, 9), objective=st.sampled_from([CAUSAL, MASKED]))
def test_positions_restart_where_documents_change(
    make_corpus: Any, tokenizer: Any, sizes: list[int], length: int, objective: ObjectiveConfig
) -> None:
    corpus = make_corpus(*([7] * size for size in [*sizes, 3]))
    for batch in validation_batches(corpus, objective, tokenizer, max_seq_len=length, batch_tokens=3 * length):
        if batch.documents is None:
            assert batch.positions is None
            assert all(len(row) == 1 for row in segments(batch))
            continue
        assert batch.positions is not None
        for documents, positions in zip(batch.documents.tolist(), batch.positions.tolist(), strict=True):
            assert positions == [slot - documents.index(number) for slot, number in enumerate(documents)]


def test_padding_is_no_part_of_any_document(make_corpus: Any, tokenizer: Any) -> None:
    corpus = make_corpus([1, 2, 3], [4, 5])
    (batch,) = validation_batches(corpus, CAUSAL, tokenizer, max_seq_len=5, batch_tokens=5)
    assert batch.documents is not None
    assert batch.documents.tolist() == [[0, 0, 1, 2, 2]]


def test_a_real_eos_keeps_its_label_when_it_is_also_the_padding(make_corpus: Any, make_tokenizer: Any) -> None:
    corpus = make_corpus([1, EOS], [EOS, 2, EOS])
    (batch,) = validation_batches(corpus, CAUSAL, make_tokenizer(pad_id=EOS), max_seq_len=5, batch_tokens=5)
    assert batch.inputs.tolist() == [[1, EOS, 2, EOS, EOS]]
    assert batch.labels.tolist() == [[EOS, 2, EOS, -100, -100]]
    assert batch.lengths is not None
    assert batch.lengths.tolist() == [3]


# --- steps ------------------------------------------------------------------------------------------------------------


def test_a_step_takes_batch_tokens_in_micro_batches(make_corpus: Any, tokenizer: Any) -> None:
    corpus = make_corpus(range(401))
    shapes = {
        (24, None): [6], (24, 8): [2, 2, 2], (27, 16): [4, 2], (1, None): [1], (24, 1): [1] * 6, (24, 999): [6]
    }  # fmt: skip
    for (batch_tokens, micro), rows in shapes.items():
        step = next(loader(corpus, tokenizer, batch_tokens=batch_tokens, micro_batch_tokens=micro))
        assert [len(batch.inputs) for batch in step] == rows
        assert [batch.target_count for batch in step] == [4 * count for count in rows]


def test_micro_batches_divide_the_same_rows(make_corpus: Any, tokenizer: Any) -> None:
    corpus = make_corpus(range(41))
    (whole,) = next(loader(corpus, tokenizer, batch_tokens=40))
    parts = next(loader(corpus, tokenizer, batch_tokens=40, micro_batch_tokens=12))
    assert torch.equal(torch.cat([part.inputs for part in parts]), whole.inputs)


def rows_of(batches: BatchLoader, steps: int) -> list[int]:
    return [int(row[0]) for _ in range(steps) for batch in next(batches) for row in batch.inputs]


def test_an_epoch_visits_every_row_once_in_its_own_order(make_corpus: Any, tokenizer: Any) -> None:
    corpus = make_corpus(range(81))
    batches = loader(corpus, tokenizer, batch_tokens=12)  # 3 of 20 rows: steps span epochs
    rows = rows_of(batches, 20)
    epochs = [rows[:20], rows[20:40], rows[40:]]
    assert all(sorted(epoch) == list(range(0, 80, 4)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert rows_of(loader(corpus, tokenizer, batch_tokens=12), 20) == rows
    assert rows_of(loader(corpus, tokenizer, batch_tokens=20), 12) == rows, "the order is not that of the steps"
    assert rows_of(loader(corpus, tokenizer, batch_tokens=12, seed=1), 20) != rows


def test_the_order_touches_no_global_generator(make_corpus: Any, tokenizer: Any) -> None:
    corpus = make_corpus(range(81))

    def states() -> list[Any]:
        return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]  # type: ignore[index]

    before = states()
    first = loader(corpus, tokenizer, MASKED, seed=3)
    steps = [next(first) for _ in range(15)]
    list(validation_batches(corpus, MASKED, tokenizer, max_seq_len=4, batch_tokens=8))
    assert states() == before
    np.random.seed(1)
    torch.manual_seed(1)
    second = loader(corpus, tokenizer, MASKED, seed=3)
    for step in steps:
        assert_equal(step[0], next(second)[0])


def test_ranks_share_the_rows_of_one_stream(make_corpus: Any, tokenizer: Any) -> None:
    corpus = make_corpus(range(81))
    options = {"batch_tokens": 32, "micro_batch_tokens": 4}
    alone = loader(corpus, tokenizer, **options)
    for world_size in (2, 4):
        ranks = [loader(corpus, tokenizer, rank=rank, world_size=world_size, **options) for rank in range(world_size)]
        alone.load_state_dict({"epoch": 0, "index": 0})
        for _ in range(5):
            steps = [next(rank) for rank in ranks]
            assert len({len(step) for step in steps}) == 1, "all ranks run the same number of micro-batches"
            together = [batch for step in steps for batch in step]
            for ours, theirs in zip(together, next(alone), strict=True):
                assert_equal(ours, theirs)
        assert {str(rank.state_dict()) for rank in ranks} == {str(alone.state_dict())}


def test_ranks_that_cannot_share_a_step_evenly_are_refused(make_corpus: Any, tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="3 rows cannot be shared by 2 ranks") as caught:
        loader(make_corpus(range(81)), tokenizer, batch_tokens=12, world_size=2)
    assert caught.value.hint == "train.batch_tokens=16"


# --- resume -----------------------------------------------------------------------------------------------------------


@fixtures_are_factories
@given(
    sizes=st.lists(st.integers(2, 12), min_size=3, max_size=8),
    objective=st.sampled_from([CAUSAL, MASKED]),
    batch_tokens=st.integers(1, 40),
    stop=st.integers(0, 12),
)
def test_a_resumed_stream_equals_the_uninterrupted_one(
    make_corpus: Any, tokenizer: Any, sizes: list[int], objective: ObjectiveConfig, batch_tokens: int, stop: int
) -> None:
    corpus = make_corpus(*([65 + size] * (size + 2) for size in sizes))
    options = {"batch_tokens": batch_tokens, "micro_batch_tokens": 8}
    whole = loader(corpus, tokenizer, objective, **options)
    for _ in range(stop):
        next(whole)
    state = whole.state_dict()
    resumed = loader(corpus, tokenizer, objective, **options)
    next(resumed)
    resumed.load_state_dict(state)
    for _ in range(6):
        assert resumed.state_dict() == whole.state_dict()
        for ours, theirs in zip(next(resumed), next(whole), strict=True):
            assert_equal(ours, theirs)


@pytest.mark.parametrize(
    "state", [{}, {"epoch": 0}, {"epoch": 0, "index": 20}, {"epoch": -1, "index": 0}, {"epoch": 0, "index": -1}]
)
def test_a_place_that_the_data_does_not_have_is_refused(make_corpus: Any, tokenizer: Any, state: Any) -> None:
    batches = loader(make_corpus(range(81)), tokenizer)
    next(batches)
    before = batches.state_dict()
    with pytest.raises(QkvError, match="an epoch has 20 rows"):
        batches.load_state_dict(state)
    assert batches.state_dict() == before


# --- ramps ------------------------------------------------------------------------------------------------------------


def test_larger_steps_go_on_in_the_order_of_the_epoch(make_corpus: Any, tokenizer: Any) -> None:
    """20 rows: three steps of one, two of two, and the rest in steps of four, of which the last goes into epoch 1."""
    ramp = [RampStageConfig(steps=3, batch_tokens=4), RampStageConfig(steps=2, batch_tokens=8)]
    corpus = make_corpus(range(81))
    ramped = loader(corpus, tokenizer, batch_tokens=16, ramp=ramp)
    plain = loader(corpus, tokenizer, batch_tokens=4)
    rows = [row.tolist() for _ in range(9) for batch in next(ramped) for row in batch.inputs]
    assert rows == [next(plain)[0].inputs[0].tolist() for _ in rows]
    assert len(rows) == 3 + 4 + 4 * 4
    assert ramped.state_dict() == {"step": 9, "epoch": 1, "index": 3}


def test_a_step_that_was_passed_over_does_not_count_in_its_stage(make_corpus: Any, tokenizer: Any) -> None:
    """The last one of a stage, the first one of a stage, and two that follow each other."""
    ramp = [RampStageConfig(steps=2, batch_tokens=4), RampStageConfig(steps=2, batch_tokens=8)]
    corpus = make_corpus(range(81))
    ramped = loader(corpus, tokenizer, batch_tokens=16, ramp=ramp)
    plain = loader(corpus, tokenizer, batch_tokens=4)
    sizes = []
    for number in range(9):
        (batch,) = next(ramped)
        sizes.append(len(batch.inputs))
        assert [row.tolist() for row in batch.inputs] == [next(plain)[0].inputs[0].tolist() for _ in batch.inputs]
        if number in (1, 3, 4):
            ramped.pass_over()
        elif number < 8:
            state, ramped = ramped.state_dict(), loader(corpus, tokenizer, batch_tokens=16, ramp=ramp)
            ramped.load_state_dict(state)
    assert sizes == [1, 1, 1, 2, 2, 2, 2, 4, 4]
    assert ramped.state_dict()["step"] == 6


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"batch_tokens": 10**12}, "train.batch_tokens"),
        (
            {"ramp": [RampStageConfig(steps=3), RampStageConfig(steps=3, batch_tokens=10**12)]},
            "train.ramp.1.batch_tokens",
        ),
        ({"batch_tokens": 10**12, "ramp": [RampStageConfig(steps=3, max_seq_len=2)]}, "train.batch_tokens"),
    ],
    ids=["plain", "ramp", "ramp of lengths"],
)
def test_a_step_that_holds_the_data_many_times_over_is_refused(
    make_corpus: Any, tokenizer: Any, options: dict[str, Any], key: str
) -> None:
    said = r"a step of 1,000,000,000,000 tokens would hold the 80 to train on 12,500,000,000 times over"
    with pytest.raises(ConfigError, match=said) as caught:
        loader(make_corpus(range(81)), tokenizer, **options)
    assert caught.value.where == key


def test_a_step_may_hold_little_data_often_and_any_data_a_few_times(make_corpus: Any, tokenizer: Any) -> None:
    (batch,) = next(loader(make_corpus(range(9)), tokenizer, batch_tokens=4000))
    assert len(batch.inputs) == 1000
    rows = 2**18  # of 4 tokens each
    for epochs, fits in ((10, True), (11, False)):
        corpus = make_corpus([1] * (4 * rows + 1))
        with nullcontext() if fits else pytest.raises(ConfigError, match="11 times over"):
            loader(corpus, tokenizer, batch_tokens=4 * rows * epochs)


def test_rows_of_another_length_begin_an_epoch_of_their_own(make_corpus: Any, tokenizer: Any) -> None:
    ramped = loader(make_corpus(range(81)), tokenizer, ramp=[RampStageConfig(steps=3, max_seq_len=2)])
    assert [next(ramped)[0].inputs.shape for _ in range(3)] == [(4, 2)] * 3
    assert ramped.state_dict() == {"step": 3, "epoch": 0, "index": 12}
    epoch = [row for _ in range(10) for row in next(ramped)[0].inputs.tolist()]
    assert sorted(epoch) == [list(range(first, first + 4)) for first in range(0, 80, 4)]
    assert ramped.state_dict() == {"step": 13, "epoch": 2, "index": 0}


def test_a_stage_that_the_data_do_not_fill_is_refused_before_the_first_step(make_corpus: Any, tokenizer: Any) -> None:
    with pytest.raises(QkvError, match="too few: a window of 40"):
        loader(make_corpus(range(30)), tokenizer, ramp=[RampStageConfig(steps=3, max_seq_len=40)])


# --- rows of their own lengths ----------------------------------------------------------------------------------------


def sentences(count: int = 3000, seed: int = 0) -> list[tuple[int, int]]:
    """Lengths of sources and targets as those of image descriptions are, in tokens: about 13 and a little more."""
    rng = np.random.default_rng(seed)
    source = np.clip(rng.lognormal(2.5, 0.35, count), 3, 60)
    target = np.clip(source * rng.lognormal(0.05, 0.25, count), 2, 60)
    return list(zip(source.astype(int).tolist(), target.astype(int).tolist(), strict=True))


@pytest.fixture(scope="module")
def pairs(make_pairs: Any) -> Pairs:
    """Each pair is told by the first two ids of its target."""
    return make_pairs(*(([7] * s, [n // 256, n % 256, *[8] * t]) for n, (s, t) in enumerate(sentences())))  # type: ignore[no-any-return]


def pair_loader(pairs: Pairs, tokenizer: Any, **options: Any) -> BatchLoader:
    return BatchLoader(pairs, TRANSLATE, tokenizer, **{"max_seq_len": 64, "batch_tokens": 2048} | options)


def epoch_of(batches: BatchLoader) -> list[list[Batch]]:
    """The steps of the epoch that begins now."""
    epoch = batches.state_dict()["epoch"]
    steps = []
    while batches.state_dict()["epoch"] == epoch:
        steps.append(next(batches))
    return steps


def numbers(steps: list[list[Batch]]) -> list[list[int]]:
    """The pairs of each step."""
    return [[256 * a + b for batch in step for a, b in batch.inputs[:, 1:3].tolist()] for step in steps]


def test_every_pair_is_visited_once_per_epoch_in_steps_of_their_own_order(pairs: Pairs, seq2seq: Any) -> None:
    batches = pair_loader(pairs, seq2seq)
    first, second = numbers(epoch_of(batches)), numbers(epoch_of(batches))
    for steps in (first, second):
        assert sorted(number for step in steps for number in step) == list(range(3000))
    assert first != second
    assert set(map(frozenset, first)) != set(map(frozenset, second)), "pairs of equal lengths meet others"
    again = pair_loader(pairs, seq2seq, micro_batch_tokens=100)
    assert [numbers(epoch_of(again)), numbers(epoch_of(again))] == [first, second]
    assert numbers(epoch_of(pair_loader(pairs, seq2seq, seed=1))) != first
    longest = [max(pairs.target.sizes[step]) for step in first]
    assert longest != sorted(longest), "steps are not in the order of their lengths"


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=20),
    batch_tokens=st.integers(1, 60),
    micro_batch_tokens=st.none() | st.integers(1, 20),
)
def test_a_step_is_never_larger_than_asked_for_unless_one_row_is(
    make_pairs: Any, seq2seq: Any, sizes: list[tuple[int, int]], batch_tokens: int, micro_batch_tokens: int | None
) -> None:
    pairs = make_pairs(*(([1] * source, [2] * target) for source, target in sizes))
    batches = pair_loader(pairs, seq2seq, batch_tokens=batch_tokens, micro_batch_tokens=micro_batch_tokens)
    steps = epoch_of(batches)
    for step in steps:
        rows = sum(len(batch.inputs) for batch in step)
        assert rows == 1 or sum(batch.target_count for batch in step) <= batch_tokens
        for batch in step if micro_batch_tokens is not None else ():
            assert batch.source_lengths is not None
            longer = torch.maximum(batch.source_lengths, (batch.labels != -100).sum(1))
            assert len(batch.inputs) == 1 or longer.sum() <= micro_batch_tokens, "the longer side counts"
    targets = [int(length) for step in steps for batch in step for length in (batch.labels != -100).sum(1)]
    assert Counter(targets) == Counter(target + 1 for _, target in sizes)


@pytest.mark.parametrize(("batch_tokens", "most"), [(512, 0.06), (2048, 0.11)])
def test_little_of_a_step_is_padding(pairs: Pairs, seq2seq: Any, batch_tokens: int, most: float) -> None:
    """With rows in random order it would be more than half."""
    steps = epoch_of(pair_loader(pairs, seq2seq, batch_tokens=batch_tokens))
    slots = sum(batch.inputs.numel() + batch.source.numel() for (batch,) in steps if batch.source is not None)
    tokens = int((pairs.source.sizes + pairs.target.sizes - 1).sum())
    assert 1 - tokens / slots < most
    assert len(steps) < 1.1 * (pairs.target.sizes - 1).sum() / batch_tokens + 1, "steps are full"


def test_ranks_share_the_pairs_of_one_step(pairs: Pairs, seq2seq: Any) -> None:
    alone = numbers(epoch_of(pair_loader(pairs, seq2seq)))
    ranks = [pair_loader(pairs, seq2seq, rank=rank, world_size=3) for rank in range(3)]
    shares = [numbers(epoch_of(rank)) for rank in ranks]
    assert [[*first, *second, *third] for first, second, third in zip(*shares, strict=True)] == alone
    assert all(rank.state_dict() == {"step": len(alone), "epoch": 1, "index": 0} for rank in ranks)


TASKS: list[ObjectiveConfig] = [
    TRANSLATE, DenoiseObjectiveConfig(), SpanObjectiveConfig(), ClassifyObjectiveConfig()
]  # fmt: skip


def data_for(objective: ObjectiveConfig, pairs: Pairs) -> Any:
    if isinstance(objective, ClassifyObjectiveConfig):
        return Labelled(pairs.source, np.arange(pairs.num_documents) % 3)
    return pairs if objective is TRANSLATE else pairs.target


@pytest.mark.parametrize("objective", TASKS, ids=lambda objective: objective.kind)
def test_a_task_goes_on_in_the_middle_of_an_epoch(pairs: Pairs, seq2seq: Any, objective: ObjectiveConfig) -> None:
    data, options = data_for(objective, pairs), {"max_seq_len": 24, "batch_tokens": 4000, "micro_batch_tokens": 900}
    if objective is TRANSLATE:
        options["max_seq_len"] = 64
    whole = BatchLoader(data, objective, seq2seq, **options)
    steps = len(epoch_of(whole))
    for stop in (steps // 2, steps - 1, steps + 1):
        whole.load_state_dict({"epoch": 0, "index": 0})
        for _ in range(stop):
            next(whole)
        resumed = BatchLoader(data, objective, seq2seq, **options)
        resumed.load_state_dict(whole.state_dict())
        for _ in range(3):
            assert resumed.state_dict() == whole.state_dict()
            for ours, theirs in zip(next(resumed), next(whole), strict=True):
                assert_equal(ours, theirs)
    with pytest.raises(QkvError, match=f"an epoch has {steps} steps"):
        whole.load_state_dict({"epoch": 0, "index": steps})


@pytest.mark.parametrize("objective", TASKS, ids=lambda objective: objective.kind)
def test_validation_of_a_task_is_the_same_in_every_call(pairs: Pairs, seq2seq: Any, objective: ObjectiveConfig) -> None:
    data, options = data_for(objective, pairs), {"max_seq_len": 64, "batch_tokens": 3000}
    one, again = (list(validation_batches(data, objective, seq2seq, **options)) for _ in range(2))
    assert sum(len(batch.inputs) for batch in one) == 3000
    for ours, theirs in zip(one, again, strict=True):
        assert_equal(ours, theirs)
        assert ours.tokens <= 3000


def test_token_dropout_is_drawn_anew_every_epoch_and_validation_has_none(pairs: Pairs, seq2seq: Any) -> None:
    data = Labelled(pairs.target, np.zeros(3000, np.int64)).choose(np.arange(3000) < 200)
    objective = ClassifyObjectiveConfig(token_dropout=0.3)
    mask = seq2seq.mask_id

    def epochs(seed: int = 0) -> list[list[list[int]]]:
        """The texts of the first two epochs, as they are read, sorted."""
        batches = BatchLoader(data, objective, seq2seq, max_seq_len=64, batch_tokens=2048, seed=seed)
        return [sorted(row for (batch,) in epoch_of(batches) for row in batch.inputs.tolist()) for _ in range(2)]

    (first, second), other = epochs(), epochs(seed=1)[0]
    assert epochs() == [first, second]
    assert first != second != other != first
    held = validation_batches(data, objective, seq2seq, max_seq_len=64, batch_tokens=2048)
    assert not any((batch.inputs == mask).any() for batch in held)


@pytest.mark.parametrize("objective", TASKS, ids=lambda objective: objective.kind)
def test_a_task_without_a_row_is_refused(make_pairs: Any, seq2seq: Any, objective: ObjectiveConfig) -> None:
    data, options = data_for(objective, make_pairs()), {"max_seq_len": 64, "batch_tokens": 3000}
    with pytest.raises(QkvError, match="nothing to learn from") as caught:
        BatchLoader(data, objective, seq2seq, **options)
    assert caught.value.where == "data.train"
    with pytest.raises(QkvError, match="hold no target") as caught:
        validation_batches(data, objective, seq2seq, **options)
    assert caught.value.where == "data.validation"


# --- devices, cost ----------------------------------------------------------------------------------------------------


def test_a_batch_moves_as_a_whole(make_corpus: Any, tokenizer: Any) -> None:
    (batch,) = next(loader(make_corpus(range(9), range(9)), tokenizer))
    moved = batch.to("meta")
    assert moved.inputs.is_meta
    assert (moved.lengths is None, moved.target_count) == (batch.lengths is None, batch.target_count)


@pytest.mark.parametrize("objective", [CAUSAL, MASKED], ids=lambda objective: objective.kind)
def test_a_step_costs_little(make_tokenizer: Any, objective: ObjectiveConfig) -> None:
    """16 rows of 256 from 100,000 documents; the bound is loose for the sake of busy machines."""
    sizes = np.random.default_rng(0).integers(2, 200, 100_000)
    ends = np.cumsum(sizes)
    corpus = Corpus(np.zeros(ends[-1], np.uint16), ends - sizes, ends)
    batches = loader(corpus, make_tokenizer(), objective, max_seq_len=256, batch_tokens=16 * 256)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        next(batches)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.01


@pytest.mark.parametrize("objective", TASKS, ids=lambda objective: objective.kind)
def test_a_step_of_short_rows_costs_little(pairs: Pairs, seq2seq: Any, objective: ObjectiveConfig) -> None:
    """About 300 rows; the bound is loose for the sake of busy machines."""
    batches = BatchLoader(data_for(objective, pairs), objective, seq2seq, max_seq_len=64, batch_tokens=4096)
    times = []
    for _ in range(10):
        start = time.perf_counter()
        next(batches)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.06


def test_a_million_pairs_are_put_in_order_in_seconds(seq2seq: Any) -> None:
    rng = np.random.default_rng(0)
    sizes = rng.integers(3, 60, 1_000_000)
    ends = np.cumsum(sizes)
    side = Corpus(np.zeros(ends[-1], np.uint16), ends - sizes, ends)
    start = time.perf_counter()
    next(pair_loader(Pairs(side, side), seq2seq, batch_tokens=8192))
    assert time.perf_counter() - start < 10
