"""`qkv plot loss | positions | masks`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from qkv.cli import LazyGroup
from qkv.cli.common import json_option, print_json

KINDS = {
    "loss": ("qkv.cli.plot:loss", "Training and validation loss of runs."),
    "positions": ("qkv.cli.plot:positions", "The heat-map of sinusoidal or learned positions."),
    "masks": ("qkv.cli.plot:masks", "Who may attend to whom: causal, window, prefix, documents, padding."),
}
Command = TypeVar("Command", bound=Callable[..., Any])


@click.group(cls=LazyGroup, table=KINDS)
def plot() -> None:
    """Draw runs, positions and masks into a PNG, SVG or PDF file."""


def output_option(command: Command) -> Command:
    """`-o FILE`."""
    return click.option(
        "-o", "--output", type=click.Path(path_type=Path), required=True, help="A .png, .svg or .pdf file."
    )(command)


def _written(output: Path, as_json: bool) -> None:
    if as_json:
        print_json({"path": str(output)})
    else:
        click.echo(f"wrote {output}", err=True)


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN...")
@output_option
@json_option
def loss(runs: tuple[Path, ...], output: Path, as_json: bool) -> None:
    """Training and validation loss over the steps of each RUN folder."""
    from qkv.inspect.plots import check_format, plot_loss, save_plot

    check_format(output)
    save_plot(plot_loss(runs), output)
    _written(output, as_json)


@click.command()
@click.argument("config")
@click.argument("overrides", nargs=-1, metavar="[key=value]...")
@output_option
@click.option("--length", type=int, help="Positions to draw (default: the whole context).")
@click.option("--allow-package", multiple=True, metavar="NAME", help="A package whose parts the model may import.")
@json_option
def positions(
    config: str,
    overrides: tuple[str, ...],
    output: Path,
    length: int | None,
    allow_package: tuple[str, ...],
    as_json: bool,
) -> None:
    """The position signal that CONFIG adds to the embedding, position by dimension.

    CONFIG is a preset, a file, or, for learned positions, the folder of a trained model.
    """
    from qkv.evaluate.runs import config_hash
    from qkv.inspect.plots import check_format, plot_positions, position_table, save_plot

    check_format(output)
    source, text = _source(config, overrides, allow_package)
    table, kind = position_table(source, length)
    save_plot(plot_positions(table, kind, footer=f"config {config_hash(text)}"), output)
    _written(output, as_json)


def _source(config: str, overrides: tuple[str, ...], allow_package: tuple[str, ...]) -> tuple[Any, str]:
    """A network where there are weights, else the first stack's configuration; and the whole configuration's text."""
    from qkv.config.errors import UsageError
    from qkv.config.run import Config

    path = Path(config)
    if not path.is_dir() and path.suffix != ".gguf":
        tree = Config.load(config, *overrides)
        return next(iter(tree.model.stacks.values())), tree.to_yaml()
    from qkv.model import load

    if overrides:
        raise UsageError("a trained model cannot be overridden", where=overrides[0])
    model = load(config, device="cpu", dtype="fp32", allow=allow_package)
    return model.network, model.config.to_yaml()


@click.command()
@output_option
@json_option
def masks(output: Path, as_json: bool) -> None:
    """Who may attend to whom under each kind of mask, as the model itself computes it."""
    from qkv.inspect.plots import check_format, plot_masks, save_plot

    check_format(output)
    save_plot(plot_masks()[0], output)
    _written(output, as_json)
