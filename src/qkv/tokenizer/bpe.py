"""Byte-level byte pair encoding, written to be read. Sennrich et al. 2016; on bytes: Radford et al. 2019 (GPT-2).

Training counts adjacent pairs inside pieces of text and joins the most frequent pair, again and again. Encoding replays
those joins: always the earliest learned pair that is present. `Tokenizer` does the same faster with the `tokenizers`
library; this file explains it and gives the same merges and the same ids.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from qkv.tokenizer.pieces import byte_alphabet, split

Pair = tuple[int, int]
_GONE = -1
"""Stands where a symbol was swallowed by its left neighbour."""


@dataclass(frozen=True, slots=True)
class Step:
    """One merge inside a piece: number `rank` of those learned joined `left` and `right`; `tokens` is the piece now."""

    rank: int
    left: bytes
    right: bytes
    tokens: tuple[bytes, ...]


class ByteBPE:
    """A vocabulary (token -> id) and merges in the order learned.

    `work` counts the heap entries handled by all encoding so far: it grows about linearly with the text.
    """

    def __init__(self, vocab: Mapping[bytes, int], merges: Sequence[tuple[bytes, bytes]]) -> None:
        self.vocab = dict(vocab)
        self.merges = list(merges)
        self.tokens = {token_id: token for token, token_id in self.vocab.items()}
        self.work = 0
        self._joins: dict[Pair, tuple[int, int]] = {}  # pair of ids -> rank, id of the joined token
        for rank, (left, right) in enumerate(self.merges):
            self._joins[self.vocab[left], self.vocab[right]] = rank, self.vocab[left + right]

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, *, first_id: int = 0) -> ByteBPE:
        """Learn merges until there are `vocab_size` tokens, the 256 bytes included, or no pair is left.

        Of equally frequent pairs, the one with the smaller ids is joined first, so that the order of the texts does not
        matter. Ids start at `first_id` (special tokens come before). Memory follows the distinct pieces, not the text.
        """
        vocab = {token: first_id + n for n, token in enumerate(byte_alphabet())}
        merges = _learn(Counter(piece for text in texts for piece in split(text)), vocab, vocab_size)
        return cls(vocab, merges)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. O(n log n) however long a piece is."""
        return [token_id for piece in split(text) for token_id in self.encode_piece(piece)]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes the ids stand for."""
        return b"".join(self.tokens[token_id] for token_id in ids)

    def encode_piece(self, piece: bytes) -> list[int]:
        """Token ids of one piece of `split`."""
        symbols = self._bytes(piece)
        for _ in self._merge(symbols):
            pass
        return [symbol for symbol in symbols if symbol != _GONE]

    def steps(self, piece: bytes) -> Iterator[Step]:
        """The merges that build the tokens of one piece, in the order they happen. O(n) for each step."""
        symbols = self._bytes(piece)
        for rank, left, right in self._merge(symbols):
            tokens = tuple(self.tokens[symbol] for symbol in symbols if symbol != _GONE)
            yield Step(rank, self.tokens[left], self.tokens[right], tokens)

    def _bytes(self, piece: bytes) -> list[int]:
        return [self.vocab[piece[n : n + 1]] for n in range(len(piece))]

    def _merge(self, symbols: list[int]) -> Iterator[tuple[int, int, int]]:
        """Merge `symbols` in place, yielding (rank, left id, right id) after each merge.

        The symbols form a linked list and candidate pairs wait in a heap: the earliest learned first, of equals the
        leftmost. An entry whose pair has changed meanwhile is dropped when it comes up. Looking for the best pair again
        after each merge would be quadratic: a 200 KB run of one letter would never end.
        """
        before = list(range(-1, len(symbols) - 1))
        after = [*range(1, len(symbols)), -1]
        pairs = itertools.pairwise(symbols)
        heap = [(*join, place) for place, pair in enumerate(pairs) if (join := self._joins.get(pair))]
        heapify(heap)
        while heap:
            _, joined, place = heappop(heap)
            self.work += 1
            left, neighbour = symbols[place], after[place]
            if left == _GONE or neighbour < 0:
                continue
            right = symbols[neighbour]
            rank, current = self._joins.get((left, right), (0, _GONE))
            if current != joined:
                continue
            symbols[place], symbols[neighbour] = joined, _GONE
            after[place] = after[neighbour]
            if after[place] >= 0:
                before[after[place]] = place
            yield rank, left, right
            for start, end in ((before[place], place), (place, after[place])):
                if start >= 0 and end >= 0 and (join := self._joins.get((symbols[start], symbols[end]))):
                    heappush(heap, (*join, start))


def _learn(pieces: Mapping[bytes, int], vocab: dict[bytes, int], vocab_size: int) -> list[tuple[bytes, bytes]]:
    """Merges learned from `pieces` (piece -> count); their tokens are added to `vocab`, numbered onwards.

    Two merges can spell one token ("a" + "bc", "ab" + "c"); it keeps one id. If such a token brings back a pair learned
    before, the pair is learned again and its last place counts. Ids depend on this; it is what `tokenizers` does.
    """
    first_id = min(vocab.values())
    tokens = {token_id: token for token, token_id in vocab.items()}
    words = [[vocab[piece[n : n + 1]] for n in range(len(piece))] for piece in pieces]
    counts = list(pieces.values())
    pair_counts: Counter[Pair] = Counter()
    places: defaultdict[Pair, set[int]] = defaultdict(set)  # pair -> the words that hold it
    for number, word in enumerate(words):
        for pair in itertools.pairwise(word):
            pair_counts[pair] += counts[number]
            places[pair].add(number)

    serial = itertools.count()  # keeps the heap from comparing sets
    queue = [(-pair_counts[pair], pair, next(serial), where) for pair, where in places.items()]
    heapify(queue)
    merges: dict[Pair, None] = {}  # a dict for its order
    while queue and len(vocab) < vocab_size:
        count, pair, _, where = heappop(queue)
        if -count != pair_counts[pair]:  # other merges took some of its places: wait again, with the true count
            heappush(queue, (-pair_counts[pair], pair, next(serial), where))
            continue
        if not count:
            break
        token = tokens[pair[0]] + tokens[pair[1]]
        joined = vocab.setdefault(token, first_id + len(vocab))
        tokens[joined] = token
        merges.pop(pair, None)
        merges[pair] = None
        grown: defaultdict[Pair, set[int]] = defaultdict(set)
        for number in where:
            for neighbours, change in _join(words[number], pair, joined):
                pair_counts[neighbours] += change * counts[number]
                if change > 0:
                    grown[neighbours].add(number)
        for neighbours, numbers in grown.items():
            if pair_counts[neighbours] > 0:
                heappush(queue, (-pair_counts[neighbours], neighbours, next(serial), numbers))
    return [(tokens[left], tokens[right]) for left, right in merges]


def _join(word: list[int], pair: Pair, joined: int) -> list[tuple[Pair, int]]:
    """Replace `pair` by `joined` in `word`, from the left; returns neighbouring pairs that go (-1) and come (+1)."""
    changes = []
    kept: list[int] = []
    place = 0
    while place < len(word):
        if tuple(word[place : place + 2]) != pair:
            kept.append(word[place])
            place += 1
            continue
        if kept:
            changes += [((kept[-1], pair[0]), -1), ((kept[-1], joined), 1)]
        place += 2
        if place < len(word):
            changes += [((pair[1], word[place]), -1), ((joined, word[place]), 1)]
        kept.append(joined)
    word[:] = kept
    return changes
