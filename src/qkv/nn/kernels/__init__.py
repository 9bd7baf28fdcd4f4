"""Interchangeable ways to compute one function: softmax(cap(q k^T * scale) + bias, where allowed) v; the product of a
query and a key may be replaced by another score, and a sink may take part in the softmax (`Scoring`).

A configuration never changes its meaning with the kernel. `math` is the reference; a kernel that cannot do something
hands it to `math` and says so once.
"""

from __future__ import annotations

from typing import Literal

from torch import nn

from qkv.nn.kernels.base import Kernel
from qkv.nn.kernels.flex import FlexKernel
from qkv.nn.kernels.math import MathKernel
from qkv.nn.kernels.sdpa import SdpaKernel
from qkv.nn.kernels.tiled import TiledKernel

KernelName = Literal["math", "tiled", "sdpa", "flex"]
KERNELS: dict[KernelName, type[Kernel]] = {
    "math": MathKernel,
    "tiled": TiledKernel,
    "sdpa": SdpaKernel,
    "flex": FlexKernel,
}

__all__ = [
    "FlexKernel",
    "Kernel",
    "KernelName",
    "MathKernel",
    "SdpaKernel",
    "TiledKernel",
    "kernels_of",
    "new_kernel",
    "use_kernel",
]


def new_kernel(name: KernelName) -> Kernel:
    """A kernel by name."""
    if name not in KERNELS:
        raise ValueError(f"no kernel is called {name!r}; there are {', '.join(KERNELS)}")
    return KERNELS[name]()


def use_kernel(network: nn.Module, name: KernelName) -> None:
    """Compute every attention of `network` with this kernel from now on."""
    for module in list(network.modules()):
        if isinstance(getattr(module, "kernel", None), Kernel):
            module.kernel = new_kernel(name)


def kernels_of(network: nn.Module) -> list[str]:
    """The names of the kernels that `network` computes attention with."""
    names = {kind: name for name, kind in KERNELS.items()}
    used = {type(module) for module in network.modules() if isinstance(module, Kernel)}
    return sorted(names.get(kind, kind.__name__) for kind in used)
