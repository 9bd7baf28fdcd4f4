"""The whole model: embeddings, an encoder stack, a decoder stack, a head. Absent parts are absent.

Shapes: B batch, T tokens, S source tokens, M model width, V vocabulary, C classes, W feature width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.config.errors import ConfigError, UsageError
from qkv.config.model import ModelConfig, StackConfig, TokenInputConfig
from qkv.nn.block import Stack
from qkv.nn.build import Dims, build
from qkv.nn.cache import Cache
from qkv.nn.embedding import Embedding
from qkv.nn.head import Head, last_real
from qkv.nn.init import initialise
from qkv.nn.mask import Documents, Padding, Rule

IGNORE = -100
"""A label that is not a target."""


@dataclass
class Output:
    """What `forward` gives for labels: summed, so that a step may be split in any way and divided once by all targets.

    loss_sum: cross-entropy in nats, float32. target_count: the number of labels that count. aux: further losses.
    """

    loss_sum: Tensor
    target_count: Tensor
    aux: dict[str, Tensor] = field(default_factory=dict)


class Transformer(nn.Module):
    """A Transformer of any family, from its configuration, with random weights by the configuration's `init`.

    `label_smoothing` is the share of a target's probability that is spread over the vocabulary in the loss.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        """`device="meta"` builds shapes without memory. `generator` draws the weights; None: torch's global one."""
        super().__init__()
        self.config = config
        self.label_smoothing = 0.0
        stacks = config.stacks
        for name, stack in stacks.items():
            if stack.vocab_size is None and isinstance(stack.input, TokenInputConfig):
                key = f"model.{name}.vocab_size" if len(stacks) == 2 else "model.vocab_size"
                raise ConfigError(f"`{key}` is not known yet", hint=f"{key}=4096, or a run that takes the tokenizer's")
        # weights are drawn once, by `init`: the modules' own defaults would be drawn only to be thrown away
        with torch.device("meta"):
            self._build(stacks)
        self._tie()
        if torch.device(device or torch.get_default_device()).type != "meta":
            self.to_empty(device=device or torch.get_default_device())
            self._start(generator)

    def _build(self, stacks: dict[Literal["encoder", "decoder"], StackConfig]) -> None:
        config = self.config
        last = list(stacks.values())[-1]
        self.encoder_embedding = self.encoder = self.decoder_embedding = self.decoder = None
        if "encoder" in stacks:
            self.encoder_embedding = Embedding(stacks["encoder"])
            self.encoder = Stack(stacks["encoder"], causal=False)
        if "decoder" in stacks:
            d_source = stacks["encoder"].d_model if "encoder" in stacks else None
            self.decoder_embedding = Embedding(stacks["decoder"])
            self.decoder = Stack(stacks["decoder"], causal=True, d_source=d_source)
        assert config.head is not None
        self.head: Head = build(config.head, Dims(last.d_model, d_out=last.vocab_size, norm=last.norm))

    def _start(self, generator: torch.Generator | None) -> None:
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)  # norms keep this, the rest is drawn
        initialise(self, self.config.init, generator)

    def _tie(self) -> None:
        """Make tied matrices one parameter."""
        tie = self.config.tie_embeddings
        reader = self.decoder_embedding if self.decoder_embedding is not None else self.encoder_embedding
        assert reader is not None
        if tie in ("head", "all"):
            self.head.weight = reader.input.weight
        if tie in ("source-target", "all"):
            assert self.encoder_embedding is not None
            self.encoder_embedding.input.weight = reader.input.weight

    def _apply(self, *args: Any, **kwargs: Any) -> Transformer:
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._tie()  # moving from the meta device gives every owner a parameter of its own
        return self

    def new_cache(self, batch: int, length: int | None = None) -> Cache:
        """An empty cache for `batch` rows: of `length` tokens at most with memory of fixed size, or growing (None)."""
        if self.decoder is None:
            raise UsageError("an encoder has no cache: it reads its whole input at once")
        parameter = next(self.parameters())
        return Cache(
            batch,
            len(self.decoder.blocks),
            capacity=length,
            cross=self.encoder is not None,
            device=parameter.device,
        )

    def forward(
        self,
        ids: Tensor,
        *,
        source: Tensor | None = None,
        lengths: Tensor | None = None,
        source_lengths: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        source_documents: Tensor | None = None,
        segments: Tensor | None = None,
        cache: Cache | None = None,
        labels: Tensor | None = None,
        logits: Literal["all", "last"] = "all",
    ) -> Any:
        """Logits, or with `labels` an `Output`.

        ids [B, T]: of the decoder, or of an encoder-only model (there also features [B, T, W]). source [B, S] ids or
        [B, S, W] features: read by the encoder of an encoder-decoder; after the first call with a cache it is not
        passed again. lengths, source_lengths [B]: real tokens per row; padding is on the right. positions [B, T]: by
        default 0, 1, ... per row, continued from the cache, restarting in each document. documents [B, T],
        source_documents [B, S]: equal ids belong together and see only each other; of an encoder-decoder both sides
        are numbered alike. segments [B, T]: BERT's token types. labels [B, T] (or [B] for a classifier): the target of
        the logit in the same place, -100 where there is none. logits "last": only each row's last real token.

        Logits are [B, T, V] (head none: hidden vectors [B, T, M]), [B, 1, V] for "last", [B, C] of a classifier.
        Raises UsageError for arguments that do not fit the model or each other.
        """
        memory_BSM, memory_rule = None, None
        if self.decoder is None:
            if source is not None or cache is not None:
                raise UsageError("an encoder-only model takes its input as ids, and neither source nor cache")
            h_BTM = self.encode(ids, lengths, positions=positions, documents=documents, segments=segments)
        else:
            if self.encoder is not None:
                memory_BSM, memory_rule = self._memory(source, source_lengths, documents, source_documents, cache)
            elif source is not None:
                raise UsageError("a decoder-only model has no encoder to read `source`")
            h_BTM = self._decode(ids, lengths, positions, documents, segments, cache, memory_BSM, memory_rule)
        if logits == "last" and labels is None and self.head.per_token:
            h_BTM = last_real(h_BTM, lengths)
        if labels is not None:
            return self.loss(h_BTM, labels, lengths)
        return self.head(h_BTM, lengths)

    def encode(
        self,
        inputs: Tensor,
        lengths: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        segments: Tensor | None = None,
    ) -> Tensor:
        """The encoder's hidden vectors [B, S, M] for ids [B, S] or features [B, S, W]."""
        if self.encoder is None or self.encoder_embedding is None:
            raise UsageError("a decoder-only model has no encoder")
        _check_input(inputs, lengths, self.encoder.config, 0, "source" if self.decoder is not None else "ids")
        rule, real_BT = _hidden_by(inputs, lengths, documents)
        positions = _positions(inputs, positions, documents, None)
        x_BSM = self.encoder_embedding(inputs, positions, segments, real_BT)
        h_BSM: Tensor = self.encoder(x_BSM, positions, rule=rule)
        return h_BSM

    def _memory(
        self,
        source: Tensor | None,
        source_lengths: Tensor | None,
        documents: Tensor | None,
        source_documents: Tensor | None,
        cache: Cache | None,
    ) -> tuple[Tensor | None, Rule | None]:
        """What cross-attention reads, and what of it is hidden; nothing to read when the cache has it already."""
        if cache is not None and cache.has_source:
            if source is not None:
                raise UsageError("the cache holds this sequence's source already", hint="leaving `source` out")
            return None, cache.source_rule
        if source is None:
            raise UsageError("an encoder-decoder needs `source`")
        if (documents is None) != (source_documents is None):
            raise UsageError("packing an encoder-decoder needs both `documents` and `source_documents`")
        memory_BSM = self.encode(source, source_lengths, documents=source_documents)
        rule: Rule | None = Padding(source_lengths) if source_lengths is not None else None
        if documents is not None and source_documents is not None:
            within = Documents(documents, source_documents)
            rule = within if rule is None else within & rule
        if cache is not None:
            cache.source_rule, cache.has_source = rule, True
        return memory_BSM, rule

    def _decode(
        self,
        ids: Tensor,
        lengths: Tensor | None,
        positions: Tensor | None,
        documents: Tensor | None,
        segments: Tensor | None,
        cache: Cache | None,
        memory_BSM: Tensor | None,
        memory_rule: Rule | None,
    ) -> Tensor:
        assert self.decoder is not None
        assert self.decoder_embedding is not None
        if cache is not None and documents is not None:
            raise UsageError("packed documents and a cache do not go together", hint="one row per document")
        if cache is not None and cache.batch != ids.shape[0]:
            raise UsageError(f"the cache has {cache.batch} rows and ids has {ids.shape[0]}")
        _check_input(ids, lengths, self.decoder.config, cache.longest if cache is not None else 0, "ids")
        # a causal stack hides right padding by itself: it lies in every real token's future
        rule, real_BT = _hidden_by(ids, lengths, documents, padding=False)
        positions = _positions(ids, positions, documents, cache)
        x_BTM = self.decoder_embedding(ids, positions, segments, real_BT)
        h_BTM: Tensor = self.decoder(
            x_BTM, positions, rule=rule, memory_BSN=memory_BSM, memory_rule=memory_rule, cache=cache
        )
        if cache is not None:
            cache.advance(ids.shape[1], lengths)
        return h_BTM

    def loss(self, h_BTM: Tensor, labels: Tensor, lengths: Tensor | None = None) -> Output:
        """The head's answers to hidden vectors against their labels."""
        scores = self.head(h_BTM, lengths)
        if scores.shape[:-1] != labels.shape:
            raise UsageError(f"labels have shape {list(labels.shape)}, expected {list(scores.shape[:-1])}")
        # in float32 whatever the precision: bfloat16 logits round a loss of 36 to steps of 0.25
        loss_sum = F.cross_entropy(
            scores.flatten(0, -2).float(),
            labels.flatten(),
            ignore_index=IGNORE,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )
        return Output(loss_sum, (labels != IGNORE).sum())


