"""`qkv translate`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from itertools import tee
from pathlib import Path
from typing import Any

import click

from qkv.cli.common import bad_bytes_option, json_line, json_lines_option, model_options


@click.command()
@click.argument("model")
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Where to write (default: stdout).")
@click.option("--beam-size", default=4, show_default=True, help="Translations in progress at a time; 1: greedy.")
@click.option("--length-penalty", default=0.6, show_default=True, help="Above 0 favours longer ones; 0: none.")
@click.option(
    "--length-penalty-kind",
    type=click.Choice(["gnmt", "power"]),
    default="gnmt",
    show_default=True,
    help="((5 + tokens) / 6)^penalty, or tokens^penalty.",
)
@click.option("--n-best", default=1, show_default=True, help="The best N of each line; at most the beam size.")
@click.option("--batch-size", default=32, show_default=True, help="Lines at once; 1: each is answered when it is read.")
@click.option("--max-new-tokens", type=int, help="At most so many per line (default: twice the source's and 16 more).")
@bad_bytes_option
@model_options
@json_lines_option
def translate(
    model: str,
    file: Path | None,
    output: Path | None,
    bad_bytes: Any,
    loading: dict[str, Any],
    as_json: bool,
    **options: Any,
) -> None:
    """Translate the lines of FILE, or of standard input, with MODEL (a run, a checkpoint or a published
    model; an encoder-decoder).

    Each line gives a line, in order, as soon as it is done; only "\\n" ends a line, and blank ones stay blank. With
    --n-best above 1 lines are `number ||| translation ||| score`, as in Moses: numbers from 0, and the best first.
    """
    from qkv.cli.lines import one_line, read_lines, write_lines
    from qkv.model import load

    sources, lines = tee(read_lines(file, bad_bytes))
    loaded = load(model, **loading)
    translations = loaded.translate_stream(lines, **options)
    ends: Counter[str] = Counter()

    def answers() -> Iterator[str]:
        for number, (source, translation) in enumerate(zip(sources, translations, strict=True)):
            ends[translation.finish_reason] += 1
            if as_json:
                yield json_line({"source": source, "text": translation.text, **asdict(translation)})
            elif options["n_best"] == 1:
                yield one_line(translation.text)
            else:
                found = translation.hypotheses
                yield "\n".join(f"{number} ||| {one_line(each.text)} ||| {each.score:.4f}" for each in found)

    write_lines(answers(), output, file, quiet=as_json)
    if ends["length"] and not as_json:
        click.echo(f"cut off at --max-new-tokens or the end of the context: {ends['length']:,}", err=True)
