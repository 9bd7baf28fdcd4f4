"""Weights that are evaluated and saved as the model, where they are not those that are trained.

Validation, samples and a checkpoint's model.safetensors have the average; training.safetensors has the trained weights,
from which a run goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from qkv.config.errors import DamagedError
from qkv.config.training import ScheduleFreeConfig, TrainConfig
from qkv.nn.transformer import Transformer
from qkv.train.optimizer import Optimizer


class Averaging:
    """None: what is evaluated is what is trained."""

    def update(self, step: int) -> None:
        """The weights have taken step number `step`, counted from 1."""

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The network has the average inside this context, and its trained weights again after it."""
        yield

    def state(self) -> dict[str, Tensor]:
        """The trained weights by name, where they are not the model's."""
        return {}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave, the network holding the average. Raises DamagedError naming what is missing."""

    def describe(self) -> list[str]:
        """A line for people, where there is something to say."""
        return []


class Averaged(Averaging):
    """What every average has in common: how it takes the place of the trained weights."""

    def __init__(self, network: Transformer) -> None:
        self.parameters = dict(network.named_parameters())

    def averages(self) -> Mapping[str, Tensor]:
        """The average of each parameter by its name; nothing before the first step."""
        raise NotImplementedError

    @contextmanager
    def applied(self) -> Iterator[None]:
        averages = self.averages()
        trained = {name: self.parameters[name].detach().clone() for name in averages}
        self._write(averages)
        try:
            yield
        finally:
            self._write(trained)

    @torch.no_grad()
    def _write(self, weights: Mapping[str, Tensor]) -> None:
        for name, weight in weights.items():
            self.parameters[name].copy_(weight)

    def state(self) -> dict[str, Tensor]:
        return {f"weights/{name}": parameter.detach().clone() for name, parameter in self.parameters.items()}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            trained = tensors.get(f"weights/{name}")
            if trained is None or trained.shape != parameter.shape:
                raise DamagedError(
                    f"the trained weights of {name} are missing or damaged", hint="resuming from an earlier checkpoint"
                )
            self._write({name: trained})


class MovingAverage(Averaged):
    """a <- d a + (1 - d) w after every step, d the smaller of `decay` and (1 + step) / (10 + step), so that the random
    weights of the beginning are soon forgotten: tf.train.ExponentialMovingAverage with its `num_updates`."""

    def __init__(self, network: Transformer, decay: float) -> None:
        super().__init__(network)
        self.decay = decay
        self._averages: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, step: int) -> None:
        if not self._averages:
            self._averages = self._copies()
        share = 1 - min(self.decay, (1 + step) / (10 + step))
        for name, average in self._averages.items():
            average.lerp_(self.parameters[name], share)

    def averages(self) -> Mapping[str, Tensor]:
        return self._averages

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        self._averages = self._copies()
        super().load_state(tensors)

    def describe(self) -> list[str]:
        return [f"evaluated and saved: the moving average of the weights, {self.decay:g} of it old"]

    def _copies(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}


class ScheduleFreeAverage(Averaged):
    """The average that a schedule-free optimiser keeps."""

    def __init__(self, network: Transformer, optimizer: Optimizer) -> None:
        super().__init__(network)
        self.optimizer = optimizer

    def averages(self) -> Mapping[str, Tensor]:
        return self.optimizer.averages()

    def describe(self) -> list[str]:
        return ["evaluated and saved: the optimiser's average of the weights"]


def build_averaging(config: TrainConfig, network: Transformer, optimizer: Optimizer) -> Averaging:
    """What `config` says of averaging, of the weights of `network` that `optimizer` updates."""
    if isinstance(config.optimizer, ScheduleFreeConfig):
        return ScheduleFreeAverage(network, optimizer)
    return Averaging() if config.ema is None else MovingAverage(network, config.ema)