def _hidden_by(
    inputs: Tensor, lengths: Tensor | None, documents: Tensor | None, *, padding: bool = True
) -> tuple[Rule | None, Tensor | None]:
    """The rule by which lengths and documents hide keys, and which slots [B, T] are real (None: all)."""
    rule: Rule | None = Documents(documents, documents) if documents is not None else None
    if lengths is None:
        return rule, None
    if padding:
        rule = Padding(lengths) if rule is None else rule & Padding(lengths)
    return rule, torch.arange(inputs.shape[1], device=inputs.device) < lengths[:, None]


def _positions(inputs: Tensor, positions: Tensor | None, documents: Tensor | None, cache: Cache | None) -> Tensor:
    """Positions [B or 1, T]: given, or continued from the cache, or restarting where a document begins."""
    if positions is not None:
        return positions
    index_1T = torch.arange(inputs.shape[1], device=inputs.device)[None]
    if cache is not None:
        return index_1T + (cache.longest if cache.even and cache.capacity is None else cache.lengths_B[:, None])
    if documents is None:
        return index_1T
    starts_BT = torch.ones_like(documents, dtype=torch.bool)
    starts_BT[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index_1T - torch.where(starts_BT, index_1T, 0).cummax(1).values


def _check_input(inputs: Tensor, lengths: Tensor | None, config: StackConfig, held: int, name: str) -> None:
    """Refuse what would fail deep inside, or worse, not fail."""
    tokens = isinstance(config.input, TokenInputConfig)
    if inputs.dim() != (2 if tokens else 3):
        raise UsageError(f"`{name}` has shape {list(inputs.shape)}, expected {'[B, T]' if tokens else '[B, T, width]'}")
    length = held + inputs.shape[1]
    if length > config.max_seq_len:
        raise UsageError(
            f"{length} tokens do not fit the model's context of {config.max_seq_len}",
            hint="a shorter input, or a model with a larger max_seq_len",
        )
    if torch.compiler.is_compiling() or inputs.device.type != "cpu" or not inputs.numel():
        return  # looking at values would stall a device and break a graph
    if tokens:
        low, high = int(inputs.min()), int(inputs.max())
        if low < 0 or high >= (config.vocab_size or 0):
            bad = low if low < 0 else high
            raise UsageError(f"the id {bad} in `{name}` is outside the vocabulary of {config.vocab_size}")
    if lengths is not None and (int(lengths.min()) < 0 or int(lengths.max()) > inputs.shape[1]):
        raise UsageError(f"lengths must lie in 0 .. {inputs.shape[1]}, got {lengths.tolist()}")
