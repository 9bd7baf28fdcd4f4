"""What a run borrows from the process and gives back: torch's global generators, and Ctrl-C."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import torch

Generators = dict[str, torch.Tensor]
"""Generator states by device type."""


def read_generators(device: torch.device) -> Generators:
    """The states of torch's global generators that training on `device` draws from."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _write(states: Generators, device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def generators_of(seed: int, device: torch.device) -> Generators:
    """The states that dropout starts from, leaving the caller's as they are."""
    places = {"cpu", "cuda"} if device.type == "cuda" else {"cpu"}
    return {place: torch.Generator(place).manual_seed(seed).get_state() for place in places}


@contextmanager
def lent_generators(states: Generators, device: torch.device) -> Iterator[None]:
    """Dropout draws from torch's global generators: lend them to the run, and give the caller's back."""
    before = read_generators(device)
    _write(states, device)
    try:
        yield
    finally:
        _write(before, device)


@contextmanager
def interrupts(tell: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C is remembered until the step is done, and `tell` says so; a second one stops at once."""
    received = False

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal received
        if received:
            raise KeyboardInterrupt
        received = True
        with suppress(RuntimeError):  # it came in the middle of another line
            tell()

    try:
        before = signal.signal(signal.SIGINT, remember)
    except ValueError:  # not in the main thread: nobody can press Ctrl-C here
        yield lambda: False
        return
    try:
        yield lambda: received
    finally:
        signal.signal(signal.SIGINT, before)
