"""Training as people see it: a progress bar on a terminal, plain lines elsewhere, JSON lines when asked."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Self

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from qkv.cli.common import print_json


class Progress:
    """A listener for `qkv.fit`; use as a context, so that the terminal is left as it was."""

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json
        self.bar: Bar | None = None
        self.task: TaskID | None = None
        if not as_json and sys.stderr.isatty():
            self.bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )

    def __enter__(self) -> Self:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def __call__(self, event: dict[str, Any]) -> None:
        if self.bar is None:
            print_event(event, self.as_json)
            return
        if event["event"] == "start":
            self.task = self.bar.add_task("training", total=event["steps"], completed=event["step"], figures="")
        if event["event"] == "train" and self.task is not None:
            figures = f"loss {event['loss']:.4f}  lr {event['lr']:.1e}  {event['tokens_per_second']:,.0f} tokens/s"
            self.bar.update(self.task, completed=event["step"], figures=figures)
            return
        line = event_line(event)
        if line is not None:
            self.bar.console.print(line, highlight=False, markup=False)


def event_line(event: dict[str, Any]) -> str | None:
    """What a person reads of an event, or None."""
    kind = event["event"]
    if kind == "start":
        from qkv.train.report import data_line

        lines = [
            f"run {event['run']}",
            f"{event['parameters']:,} parameters, {data_line(event)}",
            "; ".join(event["compute"]),
            *event["optimizer"],
            *event["ramp"],
        ]
        return "\n".join(lines)
    if kind == "train":
        return (
            f"step {event['step']:>6}  loss {event['loss']:.4f}  lr {event['lr']:.2e}  "
            f"grad norm {event['grad_norm']:.3f}  {event['tokens_per_second']:,.0f} tokens/s"
        )
    if kind == "validation":
        measures = {key.removeprefix("val_"): value for key, value in event.items() if key.startswith("val_")}
        loss = f"step {event['step']:>6}  validation loss {measures.pop('loss'):.4f}"
        return "  ".join([loss, *(f"{name.replace('_', ' ')} {value:.4g}" for name, value in measures.items())])
    return event.get("text")


def print_event(event: dict[str, Any], as_json: bool) -> None:
    """One event for a machine (stdout) or a person (stderr)."""
    if as_json:
        print_json(event)
        return
    line = event_line(event)
    if line is not None:
        click.echo(line, err=True)
