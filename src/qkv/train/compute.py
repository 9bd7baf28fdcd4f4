"""How a run computes: device, precision, compilation, each by a stated rule that is printed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch

from qkv.config.errors import UsageError
from qkv.config.training import TrainConfig
from qkv.nn.block import Stack
from qkv.nn.device import choose_device, choose_dtype, describe_device, multiplies_bf16
from qkv.nn.kernels import kernels_of, use_kernel
from qkv.nn.transformer import Transformer

REPAYS_COMPILING = {"cpu": 4e13, "cuda": 1e16}
"""Floating-point operations of a whole run from which compiling saves more than the half minute or so it costs."""

MATH_UP_TO = {"compiled": 512, "eager": 128}
"""Tokens. On a CPU, rows no longer than this learn faster with `math`, plain matrix products, than with `sdpa`, in
spite of the weights that it keeps for the backward pass; those of twice the length learn slower."""


@dataclass(frozen=True)
class Compute:
    """Where and how: weights stay float32, and `dtype` is what matrices are multiplied in."""

    device: torch.device
    dtype: torch.dtype
    compiled: bool
    why: tuple[str, ...]

    @contextmanager
    def forward_passes(self) -> Iterator[None]:
        """The context that forward passes run in."""
        plain = self.dtype == torch.float32
        precision = nullcontext() if plain else torch.autocast(self.device.type, dtype=self.dtype)
        with precision, _sizes_apart() if self.compiled else nullcontext():
            yield


def choose_compute(config: TrainConfig, network: Transformer, compiled: bool | None = None) -> Compute:
    """Apply the rules, of which that of attention changes the network's kernels; `compiled` not None is what the run
    decided when it began, and stands."""
    device = choose_device(config.device)
    dtype = choose_dtype(config.precision, device)
    name = "bf16" if dtype == torch.bfloat16 else "fp32"
    reason = "asked for"
    if config.precision == "auto":
        reason = f"auto: the hardware {'multiplies' if multiplies_bf16(device) else 'does not multiply'} bfloat16"
    if compiled is None:
        compiled, why = _repays(config, network, device)
    else:
        why = "as the run began"
    state = "compiled" if compiled else "eager"
    facts = [describe_device(device), f"{name} ({reason})", f"{state} ({why})"]
    longest = max(stack.max_seq_len for stack in network.config.stacks.values())
    short = device.type == "cpu" and longest <= MATH_UP_TO[state]
    if short:
        use_kernel(network, "math")
    if kernels := kernels_of(network):
        facts.append(f"attention by {', '.join(kernels)}{f' ({longest} tokens at most)' if short else ''}")
    if config.activation_checkpointing:
        facts.append("blocks computed again in the backward pass")
    return Compute(device, dtype, compiled, tuple(facts))


def _repays(config: TrainConfig, network: Transformer, device: torch.device) -> tuple[bool, str]:
    compiler = device.type != "cpu" or any(shutil.which(name) for name in ("c++", "g++", "clang++"))
    if config.compile == "on":
        if not compiler:
            raise UsageError(
                "train.compile is on, and there is no C++ compiler", hint="installing g++, or compile=auto"
            )
        return True, "asked for"
    if config.compile == "off":
        return False, "asked for"
    if not compiler:
        return False, "auto: no C++ compiler"
    matrices = sum(parameter.numel() for parameter in network.parameters() if parameter.dim() >= 2)
    operations = 6 * matrices * config.tokens
    enough = REPAYS_COMPILING.get(device.type, float("inf"))
    verdict: Literal["repays", "does not repay"] = "repays" if operations >= enough else "does not repay"
    return operations >= enough, f"auto: a run of {operations:.1e} operations {verdict} compiling"


def _sizes_apart() -> AbstractContextManager[object]:
    """Have the compiler take sizes that happen to be equal in the first batch (rows, source and target slots) for
    different ones: else each coincidence would cost a graph, and a block may have only so many (`recompile_limit`)."""
    from torch.fx.experimental import _config

    return _config.patch(use_duck_shape=False)  # type: ignore[attr-defined, no-any-return]


def recompute_blocks(network: Transformer) -> None:
    """Activation checkpointing: have the backward pass compute each block again, instead of keeping what it needs."""
    for module in network.modules():
        if isinstance(module, Stack):
            module.recomputes = True


def compile_blocks(network: Transformer, *, one_shape: bool = True) -> None:
    """Compile the block once for all layers. Where the residual stream grows, no block is like another: the functions
    of its sublayers are compiled, once each for all layers.

    one_shape: all batches have one of a few shapes, and code for each alone is fastest; otherwise for every shape at
    once, but for batches of one row, which are another graph. Forward passes run in `Compute.forward_passes`.
    """
    dynamic = not one_shape
    for module in network.modules():
        if not isinstance(module, Stack):
            continue
        for block in module.blocks:
            if not module.residual.grows:
                block.compile(dynamic=dynamic)
                continue
            for sublayer in block.children():
                sublayer.call = torch.compile(sublayer.call, dynamic=dynamic)  # type: ignore[assignment, arg-type]
