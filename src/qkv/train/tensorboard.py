"""The metrics of a run as TensorBoard event files, by the extra `qkv[tensorboard]`.

The files repeat metrics.jsonl: when a run goes on they are written anew from it, so that no step is there twice and
none is missing, whoever watched before.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from qkv.config.errors import NotFoundError, UsageError
from qkv.evaluate.runs import read_metrics

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FOLDER = "tensorboard"
_MEASURED = ("train", "validation", "skip")


class TensorBoard:
    """A listener for `qkv.fit` that writes every number of metrics.jsonl into `<run>/tensorboard`, under its own key;
    use as a context, so that the last steps are written too. Raises UsageError where the package is missing."""

    def __init__(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UsageError(
                "event files are written by the package `tensorboard`, which is not installed",
                hint='pip install "qkv[tensorboard]"',
            ) from None
        self._make = SummaryWriter
        self._writer: SummaryWriter | None = None
        self._last: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.close()

    def __call__(self, event: dict[str, Any]) -> None:
        if event["event"] == "start":
            self._begin(Path(event["run"]))
        elif event["event"] in _MEASURED:
            self._write(event)

    def _begin(self, run: Path) -> None:
        for old in (run / FOLDER).glob("events.out.tfevents.*"):
            old.unlink()
        self._writer = self._make(str(run / FOLDER))
        try:
            records = read_metrics(run).records
        except NotFoundError:  # a run that begins
            return
        for record in records:
            self._write(record)

    def _write(self, record: dict[str, Any]) -> None:
        assert self._writer is not None
        step = record["step"]
        for key, value in record.items():
            if key == "step" or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if step > self._last.get(key, -1):  # training and validation both tell the tokens
                self._writer.add_scalar(key, value, step)
                self._last[key] = step
