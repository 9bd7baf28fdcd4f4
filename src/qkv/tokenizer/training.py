"""How each kind of tokenizer learns its vocabulary. The same text gives the same vocabulary, every time.

`bpe` and `word` are what the `tokenizers` library trains. What its wordpiece and unigram trainers give depends on the
order of a randomly seeded hash table: wordpiece is led around that here, unigram has its own trainer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers.pre_tokenizers import PreTokenizer

from qkv.config.errors import UsageError
from qkv.tokenizer.pieces import KINDS, byte_characters, isolated, splitter
from qkv.tokenizer.text import Corpus
from qkv.tokenizer.unigram import train_unigram

DEFAULT_VOCAB_SIZE = 4096
"""For kinds that choose their vocabulary; suits a few megabytes of text."""

MAX_VOCAB_SIZE = 1 << 24
"""Far beyond any in use. Trainers take memory for every id they may give, and end the process where there is none."""

_SMALL_VOCAB_SIZE = 1 << 16  # what costs a trainer nothing, so that the text need not be measured first

DEFAULT_SPECIAL: Mapping[str, str] = {
    "pad": "<pad>",
    "bos": "<bos>",
    "eos": "<eos>",
    "unk": "<unk>",
    "mask": "<mask>",
    "cls": "<bos>",
    "sep": "<eos>",
}
"""Role -> token. One set for all three families: an encoder's [CLS] and [SEP] are <bos> and <eos>, as in RoBERTa."""

_BYTE_KINDS = ("bpe", "byte")
_LONGEST_RUN = 512  # longer pieces are cut, in training only: to learn inside a megabyte of base64 would be quadratic


@dataclass(frozen=True)
class _Task:
    corpus: Corpus
    wanted: int | None
    special: list[str]
    unk: str
    splitter: PreTokenizer | None

    @property
    def vocab_size(self) -> int:
        return self.wanted or DEFAULT_VOCAB_SIZE

    @property
    def cutter(self) -> PreTokenizer:
        return pre_tokenizers.Sequence([self.splitter, isolated(f"(?m:.{{{_LONGEST_RUN}}})")])

    def learn(self, model: models.Model, trainer: trainers.Trainer, texts: Iterable[str] | None = None) -> models.Model:
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.pre_tokenizer = self.cutter
        tokenizer.train_from_iterator(self.corpus if texts is None else texts, trainer)
        learned: models.Model = tokenizer.model
        return learned


SENTINEL = "<extra_id_{}>"
"""What stands for a span that is left out, numbered from 0: T5's spelling."""


def train(
    corpus: Corpus, kind: str, vocab_size: int | None, roles: Mapping[str, str], sentinels: int = 0
) -> tokenizers.Tokenizer:
    """A trained tokenizer of at most `vocab_size` ids, special tokens included (None: a default, or all characters).

    sentinels: so many special tokens without a role, after the others.

    Raises UsageError for an unknown kind, a vocabulary too small for its kind, unusable special tokens, and no text.
    """
    if kind not in KINDS:
        raise UsageError(f"there is no tokenizer kind {kind!r}", hint=", ".join(KINDS))
    if kind in _BYTE_KINDS:
        roles = {role: token for role, token in roles.items() if role != "unk"}  # bytes miss nothing
    elif "unk" not in roles:
        raise UsageError(f"a {kind} tokenizer needs a special token for what it does not know", hint="the role unk")
    special = [*dict.fromkeys(roles.values()), *map(SENTINEL.format, range(sentinels))]
    cut = splitter(kind, special)
    _check_special(kind, special, cut)
    smallest = len(special) + (256 if kind in _BYTE_KINDS else 1)
    if vocab_size is not None and (isinstance(vocab_size, bool) or not isinstance(vocab_size, Integral)):
        raise UsageError(f"vocab_size is a whole number, not {vocab_size!r}")
    if vocab_size is not None and vocab_size < smallest:
        raise UsageError(
            f"vocab_size {vocab_size} is too small: {kind} with {len(special)} special tokens starts at {smallest} ids"
        )
    if vocab_size is not None and vocab_size > MAX_VOCAB_SIZE:
        raise UsageError(
            f"vocab_size is at most {MAX_VOCAB_SIZE:,}, not {vocab_size:,}", hint=f"vocab_size={DEFAULT_VOCAB_SIZE}"
        )
    if vocab_size is not None and vocab_size > _SMALL_VOCAB_SIZE and kind not in ("char", "byte"):
        corpus = corpus.again()
        vocab_size = _within_reach(corpus, vocab_size, smallest)
    make_model, make_decoder = _PARTS[kind]
    tokenizer = tokenizers.Tokenizer(make_model(_Task(corpus, vocab_size, special, roles.get("unk", ""), cut)))
    if cut is not None:
        tokenizer.pre_tokenizer = cut
    tokenizer.decoder = make_decoder()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    _add_template(tokenizer, roles)
    return tokenizer


