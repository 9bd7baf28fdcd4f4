"""What a computation asks of the machine (products of matrices, bytes read), and what the machine reaches in these
alone: the limits that speeds are measured beside."""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from qkv.nn.loss import tokens_of_a_chunk

BACKWARD_PASSES = 2
"""Going back takes a product for each of the two factors of one."""
LARGEST_STREAM = 2**30
"""Bytes: more than any processor's cache holds."""

_MATRICES = 24
_SECONDS_EACH = 0.05

Product = tuple[int, int, int]
"""[m, k] times [k, n]."""


def wait(device: torch.device) -> None:
    """Until a device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """How long `work` takes, once what went before is done."""
    wait(device)
    began = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - began


def peak_memory(device: torch.device) -> int | None:
    """The most bytes that PyTorch held on a GPU, or this process in main memory; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return None
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# --- products of matrices ---------------------------------------------------------------------------------------------


@dataclass
class Count:
    """FLOPs of a forward pass, and its products of two matrices."""

    flops: int = 0
    products: Counter[Product] = field(default_factory=Counter)

    def mm(self, a: Any, b: Any, *_: Any, **__: Any) -> int:
        """The first matrix [m, k] by the second [k, n]."""
        self.products[a[0], a[1], b[1]] += 1
        return 2 * int(a[0] * a[1] * b[1])

    def addmm(self, _: Any, a: Any, b: Any, *__: Any, **___: Any) -> int:
        return self.mm(a, b)

    def loss(self, h_NM: Tensor, weight_VM: Tensor, bias_V: Any, labels_N: Tensor, *_: Any, **__: Any) -> int:
        """That of the tokens with a label with the vocabulary, in chunks as the loss takes them."""
        (vocabulary, width), targets = weight_VM.shape, int((labels_N >= 0).sum())
        chunk = tokens_of_a_chunk(vocabulary)
        for first in range(0, targets, chunk):
            self.products[min(chunk, targets - first), width, vocabulary] += 1
        return 2 * targets * width * vocabulary

    loss._get_raw = True  # type: ignore[attr-defined]  # the counter passes tensors, not their shapes


def _attention(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """Scores and their product with the values, the causal half not taken off; heads may share keys."""
    batch, heads, queries, width = q
    return 2 * int(batch * heads * queries * k[2] * (width + v[3]))


_ATTENTION = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")


@torch.no_grad()
def count_products(forward: Callable[[], object]) -> Count:
    """What a forward pass multiplies: as `qkv show` counts, but at the shapes of the batch."""
    counted = Count()
    aten = torch.ops.aten
    formulas = {aten.mm: counted.mm, aten.addmm: counted.addmm, torch.ops.qkv.cross_entropy: counted.loss}
    formulas |= {getattr(aten, f"_scaled_dot_product_{name}"): _attention for name in _ATTENTION}
    with torch.compiler.set_stance("force_eager"), FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        forward()
    counted.flops = counter.get_total_flops()
    return counted


def matrix_rate(
    products: Counter[Product], dtype: torch.dtype, device: torch.device, *, backward: bool = False
) -> float:
    """FLOP/s of plain products of these shapes (`backward`: each with those of its two gradients), mixed as often as
    they come; of many shapes those that take most."""
    costs = Counter({(m, k, n): 2 * m * k * n * count for (m, k, n), count in products.items()})
    flops = seconds = 0.0
    for (m, k, n), cost in costs.most_common(_MATRICES):
        x_MK, w_NK, g_MN = (torch.randn(shape, dtype=dtype, device=device) for shape in ((m, k), (n, k), (m, n)))

        def multiply(x_MK: Tensor = x_MK, w_NK: Tensor = w_NK, g_MN: Tensor = g_MN) -> None:
            _ = x_MK @ w_NK.t()
            if backward:
                _ = g_MN @ w_NK, g_MN.t() @ x_MK

        times: list[float] = []
        while len(times) < 4 or sum(times) < _SECONDS_EACH:
            times.append(seconds_of(multiply, device))
        flops += (1 + BACKWARD_PASSES * backward) * cost
        seconds += products[m, k, n] * statistics.median(times[1:])
    return flops / seconds


# --- bytes read -------------------------------------------------------------------------------------------------------

_GATHERS = ("embedding", "index", "index_select", "gather")
"""Operations that read no more than they put out."""


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what operations read, by the memory it lies in: each part once, however often it is read."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.parts: dict[int, dict[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [tensor for tensor in tree_leaves(out) if isinstance(tensor, Tensor)]
        same = {tensor.untyped_storage().data_ptr() for tensor in made}  # of views, and of what is changed in place
        gathers = func.overloadpacket.__name__ in _GATHERS
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and (place := tensor.untyped_storage().data_ptr()) not in same:
                key = (func, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
                size = made[0].nbytes if gathers else _distinct_bytes(tensor)
                self.parts.setdefault(place, {})[key if gathers else key[1:]] = size
        return out


def _distinct_bytes(tensor: Tensor) -> int:
    """The memory of a tensor whose parts may be the same (`expand`)."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else min(size, 1)
    return count * tensor.element_size()


@torch.no_grad()
def count_reads(forward: Callable[[], object], groups: Callable[[], Iterable[Iterable[Tensor]]]) -> list[int]:
    """The bytes of each of the `groups` of tensors, as they are afterwards, that a forward pass reads; of a table only
    the rows that are looked up, and of experts only those that a token goes through."""
    reads = _Reads()
    with torch.compiler.set_stance("force_eager"), reads:
        forward()
    found = []
    for group in groups():
        places = {tensor.untyped_storage().data_ptr() for tensor in group}
        found.append(sum(sum(reads.parts.get(place, {}).values()) for place in places))
    return found


def memory_rate(size: int, device: torch.device) -> float:
    """Bytes/s at which `size` bytes (LARGEST_STREAM at most) are read again and again, and nothing is written: from
    memory where they are more than the processor's cache holds. The faster of a sum and of a product with a vector
    counts."""
    columns = 1024
    rows = max(1, min(size, LARGEST_STREAM) // (4 * columns))
    x_RC, y_C = torch.ones(rows, columns, device=device), torch.ones(columns, device=device)
    return max(x_RC.nbytes / _seconds_each(read, device) for read in (lambda: x_RC.sum(), lambda: x_RC @ y_C))


def _seconds_each(work: Callable[[], object], device: torch.device) -> float:
    """The median time of one of several calls in a row: waiting for a GPU after each would count as work."""

    def several() -> None:
        for _ in range(calls):
            work()

    calls = 1
    while seconds_of(several, device) < _SECONDS_EACH:
        calls *= 2
    return statistics.median(seconds_of(several, device) for _ in range(5)) / calls
