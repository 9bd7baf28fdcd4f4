"""How weights start. What multiplies in a norm starts at 1, biases at 0, whatever the kind.

A part whose own parameters start otherwise has a method `start(generator)`, called after everything has been drawn.
"""

from __future__ import annotations

import math
from functools import singledispatch
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from qkv.config.parts import GPT2InitConfig, InitConfig, NormalInitConfig, T5InitConfig, XavierInitConfig
from qkv.config.residuals import DeepNormConfig
from qkv.nn.attention import Attention
from qkv.nn.block import Stack
from qkv.nn.experts import Experts, Router
from qkv.nn.feed_forward import FeedForward
from qkv.nn.head import LanguageModelHead, MaskedLanguageModelHead
from qkv.nn.latent_attention import LatentAttention
from qkv.nn.norm import RMSNorm
from qkv.nn.position import Learned, Relative
from qkv.nn.stem import PatchInput


@runtime_checkable
class OwnStart(Protocol):
    """A module that says how its own parameters start."""

    def start(self, generator: torch.Generator | None) -> None:
        """Write them, without gradients; what is drawn comes from `generator` (None: torch's global one)."""


MATRICES = (nn.Linear, nn.Conv1d, nn.Conv2d, Router)
"""Modules whose weight is drawn as a matrix, with what one output reads as its inputs."""


def initialise(network: nn.Module, config: InitConfig, generator: torch.Generator | None = None) -> None:
    """Draw every weight of `network` anew; from `generator`, or from torch's global one."""
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, MATRICES) and module.bias is not None:
                module.bias.zero_()
            if isinstance(module, RMSNorm) and module.unit_offset:
                module.weight.zero_()
        _draw(config, network, generator)
        _scale_for_deepnorm(network)
        for module in network.modules():
            if isinstance(module, OwnStart):
                module.start(generator)


@singledispatch
def _draw(config: InitConfig, network: nn.Module, generator: torch.Generator | None) -> None:
    raise TypeError(f"no initialisation is registered for {type(config).__name__}")


def _matrices(network: nn.Module) -> list[Tensor]:
    """Matrices, each expert's by itself."""
    experts = [module for module in network.modules() if isinstance(module, Experts)]
    return [
        *(module.weight for module in network.modules() if isinstance(module, MATRICES)),
        *(matrix for module in experts for part in module.matrices for matrix in part),
    ]


def _tables(network: nn.Module) -> list[Tensor]:
    """Embeddings, learned positions, class tokens, registers and untied vocabulary matrices."""
    kinds = (nn.Embedding, Learned, LanguageModelHead, MaskedLanguageModelHead)
    stems = [module for module in network.modules() if isinstance(module, PatchInput)]
    return [
        *(module.weight for module in network.modules() if isinstance(module, kinds)),
        *(token for stem in stems for token in (stem.class_token, stem.registers) if token is not None),
    ]


def _relative(network: nn.Module) -> list[tuple[Stack, Relative]]:
    """The relative positions of each stack, whose tables hold biases of scores."""
    stacks = [module for module in network.modules() if isinstance(module, Stack)]
    return [(stack, part) for stack in stacks for part in stack.positions if isinstance(part, Relative)]


def _writers(stack: nn.Module) -> list[Tensor]:
    """The matrices whose results are written to the residual stream."""
    attention = [module.output.weight for module in stack.modules() if isinstance(module, Attention | LatentAttention)]
    experts = [matrix for module in stack.modules() if isinstance(module, Experts) for matrix in module.down]
    dense = [module.down.weight for module in stack.modules() if isinstance(module, FeedForward)]
    return attention + dense + experts


def _scale_for_deepnorm(network: nn.Module) -> None:
    """Multiply by beta what DeepNorm starts smaller: of each stack, values, attention outputs and feed-forward
    matrices (Wang et al. 2022, arXiv 2203.00555, figure 2)."""
    for stack in network.modules():
        if not isinstance(stack, Stack) or not isinstance(stack.config.residual, DeepNormConfig):
            continue
        beta = stack.config.residual.complete(stack.config.num_layers).beta
        assert beta is not None
        for module in stack.modules():
            scaled: tuple[nn.Linear | None, ...] = ()
            if isinstance(module, Attention):
                scaled = (module.value, module.output)
            elif isinstance(module, LatentAttention):
                scaled = (module.value_up, module.output)
            elif isinstance(module, FeedForward):
                scaled = (module.gate, module.up, module.down)
            for part in scaled:
                if part is not None:
                    part.weight.mul_(beta)
            for matrices in module.matrices if isinstance(module, Experts) else ():
                matrices.mul_(beta)


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
                weight.normal_(0.0, config.std / math.sqrt(2 * stack.config.num_layers), generator=generator)


@_draw.register
def _xavier(config: XavierInitConfig, network: nn.Module, generator: torch.Generator | None) -> None:
    for weight in _matrices(network):
        nn.init.xavier_uniform_(weight, generator=generator)
    for weight in _tables(network):
        weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)
    for _, position in _relative(network):
        position.table.weight.zero_()


@_draw.register
def _t5(config: T5InitConfig, network: nn.Module, generator: torch.Generator | None) -> None:
    for weight in _tables(network):
        weight.normal_(0.0, 1.0, generator=generator)
    for weight in _matrices(network):
        weight.normal_(0.0, weight[0].numel() ** -0.5, generator=generator)
    for module in network.modules():
        if isinstance(module, Attention):  # T5 does not divide scores by sqrt(D): the queries start smaller instead
            std = (module.query.in_features * module.head_dim) ** -0.5
            module.query.weight.normal_(0.0, std, generator=generator)
    for stack, position in _relative(network):
        position.table.weight.normal_(0.0, stack.config.d_model**-0.5, generator=generator)
