"""The door of the network: arguments that do not fit it, or each other, are refused here by name.

Further in they would fail without a name, or worse, not fail. Shapes are always checked; values only on a CPU outside a
compiled graph, because looking at them would stall a device and break a graph.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from qkv.config.errors import UsageError
from qkv.config.model import ModelConfig
from qkv.config.positions import LearnedConfig
from qkv.config.stack import StackConfig
from qkv.nn.cache import Cache

INTEGERS = (torch.int64, torch.int32)
IGNORE = -100
"""A label that is not a target."""


def check_arguments(
    config: ModelConfig,
    ids: Tensor,
    *,
    source: Tensor | None,
    lengths: Tensor | None,
    source_lengths: Tensor | None,
    positions: Tensor | None,
    documents: Tensor | None,
    source_documents: Tensor | None,
    segments: Tensor | None,
    prefix_lengths: Tensor | None,
    cache: Cache | None,
    labels: Tensor | None,
    logits: str,
) -> None:
    """Raise UsageError for the first argument of `Transformer.forward` that cannot be meant."""
    stacks = config.stacks
    main = stacks["decoder"] if "decoder" in stacks else stacks["encoder"]
    check_sequence(main, ids, lengths, positions, documents, segments, prefix="", name="ids")
    if len(stacks) == 2:
        _check_source(stacks["encoder"], ids, source, source_lengths, documents, source_documents, cache)
    else:
        for name, given in (
            ("source", source),
            ("source_lengths", source_lengths),
            ("source_documents", source_documents),
        ):
            if given is not None:
                raise UsageError(f"`{name}` is for encoder-decoders; a model of family {config.family} has one stack")
    if cache is not None:
        _check_cache(config, ids, documents, cache, main)
    if prefix_lengths is not None:
        _check_prefix(config, ids, lengths, documents, prefix_lengths, cache)
    if logits not in ("all", "last"):
        raise UsageError(f"`logits` is all or last, not {logits!r}")
    if labels is not None:
        _check_labels(config, ids, labels, main)


def check_sequence(
    stack: StackConfig,
    inputs: Tensor,
    lengths: Tensor | None,
    positions: Tensor | None,
    documents: Tensor | None,
    segments: Tensor | None,
    *,
    prefix: Literal["", "source_"],
    name: str,
) -> None:
    """One stack's input and what comes with it."""
    if not isinstance(inputs, Tensor):
        raise UsageError(f"`{name}` is a {type(inputs).__name__}, expected a tensor", hint="torch.tensor(...)")
    kind = stack.input
    fitting = inputs.dtype in INTEGERS if kind.reads_ids else inputs.is_floating_point()
    if not fitting or not _has_axes(inputs, kind.axes):
        raise UsageError(f"`{name}` is {_describe(inputs)}, expected {kind.expects}")
    rows, size = inputs.shape[:2]
    length = kind.length(size)
    if not length:
        raise UsageError(f"`{name}` is {_describe(inputs)}: it holds no token")
    if length > stack.max_seq_len:
        tokens = f"{length} tokens" if length == size else f"{size} frames, and the {length} vectors they become"
        raise UsageError(
            f"`{name}` has {tokens}, which do not fit the model's context of {stack.max_seq_len}",
            hint="a shorter input, or a model with a larger max_seq_len",
        )
    if lengths is not None and kind.fixed_length is not None:
        raise UsageError(f"{kind.reads} are read whole, without `{prefix}lengths`")
    if documents is not None and kind.mixes:
        raise UsageError(f"{kind.reads} cannot be packed as `{prefix}documents`", hint="one row for each")
    if documents is not None and stack.num_queries is not None:
        raise UsageError(f"learned queries read no packed `{prefix}documents`", hint="one row for each")
    _check_shape(f"{prefix}lengths", lengths, [(rows,)])
    _check_shape("positions", positions, [(rows, length), (1, length)])
    # in packed rows, where positions restart with each document, distances between slots say the same
    if positions is not None and documents is None and any(layer.position.by_slots for layer in stack.layers):
        raise UsageError("`positions` would change nothing: the model's positions are distances between slots")
    _check_shape(f"{prefix}documents", documents, [(rows, length)])
    _check_shape("segments", segments, [(rows, length)])
    if segments is not None and not stack.embedding.num_segments:
        raise UsageError("the model has no `segments`", hint="embedding.num_segments=2 in its configuration")
    if kind.reads_ids:
        _check_range(name, inputs, stack.vocab_size or 0, "the vocabulary of")
    if isinstance(stack.position, LearnedConfig):  # other kinds know every position
        _check_range("positions", positions, stack.max_seq_len, "the context of")
    _check_range("segments", segments, stack.embedding.num_segments, "the segments,")
    _check_range(f"{prefix}lengths", lengths, size + 1, "the range below")


