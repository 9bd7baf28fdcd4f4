"""Interchangeable ways to compute one function: softmax(cap(q k^T * scale) + bias, where allowed) v; the product of a
query and a key may be replaced by another score.

A configuration never changes its meaning with the kernel. `math` is the reference; a kernel that cannot do something
hands it to `math` and says so once.
"""

from __future__ import annotations

from typing import Literal

from torch import nn

from qkv.nn.kernels.base import Kernel
from qkv.nn.kernels.math import MathKernel
from qkv.nn.kernels.sdpa import SdpaKernel
from qkv.nn.kernels.tiled import TiledKernel

KernelName = Literal["math", "tiled", "sdpa"]

__all__ = ["Kernel", "KernelName", "MathKernel", "SdpaKernel", "TiledKernel", "new_kernel", "use_kernel"]


def new_kernel(name: KernelName) -> Kernel:
    """A kernel by name."""
    kernels: dict[str, type[Kernel]] = {"math": MathKernel, "tiled": TiledKernel, "sdpa": SdpaKernel}
    if name not in kernels:
        raise ValueError(f"no kernel is called {name!r}; there are {', '.join(kernels)}")
    return kernels[name]()


def use_kernel(network: nn.Module, name: KernelName) -> None:
    """Compute every attention of `network` with this kernel from now on."""
    for module in list(network.modules()):
        if isinstance(getattr(module, "kernel", None), Kernel):
            module.kernel = new_kernel(name)
