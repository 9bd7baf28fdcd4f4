"""How weights start. Norm weights start at 1, biases at 0, whatever the kind."""

from __future__ import annotations

import math
from functools import singledispatch

import torch
from torch import Tensor, nn

from qkv.config.parts import GPT2InitConfig, InitConfig, NormalInitConfig, T5InitConfig, XavierInitConfig
from qkv.nn.attention import Attention
from qkv.nn.block import Stack
from qkv.nn.feed_forward import FeedForward
from qkv.nn.head import LanguageModelHead, MaskedLanguageModelHead
from qkv.nn.position import Learned


def initialise(network: nn.Module, config: InitConfig, generator: torch.Generator | None = None) -> None:
    """Draw every weight of `network` anew; from `generator`, or from torch's global one."""
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.zero_()
        _draw(config, network, generator)


@singledispatch
def _draw(config: InitConfig, network: nn.Module, generator: torch.Generator | None) -> None:
    raise TypeError(f"no initialisation is registered for {type(config).__name__}")


def _matrices(network: nn.Module) -> list[Tensor]:
    return [module.weight for module in network.modules() if isinstance(module, nn.Linear)]


def _tables(network: nn.Module) -> list[Tensor]:
    """Embeddings, learned positions and untied vocabulary matrices."""
    kinds = (nn.Embedding, Learned, LanguageModelHead, MaskedLanguageModelHead)
    return [module.weight for module in network.modules() if isinstance(module, kinds)]


def _writers(stack: nn.Module) -> list[Tensor]:
    """The matrices whose results are written to the residual stream."""
    attention = [module.output.weight for module in stack.modules() if isinstance(module, Attention)]
    return attention + [module.down.weight for module in stack.modules() if isinstance(module, FeedForward)]


@_draw.register
def _normal(config: NormalInitConfig, network: nn.Module, generator: torch.Generator | None) -> None:
    for weight in _matrices(network) + _tables(network):
        weight.normal_(0.0, config.std, generator=generator)


@_draw.register
def _gpt2(config: GPT2InitConfig, network: nn.Module, generator: torch.Generator | None) -> None:
    _normal(NormalInitConfig(std=config.std), network, generator)
    for stack in network.modules():
        if isinstance(stack, Stack):
            for weight in _writers(stack):
                weight.normal_(0.0, config.std / math.sqrt(2 * len(stack.blocks)), generator=generator)


@_draw.register
def _xavier(config: XavierInitConfig, network: nn.Module, generator: torch.Generator | None) -> None:
    for weight in _matrices(network):
        nn.init.xavier_uniform_(weight, generator=generator)
    for weight in _tables(network):
        weight.normal_(0.0, weight.shape[1] ** -0.5, generator=generator)


@_draw.register
def _t5(config: T5InitConfig, network: nn.Module, generator: torch.Generator | None) -> None:
    for weight in _tables(network):
        weight.normal_(0.0, 1.0, generator=generator)
    for weight in _matrices(network):
        weight.normal_(0.0, weight.shape[1] ** -0.5, generator=generator)
    for module in network.modules():
        if isinstance(module, Attention):  # T5 does not divide scores by sqrt(D): the queries start smaller instead
            std = (module.query.in_features * module.head_dim) ** -0.5
            module.query.weight.normal_(0.0, std, generator=generator)
