"""`qkv embed`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qkv.cli.common import bad_bytes_option, json_line, json_lines_option, model_options
from qkv.config.errors import NotFoundError, QkvError, UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_BATCHES_READ = 16  # at a time, to be sorted by length


@click.command()
@click.argument("model")
@click.argument("texts", nargs=-1, metavar="[FILE|TEXT]...")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Where to write: a .npy, or lines with --json.")
@click.option(
    "--pooling",
    type=click.Choice(["mean", "cls", "max", "last"]),
    help="How tokens become one vector (default: as the model was made, else the mean).",
)
@click.option(
    "--normalise/--no-normalise", default=None, help="To length 1 (default: as the model was made, else not)."
)
@click.option("--batch-size", type=click.IntRange(1, 10**6), default=32, show_default=True, help="Texts at once.")
@bad_bytes_option
@model_options
@json_lines_option
def embed(
    model: str,
    texts: tuple[str, ...],
    output: Path | None,
    pooling: Any,
    normalise: bool | None,
    batch_size: int,
    bad_bytes: Any,
    loading: dict[str, Any],
    as_json: bool,
) -> None:
    """The vector of each TEXT, or of each line of FILE (- or nothing: of standard input), by MODEL.

    -o OUT.npy has the vectors as float32 [texts, d_model], in order. With --json each text gives a line with `text`
    and `embedding`. What is the name of a file means its lines. For a MODEL of images each argument is an image file,
    which --json calls `image`. CLIP's models of texts and of images are FOLDER#text and FOLDER#image.
    """
    if output is None and not as_json:
        raise UsageError("the vectors have nowhere to go", hint="-o OUT.npy, or --json")
    from qkv.cli.lines import read_lines, write_lines
    from qkv.model import load

    loaded = load(model, **loading)
    reads_texts = next(iter(loaded.network.config.stacks.values())).input.reads_ids
    if not reads_texts and not texts:
        raise UsageError("there is nothing to read: the model reads images", hint="their files behind MODEL")
    file = _file_of(texts) if reads_texts else None
    lines = iter(texts) if texts and file is None else read_lines(file, bad_bytes)
    what = "text" if reads_texts else "image"

    def answers() -> Iterator[tuple[list[str], NDArray[np.float32]]]:
        while some := list(islice(lines, _BATCHES_READ * batch_size)):
            yield some, loaded.embed(some, pooling=pooling, normalise=normalise, batch_size=batch_size)

    if as_json or output is None:
        told = (
            json_line({what: text, "embedding": vector.tolist()})
            for some, vectors in answers()
            for text, vector in zip(some, vectors, strict=True)
        )
        write_lines(told, output, file, quiet=True)
        return
    none = loaded.embed([], pooling=pooling)  # the width, where there is no text
    count, width = _write_array(output, file, (vectors for _, vectors in answers()), none)
    given = f"the lines of {file}" if file else "the lines read" if not texts else f"the {what}s given"
    click.echo(f"{count:,} vectors of {width} numbers: {given}", err=True)


def _file_of(texts: tuple[str, ...]) -> Path | None:
    """The file whose lines are meant; None: standard input, or the texts themselves."""
    if len(texts) != 1:
        return None
    try:
        return Path(texts[0]) if texts[0] == "-" or Path(texts[0]).is_file() else None
    except OSError:  # too long for a name
        return None


def _write_array(
    output: Path, file: Path | None, blocks: Iterable[NDArray[np.float32]], none: NDArray[np.float32]
) -> tuple[int, int]:
    """Write blocks of vectors as one array, whole or not at all; how many there are, and how wide."""
    import numpy as np

    if output.exists() and file is not None and file.exists() and output.samefile(file):
        raise UsageError("the output would replace the lines that are read", where=str(output), hint="-o OTHER")
    beside = output.with_name(f".{output.name}.tmp-{os.getpid()}")
    try:
        with beside.open("wb") as opened:
            vectors = np.concatenate([none, *blocks])
            np.save(opened, vectors)
        beside.replace(output)
    except OSError as error:
        kind = NotFoundError if isinstance(error, FileNotFoundError) else QkvError
        raise kind(f"the output cannot be written: {error.strerror}", where=str(output)) from None
    finally:
        beside.unlink(missing_ok=True)
    return vectors.shape[0], vectors.shape[1]
