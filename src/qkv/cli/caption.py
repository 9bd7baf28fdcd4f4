"""`qkv caption`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from qkv.cli.common import json_line, json_lines_option, model_options


@click.command()
@click.argument("model")
@click.argument("images", nargs=-1, required=True, metavar="IMAGE...", type=click.Path(path_type=Path))
@click.option("--beam-size", default=4, show_default=True, help="Texts in progress at a time; 1: greedy.")
@click.option("--length-penalty", default=0.6, show_default=True, help="Above 0 favours longer ones; 0: none.")
@click.option("--batch-size", default=32, show_default=True, help="Images at once.")
@click.option("--max-new-tokens", type=int, help="At most so many per image (default: twice its vectors and 16 more).")
@model_options
@json_lines_option
def caption(model: str, images: tuple[Path, ...], loading: dict[str, Any], as_json: bool, **options: Any) -> None:
    """Write what MODEL (a run or a checkpoint; an encoder-decoder that reads images) sees in each IMAGE.

    Each image gives a line, in order. Images become of the model's size as in its training.
    """
    from qkv.cli.lines import one_line
    from qkv.model import load

    found = load(model, **loading).caption(list(images), **options)
    for image, one in zip(images, found, strict=True):
        click.echo(json_line({"image": str(image), **asdict(one)}) if as_json else one_line(one.text))
