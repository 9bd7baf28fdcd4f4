"""A trainer for unigram vocabularies (Kudo 2018, "Subword regularization") that gives the same result every time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np
import tokenizers
from tokenizers import models, trainers
from tokenizers.pre_tokenizers import PreTokenizer

_LONGEST_PIECE = 16  # characters; SentencePiece's figure
_UNKNOWN = " unknown"  # with a space, which no piece holds


def train_unigram(texts: Iterable[str], size: int, cutter: PreTokenizer) -> list[tuple[str, float]]:
    """At most `size` pieces with their log probabilities, likeliest first. `texts` is read twice.

    Hard EM: segment the text by the best path, count, rescore, prune. Seeds are twice as many BPE tokens; each round
    drops up to a quarter of the pieces, those whose loss costs the least likelihood. Characters stay, most frequent
    first if `size` cannot hold all. Real text takes fewer tokens than with the library's trainer, in about its time.
    """
    characters: Counter[str] = Counter()
    words: Counter[str] = Counter()
    for text in texts:
        for word, _ in cutter.pre_tokenize_str(text):
            words[word] += 1
    for word, count in words.items():
        for character in word:
            characters[character] += count
    alphabet = set(sorted(characters, key=lambda character: (-characters[character], character))[:size])

    scores = _rescore(*_seeds(texts, 2 * size, cutter, alphabet, words))
    while True:
        for _ in range(2):
            counts = _count(_tokenizer(scores), words)
            scores = _rescore(counts, alphabet | {piece for piece in scores if counts[piece]})
        if len(scores) <= size:
            return sorted(scores.items(), key=lambda item: (-item[1], item[0]))
        losses = {
            piece: counts[piece] * (scores[piece] - _without(piece, scores)) for piece in scores if len(piece) > 1
        }
        room = max(size, len(scores) * 3 // 4) - len(alphabet)
        best = sorted(losses, key=lambda piece: (-losses[piece], piece))[:room]
        scores = {piece: scores[piece] for piece in alphabet.union(best)}


def _seeds(
    texts: Iterable[str], size: int, cutter: PreTokenizer, alphabet: set[str], words: Mapping[str, int]
) -> tuple[Counter[str], list[str]]:
    """BPE tokens with how often BPE uses them."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = cutter
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        initial_alphabet=sorted(alphabet),
        limit_alphabet=len(alphabet),
        max_token_length=_LONGEST_PIECE,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    counts = _count(tokenizers.Tokenizer(tokenizer.model), words)
    return counts, list(counts)


def _tokenizer(scores: Mapping[str, float]) -> tokenizers.Tokenizer:
    pieces = [(_UNKNOWN, 0.0), *sorted(scores.items())]
    return tokenizers.Tokenizer(models.Unigram(pieces, 0, byte_fallback=False))


def _count(tokenizer: tokenizers.Tokenizer, words: Mapping[str, int]) -> Counter[str]:
    """How often each piece is used for `words` (word -> how often it occurs)."""
    texts, weights = list(words), np.array(list(words.values()), dtype=np.int64)
    totals = np.zeros(tokenizer.get_vocab_size(), dtype=np.int64)  # whole numbers: the order of adding is nothing
    for start in range(0, len(texts), 4096):
        rows = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts[start : start + 4096])]
        lengths = [len(row) for row in rows]
        np.add.at(totals, np.concatenate(rows).astype(np.int64), np.repeat(weights[start : start + 4096], lengths))
    return Counter({token: int(totals[token_id]) for token, token_id in tokenizer.get_vocab().items()})


def _rescore(counts: Mapping[str, int], pieces: Iterable[str]) -> dict[str, float]:
    """Log probabilities; an unused piece counts as half a use."""
    total = math.log(sum(counts.values()))
    return {piece: math.log(counts[piece] or 0.5) - total for piece in pieces}


def _without(piece: str, scores: Mapping[str, float]) -> float:
    """The score of the best segmentation of `piece` into smaller pieces."""
    best = [0.0] + [-math.inf] * len(piece)
    for end in range(1, len(piece) + 1):
        for start in range(end):
            part = piece[start:end]
            if part != piece and part in scores:
                best[end] = max(best[end], best[start] + scores[part])
    return best[-1]
