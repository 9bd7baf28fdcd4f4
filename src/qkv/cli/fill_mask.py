"""`qkv fill-mask`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from qkv.cli.common import json_lines_option, model_options, print_json
from qkv.config.errors import printable


@click.command(name="fill-mask")
@click.argument("model")
@click.argument("texts", nargs=-1, required=True, metavar="TEXT...")
@click.option("--top", type=click.IntRange(min=1), default=5, show_default=True, help="Guesses for each mask.")
@model_options
@json_lines_option
def fill_mask(model: str, texts: tuple[str, ...], top: int, loading: dict[str, Any], as_json: bool) -> None:
    """What MODEL (a run, a checkpoint or a published model; an encoder) would put for each [MASK] or <mask> in TEXT."""
    from qkv.model import load

    loaded = load(model, **loading)
    for text, found in zip(texts, loaded.fill_mask(texts, top=top), strict=True):
        masks = found if isinstance(found[0], list) else [found]
        if as_json:
            print_json({"text": text, "masks": [[asdict(guess) for guess in mask] for mask in masks]})
            continue
        click.echo(printable(text))
        for number, mask in enumerate(masks, 1):
            if len(masks) > 1:
                click.echo(f"  mask {number}")
            for guess in mask:
                click.echo(f"  {guess.probability:>7.2%}  {guess.token!r}")
