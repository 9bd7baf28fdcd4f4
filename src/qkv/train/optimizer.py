"""From gradients to weights: which parameters are updated how, and the optimiser's state by name.

Weight decay acts on matrices only, and not on those that their module lists in an attribute `undecayed`. Muon takes the
matrices inside the blocks: experts one by one, and of those that a module names in `fused`, which are several in one,
each by itself. Embeddings, heads, vectors and what belongs to the residual stream stay with AdamW. A tied matrix is one
parameter and is updated once. What no gradient trains (a router's correction bias) is left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import singledispatch
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer as TorchOptimizer

from qkv.config.errors import DamagedError, counted
from qkv.config.training import AdamConfig, AdamWConfig, MuonConfig, OptimizerConfig, ScheduleFreeConfig
from qkv.nn.block import Block
from qkv.nn.transformer import Transformer
from qkv.train.muon import Muon
from qkv.train.schedule_free import ScheduleFreeAdamW

REMEMBERED: dict[type[TorchOptimizer], tuple[str, ...]] = {
    torch.optim.Adam: ("step", "exp_avg", "exp_avg_sq"),
    torch.optim.AdamW: ("step", "exp_avg", "exp_avg_sq"),
    Muon: ("momentum_buffer",),
    ScheduleFreeAdamW: ("step", "lr_max", "weight_sum", "exp_avg_sq", "z"),
}
"""What an optimiser keeps for each parameter: numbers, and tensors of the parameter's shape."""
UNTOUCHED = "untouched"
"""Saved for a parameter that has had no gradient yet, so that it can be told from one whose state was lost."""
ADJUST_LR = {"original": "original", "match-rms-adamw": "match_rms_adamw"}


@dataclass(frozen=True)
class Piece:
    """A matrix that is a part of a parameter and shares its values; its gradient is that part of the parameter's."""

    name: str
    whole: nn.Parameter
    place: int | slice
    matrix: nn.Parameter

    @classmethod
    def of(cls, name: str, whole: nn.Parameter, place: int | slice) -> Piece:
        return cls(name, whole, place, nn.Parameter(whole.detach()[place]))


