"""A model in numbers, from its configuration alone: nothing is allocated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from qkv.config.model import ModelConfig
from qkv.nn.block import Stack
from qkv.nn.embedding import Embedding
from qkv.nn.experts import Experts, Router
from qkv.nn.head import LanguageModelHead, MaskedLanguageModelHead
from qkv.nn.stem import LogMelInput
from qkv.nn.transformer import Transformer

BYTES = {"fp32": 4, "bf16": 2}
TRAIN_STATE_BYTES_PER_PARAMETER = 16
"""Weight, gradient and two moments of Adam, four bytes each."""


@dataclass(frozen=True)
class Summary:
    """params counts every parameter once, tied or not; params_embedding those of tokens, segments and learned
    positions; params_active those that one token passes through.

    flops_per_token_forward: multiplications and additions of one token's forward at the full context (`max_seq_len`
    keys per query, or the window; the causal half is not taken off); of an encoder-decoder, one source and one target
    token. kv_cache_bytes_per_token: what all decoder layers keep of their own tokens, at the full context too: of a
    window no more than the window; cross_cache_bytes_per_source_token: of the source. train_state_bytes: weights,
    gradients and Adam's
    two moments in float32, without activations.
    """

    family: str
    params: int
    params_embedding: int
    params_active: int
    flops_per_token_forward: int
    kv_cache_bytes_per_token: int
    cross_cache_bytes_per_source_token: int
    train_state_bytes: int


def summarise(config: ModelConfig, *, cache_dtype: str = "bf16", network: Transformer | None = None) -> Summary:
    """The numbers of a model; `cache_dtype` ("fp32", "bf16") is what keys and values are kept in."""
    network = network or Transformer(config, device="meta")
    embeddings = [module for module in network.modules() if isinstance(module, Embedding)]
    params = count(network.parameters())
    cached, crossed = _cache_widths(network.decoder)
    return Summary(
        family=config.family,
        params=params,
        params_embedding=count(parameter for module in embeddings for parameter in _tables(module)),
        params_active=params - _idle(network),
        flops_per_token_forward=_flops(network),
        kv_cache_bytes_per_token=cached * BYTES[cache_dtype],
        cross_cache_bytes_per_source_token=crossed * BYTES[cache_dtype],
        train_state_bytes=params * TRAIN_STATE_BYTES_PER_PARAMETER,
    )


def count(parameters: Iterable[nn.Parameter]) -> int:
    """The number of values in these parameters, each parameter once."""
    return sum(parameter.numel() for parameter in {id(p): p for p in parameters}.values())


def _tables(embedding: Embedding) -> list[nn.Parameter]:
    parts = [embedding.position, embedding.segments]
    if isinstance(embedding.input, nn.Embedding):
        parts.append(embedding.input)
    return [parameter for part in parts if part is not None for parameter in part.parameters()]


def _idle(network: Transformer) -> int:
    """The parameters of the experts that a token does not go through."""
    experts = [module for module in network.modules() if isinstance(module, Experts)]
    return sum(count(module.parameters()) // len(module.up) * (len(module.up) - module.top_k) for module in experts)


def _flops(network: Transformer) -> int:
    """Two per weight of every matrix a token passes, and per product of attention for each key; and what residual
    streams mix."""
    total = 0
    for part in network.children():
        if isinstance(part, Embedding | LanguageModelHead | MaskedLanguageModelHead):  # other heads: once per sequence
            total += _matrix_flops(part)
    source_length = network.encoder.config.max_seq_len if network.encoder is not None else 0
    for stack in (network.encoder, network.decoder):
        if not isinstance(stack, Stack):
            continue
        for window, block, layer in zip(stack.window_of_layer, stack.layers, stack.config.layers, strict=True):
            reach = stack.config.max_seq_len
            if window:
                reach = min(reach, window if stack.causal else 2 * window - 1)
            total += _matrix_flops(block) + 2 * reach * layer.attention.score_width
            if layer.cross_attention is not None:
                total += 2 * source_length * layer.cross_attention.score_width
        total += stack.config.residual.mixing_flops(stack.config.d_model, [len(block) for block in stack.layers])
    return total


def _matrix_flops(part: nn.Module) -> int:
    total = 0
    for module in part.modules():
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | Router | LanguageModelHead | MaskedLanguageModelHead):
            total += 2 * module.weight.numel()
        if isinstance(module, Experts):
            total += 2 * module.top_k * sum(part[0].numel() for part in module.matrices)
        if isinstance(module, LogMelInput):  # two frames become one vector
            total += 2 * module.first.weight.numel()
    return total


def _cache_widths(decoder: Stack | None) -> tuple[int, int]:
    """Numbers cached per token by self-attention and per source token by cross-attention."""
    if decoder is None:
        return 0, 0
    context, layers = decoder.config.max_seq_len, decoder.config.layers
    crosses = [layer.cross_attention for layer in layers if layer.cross_attention is not None]
    own = sum(layer.attention.cached(context) for layer in layers) // context
    return own, sum(cross.cache_width for cross in crosses)
