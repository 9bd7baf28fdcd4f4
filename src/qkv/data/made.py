"""Made data: random ids, images and sound of the shapes that a configuration gives, to measure with, not to learn from.

D documents, K different ones.
"""

from __future__ import annotations

import numpy as np

from qkv.config.errors import ConfigError
from qkv.config.objectives import (
    ClassifyObjectiveConfig,
    DenoiseObjectiveConfig,
    MaskedObjectiveConfig,
    SpanObjectiveConfig,
    TranslateObjectiveConfig,
)
from qkv.config.parts import ClassifierHeadConfig
from qkv.config.run import Config
from qkv.config.stack import StackConfig
from qkv.data.batches import cut_by_cost
from qkv.data.media import Features, medium_of
from qkv.data.prepare import Corpus, Dataset, Labelled, Pairs, Prepared
from qkv.data.rows import WindowRows, build_rows
from qkv.data.tokenizers import SENTINELS, has_texts
from qkv.tokenizer.tokenizer import Tokenizer

DIFFERENT = 64
"""Documents after which they repeat, so that a large batch costs little memory."""
_LETTERS = 4096


def made_data(config: Config) -> tuple[Prepared, Tokenizer | None]:
    """Data for exactly one step of `config.train.batch_tokens`, which is an epoch, and a tokenizer of as many letters
    as its vocabulary holds. Every text is as long as the context.

    The model's sizes are given. Raises ConfigError for a vocabulary without room for special tokens and a letter.
    """
    tokenizer = _tokenizer(config) if has_texts(config) else None
    data, batch_tokens = _data(config, tokenizer), config.train.batch_tokens
    rows = build_rows(config.objective, data, tokenizer, config.model.context)
    if isinstance(rows, WindowRows):
        count = max(1, batch_tokens // config.model.context)
    else:
        count = len(cut_by_cost(np.arange(rows.count), rows.costs_N, batch_tokens)[0])
    return Prepared(data.choose(np.arange(data.num_documents) < count), None, ()), tokenizer


def _tokenizer(config: Config) -> Tokenizer:
    size = min(stack.vocab_size for stack in config.model.stacks.values() if stack.vocab_size is not None)
    letters = "".join(map(chr, range(0x4E00, 0x4E00 + _LETTERS)))
    sentinels = SENTINELS if isinstance(config.objective, SpanObjectiveConfig) else 0
    least = len(Tokenizer.train(["a"], kind="char", sentinels=sentinels).special_ids) + 1
    if size < least:
        raise ConfigError(
            f"a vocabulary of {size} has no room for special tokens and a letter",
            where="model.vocab_size",
            hint=f"model.vocab_size={least}, or more",
        )
    return Tokenizer.train([letters], kind="char", vocab_size=min(size, _LETTERS), sentinels=sentinels)


def _data(config: Config, tokenizer: Tokenizer | None) -> Dataset:
    """At least as much as a step takes: a row counts as one token or more."""
    count, context = config.train.batch_tokens, config.model.context
    reader = next(iter(config.model.stacks.values()))
    match config.objective:
        case ClassifyObjectiveConfig():
            head = config.model.head
            assert isinstance(head, ClassifierHeadConfig)
            assert head.num_classes is not None
            return Labelled(_read(config, reader, tokenizer, count), np.arange(count) % head.num_classes)
        case TranslateObjectiveConfig():
            target = config.model.stacks["decoder"].max_seq_len + 1  # begin, text and end
            return Pairs(_read(config, reader, tokenizer, count), _corpus(tokenizer, target, count))
        case DenoiseObjectiveConfig() | SpanObjectiveConfig():
            return _corpus(tokenizer, context - 2, count)  # without begin and end
        case MaskedObjectiveConfig():
            return _corpus(tokenizer, context, count)
    return _corpus(tokenizer, context + 1, count)  # the last token is only predicted


def _read(config: Config, stack: StackConfig, tokenizer: Tokenizer | None, count: int) -> Corpus | Features:
    """What the first stack reads where it does not read the objective's own texts."""
    if stack.input.reads_ids:
        return _corpus(tokenizer, stack.max_seq_len, count)
    medium = medium_of(config.data, stack)
    values = np.random.default_rng(0).integers(0, 256, (DIFFERENT, *medium.shape)).astype(medium.dtype)
    sizes_D = np.full(count, stack.max_seq_len)
    return Features(medium, values, np.arange(count) % DIFFERENT, sizes_D, in_training=True)


def _corpus(tokenizer: Tokenizer | None, length: int, count: int) -> Corpus:
    """Texts of `length` ordinary ids."""
    assert tokenizer is not None
    ordinary = np.setdiff1d(np.arange(tokenizer.vocab_size), list(tokenizer.special_ids))
    tokens = np.random.default_rng(0).choice(ordinary, DIFFERENT * length).astype(np.uint16)
    starts_D = np.arange(count) % DIFFERENT * length
    return Corpus(tokens, starts_D, starts_D + length)
