"""How text becomes ids."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from qkv.config.base import Node, contradiction
from qkv.config.numbers import VocabSize


class TokenizerConfig(Node):
    """How text becomes ids: trained on the training text (`kind`, `vocab_size`), reused (`path`), or one per side.

    Where a configuration overrides another, to name one of these replaces the others.
    `lowercase` and the like are the business of an imported tokenizer; a trained one keeps every byte.
    """

    kind: Literal["bpe", "unigram", "wordpiece", "word", "char", "byte"] = "bpe"
    vocab_size: VocabSize | None = None
    path: str | None = None
    source: TokenizerConfig | None = None
    target: TokenizerConfig | None = None

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.source is None) != (self.target is None):
            raise contradiction("tokenizer.source", "tokenizer.target", "only one is given", "both, or neither")
        if self.source and self.path:
            raise contradiction(
                "tokenizer.source", "tokenizer.path", "one or two tokenizers?", "source.path, target.path"
            )
        if self.source and self.vocab_size:
            raise contradiction(
                "tokenizer.source",
                "tokenizer.vocab_size",
                "a tokenizer for each side has its own size",
                "source.vocab_size, target.vocab_size",
            )
        for side in ("source", "target"):
            inner: TokenizerConfig | None = getattr(self, side)
            if inner is not None and inner.source is not None:
                raise contradiction(f"tokenizer.{side}.source", f"tokenizer.{side}", "a side has one tokenizer", "one")
        if self.path and self.vocab_size:
            raise contradiction(
                "tokenizer.path", "tokenizer.vocab_size", "a saved tokenizer has its own size", "one of them"
            )
        return self
