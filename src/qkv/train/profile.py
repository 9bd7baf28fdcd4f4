"""Which part of a model a step of training spends its time in.

The profiler of PyTorch records every operation of some steps. Hooks on modules, and marks in the training loop, open a
range for each part; an operation belongs to the innermost range around it, and one of the backward pass to the part
whose operation it goes back through, which the profiler tells by its sequence number. Blocks are not compiled
meanwhile: compiled code knows no parts.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from qkv.nn.block import CrossAttentionSublayer, ParallelSublayer, SelfAttentionSublayer, Stack, Sublayer
from qkv.nn.embedding import Embedding
from qkv.nn.norm import LayerNorm, RMSNorm
from qkv.nn.transformer import Transformer
from qkv.train.loop import Trainer

PARTS = (
    "attention",
    "feed-forward",
    "norms",
    "embedding",
    "head and loss",
    "optimiser",
    "clipping",
    "data",
    "other",
)
"""Of these the loop itself marks optimiser, clipping and data. Other: residual stream, masks, positions, Python."""

_BACKWARD = "autograd::engine::evaluate_function"


@dataclass(frozen=True)
class PartProfile:
    """`shares` of a step by part, which add up to 1: of time, on a GPU of the time that it computes. `overhead`: how
    much longer, as a share, the profiler made a step."""

    shares: dict[str, float]
    overhead: float


def profile_parts(trainer: Trainer, steps: int = 2) -> PartProfile:
    """Take some steps without the profiler and as many with it, all of them eager."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would write to stderr when it starts and stops
    on_gpu = trainer.compute.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with torch.compiler.set_stance("force_eager"):
        trainer.take_step()
        plain = _seconds(trainer, steps)
        with _marked(trainer.network), profile(activities=activities) as profiler:
            watched = _seconds(trainer, steps)
    events: list[FunctionEvent] = list(profiler.events() or [])
    return PartProfile(_shares(events, on_gpu), watched / plain - 1)


def _seconds(trainer: Trainer, steps: int) -> float:
    started = time.perf_counter()
    for _ in range(steps):
        with record_function("other"):
            trainer.take_step()
    return time.perf_counter() - started


def _parts_of(network: Transformer) -> Iterator[tuple[nn.Module, str]]:
    """Modules and the part that they are, but for what is another part in them."""
    yield network, "head and loss"
    for module in network.modules():
        match module:
            case Stack():
                yield module, "other"
            case Embedding():
                yield module, "embedding"
            case LayerNorm() | RMSNorm():
                yield module, "norms"
            case SelfAttentionSublayer() | CrossAttentionSublayer():
                yield module.function, "attention"
            case ParallelSublayer():
                yield module.attention, "attention"
                yield module.feed_forward, "feed-forward"
            case Sublayer():
                yield module.function, "feed-forward"


@contextmanager
def _marked(network: Transformer) -> Iterator[None]:
    """Every call of a part is a range of the profiler."""
    ranges: list[record_function] = []
    handles = []

    def close(*_: Any) -> None:
        ranges.pop().__exit__(None, None, None)

    for module, part in _parts_of(network):

        def enter(*_: Any, part: str = part) -> None:
            ranges.append(record_function(part))
            ranges[-1].__enter__()  # type: ignore[no-untyped-call]

        # blocks that are computed again are left by an exception
        handles += [
            module.register_forward_pre_hook(enter),
            module.register_forward_hook(close, always_call=True),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _shares(events: list[FunctionEvent], on_gpu: bool) -> dict[str, float]:
    by_number: dict[int, str] = {}  # the last operation with a number is the one that backward goes through
    for event in sorted(events, key=lambda event: event.time_range.start):
        around = _around(event)
        if around.name in PARTS:
            by_number[event.sequence_nr] = around.name
    times: dict[str, float] = defaultdict(float)
    for event in events:
        around = _around(event)
        part = around.name if around.name in PARTS else by_number.get(around.sequence_nr, "other")
        times[part] += event.self_device_time_total if on_gpu else event.self_cpu_time_total
    total = sum(times.values())
    return {part: times[part] / total for part in PARTS}


def _around(event: FunctionEvent) -> FunctionEvent:
    """The innermost range of a part, or step of the backward pass, that the event is or stands in; else itself."""
    found: FunctionEvent | None = event
    while found is not None:
        if found.name in PARTS or found.name.startswith(_BACKWARD):
            return found
        found = found.cpu_parent
    return event
