"""`qkv classify`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qkv.cli.common import bad_bytes_option, json_line, json_lines_option, model_options
from qkv.config.errors import UsageError, printable

if TYPE_CHECKING:
    from qkv.generate import Classification

_BATCHES_READ = 16  # at a time, to be sorted by length


@click.command()
@click.argument("model")
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@click.option("--file", type=click.Path(path_type=Path), help="One TEXT per line; - is standard input.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Where to write (default: stdout).")
@click.option("--top", type=click.IntRange(min=1), help="Only the N likeliest classes (default: all).")
@click.option("--batch-size", type=click.IntRange(1, 10**6), default=32, show_default=True, help="Texts at once.")
@bad_bytes_option
@model_options
@json_lines_option
def classify(
    model: str,
    texts: tuple[str, ...],
    file: Path | None,
    output: Path | None,
    top: int | None,
    batch_size: int,
    bad_bytes: Any,
    loading: dict[str, Any],
    as_json: bool,
) -> None:
    """Which class each TEXT belongs to, by MODEL (a run, a checkpoint or a published model; a classifier).

    Where the model reads images or sound, a TEXT is the name of such a file. The classes of a TEXT come with their
    probabilities, the likeliest first. Each line of --file gives a line: the likeliest label, a tab, its probability.
    """
    if (file is None) == (not texts):
        what = "there are texts and a file" if texts else "there is nothing to classify"
        raise UsageError(what, hint="`qkv classify MODEL TEXT`, or --file FILE")
    from qkv.cli.lines import one_line, read_lines, write_lines
    from qkv.model import load

    lines = iter(texts) if file is None else read_lines(file, bad_bytes)
    loaded = load(model, **loading)

    def answers() -> Iterator[str]:
        while some := list(islice(lines, _BATCHES_READ * batch_size)):
            for text, found in zip(some, loaded.classify(some, top=top, batch_size=batch_size), strict=True):
                if as_json:
                    yield json_line({"text": text, **asdict(found)})
                elif file is None:
                    yield _told(text, found)
                else:
                    yield f"{one_line(found.label)}\t{found.probability:.4f}"

    write_lines(answers(), output, file, quiet=as_json or file is None)


def _told(text: str, found: Classification) -> str:
    ranked = found.probabilities.items()
    return "\n".join([printable(text), *(f"  {p:>7.2%}  {printable(label)}" for label, p in ranked)])
