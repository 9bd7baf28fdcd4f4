"""The whole model: embeddings, an encoder stack, a decoder stack, a head. Absent parts are absent.

Shapes: B batch, T tokens, S source tokens, M model width, V vocabulary, C classes, W feature width. Where an encoder
reads sound or images, T or S are the vectors that its stem makes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from qkv.config.errors import ConfigError, UsageError
from qkv.config.model import ModelConfig
from qkv.config.parts import ClassifierHeadConfig, TokenInputConfig
from qkv.config.stack import StackConfig
from qkv.nn.arguments import IGNORE, check_arguments, check_sequence
from qkv.nn.block import Stack
from qkv.nn.build import Dims, build
from qkv.nn.cache import Cache
from qkv.nn.embedding import Embedding
from qkv.nn.experts import balance, record_routing, routers_of
from qkv.nn.head import Head, last_real
from qkv.nn.init import initialise
from qkv.nn.mask import Documents, Padding, Rule
from qkv.nn.mtp import Mtp
from qkv.nn.resampler import Resampler


@dataclass
class Output:
    """What `forward` gives for labels: summed, so that a step may be split in any way and divided once by all targets.

    loss_sum: cross-entropy in nats, in float32 at least. target_count: the number of labels that count. mtp_sum: in
    training, that of multi-token prediction's further tokens, times its weight. aux: further losses of a network in
    training, summed over rows and times their weights: "load_balance" of mixtures of experts.
    """

    loss_sum: Tensor
    target_count: Tensor
    mtp_sum: Tensor | None = None
    aux: dict[str, Tensor] = field(default_factory=dict)

    @property
    def loss(self) -> Tensor:
        """The mean over the targets, in nats."""
        return self.loss_sum / self.target_count

    def further(self, targets: int, rows: int) -> dict[str, Tensor]:
        """The further losses, each as it is added to the mean loss of a step with so many targets and rows."""
        found = {name: loss / rows for name, loss in self.aux.items()}
        return found if self.mtp_sum is None else {**found, "mtp": self.mtp_sum / targets}


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
        if not isinstance(config, ModelConfig):
            raise UsageError(
                f"a Transformer is built from a ModelConfig, not a {type(config).__name__}", hint="config.model"
            )
        self.config = config
        self.label_smoothing = 0.0
        stacks = config.stacks
        for name, stack in stacks.items():
            if stack.vocab_size is None and isinstance(stack.input, TokenInputConfig):
                key = f"model.{name}.vocab_size" if len(stacks) == 2 else "model.vocab_size"
                raise ConfigError(f"`{key}` is not known yet", hint=f"{key}=4096, or a run that takes the tokenizer's")
        last = list(stacks.values())[-1]
        if config.head is not None and config.head.predicts_tokens and last.vocab_size is None:
            raise ConfigError(
                "`model.vocab_size` is not known, and the head predicts tokens", hint="model.vocab_size=4096"
            )
        if isinstance(config.head, ClassifierHeadConfig) and config.head.num_classes is None:
            raise ConfigError(
                "`model.head.num_classes` is not known yet",
                hint="model.head.num_classes=2, or a run that takes the labels of its data",
            )
        # weights are drawn once, by `init`: the modules' own defaults would be drawn only to be thrown away
        with torch.device("meta"):
            self._build(stacks)
        self._routes = bool(routers_of(self))  # looked for once: walking the tree would cost a small model's step
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
            queries = stacks["encoder"].num_queries
            self.encoder = Resampler(stacks["encoder"]) if queries else Stack(stacks["encoder"], causal=False)
        if "decoder" in stacks:
            d_source = stacks["encoder"].d_model if "encoder" in stacks else None
            self.decoder_embedding = Embedding(stacks["decoder"])
            self.decoder = Stack(stacks["decoder"], causal=True, d_source=d_source, prefix=config.prefix)
        assert config.head is not None
        dims = Dims(last.d_model, d_out=last.vocab_size, d_embedding=last.embedding.width, norm=last.norm)
        self.head: Head = build(config.head, dims)
        self.mtp = Mtp(config) if config.mtp.depth else None

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

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Transformer:
        """Move or cast, but cast nothing that is kept in float32 to fewer bits."""
        kept = [tensor for one in in_float32(self).values() for tensor in (one, one.grad) if tensor is not None]
        ids = {id(tensor) for tensor in kept}

        def apply(tensor: Tensor) -> Tensor:
            changed = fn(tensor)
            narrow = changed.dtype.itemsize < torch.float32.itemsize
            return tensor.to(changed.device) if narrow and id(tensor) in ids else changed

        super()._apply(apply, recurse)  # type: ignore[no-untyped-call]
        self._tie()  # moving from the meta device gives every owner a parameter of its own
        return self

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module; tied matrices stay one parameter with `assign=True` too."""
        result = super().load_state_dict(*args, **kwargs)
        self._tie()
        return result

    def new_cache(self, batch: int, length: int | None = None) -> Cache:
        """An empty cache for `batch` rows: of `length` tokens at most with memory of fixed size, or growing (None)."""
        if self.decoder is None:
            raise UsageError("an encoder has no cache: it reads its whole input at once")
        for name, number in (("batch", batch), ("length", 1 if length is None else length)):
            if not isinstance(number, int) or number < 1:
                raise UsageError(f"`{name}` of a cache is a whole number from 1, not {number!r}")
        parameter = next(self.parameters())
        return Cache(
            batch,
            self.decoder.window_of_layer,
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
        prefix_lengths: Tensor | None = None,
        cache: Cache | None = None,
        labels: Tensor | None = None,
        logits: Literal["all", "last"] = "all",
    ) -> Any:
        """Logits, or with `labels` an `Output`.

        ids [B, T]: of the decoder, or of an encoder-only model. source [B, S]: read by the encoder of an
        encoder-decoder; after the first call with a cache it is not passed again. What an encoder reads may instead be
        features [B, T, W], log-mel features [B, frames, mels], of which T = ceil(frames / 2) vectors become, or images
        [B, channels, height, width], whose T is fixed. lengths, source_lengths [B]: real tokens, features or frames per
        row; padding is on the right. positions [B, T]: by default 0, 1, ... per row, continued from the cache,
        restarting in each document. documents [B, T], source_documents [B, S]: equal ids belong together and see only
        each other; of an encoder-decoder both sides are numbered alike. segments [B, T]: BERT's token types.
        prefix_lengths [B]: how many tokens at the beginning of each row of a prefix-LM see each other (None: 0); with a
        cache they are in its first call. labels [B, T] (or [B] for a classifier): the target of the logit in the same
        place, -100 where there is none. logits "last": only each row's last real token.

        Logits are [B, T, V] (head none: hidden vectors [B, T, M]), [B, 1, V] for "last", [B, C] of a classifier.
        Raises UsageError for arguments that do not fit the model or each other.
        """
        check_arguments(
            self.config,
            ids,
            source=source,
            lengths=lengths,
            source_lengths=source_lengths,
            positions=positions,
            documents=documents,
            source_documents=source_documents,
            segments=segments,
            prefix_lengths=prefix_lengths,
            cache=cache,
            labels=labels,
            logits=logits,
        )
        if labels is not None and self.training and self._routes:
            record_routing(self)
        if self.decoder is None:
            h_BTM = self._encode(ids, lengths, positions, documents, segments)
            lengths = self._vectors_of(lengths)
        else:
            memory_BSM, rule = self._memory(source, source_lengths, documents, source_documents, cache)
            positions = _positions(torch.arange(ids.shape[1], device=ids.device)[None], positions, documents, cache)
            assert self.decoder_embedding is not None
            x_BTM = self.decoder_embedding(ids, positions, segments, lengths)
            h_BTM = self._decode(x_BTM, positions, lengths, documents, prefix_lengths, cache, memory_BSM, rule)
        if logits == "last" and labels is None and self.head.per_token:
            h_BTM = last_real(h_BTM, lengths)
        if labels is not None:
            output = self.loss(h_BTM, labels, lengths)
            if self.mtp is not None and self.training:
                output.mtp_sum = self._mtp_sum(h_BTM, x_BTM, labels, positions, lengths, documents)
            if self._routes:
                output.aux.update(self._balance_loss(ids, lengths, source_lengths))
            return output
        return self.head(h_BTM, lengths)

    def _balance_loss(self, ids: Tensor, lengths: Tensor | None, source_lengths: Tensor | None) -> dict[str, Tensor]:
        """Of `aux`, what routers noted in the forward pass."""
        read = lengths if self.decoder is None or self.encoder is None else self._memory_lengths(source_lengths)
        parts: list[tuple[nn.Module | None, Tensor | None]] = [(self.encoder, read), (self.decoder, lengths)]
        if self.mtp is not None:
            all_B = ids.new_full(ids.shape[:1], ids.shape[1]) if lengths is None else lengths
            parts += [(module, all_B - depth) for depth, module in enumerate(self.mtp.depths, 1)]
        losses = [balance(part, real) for part, real in parts if part is not None]
        found = [loss for loss in losses if loss is not None]
        return {"load_balance": torch.stack(found).sum()} if found else {}

    def _mtp_sum(
        self,
        h_BTM: Tensor,
        x_BTM: Tensor,
        labels_BT: Tensor,
        positions: Tensor | None,
        lengths: Tensor | None,
        documents: Tensor | None,
    ) -> Tensor:
        """What further tokens cost, the mean over depths, times its weight (arXiv 2412.19437, eq. 25)."""
        assert self.mtp is not None
        rule = _hidden_by(None, documents)
        depths = self.mtp(h_BTM, x_BTM, labels_BT, positions, lengths_B=lengths, documents_BT=documents, rule=rule)
        sums = [self.loss(h_BTM, targets_BT).loss_sum for h_BTM, targets_BT in depths]
        return self.config.mtp.weight * torch.stack(sums).mean()

    def encode(self, inputs: Tensor, lengths: Tensor | None = None) -> Tensor:
        """The encoder's hidden vectors [B, S, M] for what it reads, [B, Q, M] of Q learned queries; lengths [B]: of
        each row."""
        if self.encoder is None:
            raise UsageError("a decoder-only model has no encoder")
        check_sequence(self.encoder.config, inputs, lengths, None, None, None, prefix="", name="inputs")
        return self._encode(inputs, lengths)

    def _encode(
        self,
        inputs: Tensor,
        lengths: Tensor | None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        segments: Tensor | None = None,
    ) -> Tensor:
        assert self.encoder is not None
        assert self.encoder_embedding is not None
        vectors_B = self._vectors_of(lengths)
        rule = _hidden_by(vectors_B, documents)
        index_1S = torch.arange(self.encoder.config.input.length(inputs.shape[1]), device=inputs.device)[None]
        positions = _positions(index_1S, positions, documents, None)
        x_BSM = self.encoder_embedding(inputs, positions, segments, lengths)
        h_BSM: Tensor = self.encoder(x_BSM, positions, lengths_B=vectors_B, documents_BT=documents, rule=rule)
        return h_BSM

    def _vectors_of(self, lengths: Tensor | None) -> Tensor | None:
        """How many real vectors [B] the encoder makes of the real ids, features or frames of each row."""
        assert self.encoder is not None
        return None if lengths is None else self.encoder.config.input.length(lengths)

    def _memory_lengths(self, source_lengths: Tensor | None) -> Tensor | None:
        """How many vectors [B] that the encoder puts out are real; None: all, as those of learned queries are."""
        assert self.encoder is not None
        return None if self.encoder.config.num_queries else self._vectors_of(source_lengths)

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
            return None, cache.source_rule
        if source is None:
            return None, None
        vectors_B = self._memory_lengths(source_lengths)
        rule: Rule | None = Padding(vectors_B) if vectors_B is not None else None
        if documents is not None and source_documents is not None:
            within = Documents(documents, source_documents)
            rule = within if rule is None else within & rule
        if cache is not None:
            for cross in cache.cross:  # a call that broke off may have filled some
                if cross is not None:
                    cross.reset()
        return self._encode(source, source_lengths, documents=source_documents), rule

    def _decode(
        self,
        x_BTM: Tensor,
        positions: Tensor,
        lengths: Tensor | None,
        documents: Tensor | None,
        prefix_lengths: Tensor | None,
        cache: Cache | None,
        memory_BSM: Tensor | None,
        memory_rule: Rule | None,
    ) -> Tensor:
        """Embeddings to the decoder's hidden vectors, [B, T, M]; the cache takes note only when all went well."""
        assert self.decoder is not None
        # a causal stack hides right padding by itself: it lies in every real token's future
        rule = _hidden_by(None, documents)
        h_BTM: Tensor = self.decoder(
            x_BTM,
            positions,
            lengths_B=lengths,
            documents_BT=documents,
            rule=rule,
            memory_BSN=memory_BSM,
            memory_rule=memory_rule,
            prefix_B=prefix_lengths,
            cache=cache,
        )
        if cache is not None:
            cache.advance(x_BTM.shape[1], lengths)
            if memory_BSM is not None:
                cache.source_rule, cache.has_source = memory_rule, True
        return h_BTM

    def loss(self, h_BTM: Tensor, labels: Tensor, lengths: Tensor | None = None) -> Output:
        """The head's answers to hidden vectors against their labels."""
        loss_sum = self.head.loss(h_BTM, labels, lengths, self.label_smoothing)
        return Output(loss_sum, (labels != IGNORE).sum())


