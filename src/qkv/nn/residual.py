"""The residual stream: what flows between sublayers, and how each reads from it and writes to it.

    state = stream.enter(embedding)
    per site:  x, context = site.read(state);  state = site.write(state, F(x), context)
    h = stream.exit(state)

A site belongs to one sublayer and holds its own parameters; read and write are modules, so hooks see what passes.

Shapes: B batch, T tokens, M model width.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from qkv.config.residuals import NoResidualConfig, PlainResidualConfig
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


build.register(PlainResidualConfig, PlainResidual)
build.register(NoResidualConfig, NoResidual)
