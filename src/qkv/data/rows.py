"""The rows that an objective makes of a data set, and how rows become a batch.

B rows of a batch, N rows in all, T slots of a row, S slots of a source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import numpy as np
import torch

from qkv.config.errors import ConfigError
from qkv.config.objectives import (
    ClassifyObjectiveConfig,
    DenoiseObjectiveConfig,
    ObjectiveConfig,
    PrefixObjectiveConfig,
    SpanObjectiveConfig,
    TranslateObjectiveConfig,
)
from qkv.data.cache import begin_id, end_id
from qkv.data.corruption import Corruption, Infilling, SpanCorruption
from qkv.data.media import Features
from qkv.data.objectives import build_objective
from qkv.data.prepare import Corpus, Dataset, Labelled, Pairs
from qkv.data.windows import Ints, Windows
from qkv.nn import IGNORE

if TYPE_CHECKING:
    from qkv.tokenizer.tokenizer import Tokenizer

Keys = Sequence[tuple[int, ...]]
"""Seeds of all that is random about each row of a batch, so that a row is the same whenever it is made."""


@dataclass(frozen=True)
class Batch:
    """What one forward pass takes; all tensors are int64, but images and log-mel features float32.

    `inputs` [B, T]: ids, or what an encoder reads instead. `labels` [B, T]: what the logits at the same slot should
    predict, -100 for nothing (they are shifted already); [B] the classes of a classifier. `documents` [B, T]: the
    document of each slot, numbered from 0 in each row; padding counts as one more. `positions` [B, T]: the place in
    that document, from 0. Both are None when every row is one document. `lengths` [B]: tokens per row, padding being on
    the right; None for windows without any. `source` [B, S] and `source_lengths` [B]: what an encoder-decoder reads,
    images and log-mel features being whole; None for other families. `target_count`: labels that are not -100.
    `prefix_lengths` [B]: how many tokens at the beginning of each row see each other; None where the model has no
    prefix. `origins_B` [B]: the address of each row's first token among the ids on disk (of pairs, the source's), or
    the number of its image or recording, for `qkv.data.places`.
    """

    inputs: torch.Tensor
    labels: torch.Tensor
    documents: torch.Tensor | None
    positions: torch.Tensor | None
    lengths: torch.Tensor | None
    target_count: int
    source: torch.Tensor | None = None
    source_lengths: torch.Tensor | None = None
    prefix_lengths: torch.Tensor | None = None
    origins_B: Ints | None = None

    def to(self, device: torch.device | str) -> Self:
        """The same batch on another device."""
        moved: dict[str, Any] = {
            name: value.to(device, non_blocking=True)
            for name, value in vars(self).items()
            if isinstance(value, torch.Tensor)
        }
        return replace(self, **moved)

    @property
    def tokens(self) -> int:
        """What a step counts: target tokens, of texts with a label their tokens, of images and sound with a label how
        many there are; never padding."""
        if self.labels.dim() == 2 or self.inputs.is_floating_point():
            return self.target_count
        return self.inputs.numel() if self.lengths is None else int(self.lengths.sum())

    @property
    def arguments(self) -> dict[str, torch.Tensor | None]:
        """What `Transformer.forward` takes besides `inputs` and `labels`."""
        arguments = {
            "documents": self.documents,
            "positions": self.positions,
            "lengths": self.lengths,
            "source": self.source,
            "source_lengths": self.source_lengths,
            "prefix_lengths": self.prefix_lengths,
        }
        return {name: value for name, value in arguments.items() if value is not None}


class Rows(Protocol):
    """`count` rows of their own lengths. `costs_N` [N]: how many tokens each one adds to a step (target tokens; of
    texts with a label or a prefix, all their tokens). `sizes_N` [N]: the tokens of its longer side. `order_N` [N]: rows
    with neighbouring numbers are alike in length.
    """

    count: int
    costs_N: Ints
    sizes_N: Ints
    order_N: Ints

    def batch(self, rows_B: Ints, keys_B: Keys) -> Batch:
        """The rows with these numbers, in this order."""


Wanted = TypeVar("Wanted", Corpus, Pairs, Labelled)


@singledispatch
def build_rows(
    objective: ObjectiveConfig, data: Dataset, tokenizer: Tokenizer | None, max_seq_len: int
) -> WindowRows | Rows:
    """The rows of a data set under an objective, of at most `max_seq_len` slots. tokenizer: None where there are no
    texts.

    Raises ConfigError when the data or the tokenizer are not what the objective learns from.
    """
    return WindowRows(_of(data, Corpus, objective), objective, _there(tokenizer), max_seq_len)


def _there(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise ConfigError("there is no tokenizer, and the objective is about texts", where="objective.kind")
    return tokenizer


def _of(data: Dataset, wanted: type[Wanted], objective: ObjectiveConfig) -> Wanted:
    if not isinstance(data, wanted):
        raise ConfigError(
            f"`{objective.kind}` is not learnt from {data.unit}",
            where="objective.kind",
            hint=f"data.kind={' or '.join(objective.data_kinds)}",
        )
    return data


class WindowRows:
    """Documents laid end to end and cut into rows of `max_seq_len` slots (`Windows`)."""

    def __init__(self, corpus: Corpus, objective: ObjectiveConfig, tokenizer: Tokenizer, max_seq_len: int) -> None:
        self.objective = build_objective(objective, tokenizer)
        self.windows = Windows(corpus, max_seq_len, self.objective.lookahead)
        self.padding_id = _padding_id(tokenizer)

    @property
    def count(self) -> int:
        return self.windows.count

    def batch(self, rows_B: Ints, keys_B: Keys) -> Batch:
        window = self.windows[rows_B]
        inputs_BT, labels_BT = self.objective.targets(window, keys_B)
        lengths_B = None
        if not window.real_BT.all():
            inputs_BT = np.where(window.real_BT, inputs_BT, self.padding_id)
            labels_BT = np.where(window.real_BT, labels_BT, IGNORE)
            lengths_B = torch.from_numpy(window.real_BT.sum(axis=1))
        packed = bool((window.documents_BT * window.real_BT).any())
        return Batch(
            inputs=torch.from_numpy(inputs_BT),
            labels=torch.from_numpy(labels_BT),
            documents=torch.from_numpy(window.documents_BT) if packed else None,
            positions=torch.from_numpy(window.positions_BT) if packed else None,
            lengths=lengths_B,
            target_count=int((labels_BT != IGNORE).sum()),
            origins_B=window.addresses_B,
        )


class PairRows:
    """A source and its target per row: the decoder reads [begin] target and predicts target [end].

    Images and recordings come in any order, as all are of one size.
    """

    def __init__(self, pairs: Pairs, tokenizer: Tokenizer) -> None:
        _require_ends(tokenizer, pairs.start_ids)
        self.pairs, self.padding_id = pairs, _padding_id(tokenizer)
        self.count = pairs.num_documents
        self.costs_N = pairs.target.sizes - 1
        self.sizes_N = np.maximum(pairs.source.sizes, self.costs_N)
        whole = isinstance(pairs.source, Features)
        self.order_N = np.zeros_like(self.costs_N) if whole else _alike(pairs.source.sizes, self.costs_N)

    def batch(self, rows_B: Ints, keys_B: Keys) -> Batch:
        rows, source = rows_B.tolist(), self.pairs.source
        if isinstance(source, Features):
            sources, lengths_B, origins_D = source.batch(rows, keys_B), None, source.rows_D
        else:
            (sources, lengths_B), origins_D = padded([source.document(row) for row in rows], 0), source.starts_D
        targets = [self.pairs.target.document(row) for row in rows]
        return replace(seq2seq_batch(sources, lengths_B, targets, self.padding_id), origins_B=origins_D[rows_B])


def _alike(sources_N: Ints, targets_N: Ints) -> Ints:
    """Numbers by which pairs are sorted so that neighbours are alike in both lengths: by the longer side, then by how
    much longer it is; up and down in turn, so that the other length does not jump where the longer one grows."""
    longer_N, difference_N = np.maximum(sources_N, targets_N), targets_N - sources_N
    step = 2 * int(longer_N.max(initial=0)) + 1  # more than differences can span
    return longer_N * step + np.where(longer_N % 2, -difference_N, difference_N)


class CorruptedRows:
    """A piece of one document per row, at most `max_seq_len` slots with its begin and end: the source is what a
    corruption leaves of it, the target what it asks for."""

    def __init__(self, corpus: Corpus, corruption: Corruption, tokenizer: Tokenizer, max_seq_len: int) -> None:
        self.begin, self.end = _require_ends(tokenizer)
        self.corruption, self.padding_id, self.tokens = corruption, _padding_id(tokenizer), corpus.tokens
        room = max_seq_len - 2
        if room < 2:
            raise ConfigError(
                f"a context of {max_seq_len} has no room for two tokens between the begin and the end of a text",
                where="model.max_seq_len",
            )
        corpus = corpus.choose(corpus.sizes > 0)
        # a document whose end is held out has no end of its own, and what is held out no begin
        first_D = corpus.starts_D + (self.tokens[corpus.starts_D] == self.begin)
        last_D = corpus.ends_D - (self.tokens[corpus.ends_D - 1] == self.end)
        pieces_D = -(-np.maximum(last_D - first_D, 0) // room)
        document_N = np.repeat(np.arange(len(pieces_D)), pieces_D)
        piece_N = np.arange(len(document_N)) - np.repeat(np.cumsum(pieces_D) - pieces_D, pieces_D)
        starts_N = first_D[document_N] + piece_N * room
        ends_N = np.minimum(starts_N + room, last_D[document_N])
        long_N = ends_N - starts_N >= 2  # one token has no other to be guessed from
        self.starts_N, self.ends_N = starts_N[long_N], ends_N[long_N]
        self.count = len(self.starts_N)
        self.order_N = self.ends_N - self.starts_N
        sizes, which_N = np.unique(self.order_N, return_inverse=True)
        self.costs_N = np.array([corruption.target_size(size) + 1 for size in sizes.tolist()], np.int64)[which_N]
        self.sizes_N = np.maximum(self.order_N + 2, self.costs_N)  # a corrupted source is no longer than its text

    def batch(self, rows_B: Ints, keys_B: Keys) -> Batch:
        sources, targets = [], []
        for row, key in zip(rows_B.tolist(), keys_B, strict=True):
            ids = self.tokens[self.starts_N[row] : self.ends_N[row]].tolist()
            source, target = self.corruption(ids, np.random.default_rng(key))
            sources.append([self.begin, *source, self.end])
            targets.append([self.begin, *target, self.end])
        batch = seq2seq_batch(*padded(sources, 0), targets, self.padding_id)
        return replace(batch, origins_B=self.starts_N[rows_B])


class PrefixRows:
    """A piece of one document per row, at most `max_seq_len` slots: what follows its prefix is predicted.

    Cut as windows are: every token but the first of a document is the last label of one slot.
    """

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, max_seq_len: int) -> None:
        self.tokens, self.padding_id = corpus.tokens, _padding_id(tokenizer)
        slots_D = np.maximum(corpus.sizes - 1, 0)  # the last token of a document is only predicted
        pieces_D = -(-slots_D // max_seq_len)
        document_N = np.repeat(np.arange(len(pieces_D)), pieces_D)
        before_N = (np.arange(len(document_N)) - np.repeat(np.cumsum(pieces_D) - pieces_D, pieces_D)) * max_seq_len
        self.starts_N = corpus.starts_D[document_N] + before_N
        self.costs_N = self.sizes_N = self.order_N = np.minimum(slots_D[document_N] - before_N, max_seq_len)
        self.count = len(self.starts_N)

    def batch(self, rows_B: Ints, keys_B: Keys) -> Batch:
        inputs, labels, prefixes = [], [], []
        for row, key in zip(rows_B.tolist(), keys_B, strict=True):
            start, size = self.starts_N[row], self.sizes_N[row]
            ids = self.tokens[start : start + size + 1].tolist()
            prefix = int(np.random.default_rng(key).integers(1, size, endpoint=True))
            inputs.append(ids[:-1])
            labels.append([IGNORE] * (prefix - 1) + ids[prefix:])
            prefixes.append(prefix)
        inputs_BT, lengths_B = padded(inputs, self.padding_id)
        labels_BT, _ = padded(labels, IGNORE)
        count = int((labels_BT != IGNORE).sum())
        origins_B = self.starts_N[rows_B]
        return Batch(inputs_BT, labels_BT, None, None, lengths_B, count, None, None, torch.tensor(prefixes), origins_B)


class LabelledRows:
    """A text per row, cut where the context ends but with its own end, and its class. `token_dropout` of the tokens
    between begin and end are hidden."""

    def __init__(
        self, texts: Corpus, labels_N: Ints, tokenizer: Tokenizer, max_seq_len: int, token_dropout: float = 0.0
    ) -> None:
        self.texts, self.labels_N, self.padding_id = texts, labels_N, _padding_id(tokenizer)
        self.begin, self.end, self.max_seq_len = begin_id(tokenizer), end_id(tokenizer), max_seq_len
        self.mask, self.token_dropout = tokenizer.mask_id, token_dropout
        if token_dropout and self.mask is None:
            raise ConfigError(
                "the tokenizer has no mask token to hide others behind",
                where="objective.token_dropout",
                hint="a tokenizer trained here, or 0",
            )
        self.count = texts.num_documents
        self.costs_N = self.sizes_N = self.order_N = np.minimum(self.texts.sizes, max_seq_len)

    def batch(self, rows_B: Ints, keys_B: Keys) -> Batch:
        texts = [cut(self.texts.document(row), self.max_seq_len, self.end) for row in rows_B.tolist()]
        if self.token_dropout:
            texts = [self._hidden(ids, np.random.default_rng(key)) for ids, key in zip(texts, keys_B, strict=True)]
        inputs, lengths = padded(texts, self.padding_id)
        labels = torch.from_numpy(self.labels_N[rows_B])
        origins_B = self.texts.starts_D[rows_B]
        return Batch(inputs, labels, None, None, lengths, target_count=len(labels), origins_B=origins_B)

    def _hidden(self, ids_T: Any, rng: np.random.Generator) -> Any:
        chosen_T = rng.random(len(ids_T)) < self.token_dropout
        return np.where(chosen_T & (ids_T != self.begin) & (ids_T != self.end), self.mask, ids_T)


class FeatureRows:
    """An image or a recording per row, and its class; each counts as one."""

    def __init__(self, features: Features, labels_N: Ints) -> None:
        self.features, self.labels_N, self.count = features, labels_N, features.num_documents
        self.costs_N, self.order_N = np.ones_like(labels_N), np.zeros_like(labels_N)
        self.sizes_N = features.sizes

    def batch(self, rows_B: Ints, keys_B: Keys) -> Batch:
        inputs, labels = self.features.batch(rows_B.tolist(), keys_B), torch.from_numpy(self.labels_N[rows_B])
        origins_B = self.features.rows_D[rows_B]
        return Batch(inputs, labels, None, None, None, target_count=len(labels), origins_B=origins_B)


@build_rows.register(TranslateObjectiveConfig)
def _(objective: TranslateObjectiveConfig, data: Dataset, tokenizer: Tokenizer | None, max_seq_len: int) -> PairRows:
    return PairRows(_of(data, Pairs, objective), _there(tokenizer))


@build_rows.register(PrefixObjectiveConfig)
def _(objective: PrefixObjectiveConfig, data: Dataset, tokenizer: Tokenizer | None, max_seq_len: int) -> PrefixRows:
    return PrefixRows(_of(data, Corpus, objective), _there(tokenizer), max_seq_len)


@build_rows.register(DenoiseObjectiveConfig)
def _(objective: DenoiseObjectiveConfig, data: Dataset, tokenizer: Tokenizer | None, max_seq_len: int) -> CorruptedRows:
    tokenizer = _there(tokenizer)
    if tokenizer.mask_id is None:
        raise ConfigError(
            "the tokenizer has no mask token", where="objective.kind=denoise", hint="a tokenizer trained here"
        )
    corruption = Infilling(objective.rate, objective.mean_span, tokenizer.mask_id)
    return CorruptedRows(_of(data, Corpus, objective), corruption, tokenizer, max_seq_len)


@build_rows.register(SpanObjectiveConfig)
def _(objective: SpanObjectiveConfig, data: Dataset, tokenizer: Tokenizer | None, max_seq_len: int) -> CorruptedRows:
    tokenizer = _there(tokenizer)
    if len(tokenizer.sentinel_ids) < 2:
        raise ConfigError(
            "the tokenizer has no sentinels <extra_id_0>, <extra_id_1>, ...",
            where="objective.kind=span",
            hint="a tokenizer trained here, for this objective",
        )
    corruption = SpanCorruption(objective.rate, objective.mean_span, tokenizer.sentinel_ids)
    return CorruptedRows(_of(data, Corpus, objective), corruption, tokenizer, max_seq_len)


@build_rows.register(ClassifyObjectiveConfig)
def _(objective: ClassifyObjectiveConfig, data: Dataset, tokenizer: Tokenizer | None, max_seq_len: int) -> Rows:
    labelled = _of(data, Labelled, objective)
    if isinstance(labelled.texts, Features):
        if objective.token_dropout:
            raise ConfigError(
                f"{labelled.unit} have no tokens to hide",
                where="objective.token_dropout",
                hint="objective.token_dropout=0",
            )
        return FeatureRows(labelled.texts, labelled.labels_D)
    return LabelledRows(labelled.texts, labelled.labels_D, _there(tokenizer), max_seq_len, objective.token_dropout)


# --- rows to tensors --------------------------------------------------------------------------------------------------


def seq2seq_batch(
    source: torch.Tensor, source_lengths: torch.Tensor | None, targets: Sequence[Any], padding_id: int
) -> Batch:
    """Whole targets [begin] ids [end] as decoder inputs and labels, shifted once, beside their sources.

    Sources that are texts are padded with 0, which every vocabulary has: theirs may be another one.
    """
    inputs, lengths = padded([target[:-1] for target in targets], padding_id)
    labels, _ = padded([target[1:] for target in targets], IGNORE)
    count = sum(len(target) - 1 for target in targets)
    return Batch(inputs, labels, None, None, lengths, count, source, source_lengths)


def padded(rows: Sequence[Any], fill: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of ids as [B, T], `fill` on the right, and their lengths [B]: also where all are equal, so that a compiled
    network meets one kind of batch."""
    sizes = [len(row) for row in rows]
    ids_BT = np.full((len(rows), max(sizes)), fill, np.int64)
    for ids_T, row in zip(ids_BT, rows, strict=True):
        ids_T[: len(row)] = row
    return torch.from_numpy(ids_BT), torch.tensor(sizes)


def cut(ids: Any, length: int, end: int | None) -> Any:
    """At most `length` ids; what is cut still ends with `end`."""
    if len(ids) <= length:
        return ids
    return np.array([*ids[: length - 1], end], np.int64) if end is not None else ids[:length]


def _padding_id(tokenizer: Tokenizer) -> int:
    """What fills up a row; it is never read, and looks better as padding."""
    return 0 if tokenizer.pad_id is None else tokenizer.pad_id


def _require_ends(tokenizer: Tokenizer, start_ids: Sequence[int] = ()) -> tuple[int, int]:
    """What a decoder starts with, first of all, and what ends its text."""
    begin, end = start_ids[0] if start_ids else begin_id(tokenizer), end_id(tokenizer)
    if begin is None or end is None:
        raise ConfigError(
            "the tokenizer has no token that begins a text, or none that ends one: a decoder starts and stops by them",
            where="tokenizer",
            hint="a tokenizer with BOS and EOS",
        )
    return begin, end