def in_float32(network: nn.Module) -> dict[str, nn.Parameter]:
    """What modules list in an attribute `float32`, by name: it is not cast to fewer bits when the network is."""
    listed = {
        f"{path}.{name}": getattr(module, name)
        for path, module in network.named_modules()
        for name in getattr(module, "float32", ())
    }
    return {name: parameter for name, parameter in listed.items() if parameter is not None}


def _hidden_by(lengths: Tensor | None, documents: Tensor | None) -> Rule | None:
    """The rule by which lengths and documents hide keys."""
    rule: Rule | None = Documents(documents, documents) if documents is not None else None
    if lengths is None:
        return rule
    return Padding(lengths) if rule is None else rule & Padding(lengths)


def _positions(index_1T: Tensor, positions: Tensor | None, documents: Tensor | None, cache: Cache | None) -> Tensor:
    """Positions [B or 1, T]: given, or continued from the cache, or restarting where a document begins."""
    if positions is not None:
        return positions
    if cache is not None:
        return index_1T + (cache.longest if cache.even and cache.capacity is None else cache.lengths_B[:, None])
    if documents is None:
        return index_1T
    starts_BT = torch.ones_like(documents, dtype=torch.bool)
    starts_BT[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index_1T - torch.where(starts_BT, index_1T, 0).cummax(1).values
