"""A kind becomes a module in one place.

Every file of this room registers its module class for its configuration class; `build(config, dims)` finds it. A
third-party configuration class names its module class itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import singledispatch
from typing import Any

from torch import Tensor, nn

from qkv.config.base import Part, import_object
from qkv.config.errors import ConfigError
from qkv.config.parts import NormConfig, RMSNormConfig


@dataclass(frozen=True)
class Dims:
    """What a part must know about the place it is built for.

    d_model: width of the stream it reads. d_source: width of the keys' and values' source (None: d_model). d_out:
    width or count of what it produces where that is not d_model (vocabulary, classes). d_embedding: width of the
    embedding tables where that is not d_model. num_layers: depth of the stack. layer: which of these the part is for,
    from 0. num_heads: of the attention that a position kind acts in. causal: whether the stack sees the past only.
    norm: the norm kind of the layer, for parts with norms inside.
    """

    d_model: int
    d_source: int | None = None
    d_out: int | None = None
    d_embedding: int | None = None
    max_seq_len: int = 0
    num_layers: int = 1
    layer: int = 0
    num_heads: int = 1
    causal: bool = True
    norm: NormConfig = field(default_factory=RMSNormConfig)

    def with_(self, **changes: Any) -> Dims:
        """The same with some values replaced."""
        return replace(self, **changes)


@singledispatch
def _built_in(config: object, dims: Dims) -> Any:
    raise TypeError(f"no module is registered for {type(config).__name__}")


class _Build:
    def register(self, config: type, module: Callable[[Any, Dims], nn.Module]) -> None:
        """Let `module(config, dims)` build what configurations of this class describe."""
        _built_in.register(config, module)

    def __call__(self, config: object, dims: Dims) -> Any:
        """The module that `config` describes, for a place of size `dims`."""
        if isinstance(config, Part) and config.module is not None:
            try:
                module = import_object(config.module)
            except (ImportError, AttributeError) as error:
                raise ConfigError(
                    f"cannot import `{config.module}`, the module of {type(config).__name__}: {error}",
                    hint='module: ClassVar[str] = "package.module:ModuleClass"',
                ) from None
            return module(config, dims)
        return _built_in(config, dims)


build = _Build()


def dropout_of(probability: float) -> nn.Dropout | None:
    """Dropout; None for 0."""
    return nn.Dropout(probability) if probability else None


def apply(module: nn.Module | None, x: Tensor) -> Tensor:
    """What the module makes of x; x where there is none. (When one token is read, calling ten modules per layer that
    do nothing takes longer than its arithmetic.)"""
    if module is None:
        return x
    out: Tensor = module(x)
    return out
