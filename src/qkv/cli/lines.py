"""Line in, line out: what the commands share that answer a text line by line."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qkv.config.errors import NotFoundError, QkvError, UsageError

if TYPE_CHECKING:
    from qkv.tokenizer.text import BadBytes

_DASH = Path("-")


def read_lines(file: Path | None, bad_bytes: BadBytes) -> Iterator[str]:
    """The lines of a file, or of standard input (None and `-`), each as soon as it is there.

    Raises UsageError where nothing was given and a person sits at the terminal.
    """
    from qkv.data.documents import lines_in, lines_of
    from qkv.tokenizer.text import existing_file, read_stream

    if file not in (None, _DASH):
        return lines_of(existing_file(file), bad_bytes)
    if sys.stdin is None or (file is None and sys.stdin.isatty()):
        raise UsageError("there are no lines to read", hint="a FILE, `... | qkv ...`, or - to type them")
    # a buffered stream would wait for a whole block of them
    stream = getattr(sys.stdin.buffer, "raw", sys.stdin.buffer)
    return lines_in(read_stream(stream, "standard input", bad_bytes))


def one_line(text: str) -> str:
    """A text that takes a single line, so that line n answers line n."""
    return text.replace("\n", " ")


def write_lines(answers: Iterable[str], output: Path | None, file: Path | None, *, quiet: bool = False) -> None:
    """Write each answer to its line of `output` (None: stdout) as soon as it comes, and say how many there were.

    file: where the lines come from, for a bar that knows the end. What was written stays, whatever comes after.
    """
    seen = output is None and sys.stdout.isatty()
    started, done = time.perf_counter(), 0
    with writer(output, file) as write, progress_bar(file, shown=not quiet and not seen) as advance:
        try:
            for answer in answers:
                write(answer)
                done += 1
                advance()
        except KeyboardInterrupt:
            where = f"in {output}" if output else "written"
            raise KeyboardInterrupt(f"interrupted; answers that are {where}: {done:,}") from None
    if not quiet:
        seconds = time.perf_counter() - started
        lines = "1 line" if done == 1 else f"{done:,} lines"
        click.echo(f"{lines} in {seconds:.1f} s, {done / seconds:.1f} per second", err=True)


@contextmanager
def writer(output: Path | None, *inputs: Path | None) -> Iterator[Callable[[str], Any]]:
    """What writes a line to a file, or to stdout, at once. One of `inputs` is a UsageError: it would be erased.

    What the file held before goes with the first line, or at a good end without one: no failure before that costs it.
    """
    if output is None:
        yield click.echo
        return
    if output.exists() and any(file is not None and file.exists() and output.samefile(file) for file in inputs):
        raise UsageError("the output would replace the lines that are read", where=str(output), hint="-o OTHER")
    try:
        old = output.is_file()
        with output.open("a", buffering=1, encoding="utf-8", newline="\n") as opened:

            def write(line: str) -> None:
                nonlocal old
                if old:
                    opened.truncate(0)
                    old = False
                opened.write(line + "\n")

            yield write
            if old:
                opened.truncate(0)
    except OSError as error:
        kind = NotFoundError if isinstance(error, FileNotFoundError) else QkvError
        raise kind(f"the output cannot be written: {error.strerror}", where=str(output)) from None


@contextmanager
def progress_bar(lines: Path | int | None, *, shown: bool) -> Iterator[Callable[[], None]]:
    """A bar over a number of lines, or over those of a file, on stderr where that is a terminal; call it per line."""
    if not shown or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from qkv.data.records import count_lines

    total = lines if isinstance(lines, int) else None
    if isinstance(lines, Path) and lines.is_file():  # what comes through a pipe can be read but once
        total = count_lines(lines)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("lines{task.fields[speed]}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total, speed="")

        def advance() -> None:
            bar.advance(task)
            speed = bar.tasks[0].speed
            bar.update(task, speed=f", {speed:,.1f} per second" if speed else "")

        yield advance
