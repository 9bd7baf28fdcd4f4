"""What can be said about a Transformer.

The tree has shared keys (`d_model`, `attention`, ...) that an encoder-decoder's `encoder:` and `decoder:` sections
override, and a `layers:` pattern that overrides them per layer. Validation spells everything out: afterwards every
stack has one complete `BlockConfig` per layer, and validating the spelled-out tree again changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import model_validator

from qkv.config.base import contradiction
from qkv.config.parts import (
    Head,
    HeadConfig,
    Init,
    LanguageModelHeadConfig,
    MaskedLanguageModelHeadConfig,
    MtpConfig,
    NormalInitConfig,
    TokenInputConfig,
)
from qkv.config.residuals import DeepNormConfig
from qkv.config.spelling import spelled_out
from qkv.config.stack import StackConfig

Family = Literal["decoder", "encoder", "encoder-decoder"]


class ModelConfig(StackConfig):
    """A Transformer of any family. Of an encoder-decoder, `encoder` and `decoder` are the complete stacks; a
    decoder-only or encoder-only model is itself its one stack.

    `prefix`, of a decoder: the tokens of a text's beginning (its prompt) see each other, those after it what came
    before (a prefix-LM: Raffel et al. 2019, arXiv 1910.10683, 3.2.1). `mtp`, of a decoder: what it is trained to
    predict beyond the next token.
    """

    family: Family = "decoder"
    prefix: bool = False
    tie_embeddings: Literal["none", "head", "source-target", "all"] = "none"
    head: Head | None = None
    mtp: MtpConfig = MtpConfig()
    init: Init = NormalInitConfig()
    encoder: StackConfig | None = None
    decoder: StackConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _spell_out(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        data = spelled_out(data)
        if data.get("head") is None:
            data["head"] = {"kind": "masked-language-model" if data.get("family") == "encoder" else "language-model"}
        return data

    @model_validator(mode="after")
    def _check_family(self) -> ModelConfig:
        head = self.head
        assert head is not None
        if self.family == "encoder" and isinstance(head, LanguageModelHeadConfig):
            raise contradiction(
                "family", "head.kind", "an encoder sees the words it would predict", "head.kind=masked-language-model"
            )
        if self.family != "encoder" and isinstance(head, MaskedLanguageModelHeadConfig):
            raise contradiction("family", "head.kind", "masked words need an encoder", "head.kind=language-model")
        if self.family != "encoder" and not isinstance((self.decoder or self).input, TokenInputConfig):
            raise contradiction("family", "input.kind", "a decoder reads tokens", "encoder.input in an encoder-decoder")
        if self.decoder is None and any(layer.cross_attention for layer in self.layers):
            raise contradiction(
                "family", "cross_attention", "there is no source to attend to", "family=encoder-decoder"
            )
        self._check_source()
        if self.prefix and self.family != "decoder":
            raise contradiction(
                "prefix",
                "family",
                f"a model of family {self.family} reads its source in both directions",
                "prefix=false",
            )
        self._check_tying(head)
        self._check_mtp(head)
        self._complete_deepnorm()
        return self

    def _check_mtp(self, head: HeadConfig) -> None:
        if not self.mtp.depth:
            return
        refused = (
            ("family", self.family != "decoder", f"a model of family {self.family} is not one causal stack"),
            ("prefix", self.prefix, "the tokens of a prefix would see what they are to predict"),
            ("head.kind", not head.predicts_tokens, f"a head of kind {head.kind} predicts no tokens"),
            ("max_seq_len", self.mtp.depth >= self.max_seq_len, "no token of the context is so far ahead"),
        )
        for key, breaks, why in refused:
            if breaks:
                raise contradiction("mtp.depth", key, why, "mtp.depth=0")

    def _check_source(self) -> None:
        """Which stacks may read a source, and that one does where there is a source."""
        for key, stack in (("num_queries", self), ("decoder.num_queries", self.decoder)):
            if stack is not None and stack.num_queries is not None:
                raise contradiction(
                    key, "family", "learned queries read for a decoder", "encoder.num_queries in an encoder-decoder"
                )
        if self.encoder is None or self.decoder is None:
            if any(layer.cross_gate for layer in self.layers):
                raise contradiction("family", "cross_gate", "there is no cross-attention", "family=encoder-decoder")
            return
        if any(layer.cross_attention for layer in self.encoder.layers):
            raise contradiction(
                "encoder.layers[].cross_attention", "family", "an encoder attends to no source", "decoder.layers"
            )
        if not any(layer.cross_attention for layer in self.decoder.layers):
            raise contradiction(
                "decoder.layers[].cross_attention",
                "family",
                "no layer would read what the encoder makes",
                "cross_attention in one layer at least, or family=decoder",
            )

    def _complete_deepnorm(self) -> None:
        """Fill in what DeepNorm derives from the depths. A decoder layer with cross-attention has three sublayers."""
        for side, stack in self.stacks.items():
            if not isinstance(stack.residual, DeepNormConfig):
                continue
            if self.encoder is None or self.decoder is None:
                residual = stack.residual.complete(stack.num_layers)
            elif side == "encoder":
                residual = stack.residual.complete(stack.num_layers, self.decoder.num_layers)
            else:
                cross = sum(layer.cross_attention is not None for layer in stack.layers)
                residual = stack.residual.complete(stack.num_layers + cross / 2)
            layers = tuple(layer.model_copy(update={"residual": residual}) for layer in stack.layers)
            stack.__dict__.update(residual=residual, layers=layers)

    def _check_tying(self, head: HeadConfig) -> None:
        tie = self.tie_embeddings
        if tie in ("source-target", "all"):
            if self.encoder is None or self.decoder is None:
                raise contradiction(
                    "family", "tie_embeddings", f"{tie} joins two embeddings, and there is one", "tie_embeddings=head"
                )
            for key, encoder, decoder in (
                ("vocab_size", self.encoder.vocab_size, self.decoder.vocab_size),
                ("d_model", self.encoder.d_model, self.decoder.d_model),
                ("embedding.width", self.encoder.embedding.width, self.decoder.embedding.width),
                ("input.kind", self.encoder.input.kind, "tokens"),
            ):
                if encoder != decoder:
                    raise contradiction(
                        "tie_embeddings",
                        f"encoder.{key}",
                        f"one matrix cannot serve {encoder} and {decoder}",
                        "tie_embeddings=head or none",
                    )
        if tie in ("head", "all") and not head.predicts_tokens:
            raise contradiction(
                "tie_embeddings",
                "head.kind",
                f"a head of kind {head.kind} has no vocabulary matrix",
                "tie_embeddings=none",
            )
        if tie in ("head", "all") and not isinstance((self.decoder or self).input, TokenInputConfig):
            raise contradiction(
                "tie_embeddings", "input.kind", "features have no embedding to share", "tie_embeddings=none"
            )
        factorised = (self.decoder or self).embedding.width is not None
        if tie in ("head", "all") and isinstance(head, LanguageModelHeadConfig) and factorised:
            raise contradiction(
                "tie_embeddings",
                "embedding.width",
                "the head reads vectors of d_model, which is not the embedding's width",
                "tie_embeddings=none",
            )

    def with_vocab_size(self, size: int, source: int | None = None) -> ModelConfig:
        """The same with `size` ids where no vocabulary size was given; `source`: of an encoder's own tokenizer."""
        update: dict[str, Any] = {"vocab_size": self.vocab_size or size}
        for side, wanted in (("encoder", source or size), ("decoder", size)):
            stack: StackConfig | None = getattr(self, side)
            if stack is not None:
                update[side] = stack.model_copy(update={"vocab_size": stack.vocab_size or wanted})
        return self.model_copy(update=update)

    @property
    def context(self) -> int:
        """The longest sequence that every stack reads."""
        return min(stack.max_seq_len for stack in self.stacks.values())

    @property
    def stacks(self) -> dict[Literal["encoder", "decoder"], StackConfig]:
        """The stacks there are, by name, in the order data walks."""
        if self.encoder is not None and self.decoder is not None:
            return {"encoder": self.encoder, "decoder": self.decoder}
        return {"encoder": self} if self.family == "encoder" else {"decoder": self}