def _within_reach(corpus: Corpus, vocab_size: int, smallest: int) -> int:
    """`vocab_size`, or less where the text cannot fill it: what trainers get by it then is the same.

    A byte of text gives at most two forms of a character ("x" and "##x") and one merge. Reads no more than it must.
    """
    reach = smallest
    for chunk in corpus:
        reach += 3 * len(chunk.encode())
        if reach >= vocab_size:
            return vocab_size
    return reach


def _check_special(kind: str, special: list[str], cut: PreTokenizer | None) -> None:
    for token in special:
        if len(token) < 2 or any(character.isspace() for character in token):
            raise UsageError(f"{token!r} cannot be a special token: too short, or with white space", hint="<eos>")
        if kind in ("bpe", "wordpiece") and cut is not None and len(cut.pre_tokenize_str(token)) < 2:
            raise UsageError(f"{token!r} cannot be a special token: it may be a word of the text", hint=f"<{token}>")


def _add_template(tokenizer: tokenizers.Tokenizer, roles: Mapping[str, str]) -> None:
    first, last = roles.get("cls") or roles.get("bos"), roles.get("sep") or roles.get("eos")
    around = [token for token in dict.fromkeys((first, last)) if token]
    if around:
        single = " ".join(part for part in (first, "$A", last) if part)
        pair = " ".join(part for part in (single, "$B:1", f"{last}:1" if last else "") if part)
        used = [(token, tokenizer.token_to_id(token)) for token in around]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=used)


# --- kinds ------------------------------------------------------------------------------------------------------------


def _bpe(task: _Task) -> models.Model:
    trainer = trainers.BpeTrainer(
        vocab_size=task.vocab_size,
        special_tokens=task.special,
        initial_alphabet=list(byte_characters().values()),
        show_progress=False,
    )
    return task.learn(models.BPE(), trainer)


def _word(task: _Task) -> models.Model:
    trainer = trainers.WordLevelTrainer(vocab_size=task.vocab_size, special_tokens=task.special, show_progress=False)
    return task.learn(models.WordLevel(unk_token=task.unk), trainer)


def _char(task: _Task) -> models.Model:
    counts: Counter[str] = Counter()
    for chunk in task.corpus:
        counts.update(chunk)
    room = len(counts) if task.wanted is None else task.wanted - len(task.special)
    kept = sorted(_most_frequent(counts)[:room])
    return models.BPE({token: n for n, token in enumerate([*task.special, *kept])}, [], unk_token=task.unk)


def _byte(task: _Task) -> models.Model:
    # the id of a byte is its value; special tokens follow at 256
    return models.BPE({character: byte for byte, character in byte_characters().items()}, [])


def _wordpiece(task: _Task) -> models.Model:
    """BPE on characters, spelled as BERT does ("low", "##er").

    The library numbers the forms "##x" in the order of a hash table. A first pass finds them, without merging; named as
    special tokens of the second pass they get their ids in a fixed order. What does not fit is dropped, rarest first.
    """
    corpus = task.corpus.again()
    counts: Counter[str] = Counter()

    def counted() -> Iterable[str]:
        for chunk in corpus:
            counts.update(chunk)
            yield chunk

    no_merges = trainers.WordPieceTrainer(vocab_size=0, show_progress=False)
    forms = tokenizers.Tokenizer(task.learn(models.WordPiece(unk_token=task.unk), no_merges, counted())).get_vocab()
    kept: list[str] = []
    for character in _most_frequent(counts):
        both = [form for form in (character, f"##{character}") if form in forms]
        if len(task.special) + len(kept) + len(both) > task.vocab_size:
            break
        kept += both
    alphabet = [form for form in kept if len(form) == 1]
    trainer = trainers.WordPieceTrainer(
        vocab_size=task.vocab_size,
        special_tokens=[*task.special, *sorted(kept)],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    return task.learn(models.WordPiece(unk_token=task.unk), trainer, corpus)


def _unigram(task: _Task) -> models.Model:
    pieces = train_unigram(task.corpus.again(), task.vocab_size - len(task.special), task.cutter)
    known = [*((token, 0.0) for token in task.special), *pieces]
    return models.Unigram(known, task.special.index(task.unk), byte_fallback=False)


def _most_frequent(counts: Mapping[str, int]) -> list[str]:
    return sorted(counts, key=lambda token: (-counts[token], token))


_PARTS: dict[str, tuple[Callable[[_Task], models.Model], Callable[[], decoders.Decoder]]] = {
    "bpe": (_bpe, decoders.ByteLevel),
    "unigram": (_unigram, lambda: decoders.Metaspace(prepend_scheme="never")),
    "wordpiece": (_wordpiece, lambda: decoders.WordPiece(prefix="##", cleanup=False)),
    "word": (_word, decoders.Fuse),
    "char": (_char, decoders.Fuse),
    "byte": (_byte, decoders.ByteLevel),
}
