"""A model in numbers, from its configuration alone: nothing is allocated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from qkv.config.model import ModelConfig
from qkv.config.objectives import ClassifyObjectiveConfig
from qkv.config.parts import ClassifierHeadConfig
from qkv.config.run import Config
from qkv.nn.block import Stack
from qkv.nn.embedding import Embedding
from qkv.nn.experts import Experts, Router
from qkv.nn.head import LanguageModelHead, MaskedLanguageModelHead
from qkv.nn.stem import LogMelInput
from qkv.nn.transformer import Transformer

BYTES = {"fp32": 4, "bf16": 2}
TRAIN_STATE_BYTES_PER_PARAMETER = 16
"""Weight, gradient and two moments of Adam, four bytes each."""
ASSUMED_CLASSES, ASSUMED_TOKENS = 2, 100
"""What is counted where the data decide."""
_OF_THE_DATA = ("word", "char")
"""Kinds of tokenizers whose vocabulary is as large as their text makes it."""
_READING = ("key", "value", "latent_down", "key_up", "value_up")
"""Projections of what attention reads, by their names in its modules."""


@dataclass(frozen=True)
class Summary:
    """params counts every parameter once, tied or not; params_embedding those of tokens, segments and learned
    positions; params_training those that only training uses (multi-token prediction); params_active those that one
    token passes through after it.

    flops_per_token_forward: multiplications and additions of one token's forward at the full context (`max_seq_len`
    keys per query, or the window; the causal half is not taken off); of an encoder-decoder, one source and one target
    token. flops_per_token_train: those of a step of training, in which going back costs twice a forward, further tokens
    included. kv_cache_bytes_per_token: what all decoder layers keep of their own tokens, at the full context too: of a
    window no more than the window; cross_cache_bytes_per_source_token: of the source. train_state_bytes: weights,
    gradients and Adam's two moments in float32, without activations.
    """

    family: str
    params: int
    params_embedding: int
    params_training: int
    params_active: int
    flops_per_token_forward: int
    flops_per_token_train: int
    kv_cache_bytes_per_token: int
    cross_cache_bytes_per_source_token: int
    train_state_bytes: int


def summarise(config: ModelConfig, *, cache_dtype: str = "bf16", network: Transformer | None = None) -> Summary:
    """The numbers of a model; `cache_dtype` ("fp32", "bf16") is what keys and values are kept in."""
    network = network or Transformer(config, device="meta")
    embeddings = [module for module in network.modules() if isinstance(module, Embedding)]
    params, training = count(network.parameters()), 0 if network.mtp is None else count(network.mtp.parameters())
    cached, crossed = _cache_widths(network.decoder)
    return Summary(
        family=config.family,
        params=params,
        params_embedding=count(parameter for module in embeddings for parameter in _tables(module)),
        params_training=training,
        params_active=params - training - _idle(network),
        flops_per_token_forward=_flops(network),
        flops_per_token_train=3 * (_flops(network) + _mtp_flops(network)),
        kv_cache_bytes_per_token=cached * BYTES[cache_dtype],
        cross_cache_bytes_per_source_token=crossed * BYTES[cache_dtype],
        train_state_bytes=params * TRAIN_STATE_BYTES_PER_PARAMETER,
    )


def sized(config: Config) -> tuple[ModelConfig, dict[str, int]]:
    """The model with all its sizes, and by key those that are assumed because the data decide: how many classes there
    are, and how many words or characters."""
    model, assumed = config.model, {}
    if config.tokenizer.vocab_size:
        model = model.with_vocab_size(config.tokenizer.vocab_size)
    unknown = any(stack.vocab_size is None and stack.input.reads_ids for stack in model.stacks.values())
    if unknown and config.tokenizer.kind in _OF_THE_DATA and config.tokenizer.source is None:
        model = model.with_vocab_size(ASSUMED_TOKENS)
        assumed["model.vocab_size"] = ASSUMED_TOKENS
    head, objective = model.head, config.objective
    if isinstance(head, ClassifierHeadConfig) and head.num_classes is None:
        labels = objective.labels if isinstance(objective, ClassifyObjectiveConfig) else None
        classes = len(labels) if labels else ASSUMED_CLASSES
        model = model.model_copy(update={"head": head.model_copy(update={"num_classes": classes})})
        if labels is None:
            assumed["model.head.num_classes"] = classes
    return model, assumed


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
    parts = [part for part in (network.encoder, network.decoder) if part is not None]
    experts = [module for part in parts for module in part.modules() if isinstance(module, Experts)]
    return sum(count(module.parameters()) // len(module.up) * (len(module.up) - module.top_k) for module in experts)


def _flops(network: Transformer) -> int:
    """Two per weight of every matrix a token passes, and per product of attention for each key; and what residual
    streams mix. The work of learned queries is divided by the tokens that they read."""
    total = 0
    for part in network.children():
        if isinstance(part, Embedding | LanguageModelHead | MaskedLanguageModelHead):  # other heads: once per sequence
            total += _matrix_flops(part)
    source = None if network.encoder is None else network.encoder.config
    memory = 0 if source is None else source.num_queries or source.max_seq_len
    for stack in (network.encoder, network.decoder):
        if not isinstance(stack, Stack):
            continue
        config, length = stack.config, stack.config.max_seq_len
        vectors = config.num_queries or length  # that run through the layers
        in_layers = config.residual.mixing_flops(config.d_model, [len(block) for block in stack.layers])
        for window, block, layer in zip(stack.window_of_layer, stack.layers, config.layers, strict=True):
            reach = length + (config.num_queries or 0)
            if window:
                reach = min(reach, window if stack.causal else 2 * window - 1)
            in_layers += _matrix_flops(block) + 2 * reach * layer.attention.score_width
            if config.num_queries:
                total += _reading_flops(block.attention("self"))
            if source is not None and layer.cross_attention is not None:
                in_layers += 2 * memory * layer.cross_attention.score_width
                spared = source.max_seq_len - memory  # vectors that the decoder does not read
                total -= _reading_flops(block.attention("cross")) * spared // source.max_seq_len
        total += in_layers * vectors // length
    return total


def _mtp_flops(network: Transformer) -> int:
    """Those of the further tokens that training predicts: of each depth, its block and the head once more."""
    if network.mtp is None or network.decoder is None:
        return 0
    config, window = network.config, network.decoder.window_of_layer[-1]
    reach = min(config.max_seq_len, window or config.max_seq_len)
    mixing = config.residual.mixing_flops(config.d_model, [len(network.decoder.layers[-1])])
    each = _matrix_flops(network.head) + 2 * reach * config.layers[-1].attention.score_width + mixing
    return _matrix_flops(network.mtp) + len(network.mtp.depths) * each


def _reading_flops(attention: nn.Module | None) -> int:
    """Those of the keys and values of one vector that attention reads."""
    parts = [getattr(attention, name, None) for name in _READING]
    return sum(_matrix_flops(part) for part in parts if part is not None)


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
