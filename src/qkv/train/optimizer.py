"""From gradients to weights: which parameters are updated how, and the optimiser's state by name.

Weight decay acts on matrices only, and not on those that their module lists in an attribute `undecayed`. Muon takes the
matrices inside the stacks; embeddings, heads, vectors, experts (three dimensions) and what belongs to the residual
stream stay with AdamW. A tied matrix is one parameter and is updated once. What no gradient trains (a router's
correction bias) is left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import singledispatch
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer as TorchOptimizer

from qkv.config.errors import QkvError
from qkv.config.run import AdamWConfig, MuonConfig, OptimizerConfig
from qkv.nn.block import Block
from qkv.nn.transformer import Transformer

Named = dict[str, nn.Parameter]
REMEMBERED: dict[type[TorchOptimizer], tuple[str, ...]] = {
    torch.optim.AdamW: ("step", "exp_avg", "exp_avg_sq"),
    torch.optim.Muon: ("momentum_buffer",),
}
"""What an optimiser keeps for each parameter: numbers, and tensors of the parameter's shape."""


class Optimizer:
    """One or two torch optimisers driven as one, with one schedule and one state."""

    def __init__(self, network: Transformer, optimizers: list[TorchOptimizer]) -> None:
        self.names = {id(parameter): name for name, parameter in network.named_parameters()}
        self.optimizers = optimizers
        self.peaks = [[float(group["lr"]) for group in optimizer.param_groups] for optimizer in optimizers]

    def step(self, share: float) -> float:
        """Update every weight with `share` of the peak learning rates. Returns the first group's learning rate."""
        for optimizer, peaks in zip(self.optimizers, self.peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * share
            optimizer.step()
        return self.peaks[0][0] * share

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def describe(self) -> list[str]:
        """One line per parameter group."""
        lines = []
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                size = sum(parameter.numel() for parameter in group["params"])
                lines.append(
                    f"{type(optimizer).__name__}: {len(group['params'])} tensors, {size:,} values, "
                    f"lr {group['lr']:g}, weight decay {group['weight_decay']:g}"
                )
        return lines

    def state(self) -> dict[str, Tensor]:
        """Everything the optimisers remember, as tensors by parameter name."""
        tensors: dict[str, Tensor] = {}
        for optimizer in self.optimizers:
            for parameter, remembered in optimizer.state.items():
                for key, value in remembered.items():
                    name = f"optimizer/{self.names[id(parameter)]}/{key}"
                    tensors[name] = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        return tensors

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `state` gave. Raises QkvError naming a part that is missing."""
        by_name: dict[str, dict[str, Tensor]] = {}
        for path, value in tensors.items():
            kind, _, rest = path.partition("/")
            if kind == "optimizer":
                name, _, key = rest.rpartition("/")
                by_name.setdefault(name, {})[key] = value
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    name = self.names[id(parameter)]
                    found = by_name.get(name, {})
                    keys = REMEMBERED.get(type(optimizer), tuple(found))
                    faulty = [key for key in keys if key not in found or not _fits(found[key], parameter)]
                    if not found or faulty:
                        raise QkvError(
                            f"the optimiser's state of {name} is missing or damaged: {', '.join(faulty or keys)}",
                            hint="resuming with the run's own optimiser",
                        )
                    optimizer.state[parameter] = {
                        key: value.to(parameter.device, copy=True) for key, value in found.items()
                    }


def _fits(remembered: Tensor, parameter: Tensor) -> bool:
    return remembered.dim() == 0 or remembered.shape == parameter.shape


@singledispatch
def build_optimizer(config: OptimizerConfig, network: Transformer) -> Optimizer:
    """The optimiser that `config` describes, over every parameter of `network`."""
    raise TypeError(f"no optimiser is registered for {type(config).__name__}")


@build_optimizer.register
def _adamw(config: AdamWConfig, network: Transformer) -> Optimizer:
    return Optimizer(network, [_adam(network, network.parameters(), config, config.lr)])


@build_optimizer.register
def _muon(config: MuonConfig, network: Transformer) -> Optimizer:
    """Jordan et al. 2024, as torch.optim.Muon: each update is roughly orthogonalised."""
    hidden: Named = {}
    vectors = _undecayed(network)
    for name, module in network.named_modules():
        if isinstance(module, Block):
            for inner, parameter in module.named_parameters():
                if parameter.dim() == 2 and ".site." not in inner and parameter not in vectors:
                    hidden[f"{name}.{inner}"] = parameter
    rest = [parameter for name, parameter in network.named_parameters() if name not in hidden]
    muon = torch.optim.Muon(hidden.values(), lr=config.lr, weight_decay=config.weight_decay, momentum=config.momentum)
    return Optimizer(network, [muon, _adam(network, rest, config, config.adam_lr)])


def _adam(
    network: Transformer, parameters: Iterable[nn.Parameter], config: AdamWConfig | MuonConfig, lr: float
) -> TorchOptimizer:
    kept = _undecayed(network)
    decays: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in parameters:
        if parameter.requires_grad:
            decays[parameter.dim() >= 2 and parameter not in kept].append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": decays[True], "weight_decay": config.weight_decay},
        {"params": decays[False], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=lr, betas=config.betas, eps=config.eps, fused=True)


def _undecayed(network: Transformer) -> set[nn.Parameter]:
    """What modules exempt from weight decay, though it has the shape of matrices."""
    return {getattr(module, name) for module in network.modules() for name in getattr(module, "undecayed", ())}
