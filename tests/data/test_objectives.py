"""What is asked of the model."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from qkv.config.errors import ConfigError, QkvError
from qkv.config.objectives import MaskedObjectiveConfig, ObjectiveConfig
from qkv.data import Batch, BatchLoader, Corpus, validation_batches
from qkv.data.objectives import build_objective
from qkv.data.windows import Ints, Window

EOS, MASK = 256, 257
ORDINARY = 256


@pytest.fixture
def letters() -> Corpus:
    """40,000 ordinary ids in documents of 40, each with BOS and EOS."""
    ids = np.random.default_rng(0).integers(0, ORDINARY, (1000, 42)).astype(np.uint16)
    ids[:, 0], ids[:, -1] = 258, EOS
    starts = np.arange(1000) * 42
    return Corpus(ids.reshape(-1), starts, starts + 42)


def epoch(corpus: Corpus, tokenizer: Any, number: int = 0, seed: int = 0, rate: float = 0.15) -> Batch:
    """All rows of an epoch, in the order of the corpus."""
    objective = MaskedObjectiveConfig(rate=rate)
    loader = BatchLoader(corpus, objective, tokenizer, max_seq_len=64, batch_tokens=64 * 657, seed=seed)
    assert loader.rows_per_epoch == 657
    loader.load_state_dict({"epoch": number, "index": 0})
    (batch,) = next(loader)
    rows = np.random.default_rng((seed, 0, number)).permutation(657).argsort()
    assert batch.documents is not None
    return Batch(batch.inputs[rows], batch.labels[rows], None, None, None, batch.target_count)


def test_masked_targets_are_chosen_and_replaced_as_stated(letters: Corpus, tokenizer: Any) -> None:
    batch = epoch(letters, tokenizer)
    original = torch.from_numpy(letters.tokens.astype(np.int64))
    inputs, labels = batch.inputs.flatten()[:42_000], batch.labels.flatten()[:42_000]
    chosen = labels != -100
    assert chosen.sum() == batch.target_count
    assert torch.equal(labels[chosen], original[chosen]), "a label is the token itself, at its own slot"
    assert torch.equal(inputs[~chosen], original[~chosen])
    assert bool((original[chosen] < ORDINARY).all()), "special tokens are never targets"
    assert abs(chosen.sum() / 40_000 - 0.15) < 0.003
    assert bool((batch.labels != -100).any(dim=1).all()), "every row has a target"

    masked = inputs[chosen] == MASK
    kept = inputs[chosen] == labels[chosen]
    other = inputs[chosen][~masked & ~kept]
    assert abs(masked.float().mean() - 0.8) < 0.02
    assert abs(kept.float().mean() - 0.1 - 0.1 / ORDINARY) < 0.015
    assert bool((other < ORDINARY).all()), "special tokens never stand in"
    assert len(other.unique()) > 200
    where = (batch.labels != -100).float().mean(dim=0)
    assert 0.08 < where.min() < where.max() < 0.22, "any slot of a row"


def test_masks_differ_between_epochs_and_seeds_only(letters: Corpus, tokenizer: Any) -> None:
    first = epoch(letters, tokenizer)
    assert torch.equal(first.inputs, epoch(letters, tokenizer).inputs)
    for other in (epoch(letters, tokenizer, number=1), epoch(letters, tokenizer, seed=1)):
        assert not torch.equal(first.labels, other.labels)


def test_validation_masks_never_change(letters: Corpus, tokenizer: Any) -> None:
    def labels(rows: int) -> torch.Tensor:
        batches = validation_batches(
            letters, MaskedObjectiveConfig(), tokenizer, max_seq_len=64, batch_tokens=64 * rows
        )
        return torch.cat([batch.labels for batch in batches])

    assert torch.equal(labels(3), labels(100))


def test_masked_validation_holds_every_token_once(letters: Corpus, tokenizer: Any) -> None:
    seen = []
    for batch in validation_batches(letters, MaskedObjectiveConfig(), tokenizer, max_seq_len=64, batch_tokens=640):
        original = torch.where(batch.labels != -100, batch.labels, batch.inputs)
        lengths = [64] * len(original) if batch.lengths is None else batch.lengths.tolist()
        seen += [token for row, length in zip(original.tolist(), lengths, strict=True) for token in row[:length]]
    assert seen == letters.tokens.tolist()


@pytest.mark.parametrize("rate", [0.0001, 0.9999])
def test_a_row_has_a_target_at_any_rate_unless_all_is_special(make_corpus: Any, tokenizer: Any, rate: float) -> None:
    corpus = make_corpus([258, 1, 2, EOS], [258, 258, 258, EOS])
    (batch,) = validation_batches(corpus, MaskedObjectiveConfig(rate=rate), tokenizer, max_seq_len=4, batch_tokens=8)
    assert (batch.labels != -100).sum(dim=1).tolist() == ([1, 0] if rate < 0.5 else [2, 0])


def test_a_masked_window_takes_block_tokens(make_corpus: Any, tokenizer: Any) -> None:
    assert (
        BatchLoader(
            make_corpus(range(4)), MaskedObjectiveConfig(), tokenizer, max_seq_len=4, batch_tokens=4
        ).rows_per_epoch
        == 1
    )
    with pytest.raises(QkvError, match=r"3 training tokens .* window of 4 takes 4"):
        BatchLoader(make_corpus(range(3)), MaskedObjectiveConfig(), tokenizer, max_seq_len=4, batch_tokens=4)


def test_padding_is_never_a_masked_target(make_corpus: Any, make_tokenizer: Any) -> None:
    """Also when the padding is an ordinary id."""
    batches = validation_batches(
        make_corpus(range(5)), MaskedObjectiveConfig(rate=0.99), make_tokenizer(pad_id=0), max_seq_len=8, batch_tokens=8
    )
    (batch,) = batches
    assert (batch.labels != -100).tolist() == [[True] * 5 + [False] * 3]
    assert batch.inputs[0, 5:].tolist() == [0, 0, 0]


def test_the_rate_is_of_real_tokens(make_corpus: Any, tokenizer: Any) -> None:
    objective = MaskedObjectiveConfig(rate=0.5)
    (batch,) = validation_batches(make_corpus(range(4)), objective, tokenizer, max_seq_len=64, batch_tokens=64)
    assert batch.target_count == 2


def test_a_tokenizer_without_a_mask_is_refused(make_tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="no mask token"):
        build_objective(MaskedObjectiveConfig(), make_tokenizer(mask_id=None))


class Backwards:
    """Predicts the token itself: a third party's idea."""

    lookahead = 0

    def __init__(self, config: ObjectiveConfig, tokenizer: Any) -> None:
        pass

    def targets(self, window: Window, keys_B: Any) -> tuple[Ints, Ints]:
        return window.tokens_BT, window.tokens_BT


class BackwardsConfig(ObjectiveConfig):
    module: ClassVar[str | None] = f"{__name__}:Backwards"


def test_a_third_party_objective_is_built_from_its_module(make_corpus: Any, tokenizer: Any) -> None:
    (batch,) = validation_batches(make_corpus([1, 2]), BackwardsConfig(), tokenizer, max_seq_len=2, batch_tokens=2)
    assert batch.labels.tolist() == [[1, 2]]
    with pytest.raises(ConfigError, match="no data can be made"):
        build_objective(ObjectiveConfig(kind="span"), tokenizer)
