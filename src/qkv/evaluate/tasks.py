"""What each task is judged by: one figure that means something to the people who use the model, beside the loss."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import singledispatch
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from qkv.config.objectives import ClassifyObjectiveConfig, ObjectiveConfig, TranslateObjectiveConfig
from qkv.data.batches import validation_batches
from qkv.data.media import Features
from qkv.data.prepare import Dataset, Labelled, Pairs
from qkv.evaluate.classification import classification_scores
from qkv.evaluate.error_rates import error_rate, exact_match
from qkv.evaluate.translation import translation_scores
from qkv.generate.decode import device_of, evaluating
from qkv.generate.prompts import begin_of, end_of
from qkv.generate.translate import translate
from qkv.nn.transformer import Transformer

if TYPE_CHECKING:
    from qkv.tokenizer.tokenizer import Tokenizer

_SOURCES_AT_ONCE = 64
_TOKENS_AT_ONCE = 1 << 14
_FILES_AT_ONCE = 64


@dataclass(frozen=True)
class Measure:
    """A figure and which way is better."""

    name: str
    value: float
    higher_is_better: bool


@singledispatch
def measure(
    objective: ObjectiveConfig, network: Transformer, data: Dataset, tokenizer: Tokenizer | None
) -> Measure | None:
    """The task's own measure of a network on data held out; None where the loss is all there is.

    Draws nothing at random, and leaves the network's mode as it is.
    """
    return None


@measure.register(TranslateObjectiveConfig)
def _(
    objective: TranslateObjectiveConfig, network: Transformer, data: Dataset, tokenizer: Tokenizer | None
) -> Measure | None:
    assert isinstance(data, Pairs)
    assert tokenizer is not None
    references: dict[bytes, list[str]] = {}  # of each source, in the order of the data
    sources: list[Sequence[int] | Tensor] = []
    for number in range(data.num_documents):
        source = source_at(data, number)
        known = np.asarray(source).tobytes()
        if known not in references:
            if len(sources) == objective.measure_examples:
                continue
            sources.append(source)
        references.setdefault(known, []).append(tokenizer.decode(data.target.document(number).tolist()))
    written = greedy(network, sources, tokenizer, data.start_ids)
    wanted = list(references.values())
    match objective.measure:
        case "bleu" | "chrf":
            scores = translation_scores(written, [texts[0] for texts in wanted])
            return Measure(objective.measure, getattr(scores, objective.measure), higher_is_better=True)
        case "exact-match":
            return Measure("exact_match", exact_match(written, wanted), higher_is_better=True)
        case "word-error-rate":
            return Measure("word_error_rate", error_rate(written, wanted, "word"), higher_is_better=False)
        case "character-error-rate":
            return Measure("character_error_rate", error_rate(written, wanted, "character"), higher_is_better=False)


@measure.register(ClassifyObjectiveConfig)
def _(
    objective: ClassifyObjectiveConfig, network: Transformer, data: Dataset, tokenizer: Tokenizer | None
) -> Measure | None:
    assert isinstance(data, Labelled)
    assert objective.labels is not None
    predicted, true = predictions(network, data, objective, tokenizer)
    named, wanted = ([objective.labels[number] for number in numbers] for numbers in (predicted, true))
    scores = classification_scores(named, wanted, objective.labels)
    return Measure(objective.measure, getattr(scores, objective.measure), higher_is_better=True)


def source_at(pairs: Pairs, number: int) -> Sequence[int] | Tensor:
    """What the encoder reads of one pair: ids, or an image or recording."""
    if isinstance(pairs.source, Features):
        return pairs.source.document(number)
    return pairs.source.document(number).tolist()  # type: ignore[no-any-return]


def greedy(
    network: Transformer, sources: Iterable[Sequence[int] | Tensor], tokenizer: Tokenizer, start_ids: Sequence[int] = ()
) -> list[str]:
    """The likeliest translation, token by token, of each source [begin] ids [end], image or recording.

    start_ids: what translations start from, where that is not the tokenizer's begin.
    """
    found = translate(
        network,
        sources,
        start_ids=list(start_ids) or begin_of(tokenizer),
        eos_ids=end_of(tokenizer),
        vocab_size=tokenizer.vocab_size,
        beam_size=1,
        batch_size=_SOURCES_AT_ONCE,
    )
    return [tokenizer.decode(best.token_ids) for (best, *_) in found]


@torch.inference_mode()
def predictions(
    network: Transformer, data: Labelled, objective: ClassifyObjectiveConfig, tokenizer: Tokenizer | None
) -> tuple[list[int], list[int]]:
    """The class a classifier gives to each text, image or recording, and the true one."""
    predicted: list[int] = []
    true: list[int] = []
    device = device_of(network)
    most = _FILES_AT_ONCE if isinstance(data.texts, Features) else _TOKENS_AT_ONCE
    batches = validation_batches(data, objective, tokenizer, max_seq_len=network.config.context, batch_tokens=most)
    with evaluating(network.modules()):
        for batch in batches:
            batch = batch.to(device)
            predicted += network(batch.inputs, **batch.arguments).argmax(-1).tolist()
            true += batch.labels.tolist()
    return predicted, true
