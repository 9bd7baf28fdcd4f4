"""How fast a configuration trains on this machine, beside what the machine's own matrix products reach."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from qkv.config.paths import cache_folder
from qkv.config.run import Config
from qkv.data.made import made_data
from qkv.data.tokenizers import tokenizers_for
from qkv.evaluate.limits import BACKWARD_PASSES, Count, Product, count_products, matrix_rate, peak_memory, wait
from qkv.nn.transformer import Transformer
from qkv.train.compute import choose_compute
from qkv.train.loop import Trainer, new_trainer
from qkv.train.profile import PartProfile, profile_parts

WARM_UP = 2
"""Steps before those that are measured; the first one is timed by itself."""
PASSES = 1 + BACKWARD_PASSES
"""What a step multiplies, in forward passes."""


@dataclass
class TrainingSpeed:
    """What was measured; None and empty where Ctrl-C came before.

    made_data: whether it trained on random data, of the configuration's shapes. compute: how, and by which rules.
    first_step: seconds from the configuration to the end of the first step. tokens, seconds: of each measured step,
    tokens counted as `Batch.tokens` does. flops: of each of them, what it multiplies, as `qkv show` counts.
    peak_memory: bytes that the process, or PyTorch on a GPU, held at most. matrix_rate: FLOP/s of plain products of the
    same shapes, in the same precision.
    """

    made_data: bool
    compute: tuple[str, ...]
    first_step: float | None = None
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak_memory: int | None = None
    flops: list[float] = field(default_factory=list)
    matrix_rate: float | None = None
    parts: PartProfile | None = None
    interrupted: bool = False

    @property
    def tokens_per_second(self) -> list[float]:
        """Of each measured step."""
        return [count / seconds for count, seconds in zip(self.tokens, self.seconds, strict=True)]

    @property
    def flops_per_second(self) -> float | None:
        """The median of the steps."""
        if not self.flops:
            return None
        return statistics.median(flops / seconds for flops, seconds in zip(self.flops, self.seconds, strict=True))

    @property
    def ratio(self) -> float | None:
        """The share of the matrix rate that training reaches."""
        if self.flops_per_second is None or self.matrix_rate is None:
            return None
        return self.flops_per_second / self.matrix_rate


def measure_training(config: Config, steps: int = 20, tell: Callable[[str], None] | None = None) -> TrainingSpeed:
    """Take `steps` steps as `qkv train` would, without saving or validation, and measure them; a ramp is left out.

    The data are those of `config`, or made where it names none: then the model's sizes must be known. tell: hears how
    far it is. Ctrl-C ends the measuring, but not before a step was measured.

    Raises QkvError for what cannot be trained.
    """
    tell = tell or (lambda text: None)
    started = time.perf_counter()
    trainer = _trainer(config, steps)
    speed = TrainingSpeed(not config.data.train, trainer.compute.why)
    tell("; ".join(speed.compute))
    calls = _Calls(trainer.network)
    try:
        _measure_steps(trainer, speed, calls, started, steps, tell)
        speed.peak_memory = peak_memory(trainer.compute.device)
        tell("counting and measuring products of matrices")
        counts = {key: _count(trainer, *call) for key, call in calls.kept.items()}
        speed.flops = [PASSES * sum(counts[key].flops for key in keys) for keys in calls.of_step]
        products = Counter[Product]()
        for keys in calls.of_step:
            for key in keys:
                products.update(counts[key].products)
        speed.matrix_rate = matrix_rate(products, trainer.compute.dtype, trainer.compute.device, backward=True)
        tell("profiling")
        speed.parts = profile_parts(trainer)
    except KeyboardInterrupt:
        if not speed.seconds:
            raise
        speed.interrupted = True
        speed.peak_memory = peak_memory(trainer.compute.device)
    return speed


def _trainer(config: Config, steps: int) -> Trainer:
    """A trainer before its first step, whose run is long enough to be measured."""
    config = config.model_copy(update={"train": config.train.model_copy(update={"ramp": ()})})
    if config.data.train:
        trainer = new_trainer(config, *tokenizers_for(config, cache_folder()), None)
    else:
        prepared, tokenizer = made_data(config)
        network = Transformer(config.model, generator=torch.Generator().manual_seed(config.train.seed))
        trainer = Trainer(config, network, tokenizer, prepared, choose_compute(config.train, network))
    longest = max(config.train.steps, WARM_UP + steps + 10)
    trainer.config = trainer.config.model_copy(
        update={"train": trainer.config.train.model_copy(update={"steps": longest})}
    )
    return trainer


def _measure_steps(
    trainer: Trainer, speed: TrainingSpeed, calls: _Calls, started: float, steps: int, tell: Callable[[str], None]
) -> None:
    device = trainer.compute.device
    trainer.take_step()
    wait(device)
    speed.first_step = time.perf_counter() - started
    tell(f"first step after {speed.first_step:.1f} s")
    for _ in range(WARM_UP - 1):
        trainer.take_step()
    with calls:
        for step in range(steps):
            calls.of_step.append([])
            wait(device)
            before, began = trainer.tokens, time.perf_counter()
            trainer.take_step()
            wait(device)
            seconds = time.perf_counter() - began
            speed.seconds.append(seconds)
            speed.tokens.append(trainer.tokens - before)
            tell(f"step {step + 1:>4} of {steps}  {speed.tokens[-1] / seconds:,.0f} tokens/s")


class _Calls:
    """Keeps, while it is a context, one call of the network of each shape (`kept`), and which ones each step made."""

    def __init__(self, network: Transformer) -> None:
        self.network = network
        self.kept: dict[Any, tuple[Any, Any]] = {}
        self.of_step: list[list[Any]] = []

    def __enter__(self) -> None:
        self._handle = self.network.register_forward_pre_hook(self._keep, with_kwargs=True)

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def _keep(self, _: Any, ids: tuple[Tensor, ...], options: dict[str, Tensor]) -> None:
        key = tuple(tuple(value.shape) for value in (*ids, *options.values())), int((options["labels"] >= 0).sum())
        self.kept.setdefault(key, (ids, options))
        self.of_step[-1].append(key)


def _count(trainer: Trainer, ids: Any, options: Any) -> Count:
    """What a forward pass of training multiplies."""
    with trainer.compute.forward_passes():
        return count_products(lambda: trainer.network(*ids, **options))
