"""`Tokenizer`: text <-> ids."""

from __future__ import annotations

import hashlib
import json
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, SupportsIndex

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from qkv.config.errors import QkvError, UsageError
from qkv.tokenizer import backends, files, pieces, tokenizer_json, training
from qkv.tokenizer.backends import Source
from qkv.tokenizer.beside import ROLES
from qkv.tokenizer.bpe import ByteBPE
from qkv.tokenizer.chat import ChatTemplate, Message
from qkv.tokenizer.decoding import TokenBytes
from qkv.tokenizer.explain import Explanation, TextStats, byte_bpe, explain_text, text_stats
from qkv.tokenizer.stream import StreamDecoder
from qkv.tokenizer.text import BadBytes, Corpus, TextSource, check_text, chunks

_LONG_TEXT = 1 << 20  # characters; beyond, a text is encoded in parts (with the same ids) to bound the memory


class Tokenizer:
    """Text to token ids and back: a thin face over a `tokenizers.Tokenizer`.

    `roles` says what special tokens are for (pad, bos, eos, unk, mask, cls, sep -> token). Text that spells a special
    token is ordinary text, unless `parse_special=True`. Byte-level kinds (bpe, byte) give every text back unchanged.
    `chat_template` says how conversations become text; None where the tokenizer has no such template.
    """

    def __init__(
        self,
        text: str,
        *,
        kind: str,
        roles: Mapping[str, str],
        chat_template: str | None = None,
        ids: Mapping[str, int] | None = None,
    ) -> None:
        """`text`: a tokenizer in the JSON of the `tokenizers` library; truncation, padding and dropout are dropped.

        ids: the vocabulary, where its pieces have other ids than that tokenizer gives them.
        """
        self._set(Source(tokenizers.Tokenizer.from_str(text), kind, dict(roles), chat_template, text, ids))

    def _set(self, source: Source) -> None:
        """Become the tokenizer that was read."""
        kind, roles = source.kind, source.roles
        self._backend, self._source_text = source.backend, source.text
        self._backend.no_truncation()
        self._backend.no_padding()
        if hasattr(self._backend.model, "dropout"):
            self._backend.model.dropout = None
        self.kind = kind
        self.roles = dict(roles)
        template = source.chat_template
        self.chat_template = None if template is None else ChatTemplate(template, self.roles)
        self._ids = source.ids
        vocab = self._backend.get_vocab(with_added_tokens=True) if self._ids is None else self._ids
        self._tokens = {token_id: token for token, token_id in vocab.items()}
        added = self._backend.get_added_tokens_decoder().values()
        parts = backends.parts(self._backend)
        plain = frozenset(vocab[token.content] for token in added if token.content in vocab)
        self._bytes = TokenBytes(self._tokens, plain, parts["decoder"])
        self._reserved = {token.content for token in added if token.special}.union(self.roles.values())
        self.special_ids = frozenset(vocab[token] for token in self._reserved if token in vocab)
        # an unknown word is part of the text: leaving it out of decoded text would hide that something is missing
        unknown = set(self.roles.values()) - {token for role, token in self.roles.items() if role != "unk"}
        self._skipped = self.special_ids - {vocab[token] for token in unknown}
        self._cuttable = parts["normalizer"] is None and pieces.splits_as_trained(parts["pre_tokenizer"], kind, roles)
        self._plain = backends.twin(self._backend)
        self._plain.encode_special_tokens = True
        self._guard(self._plain)

    # --- make, load, save ---------------------------------------------------------------------------------------------

    @classmethod
    def train(
        cls,
        source: TextSource | Iterable[TextSource],
        *,
        kind: str = "bpe",
        vocab_size: int | None = None,
        special: Mapping[str, str] | None = None,
        sentinels: int = 0,
        bad_bytes: BadBytes = "error",
    ) -> Tokenizer:
        """Learn a vocabulary of at most `vocab_size` ids (special tokens included) from texts and files.

        A `str` is a text; a `Path` is a file, streamed by the rule of `qkv.tokenizer.text`. `kind` is bpe, unigram,
        wordpiece, word, char or byte; without `vocab_size`, char keeps every character and the others have 4,096 ids.
        `special` maps roles to tokens (default: `training.DEFAULT_SPECIAL`); `sentinels`: so many more special tokens,
        for T5's spans. The same text gives the same tokenizer.
        Raises UsageError, NotFoundError, and QkvError with file and byte for text that is not UTF-8.
        """
        if special is not None and not (
            isinstance(special, Mapping) and all(isinstance(token, str) for token in special.values())
        ):
            raise UsageError(f"`special` maps roles to tokens, which {special!r} does not", hint='{"eos": "<eos>"}')
        roles = dict(training.DEFAULT_SPECIAL if special is None else special)
        if unknown := roles.keys() - set(ROLES):
            raise UsageError(f"special tokens have no role {sorted(unknown)[0]!r}", hint=", ".join(ROLES))
        backend = training.train(Corpus(source, bad_bytes), kind, vocab_size, roles, sentinels)
        roles = {role: token for role, token in roles.items() if backend.token_to_id(token) is not None}
        return cls(backend.to_str(), kind=kind, roles=roles)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, encoding: str | None = None) -> Tokenizer:
        """The tokenizer in a folder or file. Never touches the network.

        A `tokenizer.json` (ours or Hugging Face's), GGUF, a SentencePiece .model, a tiktoken file, BERT's vocab.txt,
        GPT-2's merges.txt, llama2.c's tokenizer.bin; with what stands beside it in its folder. Of a Marian folder it is
        that of the sources; its target.spm is that of the translations. encoding: the name of a tiktoken file's
        encoding, where it is not a known file. Raises NotFoundError, UsageError for an encoding that is not known or
        not told, and QkvError that tells "not supported" from "damaged".
        """
        return cls._of(files.read(path, encoding))

    @classmethod
    def _of(cls, source: Source) -> Tokenizer:
        made = cls.__new__(cls)
        made._set(source)
        return made

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`, each whole or not at all.

        `transformers` reads them; but of a Marian tokenizer it does not know the ids.
        """
        tokenizer_json.write(folder, self._text, self.kind, self.roles, self._template_text, self._ids)

    @cached_property
    def _text(self) -> str:
        """The saved form."""
        tree = json.loads(self._source_text or self._backend.to_str()) | {"truncation": None, "padding": None}
        if "dropout" in tree["model"]:
            tree["model"]["dropout"] = None
        return json.dumps(tree, ensure_ascii=False, indent=2)

    @property
    def _template_text(self) -> str | None:
        return None if self.chat_template is None else self.chat_template.source

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self._text, self.kind, self.roles, self._template_text, self._ids)

    def __repr__(self) -> str:
        return f"Tokenizer(kind={self.kind!r}, vocab_size={self.vocab_size})"

    # --- vocabulary ---------------------------------------------------------------------------------------------------

    @cached_property
    def vocab_size(self) -> int:
        """The largest id + 1: the rows an embedding needs."""
        return max(self._tokens) + 1

    @cached_property
    def sentinel_ids(self) -> tuple[int, ...]:
        """What stands for spans that are left out, <extra_id_0> first; none unless the tokenizer has such tokens."""
        ids = {token: token_id for token_id, token in self._tokens.items() if token_id in self.special_ids}
        spelled = (training.SENTINEL.format(number) for number in range(len(ids)))
        return tuple(ids[token] for token in spelled if token in ids)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the saved form, in hexadecimal."""
        template = [] if self._template_text is None else [self._template_text]
        ids = [] if self._ids is None else [sorted(self._ids.items())]
        form = json.dumps([self._text, self.kind, sorted(self.roles.items()), *template, *ids])
        return hashlib.sha256(form.encode()).hexdigest()

    @property
    def pad_id(self) -> int | None:
        """Padding; None when there is no such token, as for the following."""
        return self._role_id("pad")

    @property
    def bos_id(self) -> int | None:
        """Beginning of a text."""
        return self._role_id("bos")

    @property
    def eos_id(self) -> int | None:
        """End of a text."""
        return self._role_id("eos")

    @property
    def unk_id(self) -> int | None:
        """What the vocabulary does not hold; None for byte-level kinds."""
        return self._role_id("unk")

    @property
    def mask_id(self) -> int | None:
        """A token to be guessed."""
        return self._role_id("mask")

    @property
    def cls_id(self) -> int | None:
        """The first token of an encoder's input, which stands for the whole; <bos> in tokenizers trained here."""
        return self._role_id("cls")

    @property
    def sep_id(self) -> int | None:
        """The end of a segment of an encoder's input; <eos> in tokenizers trained here."""
        return self._role_id("sep")

    def _role_id(self, role: str) -> int | None:
        token = self.roles.get(role)
        return None if token is None else self.token_to_id(token)

    def id_to_token(self, token_id: SupportsIndex) -> str:
        """The token as the file spells it. Raises UsageError outside the vocabulary."""
        return self._tokens[self._known(token_id)]

    def token_to_id(self, token: str) -> int | None:
        """The id of a token as the file spells it, or None."""
        check_text(token)
        return self._backend.token_to_id(token) if self._ids is None else self._ids.get(token)

    def token_bytes(self, token_id: SupportsIndex) -> bytes:
        """The bytes a token adds to a text that it does not begin. Raises UsageError outside the vocabulary."""
        return self._bytes(self._known(token_id), False)

    def _known(self, token_id: SupportsIndex) -> int:
        try:
            number = operator.index(token_id)
        except TypeError:
            raise UsageError(f"a token id is a whole number, not {token_id!r}") from None
        if isinstance(token_id, bool):
            raise UsageError(f"a token id is a whole number, not {token_id!r}")
        if number not in self._tokens:
            raise UsageError(f"token id {number} is not in the vocabulary: ids are 0 to {self.vocab_size - 1}")
        return number

    # --- text -> ids --------------------------------------------------------------------------------------------------

    def encode(
        self, text: str, *, parse_special: bool = False, add_special: bool = False, strict: bool = False
    ) -> list[int]:
        """Token ids of `text`.

        `parse_special`: a spelled special token becomes its id. `add_special`: with the tokens that the tokenizer's
        template puts around a text, never a second <bos>. `strict`: an unknown character is a UsageError naming it,
        instead of `unk_id`. Raises UsageError for text with lone surrogates.
        """
        if not isinstance(text, str):
            check_text(text)
        backend = self._backend if parse_special else self._plain
        parts: Iterable[str] = [text]
        if self._cuttable and len(text) > _LONG_TEXT:
            parts = chunks(parts, _LONG_TEXT, cut_runs=self.kind in ("char", "byte") and not parse_special)
        try:
            ids = [
                token_id for part in parts for token_id in self._ids_of(backend.encode(part, add_special_tokens=False))
            ]
        except TypeError:
            check_text(text)
            raise
        return self._finished(text, ids, backend, add_special, strict)

    def encode_batch(
        self, texts: Sequence[str], *, parse_special: bool = False, add_special: bool = False, strict: bool = False
    ) -> list[list[int]]:
        """`encode` of each text, on all cores."""
        if isinstance(texts, str) or not isinstance(texts, Sequence):
            raise UsageError(f"encode_batch reads a list of texts, not {type(texts).__name__}", hint="encode")
        for text in texts:
            if not isinstance(text, str):
                check_text(text)
        if any(len(text) > _LONG_TEXT for text in texts):
            return [
                self.encode(text, parse_special=parse_special, add_special=add_special, strict=strict) for text in texts
            ]
        backend = self._backend if parse_special else self._plain
        try:
            # the fast one leaves out how tokens are spelled
            encode = backend.encode_batch_fast if self._ids is None else backend.encode_batch
            encodings = encode(list(texts), add_special_tokens=False)
        except TypeError:
            for text in texts:
                check_text(text)
            raise
        return [
            self._finished(text, self._ids_of(encoding), backend, add_special, strict)
            for text, encoding in zip(texts, encodings, strict=True)
        ]

    def _ids_of(self, encoding: tokenizers.Encoding) -> list[int]:
        ids: list[int] = encoding.ids
        return ids if self._ids is None else list(map(self._number, encoding.tokens, ids))

    def _number(self, token: str, token_id: int) -> int:
        """The id of a token that has `token_id` in the backend."""
        return token_id if self._ids is None else self._ids.get(token, self._ids[self.roles["unk"]])

    def _finished(
        self, text: str, ids: list[int], backend: tokenizers.Tokenizer, add_special: bool, strict: bool
    ) -> list[int]:
        if strict:
            self._check_known(text, ids, backend)
        if not add_special:
            return ids
        before, after = self.around
        start = [] if ids[: len(before)] == before else before
        end = [] if ids[len(ids) - len(after) :] == after else after
        return [*start, *ids, *end]

    def _check_known(self, text: str, ids: list[int], backend: tokenizers.Tokenizer) -> None:
        if self.unk_id is None or self.unk_id not in ids:
            return
        encoding = backend.encode(text, add_special_tokens=False)
        start, end = encoding.offsets[self._ids_of(encoding).index(self.unk_id)]
        unknown = text[start:end]
        code = f" (U+{ord(unknown):04X})" if len(unknown) == 1 else ""
        raise UsageError(f"{unknown!r}{code} is not in the vocabulary of {self!r}", where=f"character {start}")

    @cached_property
    def around(self) -> tuple[list[int], list[int]]:
        """What stands before and after a whole text: <bos> or not, as the tokenizer's file says."""
        for text in ("a", *self._tokens.values()):  # whichever gives an id
            bare, full = (self._ids_of(self._plain.encode(text, add_special_tokens=add)) for add in (False, True))
            if bare:
                start = next(n for n in range(len(full)) if full[n : n + len(bare)] == bare)
                return full[:start], full[start + len(bare) :]
        return [], []

    def open_ended(self) -> Tokenizer:
        """The same, but that nothing is put after a text: what other programs have a decoder go on from."""
        tree = json.loads(self._text)
        template = tree["post_processor"] or {}
        if not self.around[1] or template.get("type") != "TemplateProcessing":
            return self
        for parts in (template["single"], template["pair"]):
            while "SpecialToken" in parts[-1]:
                parts.pop()
        return _rebuild(json.dumps(tree, ensure_ascii=False), self.kind, self.roles, self._template_text, self._ids)

    def _guard(self, backend: tokenizers.Tokenizer) -> None:
        """Keep ordinary text from being a special token that the model itself knows as a word."""
        merges = isinstance(backend.model, models.BPE)
        if merges and not backend.model.ignore_merges:
            return  # merges make no such word
        special = pieces.guard(sorted(self._reserved), whole=merges)
        first = [] if backend.pre_tokenizer is None else [backend.pre_tokenizer]
        backend.pre_tokenizer = pre_tokenizers.Sequence([*first, special])

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        template: ChatTemplate | None = None,
        **variables: Any,
    ) -> list[int]:
        """Token ids of a conversation, as its chat template (None: the tokenizer's own) writes it.

        The special tokens that the template writes are meant; those that a message spells are ordinary text. They begin
        with exactly one <bos> where texts do. The rest: `ChatTemplate.apply`. Raises UsageError where there is no
        template.
        """
        template = template or self.chat_template
        if template is None:
            raise UsageError("the tokenizer has no chat template", hint="one of your own, in a file")
        marked, mark = template.apply_marked(
            messages, self._special_tokens, add_generation_prompt=add_generation_prompt, **variables
        )
        check_text(marked)
        ids = self._ids_of(self._without(mark).encode(marked, add_special_tokens=False))
        before, _ = self.around
        return ids if ids[: len(before)] == before else before + ids

    @cached_property
    def _special_tokens(self) -> list[str]:
        return [self._tokens[token_id] for token_id in sorted(self.special_ids)]

    def _without(self, mark: str) -> tokenizers.Tokenizer:
        """The tokenizer that finds special tokens, but not where `mark` stands in them; then the marks go."""
        backend = backends.twin(self._backend)
        added = backend.get_added_tokens_decoder()
        # looked for before the normalizer, which takes the marks away
        backend.add_tokens(
            [backends.raw(added[each]) for each in sorted(added) if added[each].content in self._reserved]
        )
        kept = [] if backend.normalizer is None else [backend.normalizer]
        backend.normalizer = normalizers.Sequence([normalizers.Replace(mark, ""), *kept])
        self._guard(backend)
        return backend

    def end_of_turn(self, template: ChatTemplate | None = None) -> int | None:
        """The special token with which a chat template ends an answer; None if it writes none there."""
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        try:
            asked = self.encode_chat(turns[:1], template=template)
            answered = self.encode_chat(turns, add_generation_prompt=False, template=template)
        except QkvError:  # a template that wants other messages
            return None
        while asked and asked[:1] == answered[:1]:
            del asked[0], answered[0]
        return next((token_id for token_id in answered if token_id in self.special_ids), None)

    # --- ids -> text --------------------------------------------------------------------------------------------------

    def decode(self, ids: Iterable[SupportsIndex], *, skip_special: bool = True) -> str:
        """The text of `ids`, spaces untouched; bytes that are no character become U+FFFD.

        Special tokens are left out unless `skip_special=False`; an unknown word stays, as its token's spelling.
        Raises UsageError naming an id outside the vocabulary.
        """
        return self.decode_bytes(ids, skip_special=skip_special).decode(errors="replace")

    def decode_bytes(self, ids: Iterable[SupportsIndex], *, skip_special: bool = True) -> bytes:
        """The bytes of `ids`; see `decode`."""
        if isinstance(ids, str | bytes | bytearray) or not isinstance(ids, Iterable):
            raise UsageError(f"decode reads a list of ids, not {ids!r}", hint="decode([12, 7])")
        parts: list[bytes] = []
        for token_id in ids:
            part = self._piece(token_id, not parts, skip_special)
            if part is not None:
                parts.append(part)
        return b"".join(parts)

    def stream(self, *, skip_special: bool = True) -> StreamDecoder:
        """A decoder for ids that come one by one."""
        return StreamDecoder(lambda token_id, first: self._piece(token_id, first, skip_special))

    def _piece(self, token_id: SupportsIndex, first: bool, skip_special: bool) -> bytes | None:
        number = self._known(token_id)
        return None if skip_special and number in self._skipped else self._bytes(number, first)

    # --- look inside --------------------------------------------------------------------------------------------------

    def explain(self, text: str) -> Explanation:
        """The pieces of `text`, their tokens and, for byte-level BPE, each merge in the order it happens."""
        check_text(text)
        return explain_text(self._plain, self.kind, text, self._bytes, self._twin, self._number)

    @cached_property
    def _twin(self) -> ByteBPE | None:
        return byte_bpe(self._backend)

    def stats(self, source: TextSource | Iterable[TextSource], *, bad_bytes: BadBytes = "error") -> TextStats:
        """How many tokens texts (`str`) and files (`Path`) take, for Chinese and for other characters."""
        return text_stats(self._plain, Corpus(source, bad_bytes), self.unk_id, self._ids_of)


def _rebuild(
    text: str, kind: str, roles: Mapping[str, str], chat_template: str | None, ids: Mapping[str, int] | None
) -> Tokenizer:
    return Tokenizer(text, kind=kind, roles=roles, chat_template=chat_template, ids=ids)