class Optimizer:
    """One or two torch optimisers driven as one, with one schedule and one state.

    pieces: parts of parameters that are updated as parameters of their own.
    """

    def __init__(self, network: Transformer, optimizers: list[TorchOptimizer], pieces: Sequence[Piece] = ()) -> None:
        self.names = {id(parameter): name for name, parameter in network.named_parameters()}
        self.names |= {id(piece.matrix): piece.name for piece in pieces}
        self.network, self.optimizers, self.pieces = network, optimizers, pieces
        self.peaks = [[float(group["lr"]) for group in optimizer.param_groups] for optimizer in optimizers]

    def step(self, share: float) -> float:
        """Update every weight with `share` of the peak learning rates. Returns the first group's learning rate."""
        for piece in self.pieces:
            gradient = piece.whole.grad
            piece.matrix.grad = None if gradient is None else gradient[piece.place]
        for optimizer, peaks in zip(self.optimizers, self.peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * share
            optimizer.step()
        return self.peaks[0][0] * share

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self.network.zero_grad(set_to_none=True)
        for piece in self.pieces:
            piece.matrix.grad = None

    def describe(self) -> list[str]:
        """One line per parameter group, with the last names of its parameters."""
        lines = []
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                size = sum(parameter.numel() for parameter in group["params"])
                counts = counted(len(group["params"]), "tensor"), counted(size, "value")
                decay = group["weight_decay"]
                names = dict.fromkeys(_last_name(self.names[id(parameter)]) for parameter in group["params"])
                lines.append(
                    f"{type(optimizer).__name__}: {', '.join(counts)}, "
                    f"lr {group['lr']:g}, weight decay {decay:g}: {', '.join(names)}"
                )
        return lines

    def averages(self) -> dict[str, Tensor]:
        """The weights to evaluate, by parameter name, where they are not those that are trained."""
        return {
            self.names[id(parameter)]: optimizer.average(parameter)
            for optimizer in self.optimizers
            if isinstance(optimizer, ScheduleFreeAdamW)
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    def state(self) -> dict[str, Tensor]:
        """Everything the optimisers remember, as tensors by parameter name."""
        tensors: dict[str, Tensor] = {}
        for optimizer, parameter in self._updated():
            remembered = optimizer.state.get(parameter) or {UNTOUCHED: torch.ones(())}
            for key, value in remembered.items():
                name = f"optimizer/{self.names[id(parameter)]}/{key}"
                tensors[name] = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        return tensors

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `state` gave. Raises DamagedError naming a part that is missing."""
        by_name: dict[str, dict[str, Tensor]] = {}
        for path, value in tensors.items():
            kind, _, rest = path.partition("/")
            if kind == "optimizer":
                name, _, key = rest.rpartition("/")
                by_name.setdefault(name, {})[key] = value
        for optimizer, parameter in self._updated():
            name = self.names[id(parameter)]
            found = by_name.get(name, {})
            if UNTOUCHED in found:
                continue
            keys = REMEMBERED.get(type(optimizer), tuple(found))
            faulty = [key for key in keys if key not in found or not _fits(found[key], parameter)]
            if not found or faulty:
                raise DamagedError(
                    f"the optimiser's state of {name} is missing or damaged: {', '.join(faulty or keys)}",
                    hint="resuming with the run's own optimiser",
                )
            optimizer.state[parameter] = {key: value.to(parameter.device, copy=True) for key, value in found.items()}

    def _updated(self) -> Iterator[tuple[TorchOptimizer, nn.Parameter]]:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    yield optimizer, parameter


def _fits(remembered: Tensor, parameter: Tensor) -> bool:
    return remembered.dim() == 0 or remembered.shape == parameter.shape


def _last_name(name: str) -> str:
    """What a parameter is called in its block or outside of one: `query`, `query.bias`, `experts.up`."""
    parts = [part for part in name.split(".") if not part.isdecimal()]
    if parts[-1] == "weight":
        parts = parts[:-1]
        return parts[-1]
    return ".".join(parts[-2:])


@singledispatch
def build_optimizer(config: OptimizerConfig, network: Transformer) -> Optimizer:
    """The optimiser that `config` describes, over every parameter of `network`."""
    raise TypeError(f"no optimiser is registered for {type(config).__name__}")


@build_optimizer.register
def _adam(config: AdamConfig, network: Transformer) -> Optimizer:
    """Kingma and Ba 2014 (arXiv 1412.6980)."""
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    return Optimizer(network, [torch.optim.Adam(trained, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)])


@build_optimizer.register
def _adamw(config: AdamWConfig, network: Transformer) -> Optimizer:
    """Loshchilov and Hutter 2017 (arXiv 1711.05101)."""
    return Optimizer(network, [_adamw_on(network.parameters(), network, config, config.lr)])


@build_optimizer.register
def _schedule_free(config: ScheduleFreeConfig, network: Transformer) -> Optimizer:
    groups = _groups(network.parameters(), network, config.weight_decay)
    return Optimizer(network, [ScheduleFreeAdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)])


@build_optimizer.register
def _muon(config: MuonConfig, network: Transformer) -> Optimizer:
    """Matrices of the blocks by Muon, the rest by AdamW."""
    hidden = _hidden_matrices(network)
    fused = _fused(network)
    pieces = [
        Piece.of(f"{name}.{number}", parameter, place)
        for name, parameter in hidden.items()
        for number, place in enumerate(_places(parameter, fused.get(parameter)))
    ]
    divided = {piece.whole for piece in pieces}
    matrices = [parameter for parameter in hidden.values() if parameter not in divided]
    muon = Muon(
        [*matrices, *(piece.matrix for piece in pieces)],
        lr=config.lr,
        weight_decay=config.weight_decay,
        momentum=config.momentum,
        adjust_lr_fn=ADJUST_LR[config.adjust_lr],
    )
    rest = [parameter for name, parameter in network.named_parameters() if name not in hidden]
    return Optimizer(network, [muon, _adamw_on(rest, network, config, config.adam_lr)], pieces)


def _hidden_matrices(network: Transformer) -> dict[str, nn.Parameter]:
    """What Muon takes, by name: matrices [out, in] and stacks of them [E, out, in]; one row or column is a vector."""
    vectors = _undecayed(network)
    return {
        f"{name}.{inner}": parameter
        for name, module in network.named_modules()
        if isinstance(module, Block)
        for inner, parameter in module.named_parameters()
        if parameter.requires_grad
        and parameter.dim() >= 2
        and min(parameter.shape[-2:]) > 1
        and ".site." not in inner
        and parameter not in vectors
    }


def _fused(network: Transformer) -> dict[nn.Parameter, tuple[int, ...]]:
    """Matrices that are several in one, with the rows of each."""
    return {
        module.get_parameter(f"{name}.weight"): rows
        for module in network.modules()
        for name, rows in getattr(module, "fused", {}).items()
    }


def _places(parameter: nn.Parameter, rows: tuple[int, ...] | None) -> Sequence[int | slice]:
    """Where the matrices of a parameter are that holds several."""
    if parameter.dim() == 3:
        return list(range(len(parameter)))
    ends = list(accumulate(rows or ()))
    return [slice(first, last) for first, last in zip([0, *ends], ends, strict=False)]


def _adamw_on(
    parameters: Iterable[nn.Parameter], network: Transformer, config: AdamWConfig | MuonConfig, lr: float
) -> TorchOptimizer:
    groups = _groups(parameters, network, config.weight_decay)
    return torch.optim.AdamW(groups, lr=lr, betas=config.betas, eps=config.eps, fused=True)


def _groups(parameters: Iterable[nn.Parameter], network: Transformer, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices with weight decay, and all else without."""
    kept = _undecayed(network)
    decays: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in parameters:
        if parameter.requires_grad:
            decays[parameter.dim() >= 2 and parameter not in kept].append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": decays[True], "weight_decay": weight_decay},
        {"params": decays[False], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _undecayed(network: Transformer) -> set[nn.Parameter]:
    """What modules exempt from weight decay, though it has the shape of matrices."""
    return {getattr(module, name) for module in network.modules() for name in getattr(module, "undecayed", ())}