def _check_source(
    encoder: StackConfig,
    ids: Tensor,
    source: Tensor | None,
    source_lengths: Tensor | None,
    documents: Tensor | None,
    source_documents: Tensor | None,
    cache: Cache | None,
) -> None:
    if cache is not None and cache.has_source:
        for name, given in (("source", source), ("source_lengths", source_lengths)):
            if given is not None:
                raise UsageError(f"the cache holds this sequence's source already: leave `{name}` out")
        return
    if source is None:
        raise UsageError("an encoder-decoder needs `source`")
    if (documents is None) != (source_documents is None):
        raise UsageError("packing an encoder-decoder needs both `documents` and `source_documents`")
    check_sequence(encoder, source, source_lengths, None, source_documents, None, prefix="source_", name="source")
    if source.shape[0] != ids.shape[0]:
        raise UsageError(f"`source` has {source.shape[0]} rows and `ids` has {ids.shape[0]}")


def _check_cache(config: ModelConfig, ids: Tensor, documents: Tensor | None, cache: Cache, main: StackConfig) -> None:
    if config.family == "encoder":
        raise UsageError("an encoder has no cache: it reads its whole input at once")
    if documents is not None:
        raise UsageError("packed `documents` and a `cache` do not go together", hint="one row per document")
    if len(cache.layers) != main.num_layers:
        raise UsageError(f"the cache has {len(cache.layers)} layers and the model has {main.num_layers}")
    if cache.batch != ids.shape[0]:
        raise UsageError(f"the cache has {cache.batch} rows and `ids` has {ids.shape[0]}")
    end = cache.room_for(ids.shape[1])
    if end > main.max_seq_len:
        raise UsageError(
            f"{cache.longest} + {ids.shape[1]} = {end} tokens do not fit the model's context of {main.max_seq_len}",
            hint="a new cache, or a model with a larger max_seq_len",
        )


def _check_prefix(
    config: ModelConfig,
    ids: Tensor,
    lengths: Tensor | None,
    documents: Tensor | None,
    prefix_lengths: Tensor,
    cache: Cache | None,
) -> None:
    if not config.prefix:
        raise UsageError("the model has no prefix", hint="prefix=true in its configuration")
    if documents is not None:
        raise UsageError("a row of packed `documents` has no prefix", hint="one row per document")
    _check_shape("prefix_lengths", prefix_lengths, [(ids.shape[0],)])
    _check_range("prefix_lengths", prefix_lengths, ids.shape[1] + 1, "the range below")
    if cache is not None and cache.longest:
        raise UsageError("the tokens of a prefix see each other, so all of them are in a cache's first call")
    if lengths is None or torch.compiler.is_compiling() or ids.device.type != "cpu":
        return
    for row, (prefix, length) in enumerate(zip(prefix_lengths.tolist(), lengths.tolist(), strict=True)):
        if prefix > length:
            raise UsageError(f"the prefix of row {row} has {prefix} tokens, and the row {length}")


def _check_labels(config: ModelConfig, ids: Tensor, labels: Tensor, main: StackConfig) -> None:
    head = config.head
    assert head is not None
    classes = main.vocab_size if head.predicts_tokens else getattr(head, "num_classes", None)
    if classes is None:
        raise UsageError(f"a head of kind {head.kind} predicts nothing that `labels` could be")
    rows, length = ids.shape[0], main.input.length(ids.shape[1])
    _check_shape("labels", labels, [(rows, length) if head.predicts_tokens else (rows,)])
    _check_range("labels", labels, classes, "the classes,", besides=IGNORE)


def _has_axes(value: Tensor, axes: tuple[str | int, ...]) -> bool:
    """Whether the sizes of a tensor are these; a letter stands for any size."""
    return value.dim() == len(axes) and all(
        isinstance(wanted, str) or size == wanted for size, wanted in zip(value.shape, axes, strict=True)
    )


def _check_shape(name: str, value: Tensor | None, shapes: list[tuple[int, ...]]) -> None:
    """`value` is None, or integers of one of these shapes."""
    if value is None:
        return
    if not isinstance(value, Tensor):
        raise UsageError(f"`{name}` is a {type(value).__name__}, expected a tensor", hint="torch.tensor(...)")
    if tuple(value.shape) not in shapes or value.dtype not in INTEGERS:
        raise UsageError(f"`{name}` is {_describe(value)}, expected int64 {list(shapes[0])}")


def _check_range(name: str, value: Tensor | None, stop: int, of: str, besides: int | None = None) -> None:
    """Every value lies in 0 .. stop - 1, or is `besides`."""
    # nothing of a shape may be put into words before this line: a compiled graph would be specialised to it
    if value is None or torch.compiler.is_compiling() or value.device.type != "cpu" or not value.numel():
        return
    if besides is not None:
        value = value.masked_fill(value == besides, 0)
    low, high = torch.aminmax(value)
    bad = int(low) if low < 0 else int(high)
    if bad < 0 or bad >= stop:
        raise UsageError(f"{bad} in `{name}` is outside {of} {stop} (0 .. {stop - 1})")


def _describe(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
