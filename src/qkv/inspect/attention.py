"""Attention weights of any network: what its kernels receive, read through hooks, and what `math` makes of it.

The network computes as always, with its own kernels, and knows nothing of being looked at.

Shapes: T query slots, S key slots, H heads, G key/value heads, D width of queries and keys, E of values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from inspect import signature
from numbers import Integral
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from qkv.config.errors import UsageError
from qkv.config.parts import InputConfig, LogMelInputConfig, PatchInputConfig
from qkv.data.audio import HOP, SAMPLE_RATE
from qkv.data.describe import spelling
from qkv.generate.decode import check_ids, device_of, evaluating, pad, prefix_of
from qkv.generate.prompts import begin_of, end_of, prompt_ids, read_ids, text_ids, whole_ids
from qkv.nn.kernels import Kernel, MathKernel
from qkv.nn.mask import Mask
from qkv.nn.score import Scoring
from qkv.nn.transformer import Transformer
from qkv.tokenizer.tokenizer import Tokenizer

StackName = Literal["encoder", "decoder"]
Kind = Literal["self", "cross"]


@dataclass(frozen=True, eq=False)
class LayerAttention:
    """What the kernel of one layer received for one sequence. Weights are made when asked for, head by head."""

    q_1HTD: Tensor
    k_1GSD: Tensor
    v_1GSE: Tensor
    mask: Mask
    scoring: Scoring

    @property
    def shape(self) -> tuple[int, int, int]:
        """H, T, S."""
        return self.q_1HTD.shape[1], self.q_1HTD.shape[2], self.k_1GSD.shape[2]

    def head(self, number: int) -> Tensor:
        """The weights of one head, counted from 0: [T, S] on the CPU, in float32 at least.

        Rows sum to 1 (with sinks to less; a query that may attend to nothing: to 0), hidden keys have 0. Raises
        UsageError for a head that there is not.
        """
        heads, groups = self.q_1HTD.shape[1], self.k_1GSD.shape[1]
        check_number("head", number, heads)
        group = number // (heads // groups)
        parts = self.q_1HTD[:, number, None], self.k_1GSD[:, group, None], self.v_1GSE[:, group, None]
        q_11TD, k_11SD, v_11SE = (part.to(torch.promote_types(part.dtype, torch.float32)) for part in parts)
        _, weights_11TS = MathKernel().attend(q_11TD, k_11SD, v_11SE, self.mask, self.scoring.head(number))
        return weights_11TS[0, 0].detach().cpu()

    def weights(self) -> Tensor:
        """The weights of all heads, [H, T, S]."""
        return torch.stack([self.head(number) for number in range(self.shape[0])])


def attention_weights(network: Transformer, ids_1T: Tensor, **options: Any) -> list[Tensor]:
    """The weights [H, T, S] of the layers asked for; the options are those of `read_attention`.

    Each takes H x T x S x 4 bytes: of long inputs, `read_attention` gives one layer or head at a time.
    """
    return [layer.weights() for layer in read_attention(network, ids_1T, **options)]


def read_attention(
    network: Transformer,
    ids_1T: Tensor,
    *,
    stack: StackName | None = None,
    kind: Kind = "self",
    layers: Sequence[int] | None = None,
    **inputs: Tensor | None,
) -> list[LayerAttention]:
    """What the kernels of a stack receive in one forward pass over one sequence, without dropout.

    stack: None is the decoder, of an encoder-only model the encoder. kind: "cross" is the decoder's attention to the
    source. layers: counted from 0, in this order; None: all that have such attention. inputs: `source`, `lengths`,
    `documents` and the other inputs of `Transformer.forward`. The network's mode is put back and no hook stays,
    whatever happens. Raises UsageError for what the network does not have, and what `forward` raises.
    """
    if len(ids_1T) != 1:
        raise UsageError(
            f"attention is read of one sequence at a time, not of {len(ids_1T)}", hint="ids[row : row + 1]"
        )
    kernels = _kernels(network, stack or main_stack(network), kind)
    having = [layer for layer, kernel in enumerate(kernels) if kernel is not None]
    wanted = list(having if layers is None else layers)
    for layer in wanted:
        check_number("layer", layer, len(kernels))
        if layer not in having:
            raise UsageError(f"layer {layer} has no {kind}-attention", hint=f"layers {', '.join(map(str, having))}")
    received: dict[int, LayerAttention] = {}
    with ExitStack() as hooks, evaluating(network.modules()), torch.no_grad(), _eager():
        for kernel in {kernel for layer in wanted if (kernel := kernels[layer]) is not None}:
            # layers that share their parameters share their kernel, which is called for one after the other
            calls = [layer for layer, other in enumerate(kernels) if other is kernel]
            hooks.enter_context(kernel.register_forward_pre_hook(_keep_in(received, calls), with_kwargs=True))
        network(ids_1T, logits="last", **inputs)
    return [received[layer] for layer in wanted]


def main_stack(network: Transformer) -> StackName:
    """The stack that the head reads."""
    return "encoder" if network.decoder is None else "decoder"


def _kernels(network: Transformer, stack: StackName, kind: Kind) -> list[Kernel | None]:
    """The kernel of each layer; None where a layer has no such attention."""
    if stack not in ("encoder", "decoder") or kind not in ("self", "cross"):
        raise UsageError(f"there is encoder or decoder, self or cross, and not {stack} {kind}")
    tower = getattr(network, stack)
    if tower is None:
        raise UsageError(f"a model of family {network.config.family} has no {stack}")
    if kind == "cross" and (stack == "encoder" or network.encoder is None):
        raise UsageError(
            "only the decoder of an encoder-decoder has cross-attention, and this is the "
            f"{stack} of a model of family {network.config.family}"
        )
    parts = [block.attention(kind) for block in tower.layers]
    return [None if part is None else _kernel(part, layer) for layer, part in enumerate(parts)]


def _kernel(attention: nn.Module, layer: int) -> Kernel:
    kernels = [module for module in attention.modules() if isinstance(module, Kernel)]
    if len(kernels) != 1:
        raise UsageError(f"the attention of layer {layer} has {len(kernels)} kernels: one can be looked at")
    return kernels[0]


def _keep_in(received: dict[int, LayerAttention], layers: Sequence[int]) -> Callable[..., None]:
    """A hook for the kernel of these layers, which are called in this order."""
    calls = iter(layers)

    def hook(kernel: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = signature(kernel.forward).bind(*args, **kwargs).arguments
        received[next(calls)] = LayerAttention(*list(given.values())[:5])

    return hook


def _eager() -> AbstractContextManager[Any]:
    """A compiled block calls no new hooks. Without this module nothing is compiled, and loading it takes a second."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def check_number(name: str, number: int, count: int) -> None:
    """Raise UsageError unless `number` is one of so many, counted from 0."""
    if isinstance(number, bool) or not isinstance(number, Integral) or not 0 <= number < count:
        raise UsageError(f"there are {name}s 0 to {count - 1}, got {number}")


