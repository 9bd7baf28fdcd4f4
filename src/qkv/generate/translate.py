"""Translation: any number of sources, decoded in batches of like length, answered in order."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, tee
from typing import Literal

from qkv.config.errors import QkvError, UsageError
from qkv.generate.arguments import check_count, check_names
from qkv.generate.beam import Beams, Hypothesis, beam_search
from qkv.generate.decode import check_prompts
from qkv.generate.inputs import Input, padded
from qkv.generate.options import TranslationOptions
from qkv.generate.reader import Reader
from qkv.generate.suppression import NOTHING_SUPPRESSED, Suppression
from qkv.generate.text import text_of
from qkv.nn.transformer import Transformer
from qkv.tokenizer.tokenizer import Tokenizer

READ_AHEAD = 8
"""Batches of sources that are held at a time, to be sorted by length."""


@dataclass(frozen=True)
class Alternative(Hypothesis):
    """A hypothesis, and its text without EOS."""

    text: str


@dataclass(frozen=True)
class Translation(Alternative):
    """The best hypothesis for a source of `source_tokens` tokens; hypotheses: the n_best, it first."""

    source_tokens: int
    hypotheses: list[Alternative]


def translate(
    network: Transformer,
    sources: Iterable[Input],
    *,
    start_ids: Sequence[int],
    eos_ids: Collection[int] = (),
    vocab_size: int | None = None,
    suppress: Suppression = NOTHING_SUPPRESSED,
    beam_size: int = 4,
    n_best: int = 1,
    length_penalty: float = 0.6,
    length_penalty_kind: Literal["gnmt", "power"] = "gnmt",
    batch_size: int = 32,
    max_new_tokens: int | None = None,
) -> Iterator[list[Hypothesis]]:
    """The `n_best` hypotheses for each source, best first, in the order of the sources.

    sources: ids, features [S, W] or images [C, H, W], as the encoder reads them. They are taken up as needed,
    `READ_AHEAD` batches at a time (one by one where batch_size is 1), so that any number of them can stream through. A
    source without tokens gives an empty hypothesis, for which the model does not run. start_ids: what the decoder
    starts from. max_new_tokens: by default twice the source's tokens (or vectors) and 16 more. The other arguments:
    `Beams` and `beam_search`.

    Raises UsageError before anything is read for a model that is no encoder-decoder and for arguments out of range.
    """
    check_translates(network)
    assert network.encoder is not None
    reads = network.encoder.config.input
    beams = Beams(beam_size, n_best, length_penalty, length_penalty_kind)
    batch_size = check_count("batch_size", batch_size, least=1)
    if max_new_tokens is not None:
        check_count("max_new_tokens", max_new_tokens)

    window_size = min(READ_AHEAD * batch_size, sys.maxsize) if batch_size > 1 else 1

    def search(batch: list[Input]) -> list[list[Hypothesis]]:
        source, lengths_B = padded(batch, next(network.parameters()))
        limits = [2 * reads.length(len(one)) + 16 if max_new_tokens is None else max_new_tokens for one in batch]
        return beam_search(
            network,
            [start_ids] * len(batch),
            beams,
            max_new_tokens=limits,
            eos_ids=eos_ids,
            source=source,
            source_lengths=lengths_B,
            vocab_size=vocab_size,
            suppress=suppress,
        )

    def answers() -> Iterator[list[Hypothesis]]:
        remaining = iter(sources)
        while window := list(islice(remaining, window_size)):
            found = [[Hypothesis([], 0.0, 0.0, "stop")] for _ in window]
            order = sorted((number for number, one in enumerate(window) if len(one)), key=lambda n: len(window[n]))
            for first in range(0, len(order), batch_size):
                numbers = order[first : first + batch_size]
                for number, hypotheses in zip(numbers, search([window[n] for n in numbers]), strict=True):
                    found[number] = hypotheses
            yield from found

    return answers()


def check_translates(network: Transformer) -> None:
    """Raises UsageError for what is no encoder-decoder that predicts tokens."""
    if network.encoder is None or network.decoder is None:
        raise UsageError(f"a model of family {network.config.family} does not translate", hint="an encoder-decoder")
    check_prompts(network, [])


def translations(reader: Reader, sources: Iterable[Input], options: TranslationOptions) -> Iterator[Translation]:
    """What `translate` finds for each source, as texts."""
    check_names(options, TranslationOptions.__annotations__)
    kept, read = tee(sources)
    found = translate(
        reader.network,
        read,
        start_ids=reader.start_ids,
        eos_ids=reader.eos_ids,
        vocab_size=reader.vocab_size,
        suppress=reader.suppression,
        **options,
    )
    pairs = zip(kept, found, strict=True)
    return (_written(best, reader.tokenizer, len(source), reader.eos_ids) for source, best in pairs)


def line_translations(reader: Reader, lines: Iterable[str], options: TranslationOptions) -> Iterator[Translation]:
    """The translation of each line; what is wrong with one is raised, with its number from 1, after those before it."""
    wrong: list[QkvError] = []

    def sources() -> Iterator[list[int]]:
        try:
            for number, line in enumerate(lines, 1):
                yield reader.source_line(line, f"line {number}")
        except QkvError as error:
            wrong.append(QkvError(error.what, where=error.where, hint=error.hint))

    def answers(found: Iterator[Translation]) -> Iterator[Translation]:
        yield from found
        if wrong:
            raise wrong[0]

    return answers(translations(reader, sources(), options))


def _written(
    hypotheses: Sequence[Hypothesis], tokenizer: Tokenizer | None, source_tokens: int, eos_ids: Collection[int]
) -> Translation:
    """The hypotheses for a source, best first, as texts ("" without a tokenizer)."""
    texts = [Alternative(**vars(one), text=text_of(one.token_ids, tokenizer, eos_ids)) for one in hypotheses]
    return Translation(**vars(texts[0]), source_tokens=source_tokens, hypotheses=texts)
