"""The next step's batches, made while this one is computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from qkv.data.batches import BatchLoader
from qkv.data.rows import Batch


class Prefetched:
    """A `BatchLoader` that is one step ahead, in a thread: the same steps, and the states that it had without.

    What goes wrong with a step's batches is raised when that step is asked for.
    """

    def __init__(self, loader: BatchLoader) -> None:
        self._loader = loader
        self._thread = ThreadPoolExecutor(1, "qkv-batches")
        self._coming: Future[tuple[list[Batch], dict[str, int]]] | None = None
        self._state = loader.state_dict()

    @property
    def one_shape(self) -> bool:
        """As in `BatchLoader`."""
        return self._loader.one_shape

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        coming, self._coming = self._coming or self._thread.submit(self._make), None
        batches, self._state = coming.result()
        self._coming = self._thread.submit(self._make)
        return batches

    def state_dict(self) -> dict[str, int]:
        """The loader's after the step that was last given."""
        return self._state

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """As in `BatchLoader`; the step that was made ahead is dropped."""
        if self._coming is not None and not self._coming.cancel():
            self._coming.exception()  # waits until the loader is at rest
        self._coming = None
        self._loader.load_state_dict(state)
        self._state = self._loader.state_dict()

    def pass_over(self) -> None:
        """As in `BatchLoader`: the step that was last given was not taken."""
        self.load_state_dict(self._state)
        self._loader.pass_over()
        self._state = self._loader.state_dict()

    def _make(self) -> tuple[list[Batch], dict[str, int]]:
        return next(self._loader), self._loader.state_dict()
