"""What an objective makes of pairs, of plain text and of texts with a label."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qkv.config.errors import ConfigError
from qkv.config.model import ModelConfig
from qkv.config.objectives import (
    CausalObjectiveConfig,
    ClassifyObjectiveConfig,
    DenoiseObjectiveConfig,
    ObjectiveConfig,
    SpanObjectiveConfig,
    TranslateObjectiveConfig,
)
from qkv.data import Batch, Corpus, Labelled, Pairs, validation_batches
from qkv.data.rows import build_rows, padded, seq2seq_batch
from qkv.nn.transformer import Transformer

TRANSLATE, DENOISE, SPAN, CLASSIFY = (
    TranslateObjectiveConfig(),
    DenoiseObjectiveConfig(),
    SpanObjectiveConfig(),
    ClassifyObjectiveConfig(),
)
PAD, BOS, EOS, MASK = 256, 257, 258, 259


def whole(data: Any, objective: ObjectiveConfig, tokenizer: Any, max_seq_len: int = 16) -> Batch:
    """All rows in one batch."""
    (batch,) = validation_batches(data, objective, tokenizer, max_seq_len=max_seq_len, batch_tokens=1 << 20)
    return batch


def real(ids_BT: torch.Tensor | None, lengths_B: torch.Tensor | None) -> list[list[int]]:
    """The rows without their padding."""
    assert ids_BT is not None
    lengths = [ids_BT.shape[1]] * len(ids_BT) if lengths_B is None else lengths_B.tolist()
    return [row[:length] for row, length in zip(ids_BT.tolist(), lengths, strict=True)]


# --- pairs ------------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pairs=st.lists(st.tuples(st.binary(max_size=6), st.binary(max_size=6)), min_size=1, max_size=6))
def test_a_decoder_reads_start_and_the_labels_shifted_once(
    make_pairs: Any, seq2seq: Any, pairs: list[tuple[bytes, bytes]]
) -> None:
    batch = whole(make_pairs(*pairs), TRANSLATE, seq2seq)
    assert batch.labels.shape == batch.inputs.shape
    found = Counter[tuple[bytes, bytes]]()
    rows = zip(
        real(batch.inputs, batch.lengths), batch.labels.tolist(), real(batch.source, batch.source_lengths), strict=True
    )
    for inputs, labels, source in rows:
        assert inputs[0] == BOS
        assert inputs[1:] == labels[: len(inputs) - 1]
        assert labels[len(inputs) - 1] == EOS
        assert set(labels[len(inputs) :]) <= {-100}
        assert (source[0], source[-1]) == (BOS, EOS)
        found[bytes(source[1:-1]), bytes(inputs[1:])] += 1
    assert found == Counter(pairs)
    assert batch.target_count == batch.tokens == int((batch.labels != -100).sum())
    assert int(batch.inputs.min()) >= 0, "-100 reaches no embedding"
    assert (batch.documents, batch.positions) == (None, None)


def test_the_end_of_a_target_is_a_label_even_where_it_pads_too(make_pairs: Any, make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer(bos_id=BOS, eos_id=EOS, pad_id=EOS)
    batch = whole(make_pairs(([1], [5]), ([2], [6, 7, 8])), TRANSLATE, tokenizer)
    assert batch.inputs.tolist() == [[BOS, 5, EOS, EOS], [BOS, 6, 7, 8]]
    assert batch.labels.tolist() == [[5, EOS, -100, -100], [6, 7, 8, EOS]]
    assert batch.lengths is not None
    assert batch.lengths.tolist() == [2, 4]


def test_a_decoder_may_start_with_other_ids_than_the_tokenizer_s(make_corpus: Any, make_tokenizer: Any) -> None:
    """Those that a published model is known to start from; its tokenizer may have no begin."""
    source, target = make_corpus([1, EOS]), make_corpus([PAD, 9, 5, 6, EOS])
    tokenizer = make_tokenizer(bos_id=None, cls_id=None, eos_id=EOS)
    batch = whole(Pairs(source, target, start_ids=(PAD, 9)), TRANSLATE, tokenizer)
    assert batch.inputs.tolist() == [[PAD, 9, 5, 6]]
    assert batch.labels.tolist() == [[9, 5, 6, EOS]]


def test_sources_are_padded_with_an_id_that_their_own_vocabulary_has(make_pairs: Any, seq2seq: Any) -> None:
    """The padding of the target may lie beyond it."""
    batch = whole(make_pairs(([1, 2, 3], [4]), ([5], [6, 7])), TRANSLATE, seq2seq)
    assert batch.source is not None
    assert batch.source.tolist() == [[BOS, 5, EOS, 0, 0], [BOS, 1, 2, 3, EOS]]
    assert batch.source_lengths is not None
    assert batch.source_lengths.tolist() == [3, 5]
    assert PAD in batch.inputs


def test_lengths_are_there_even_where_nothing_is_padded() -> None:
    """A compiled network meets one kind of batch."""
    batch = seq2seq_batch(*padded([[1, 2], [3, 4]], 0), [[5, 6, 7], [5, 8, 7]], PAD)
    assert batch.lengths is not None
    assert batch.source_lengths is not None
    assert (batch.lengths.tolist(), batch.source_lengths.tolist()) == ([2, 2], [2, 2])
    assert batch.inputs.tolist() == [[5, 6], [5, 8]]
    assert batch.labels.tolist() == [[6, 7], [8, 7]]


def test_padding_takes_no_part_in_the_loss_of_pairs(make_pairs: Any, seq2seq: Any) -> None:
    """Pairs of very different lengths in one batch have the loss that they have alone."""
    config = ModelConfig(
        family="encoder-decoder", vocab_size=300, d_model=16, num_layers=1, max_seq_len=16, attention={"num_heads": 2}
    )
    network = Transformer(config, generator=torch.Generator().manual_seed(0)).eval()
    pairs = [([1], [2, 3, 4, 5, 6, 7]), ([8, 9, 10, 11, 12, 13, 14], [15]), ([16, 17], [18, 19])]

    def loss(*chosen: Any) -> float:
        batch = whole(make_pairs(*chosen), TRANSLATE, seq2seq)
        with torch.no_grad():
            return float(network(batch.inputs, labels=batch.labels, **batch.arguments).loss_sum)

    assert loss(*pairs) == pytest.approx(sum(loss(pair) for pair in pairs), rel=1e-5)


# --- denoising --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", [DENOISE, SPAN], ids=["denoise", "span"])
def test_every_token_of_a_document_is_in_one_piece(make_corpus: Any, seq2seq: Any, objective: Any) -> None:
    """Pieces fill the context; a single token that remains has none to be guessed from."""
    corpus = make_corpus([BOS, *range(1, 31), EOS], [BOS, *range(40, 48), EOS], [BOS, EOS], [BOS, 99, EOS])
    rows = build_rows(objective, corpus, seq2seq, 12)
    assert rows.count == 4
    batch = rows.batch(np.arange(4), [(7, row) for row in range(4)])
    for row, ids in enumerate([range(1, 11), range(11, 21), range(21, 31), range(40, 48)]):
        source, inputs = real(batch.source, batch.source_lengths)[row], real(batch.inputs, batch.lengths)[row]
        labels = batch.labels[row].tolist()[: len(inputs)]
        assert (source[0], source[-1], inputs[0], labels[-1]) == (BOS, EOS, BOS, EOS)
        assert inputs[1:] == labels[:-1]
        assert max(len(source), len(inputs)) <= 12
        assert len(labels) == rows.costs_N[row]
        if objective is DENOISE:
            assert labels[:-1] == list(ids)
            assert set(source[1:-1]) <= {*ids, MASK}
        else:
            assert sorted(token for token in source + labels if token < PAD) == list(ids)


def test_a_row_is_damaged_by_its_key_alone(make_corpus: Any, seq2seq: Any) -> None:
    corpus = make_corpus(*([BOS, *range(10 * n, 10 * n + 10), EOS] for n in range(8)))
    rows = build_rows(SpanObjectiveConfig(rate=0.5), corpus, seq2seq, 12)
    together = rows.batch(np.arange(8), [(1, row) for row in range(8)])
    alone = rows.batch(np.array([5]), [(1, 5)])
    again = rows.batch(np.array([5]), [(2, 5)])
    row = real(together.source, together.source_lengths)[5]
    assert row == real(alone.source, alone.source_lengths)[0]
    assert row != real(again.source, again.source_lengths)[0]


def test_a_document_that_lost_its_end_loses_no_token(make_corpus: Any, seq2seq: Any) -> None:
    """Where the end of a file is held out, what is left has no <eos>, and what is held out no <bos>."""
    for corpus in (make_corpus([BOS, 1, 2, 3]), make_corpus([1, 2, 3, EOS]), make_corpus([BOS, 1, 2, 3, EOS])):
        batch = whole(corpus, DENOISE, seq2seq)
        assert batch.labels.tolist() == [[1, 2, 3, EOS]]


def test_what_is_too_short_gives_no_row(make_corpus: Any, seq2seq: Any) -> None:
    for corpus in (make_corpus(), make_corpus([]), make_corpus([BOS, EOS], [BOS, 1, EOS])):
        assert build_rows(DENOISE, corpus, seq2seq, 16).count == 0
    with pytest.raises(ConfigError, match="no room for two tokens") as caught:
        build_rows(DENOISE, make_corpus([BOS, 1, 2, EOS]), seq2seq, 3)
    assert caught.value.where == "model.max_seq_len"


# --- texts with a label -----------------------------------------------------------------------------------------------


def test_texts_keep_their_labels_and_cut_ones_their_end(make_corpus: Any, seq2seq: Any) -> None:
    texts = make_corpus([BOS, 1, 2, 3, 4, 5, EOS], [BOS, 6, EOS], [BOS, 7, 8, EOS])
    batch = whole(Labelled(texts, np.array([2, 0, 1])), CLASSIFY, seq2seq, max_seq_len=5)
    assert real(batch.inputs, batch.lengths) == [[BOS, 6, EOS], [BOS, 7, 8, EOS], [BOS, 1, 2, 3, EOS]]
    assert batch.labels.tolist() == [0, 1, 2]
    assert (batch.target_count, batch.tokens) == (3, 12)
    assert batch.inputs[0].tolist() == [BOS, 6, EOS, PAD, PAD]


def test_a_tokenizer_without_an_end_cuts_plainly(make_corpus: Any, make_tokenizer: Any) -> None:
    data = Labelled(make_corpus([1, 2, 3, 4]), np.array([1]))
    assert whole(data, CLASSIFY, make_tokenizer(eos_id=None), max_seq_len=3).inputs.tolist() == [[1, 2, 3]]


def hidden(seed: int, rate: float, tokenizer: Any, make_corpus: Any) -> list[list[int]]:
    """The rows of 50 texts, 40 tokens each, as an epoch reads them; `seed` stands for it."""
    texts = make_corpus(*([BOS, *[row % 256] * 40, EOS] for row in range(50)))
    rows = build_rows(ClassifyObjectiveConfig(token_dropout=rate), Labelled(texts, np.zeros(50, int)), tokenizer, 64)
    batch = rows.batch(np.arange(50), [(seed, row) for row in range(50)])
    return real(batch.inputs, batch.lengths)


@pytest.mark.parametrize("rate", [0.2, 0.9])
def test_token_dropout_hides_its_share_but_never_an_end(rate: float, make_corpus: Any, seq2seq: Any) -> None:
    rows = hidden(0, rate, seq2seq, make_corpus)
    assert all((row[0], row[-1]) == (BOS, EOS) for row in rows)
    inside = [token for row in rows for token in row[1:-1]]
    assert all(token in (row, MASK) for row, ids in enumerate(rows) for token in ids[1:-1])
    share = inside.count(MASK) / len(inside)
    deviation = (rate * (1 - rate) / len(inside)) ** 0.5
    assert abs(share - rate) < 4 * deviation


def test_token_dropout_is_drawn_by_the_row_s_key_alone(make_corpus: Any, seq2seq: Any) -> None:
    one, again, other = (hidden(seed, 0.3, seq2seq, make_corpus) for seed in (1, 1, 2))
    assert one == again
    assert all(first != second for first, second in zip(one, other, strict=True))
    places = {tuple(token == MASK for token in row) for row in one}
    assert len(places) == len(one)


def test_no_token_dropout_changes_nothing(make_corpus: Any, seq2seq: Any) -> None:
    assert MASK not in {token for row in hidden(0, 0.0, seq2seq, make_corpus) for token in row}


# --- what does not fit ------------------------------------------------------------------------------------------------


def test_other_data_than_the_objective_learns_from_are_refused(make_corpus: Any, make_pairs: Any, seq2seq: Any) -> None:
    corpus, pairs = make_corpus([BOS, 1, 2, EOS]), make_pairs(([1], [2]))
    data: Any
    for objective, data, unit in (
        (CausalObjectiveConfig(), pairs, "pairs"),
        (TRANSLATE, corpus, "documents"),
        (DENOISE, pairs, "pairs"),
        (CLASSIFY, corpus, "documents"),
        (SPAN, Labelled(corpus, np.array([0])), "texts"),
    ):
        with pytest.raises(ConfigError, match=f"`{objective.kind}` is not learnt from {unit}"):
            build_rows(objective, data, seq2seq, 16)


def test_token_dropout_needs_something_to_hide_behind(make_corpus: Any, make_tokenizer: Any) -> None:
    data, blind = Labelled(make_corpus([1, 2, 3]), np.array([0])), make_tokenizer(mask_id=None)
    assert build_rows(CLASSIFY, data, blind, 16).count == 1
    with pytest.raises(ConfigError, match="no mask token") as caught:
        build_rows(ClassifyObjectiveConfig(token_dropout=0.1), data, blind, 16)
    assert caught.value.where == "objective.token_dropout"


@pytest.mark.parametrize(
    ("objective", "lacking", "said"),
    [
        (TRANSLATE, {"bos_id": None, "cls_id": None}, "begins a text"),
        (TRANSLATE, {"eos_id": None}, "ends one"),
        (DENOISE, {"mask_id": None}, "no mask token"),
        (DENOISE, {"bos_id": None}, "begins a text"),
        (SPAN, {}, "no sentinels"),
    ],
)
def test_a_tokenizer_that_lacks_a_token_is_refused(
    make_corpus: Any, make_pairs: Any, make_tokenizer: Any, objective: Any, lacking: Any, said: str
) -> None:
    data: Pairs | Corpus = make_pairs(([1], [2])) if objective is TRANSLATE else make_corpus([1, 2, 3])
    with pytest.raises(ConfigError, match=said):
        build_rows(objective, data, make_tokenizer(**{"bos_id": BOS, "sentinel_ids": ()} | lacking), 16)
