"""Fixed inputs that show whether two ways of running a model, or two models, are the same.

Shapes: B rows, T tokens of the decoder or of a model with one stack, S tokens of a source.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from qkv.config.parts import LogMelInputConfig
from qkv.config.stack import StackConfig
from qkv.generate.prompts import begin_of, prompt_ids, text_ids, whole_ids
from qkv.nn.transformer import Transformer
from qkv.tokenizer.tokenizer import Tokenizer

TEXTS = (
    "Once upon a time there was a model that could count: one, two, three.",
    "我爱你。 def f(x):\n    return x + 1",
)
RANDOM_LENGTHS = (12, 48)

REAL_SIZE = 10_000_000
"""Parameters from which a model counts as a real one; below, it is of a size that tests have."""


@dataclass(frozen=True)
class Probe:
    """One sequence: ids [1, T], or what else an encoder reads; and the source [1, S] of an encoder-decoder. prefix: how
    many of its tokens see each other in a prefix-LM."""

    ids: Tensor
    source: Tensor | None = None
    prefix: int = 0

    def arguments(self, network: Transformer) -> dict[str, Any]:
        """What the network is called with, where it computes and in its precision."""
        return together([self], network)


def placed(value: Tensor, network: Transformer) -> Tensor:
    """A tensor where the network computes; floats in its precision."""
    parameter = next(network.parameters())
    return value.to(parameter.device, parameter.dtype) if value.is_floating_point() else value.to(parameter.device)


def probes(
    network: Transformer,
    tokenizer: Tokenizer | None = None,
    source_tokenizer: Tokenizer | None = None,
    *,
    start_ids: Sequence[int] | None = None,
    avoid: Collection[int] = (),
) -> list[Probe]:
    """Texts, where there is a tokenizer, and random ids: the same ones for the same model.

    source_tokenizer: of what an encoder-decoder reads (None: `tokenizer`). start_ids: what its decoder starts from
    (None: BOS). avoid: ids that are not drawn. What is longer than the context is cut. Half of what a prefix-LM reads
    is its prefix.
    """
    generator = torch.Generator().manual_seed(0)
    stacks = network.config.stacks
    inner = list(stacks.values())[-1]
    if len(stacks) == 2:
        sources = _inputs(stacks["encoder"], source_tokenizer or tokenizer, True, generator, avoid)
        start = begin_of(tokenizer) if start_ids is None else list(start_ids)
        targets = _inputs(inner, tokenizer, True, generator, avoid, start)
        # texts against the other texts, so that source and target are not of one length
        return [Probe(ids, source) for ids, source in zip([*targets[1:], targets[0]], sources, strict=False)]
    inputs = _inputs(inner, tokenizer, network.decoder is None, generator, avoid)
    return [Probe(one, prefix=one.shape[1] // 2 if network.config.prefix else 0) for one in inputs]


def _inputs(
    stack: StackConfig,
    tokenizer: Tokenizer | None,
    whole: bool,
    generator: torch.Generator,
    avoid: Collection[int],
    start: list[int] | None = None,
) -> list[Tensor]:
    """What a stack reads: `whole` texts [begin] text [end], after `start` where that is given, and random ids."""
    reads, longest = stack.input, stack.max_seq_len
    if not reads.reads_ids:
        return [torch.randn(shape, generator=generator) for shape in _shapes(stack)]
    texts: list[list[int]] = []
    for text in () if tokenizer is None else TEXTS:
        if start is not None:
            texts.append([*start, *text_ids(tokenizer, text)])
        else:
            texts.append(whole_ids(tokenizer, text) if whole else prompt_ids(tokenizer, text))
    allowed = torch.tensor([token_id for token_id in range(stack.vocab_size or 0) if token_id not in avoid])
    drawn = [allowed[torch.randint(len(allowed), (count,), generator=generator)] for count in RANDOM_LENGTHS]
    return [ids[None, :longest] for ids in [*(torch.tensor(ids) for ids in texts), *drawn]]


def _shapes(stack: StackConfig) -> Iterator[tuple[int, ...]]:
    """Of inputs that are no ids: sound as long as the encoder reads it, images, and features of two lengths."""
    _, *axes = stack.input.axes
    lengths = RANDOM_LENGTHS
    if isinstance(stack.input, LogMelInputConfig):
        lengths = (2 * stack.max_seq_len,) * 2
    for length in lengths:
        yield (1, *(min(length, 2 * stack.max_seq_len) if isinstance(axis, str) else axis for axis in axes))


def together(some: Sequence[Probe], network: Transformer) -> dict[str, Any]:
    """The arguments of one call for all of them, padded on the right."""
    given: dict[str, Any] = {}
    for name, lengths_name in (("ids", "lengths"), ("source", "source_lengths")):
        values = [getattr(probe, name) for probe in some]
        if values[0] is None:
            continue
        lengths = [value.shape[1] for value in values]
        given[name] = placed(pad_sequence([value[0] for value in values], batch_first=True), network)
        if len(set(lengths)) > 1:
            given[lengths_name] = torch.tensor(lengths, device=given[name].device)
    if network.config.prefix:
        given["prefix_lengths"] = torch.tensor([probe.prefix for probe in some], device=given["ids"].device)
    return given


def tolerance_for(network: Transformer, largest: float, *, reordered: bool = False) -> float | None:
    """How far outputs, the largest of which is `largest`, may differ. None: nothing is promised of such weights.

    In float32: 1e-3 for real models, and for those of the size of tests 1e-5 of the largest output, or 5e-5 where sums
    are added up in another order (`reordered`), as other kernels and compiled code do.
    """
    blocks = [buffer for name, buffer in network.named_buffers() if name.rpartition(".")[2] == "blocks"]
    if blocks or next(network.parameters()).dtype.itemsize < 4:
        return None
    if sum(parameter.numel() for parameter in network.parameters()) >= REAL_SIZE:
        return 1e-3
    return (5e-5 if reordered else 1e-5) * max(largest, 1.0)