# --- of what a model reads --------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class StackAttention:
    """The attention of one stack over what it reads, with names for both axes, [T] and [S]: tokens, and of images and
    sound the vectors that the encoder makes of them (`vector_names`).

    rows: self-attention, what attends; cross-attention, the tokens that are being predicted: the query that reads
    target token t - 1 predicts token t. A part of a character is shown by its bytes, `\\x..`. source, grid: of images
    and sound, see `Alignment`.
    """

    stack: StackName
    kind: Kind
    rows: list[str]
    columns: list[str]
    layers: list[LayerAttention]
    source: Tensor | None = None
    grid: tuple[int, int] | None = None


@dataclass(frozen=True)
class Alignment:
    """Who reads what: `weights` [T, S] from the target tokens `rows` [T] to `columns` [S], the tokens of the source, or
    what the encoder makes of an image or sound (`vector_names`).

    Rows sum to 1, with sinks to less; row t is the attention with which token t was predicted. source: what
    the encoder read of an image [C, H, W] or sound [F, S], None of a text. grid: the rows and columns of an image's
    patches, which are the last of the columns, row by row.
    """

    rows: list[str]
    columns: list[str]
    weights: NDArray[np.float32]
    source: NDArray[np.float32] | None = None
    grid: tuple[int, int] | None = None


def attention_of(
    network: Transformer,
    tokenizer: Tokenizer | None,
    source: str | Tensor,
    *,
    target: str | Sequence[int] | None = None,
    source_tokenizer: Tokenizer | None = None,
    start_ids: Sequence[int] | None = None,
    stack: StackName | None = None,
    kind: Kind = "self",
) -> StackAttention:
    """The attention over `source` as the network reads it in training: a text as [begin] text, in encoders also [end],
    to a prefix-LM the text is its prefix; or a tensor, what an encoder reads of an image [C, H, W] or sound [F, S].

    target: what the decoder of an encoder-decoder is given, a text or generated ids: it reads [begin] target and
    predicts target [end]. source_tokenizer: of a text there (None: one tokenizer for both). start_ids: what the decoder
    starts from there (None: [begin]). stack, kind: see `read_attention`. Raises UsageError for a target that is missing
    or not meant, and for what does not fit.
    """
    stack = stack or main_stack(network)
    if network.encoder is not None and network.decoder is not None:
        start = begin_of(tokenizer) if start_ids is None else list(start_ids)
        return _attention_of_pair(network, source_tokenizer or tokenizer, tokenizer, source, target, start, stack, kind)
    if target is not None:
        raise UsageError(f"a model of family {network.config.family} reads one source and no target")
    inputs, names = _read(network, main_stack(network), tokenizer, source)
    prefix_1 = prefix_of(network, [range(len(names))]).get("prefix_lengths")
    layers = read_attention(network, inputs, stack=stack, kind=kind, prefix_lengths=prefix_1)
    return StackAttention(stack, kind, names, names, layers, **_shown(network, source))


