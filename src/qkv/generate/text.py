"""From tokens to text: pieces as they become certain, and a `Generation` at the end."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from qkv.generate.decode import Decoding, FinishReason
from qkv.generate.stopping import StopStrings
from qkv.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class Likelihood:
    """A token and its log-probability in nats; `token` is what it adds to the text ("" without a tokenizer)."""

    token_id: int
    token: str
    logprob: float


@dataclass(frozen=True)
class TokenLogprob(Likelihood):
    """A token of the text, and the most likely tokens in its place, best first."""

    top: tuple[Likelihood, ...]


@dataclass(frozen=True)
class Generation:
    """What was generated for one prompt.

    text: without EOS and stop string. token_ids: all that was generated, a final EOS and the tokens of a stop string
    included; completion_tokens is their number. prompt_tokens: BOS included; of an encoder-decoder, of the source.
    finish_reason: "stop" (EOS or stop string) or "length". seconds: from the start of the batch to this row's end.
    logprobs: of the model itself, before penalties, temperature and filters; None where not asked for. prompt_logprobs:
    those of the prompt's tokens but the first, where `logprobs` were asked for and no new token.
    """

    text: str
    token_ids: list[int]
    prompt_tokens: int
    completion_tokens: int
    finish_reason: FinishReason
    seconds: float
    tokens_per_second: float
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None


class _Row:
    """One row's text so far."""

    def __init__(self, tokenizer: Tokenizer | None, stops: StopStrings, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.stops = stops
        self.text = ""
        self.logprobs: list[TokenLogprob] = []
        self._decoder = None if tokenizer is None else tokenizer.stream()

    def push(self, token_id: int) -> str:
        """The text that a token makes certain."""
        return self._show(self.stops.push(self._decoder.push(token_id)) if self._decoder else "")

    def finish(self) -> str:
        """The rest: an incomplete character, and what might have become a stop string."""
        if self._decoder is None:
            return ""
        return self._show(self.stops.push(self._decoder.finish()) + self.stops.finish())

    def _show(self, piece: str) -> str:
        self.text += piece
        return piece


class Writing:
    """Runs a `Decoding` and gives (row, piece of text) as pieces become certain; they add up to each row's `text`.

    prompt_tokens: what each row's `Generation` says of its prompt.
    """

    def __init__(
        self, decoding: Decoding, tokenizer: Tokenizer | None, stop: str | Sequence[str], prompt_tokens: Sequence[int]
    ) -> None:
        self._decoding, self._tokenizer = decoding, tokenizer
        self._rows = [_Row(tokenizer, StopStrings(stop), count) for count in prompt_tokens]
        self._ended: dict[int, Generation] = {}
        self._started = time.perf_counter()

    def __iter__(self) -> Iterator[tuple[int, str]]:
        self._started = time.perf_counter()
        for number, reason in enumerate(self._decoding.finish_reasons):
            if reason is not None:
                self._end(number)
        for token in self._decoding:
            row = self._rows[token.row]
            piece = "" if token.token_id in self._decoding.eos_ids else row.push(token.token_id)
            if token.logprob is not None:
                row.logprobs.append(describe(token.token_id, token.logprob, token.top, self._tokenizer))
            if row.stops.found:
                self._decoding.stop(token.row)
            if self._decoding.finish_reasons[token.row] is not None:
                piece += self._end(token.row)
            if piece:
                yield token.row, piece

    @property
    def generations(self) -> list[Generation]:
        """Of the rows that have ended, in order: of all rows after the iteration."""
        return [self._ended[row] for row in sorted(self._ended)]

    def _end(self, number: int) -> str:
        row = self._rows[number]
        piece = row.finish()
        if row.stops.found:
            self._decoding.stop(number)
        ids, reason = self._decoding.generated[number], self._decoding.finish_reasons[number]
        assert reason is not None
        seconds = time.perf_counter() - self._started
        speed = len(ids) / seconds if ids else 0.0
        logprobs = row.logprobs if self._decoding.logprobs else None
        self._ended[number] = Generation(row.text, ids, row.prompt_tokens, len(ids), reason, seconds, speed, logprobs)
        return piece


class TextStream(Iterator[str]):
    """Pieces of text as they become certain; joined, they are the `text` that would come in one.

    `generation` is there after the last piece.
    """

    def __init__(self, writing: Writing) -> None:
        self._writing = writing
        self._pieces = (piece for _, piece in writing)

    def __next__(self) -> str:
        return next(self._pieces)

    @property
    def generation(self) -> Generation | None:
        """The whole, once the stream has ended."""
        return next(iter(self._writing.generations), None)


def text_of(ids: Sequence[int], tokenizer: Tokenizer | None, eos_ids: Collection[int]) -> str:
    """The text of generated ids without the one that ended them ("" without a tokenizer)."""
    ids = ids[:-1] if ids and ids[-1] in eos_ids else ids
    return "" if tokenizer is None else tokenizer.decode(ids)


def describe(
    token_id: int, logprob: float, top: Sequence[tuple[int, float]], tokenizer: Tokenizer | None
) -> TokenLogprob:
    """Log-probabilities with the tokens' texts."""
    others = tuple(Likelihood(other, piece_of(other, tokenizer), value) for other, value in top)
    return TokenLogprob(token_id, piece_of(token_id, tokenizer), logprob, others)


def piece_of(token_id: int, tokenizer: Tokenizer | None) -> str:
    """What a token adds to a text; U+FFFD for a part of a character."""
    return "" if tokenizer is None else tokenizer.token_bytes(token_id).decode("utf-8", "replace")
