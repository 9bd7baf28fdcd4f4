"""Texts, images or recordings and what each should become, as the files have it: references are never decoded from
ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from qkv.config.data import LabelledDataConfig, MediaDataConfig, ParallelDataConfig
from qkv.config.errors import QkvError, UsageError
from qkv.config.paths import cache_folder
from qkv.config.run import Config
from qkv.data.documents import whole
from qkv.data.media import medium_of, read_features
from qkv.data.prepare import label_numbers
from qkv.data.records import Part, check_sides, files_of, read_labels, read_media, read_side, read_texts
from qkv.data.split import ContentHash, held_out
from qkv.evaluate.error_rates import error_rate, exact_match
from qkv.evaluate.translation import BleuTokenizer, TranslationScores, translation_scores
from qkv.generate.prompts import whole_ids

if TYPE_CHECKING:
    from qkv.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class Examples:
    """Text n, or the name of an image or sound file, and its answer n: the other side of a pair, or a label."""

    texts: list[str]
    answers: list[str]

    @property
    def variants(self) -> dict[str, list[str]]:
        """All answers to each text, in the order of the data: a text that repeats has several."""
        found: dict[str, list[str]] = {}
        for text, answer in zip(self.texts, self.answers, strict=True):
            found.setdefault(text, []).append(answer)
        return found


def read_examples(
    data: ParallelDataConfig | LabelledDataConfig | MediaDataConfig,
    part: Part = "train",
    labels: Sequence[str] | None = None,
) -> Examples:
    """Every record of the files of one part of the data; a blank side is "".

    labels: those that are known; of images and sound None means that texts are their answers. Raises QkvError for files
    without a record, for an unknown label, and for what else is wrong with a record (file:line).
    """
    if isinstance(data, ParallelDataConfig):
        check_sides(data, part)
        texts, answers = (list(whole(read_side(data, part, side))) for side in ("source", "target"))
    elif isinstance(data, MediaDataConfig):
        records = list(read_media(data, part, labelled=labels is not None))
        texts, answers = [record.file for record in records], [record.text for record in records]
        if labels is not None:
            label_numbers(((record.text, record.where) for record in records), labels)
    else:
        texts, told = list(whole(read_texts(data, part))), list(read_labels(data, part))
        answers = [label for label, _ in told]
        if labels is not None:
            label_numbers(told, labels)
    if not texts:
        raise QkvError("the data hold no example", where=", ".join(files_of(data, part)))
    return Examples(texts, answers)


def held_out_examples(config: Config, labels: Sequence[str] | None = None) -> Examples:
    """What training with `config` holds out; what it leaves out for its length is here too.

    Raises UsageError where nothing is held out, and what `read_examples` raises.
    """
    data = config.data
    if isinstance(data, ParallelDataConfig | LabelledDataConfig | MediaDataConfig):
        if not isinstance(data.validation, float):
            if data.validation:
                return read_examples(data, "validation", labels)
        elif data.validation and data.train:
            examples = read_examples(data, "train", labels)
            hashes_D = _hashes(examples.texts, config)
            held_D = held_out(hashes_D, data.validation, config.train.seed).tolist()
            return Examples(list(compress(examples.texts, held_D)), list(compress(examples.answers, held_D)))
    raise UsageError("the model's configuration names no validation data of this kind", hint="--data FILE")


def _hashes(texts: list[str], config: Config) -> NDArray[np.uint64]:
    """What decides which of them are held out: of texts their characters, of files what is in them, as it is read."""
    if isinstance(config.data, MediaDataConfig):
        medium = medium_of(config.data, next(iter(config.model.stacks.values())))
        return read_features(texts, medium, cache_folder() / "data").hashes
    return np.array([_hash(text) for text in texts], np.uint64)


def _hash(text: str) -> int:
    content = ContentHash()
    content.update(text)
    return content.value()


def within_context(texts: Sequence[str], tokenizer: Tokenizer | None, context: int) -> list[str]:
    """The texts, but "" for those of more than `context` tokens, which no model with that context can read."""
    return [text if len(whole_ids(tokenizer, text)) <= context else "" for text in texts]


@dataclass(frozen=True)
class PairScores(TranslationScores):
    """BLEU and chrF of all pairs. The rest, from 0, is of distinct sources: one that repeats has several right answers,
    and the closest counts."""

    exact_match: float
    word_error_rate: float
    character_error_rate: float


def pair_scores(
    examples: Examples, found: Mapping[str, str], *, tokenize: BleuTokenizer = "auto", lowercase: bool = False
) -> PairScores:
    """Score what was `found` for each text of `examples`. Options and errors are those of `translation_scores`."""
    variants = examples.variants
    written, wanted = [found[text] for text in variants], list(variants.values())
    scores = translation_scores(
        [found[text] for text in examples.texts], examples.answers, tokenize=tokenize, lowercase=lowercase
    )
    return PairScores(
        **vars(scores),
        exact_match=exact_match(written, wanted),
        word_error_rate=error_rate(written, wanted, "word"),
        character_error_rate=error_rate(written, wanted, "character"),
    )