def _attention_of_pair(
    network: Transformer,
    source_tokenizer: Tokenizer | None,
    tokenizer: Tokenizer | None,
    source: str | Tensor,
    target: str | Sequence[int] | None,
    start: list[int],
    stack: StackName,
    kind: Kind,
) -> StackAttention:
    assert network.encoder is not None
    if network.encoder.config.num_queries and (stack == "encoder" or kind == "cross"):
        raise UsageError(
            "what the encoder's learned queries read or become has no place in the source",
            hint="qkv.inspect.attention.read_attention",
        )
    inputs, names = _read(network, "encoder", source_tokenizer, source)
    if stack == "encoder":
        if target is not None:
            raise UsageError("the encoder reads the source and no target", hint="stack decoder, or no target")
        whole = [0, 0]  # what the decoder reads is all the same to the encoder
    elif target is None:
        raise UsageError("the decoder of an encoder-decoder reads a target", hint="target, a text or generated ids")
    elif isinstance(target, str):
        whole = start + text_ids(tokenizer, target) + end_of(tokenizer)
    else:
        ids = read_ids(target, "the target")
        whole = ids if ids[: len(start)] == start else start + ids
    ids_1T = _sequence(network, "decoder", whole[:-1], "the target")
    layers = read_attention(network, ids_1T, source=inputs, stack=stack, kind=kind)
    if stack == "encoder":
        return StackAttention(stack, kind, names, names, layers, **_shown(network, source))
    if kind == "cross":
        rows = _spelled(whole[1:], tokenizer)
        return StackAttention(stack, kind, rows, names, layers, **_shown(network, source))
    tokens = _spelled(whole[:-1], tokenizer)
    return StackAttention(stack, kind, tokens, tokens, layers)


def _read(
    network: Transformer, stack: StackName, tokenizer: Tokenizer | None, source: str | Tensor
) -> tuple[Tensor, list[str]]:
    """What the stack reads of a source, as a batch of one, and a name for each vector that becomes of it."""
    if isinstance(source, Tensor):
        parameter = next(network.parameters())
        names = vector_names(network.config.stacks[stack].input, len(source))
        return source[None].to(parameter.device, parameter.dtype), names
    ids = prompt_ids(tokenizer, source) if stack == "decoder" else whole_ids(tokenizer, source)
    return _sequence(network, stack, ids, "the text"), _spelled(ids, tokenizer)


def vector_names(reads: InputConfig, size: int) -> list[str]:
    """What each vector stands for that becomes of an image (the class token, registers, patches by row and column) or
    of `size` frames of sound (the moment in its middle) or features (their numbers)."""
    if isinstance(reads, PatchInputConfig):
        rows, columns = reads.grid
        learned = ["class"] * reads.class_token + [f"register {number}" for number in range(reads.num_registers)]
        return learned + [f"patch {row}, {column}" for row in range(rows) for column in range(columns)]
    count = reads.length(size)
    if isinstance(reads, LogMelInputConfig):
        return [f"{2 * number * HOP / SAMPLE_RATE:.2f} s" for number in range(count)]
    return [f"vector {number}" for number in range(count)]


def _shown(network: Transformer, source: str | Tensor) -> dict[str, Any]:
    """What pictures of the attention are drawn upon; nothing of a text."""
    if isinstance(source, str):
        return {}
    reads = next(iter(network.config.stacks.values())).input
    return {"source": source, "grid": reads.grid if isinstance(reads, PatchInputConfig) else None}


def _sequence(network: Transformer, stack: StackName, ids: list[int], where: str) -> Tensor:
    """The ids of one sequence, [1, T], that this stack can read."""
    config = network.config.stacks[stack]
    if not config.input.reads_ids:
        reads = config.input.reads
        raise UsageError(f"the {stack} reads {reads}, not text", hint="qkv.inspect.attention.read_attention")
    if not ids:
        raise UsageError(f"{where} is empty: there is nothing to read")
    if len(ids) > config.max_seq_len:
        raise UsageError(f"{where} has {len(ids)} tokens, and the {stack}'s context is {config.max_seq_len}")
    check_ids(ids, config.vocab_size, where)
    return pad([ids], device_of(network))[0]


def _spelled(ids: Sequence[int], tokenizer: Tokenizer | None) -> list[str]:
    assert tokenizer is not None  # it has read the text
    return [spelling(token_id, tokenizer) for token_id in ids]


def alignment(
    layers: Sequence[LayerAttention], *, layer: int | Literal["last", "mean"] = "last", head: int | None = None
) -> Tensor:
    """Who reads what, in one matrix [T, S]: the mean over the heads of one layer, or one head of it.

    layer: counted from 0; "mean" is that of all layers. Rows sum to 1, with sinks to less: what a sink takes is no
    token's. Raises UsageError for what is not there.
    """
    if layer == "mean":
        chosen = list(layers)
    else:
        number = len(layers) - 1 if layer == "last" else layer
        check_number("layer", number, len(layers))
        chosen = [layers[number]]
    matrices = [one.weights().mean(0) if head is None else one.head(head) for one in chosen]
    return torch.stack(matrices).mean(0)
