"""Perplexity and its relatives: how well a model predicts text.

loss = mean of -ln p(token), in nats; perplexity = exp(loss); bits per byte = sum of -log2 p(token) / UTF-8 bytes of the
tokens scored, which compares models with different tokenizers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from qkv.config.errors import QkvError, UsageError
from qkv.config.objectives import MaskedObjectiveConfig, ObjectiveConfig, PrefixObjectiveConfig
from qkv.data.batches import validation_batches
from qkv.data.prepare import Corpus
from qkv.evaluate.score import Tally, check_predicts_tokens, score_batches
from qkv.evaluate.windows import SlidingWindows
from qkv.nn import Transformer

if TYPE_CHECKING:
    from qkv.tokenizer.tokenizer import Tokenizer

_LOGITS_AT_ONCE = 1 << 26
_SLOTS_AT_ONCE = 1 << 14


@dataclass(frozen=True)
class Scores:
    """`loss` in nats per scored token, `perplexity` = exp(loss), `accuracy`: share of tokens the highest logit names.

    `bytes` is the UTF-8 length of the scored tokens (special ones have none) and `bits_per_byte` what each byte costs.
    Both are None without a tokenizer, where unknown tokens stand for text that is lost, and for masked tokens, whose
    guesses do not add up to a code for the text, nor do those of what follows a prefix.
    """

    loss: float
    perplexity: float
    accuracy: float
    tokens: int
    bytes: int | None = None
    bits_per_byte: float | None = None


def perplexity(
    network: Transformer,
    ids: Corpus | Sequence[int] | Any,
    *,
    window: int | None = None,
    stride: int | None = None,
    max_windows: int | None = None,
    batch_size: int | None = None,
    tokenizer: Tokenizer | None = None,
) -> Scores:
    """Score a causal model on a text: `ids` [N] (list, array or tensor), or the documents of a Corpus.

    The network reads `window` tokens at once (None: its context, max_seq_len), and every `stride` tokens (None:
    `window`) a new window begins. Each token is scored exactly once, in the first window that holds it: a smaller
    stride gives every token at least window - stride tokens of context, where there are that many. The first token of a
    document has none and is not scored, nor is a <bos> of `tokenizer`. A stride of window + 1 makes of every window a
    text of its own: its first token is read and not scored, as where `transformers` is given labels. `max_windows`:
    only so many, from the front. `batch_size` windows are computed at once (None: what fits memory); the figures do not
    depend on it.

    Raises UsageError for numbers that make no sense and for a prefix-LM, QkvError where there is nothing to score.
    """
    check_predicts_tokens(network)
    if network.config.family != "decoder":
        raise UsageError("an encoder sees the words it would predict", hint="masked_scores")
    if network.config.prefix:
        raise UsageError("a prefix-LM is scored on what follows a prefix, not on every token", hint="prefix_scores")
    context = network.config.max_seq_len
    window = context if window is None else window
    stride = window if stride is None else stride
    _check_range("window", window, context, f"the model reads at most {context} tokens")
    _check_range("stride", stride, window + 1, f"a window of {window} tokens would leave some out")
    for name, value in (("max_windows", max_windows), ("batch_size", batch_size)):
        if value is not None:
            _check_range(name, value)
    corpus = ids if isinstance(ids, Corpus) else _one_document(ids)
    sliding = SlidingWindows(corpus, window, stride, _bos_only(tokenizer))
    if sliding.count == 0:
        raise QkvError(f"the text has {_tokens(corpus)}, and scoring one takes another before it", hint="a longer text")
    if batch_size is None:
        vocabulary = network.config.vocab_size or 1
        batch_size = max(1, min(_LOGITS_AT_ONCE // (window * vocabulary), _SLOTS_AT_ONCE // window))
    tally = score_batches(network, sliding.batches(batch_size, max_windows))
    if tally.targets == 0:
        raise QkvError("the text holds nothing but <bos>, which is never scored", hint="a longer text")
    if tokenizer is None:
        return _scores(tally, None)
    return _scores(tally, _bytes(tally, sliding.first_tokens(tokenizer.special_ids, max_windows), tokenizer))


def masked_scores(
    network: Transformer,
    corpus: Corpus,
    tokenizer: Tokenizer,
    *,
    rate: float = 0.15,
    window: int | None = None,
    batch_size: int | None = None,
) -> Scores:
    """Score an encoder on masked tokens: BERT's masking (`qkv.data.objectives`), the same in every call.

    Rows of `window` tokens (None: the model's context), `batch_size` at once; `rate` of the tokens are targets.
    """
    check_predicts_tokens(network)
    if network.config.family != "encoder":
        raise UsageError("only an encoder guesses masked tokens", hint="perplexity")
    objective = MaskedObjectiveConfig(rate=rate)
    tally = _tally(network, corpus, tokenizer, objective, window, batch_size)
    if tally.targets == 0:
        raise QkvError("the text holds special tokens only, and these are never masked", hint="a longer text")
    return _scores(tally, None)


def prefix_scores(
    network: Transformer,
    corpus: Corpus,
    tokenizer: Tokenizer,
    *,
    window: int | None = None,
    batch_size: int | None = None,
) -> Scores:
    """Score a prefix-LM on what follows a prefix, whose length in each row is drawn as in training, the same in every
    call.

    Rows are pieces of at most `window` tokens (None: the model's context) of one document each, as many at once as have
    `batch_size` times that many.
    """
    check_predicts_tokens(network)
    if not network.config.prefix:
        raise UsageError("the model has no prefix", hint="perplexity")
    return _scores(_tally(network, corpus, tokenizer, PrefixObjectiveConfig(), window, batch_size), None)


def _tally(
    network: Transformer,
    corpus: Corpus,
    tokenizer: Tokenizer,
    objective: ObjectiveConfig,
    window: int | None,
    batch_size: int | None,
) -> Tally:
    """The network's answers to the rows that validation makes of a corpus."""
    context = network.config.max_seq_len
    window = context if window is None else window
    _check_range("window", window, context, f"the model reads at most {context} tokens")
    if batch_size is not None:
        _check_range("batch_size", batch_size)
    slots = _SLOTS_AT_ONCE if batch_size is None else batch_size * window
    return score_batches(
        network, validation_batches(corpus, objective, tokenizer, max_seq_len=window, batch_tokens=slots)
    )


def _check_range(name: str, value: int, largest: int | None = None, why: str = "") -> None:
    if value < 1:
        raise UsageError(f"{name} must be at least 1, got {value}")
    if largest is not None and value > largest:
        raise UsageError(f"{name} {value} is too large: {why}", hint=f"{name} {largest}")


def _one_document(ids: Any) -> Corpus:
    tokens = np.asarray(ids.cpu() if hasattr(ids, "cpu") else ids, dtype=np.int64)
    if tokens.ndim != 1:
        raise UsageError(f"ids are one row of tokens [N], got shape {list(tokens.shape)}")
    return Corpus(tokens.astype(np.uint32), np.zeros(1, np.int64), np.array([len(tokens)], np.int64))


def _tokens(corpus: Corpus) -> str:
    number = f"{corpus.num_tokens} token{'' if corpus.num_tokens == 1 else 's'}"
    return number if corpus.num_documents < 2 else f"{number} in {corpus.num_documents} documents"


def _bos_only(tokenizer: Tokenizer | None) -> int | None:
    """The id that only begins a text; GPT-2's <|endoftext|> also ends one, and ends are scored."""
    if tokenizer is None or tokenizer.bos_id == tokenizer.eos_id:
        return None
    return tokenizer.bos_id


def _bytes(tally: Tally, first_ids: Sequence[int], tokenizer: Tokenizer) -> int | None:
    """UTF-8 bytes of the tokens scored; None where some of the text is lost in unknown tokens.

    first_ids: those that follow a special token at the beginning of a document; SentencePiece and WordPiece put a space
    before the first word, which is not in the text.
    """
    if tokenizer.unk_id is not None and tally.ids[tokenizer.unk_id]:
        return None
    special = tokenizer.special_ids
    size = sum(len(tokenizer.token_bytes(i)) * times for i, times in tally.ids.items() if i not in special)
    for first, times in Counter(i for i in first_ids if i not in special).items():
        if tokenizer.token_bytes(first).startswith(b" ") and not tokenizer.decode([first]).startswith(" "):
            size -= times
    return size


def _scores(tally: Tally, size: int | None) -> Scores:
    return Scores(
        loss=tally.loss,
        perplexity=math.exp(tally.loss) if tally.loss < 700 else math.inf,
        accuracy=tally.correct / tally.targets,
        tokens=tally.targets,
        bytes=size,
        bits_per_byte=tally.nats / math.log(2) / size if size else None,
    )
