"""The residual stream: what flows between sublayers, and how each reads from it and writes to it.

    state = stream.enter(embedding)
    per site:  x, context = site.read(state);  state = site.write(state, F(x), context)
    h = stream.exit(state)

A site belongs to one sublayer and holds its own parameters; read and write are modules, so hooks see what passes.

Shapes: B batch, T tokens, M model width.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from qkv.config.residuals import (
    DeepNormConfig,
    LayerScaleConfig,
    NoResidualConfig,
    PlainResidualConfig,
    ReZeroConfig,
)
from qkv.nn.build import Dims, build


class Site(nn.Module):
    """One sublayer's place on the stream: `read(state) -> (x, context)`, `write(state, y, context) -> state`.

    Without `read`, x is the state.
    """

    def __init__(self, read: nn.Module | None, write: nn.Module) -> None:
        super().__init__()
        self.read = read
        self.write = write


class ResidualStream(nn.Module):
    """Base of the residual kinds. The plain state is the hidden vector itself."""

    grows: ClassVar[bool] = False
    """The state has more parts in later layers, so that no two blocks are one graph to the compiler."""

    def enter(self, x_BTM: Tensor) -> Any:
        """The embedding as the first state."""
        return x_BTM

    def exit(self, state: Any) -> Tensor:
        """The last state as hidden vectors [B, T, M]."""
        return state  # type: ignore[no-any-return]

    def new_site(self, index: int, layer: int) -> Site:
        """The site of sublayer `index` of the stack, in its layer `layer`; both from 0."""
        raise TypeError(f"{type(self).__name__} has no sites")


class Add(nn.Module):
    """state + F(x) (He et al. 2015, arXiv 1512.03385)."""

    def forward(self, state: Tensor, y: Tensor, context: None) -> Tensor:
        return state + y


class AddScaled(nn.Module):
    """state + a F(x), a learned: a number, or one per channel; it starts at `first`."""

    def __init__(self, shape: tuple[int, ...], first: float) -> None:
        super().__init__()
        self.first = first
        self.scale = nn.Parameter(torch.full(shape, first))

    def start(self, generator: torch.Generator | None) -> None:
        """As built; nothing is drawn."""
        self.scale.fill_(self.first)

    def forward(self, state: Tensor, y: Tensor, context: None) -> Tensor:
        return state + self.scale * y


class AddToScaled(nn.Module):
    """alpha state + F(x), alpha a constant."""

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.alpha = alpha

    def forward(self, state: Tensor, y: Tensor, context: None) -> Tensor:
        return torch.add(y, state, alpha=self.alpha)

    def extra_repr(self) -> str:
        return f"alpha={self.alpha:.4g}"


class Replace(nn.Module):
    """F(x)."""

    def forward(self, state: Tensor, y: Tensor, context: None) -> Tensor:
        return y


class PlainResidual(ResidualStream):
    """x + F(x)."""

    def __init__(self, config: PlainResidualConfig, dims: Dims) -> None:
        super().__init__()

    def new_site(self, index: int, layer: int) -> Site:
        return Site(None, Add())


class NoResidual(ResidualStream):
    """F(x): every sublayer replaces the stream."""

    def __init__(self, config: NoResidualConfig, dims: Dims) -> None:
        super().__init__()

    def new_site(self, index: int, layer: int) -> Site:
        return Site(None, Replace())


class ReZero(ResidualStream):
    """x + a F(x), a number per sublayer that starts at 0 (Bachlechner et al. 2020, arXiv 2003.04887)."""

    def __init__(self, config: ReZeroConfig, dims: Dims) -> None:
        super().__init__()

    def new_site(self, index: int, layer: int) -> Site:
        return Site(None, AddScaled((), 0.0))


class LayerScale(ResidualStream):
    """x + diag(a) F(x), a number per channel that starts small (Touvron et al. 2021, arXiv 2103.17239)."""

    def __init__(self, config: LayerScaleConfig, dims: Dims) -> None:
        super().__init__()
        self.width, self.first = dims.d_model, config.start

    def new_site(self, index: int, layer: int) -> Site:
        return Site(None, AddScaled((self.width,), self.first))


class DeepNorm(ResidualStream):
    """N(alpha x + F(x)), the norm by its placement post (Wang et al. 2022, arXiv 2203.00555); `init` applies beta."""

    def __init__(self, config: DeepNormConfig, dims: Dims) -> None:
        super().__init__()
        alpha = config.complete(dims.num_layers).alpha
        assert alpha is not None
        self.alpha = alpha

    def new_site(self, index: int, layer: int) -> Site:
        return Site(None, AddToScaled(self.alpha))


build.register(PlainResidualConfig, PlainResidual)
build.register(NoResidualConfig, NoResidual)
build.register(ReZeroConfig, ReZero)
build.register(LayerScaleConfig, LayerScale)
build.register(DeepNormConfig, DeepNorm)
