"""The learning rate over the steps, as a share of its peak.

Steps count from 1. Warm-up rises linearly, never uses 0, and reaches the peak exactly at step `warmup`; one that is
counted in tokens is turned into steps first (`TrainConfig.schedule_by_step`).
"""

from __future__ import annotations

import math
from functools import singledispatch

from qkv.config.training import (
    ConstantScheduleConfig,
    CosineScheduleConfig,
    InverseSqrtScheduleConfig,
    ScheduleConfig,
    WSDScheduleConfig,
)


def share_of_peak(config: ScheduleConfig, step: int, steps: int) -> float:
    """The factor on every learning rate at `step` (1 .. steps)."""
    if step < config.warmup:
        return step / config.warmup
    return after_warmup(config, step, steps)


@singledispatch
def after_warmup(config: ScheduleConfig, step: int, steps: int) -> float:
    """The factor from step `warmup` on, where it is 1."""
    raise TypeError(f"no schedule is registered for {type(config).__name__}")


@after_warmup.register
def _constant(config: ConstantScheduleConfig, step: int, steps: int) -> float:
    return 1.0


@after_warmup.register
def _cosine(config: CosineScheduleConfig, step: int, steps: int) -> float:
    """Loshchilov and Hutter 2016 (arXiv 1608.03983), without restarts; the last step has `final`."""
    first = max(config.warmup, 1)
    progress = (step - first) / max(steps - first, 1)
    return config.final + (1 - config.final) * 0.5 * (1 + math.cos(math.pi * progress))


@after_warmup.register
def _wsd(config: WSDScheduleConfig, step: int, steps: int) -> float:
    """Warm up, stay, decay; `final` would be reached one step after the last, so that no step is taken with 0."""
    decaying = min(round(config.decay * steps), steps - max(config.warmup, 1))
    into = step - (steps - decaying)
    return 1.0 if into <= 0 else 1 - (1 - config.final) * into / (decaying + 1)


@after_warmup.register
def _inverse_sqrt(config: InverseSqrtScheduleConfig, step: int, steps: int) -> float:
    """ "Attention Is All You Need", 5.3, scaled to a peak of 1."""
    return math.sqrt(config.warmup / step)
