"""`qkv plot loss | lr | grad-norm | speed | positions | masks | attention`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from qkv.cli import LazyGroup
from qkv.cli.common import allow_option, json_option, model_options, print_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import Tensor

    from qkv.inspect.attention import StackAttention

KINDS = {
    "loss": ("qkv.cli.plot:loss", "Training and validation loss of runs."),
    "lr": ("qkv.cli.plot:lr", "Learning rate of runs."),
    "grad-norm": ("qkv.cli.plot:grad_norm", "Gradient norm of runs, before clipping."),
    "speed": ("qkv.cli.plot:speed", "Tokens per second of runs."),
    "positions": ("qkv.cli.plot:positions", "The heat-map of sinusoidal or learned positions."),
    "masks": ("qkv.cli.plot:masks", "Who may attend to whom: causal, window, prefix, documents, padding."),
    "attention": ("qkv.cli.plot:attention", "Attention weights: all heads, one head, or the alignment of a pair."),
}
Command = TypeVar("Command", bound=Callable[..., Any])


@click.group(cls=LazyGroup, table=KINDS)
def plot() -> None:
    """Draw runs, positions, masks and attention into a PNG, SVG or PDF file."""


def output_option(command: Command) -> Command:
    """`-o FILE`."""
    return click.option(
        "-o", "--output", type=click.Path(path_type=Path), required=True, help="A .png, .svg or .pdf file."
    )(command)


def _written(output: Path, as_json: bool, **more: Any) -> None:
    if as_json:
        print_json({"path": str(output), **more})
    else:
        click.echo(f"wrote {output}", err=True)


def _plot_of_runs(kind: str, what: str) -> click.Command:
    """The command that draws a curve of qkv.inspect.run_plots."""
    text = f"""{what} over the steps of each RUN folder.

    Runs that differ in train.seed alone are one line, their mean, in a band from the lowest to the highest.
    """

    @click.command(kind, help=text)
    @click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN...")
    @output_option
    @click.option("--log-x", is_flag=True, help="Steps on a logarithmic axis.")
    @click.option("--log-y", is_flag=True, help="Values on a logarithmic axis.")
    @json_option
    def command(runs: tuple[Path, ...], output: Path, log_x: bool, log_y: bool, as_json: bool) -> None:
        from qkv.inspect.plots import check_format, save_plot
        from qkv.inspect.run_plots import plot_runs

        check_format(output)
        save_plot(plot_runs(runs, kind, log_x=log_x, log_y=log_y), output)
        _written(output, as_json)

    return command


loss = _plot_of_runs("loss", "Training and validation loss")
lr = _plot_of_runs("lr", "Learning rate")
grad_norm = _plot_of_runs("grad-norm", "Gradient norm, before clipping,")
speed = _plot_of_runs("speed", "Tokens per second")


@click.command()
@click.argument("config")
@click.argument("overrides", nargs=-1, metavar="[key=value]...")
@output_option
@click.option("--length", type=int, help="Positions to draw (default: the whole context).")
@allow_option
@json_option
def positions(
    config: str,
    overrides: tuple[str, ...],
    output: Path,
    length: int | None,
    allow: tuple[str, ...],
    as_json: bool,
) -> None:
    """The position signal that CONFIG adds to the embedding, position by dimension.

    CONFIG is a preset, a file, or, for learned positions, the folder of a trained model.
    """
    from qkv.evaluate.runs import config_hash
    from qkv.inspect.plots import check_format, plot_positions, position_table, save_plot

    check_format(output)
    source, text = _source(config, overrides, allow)
    table, kind = position_table(source, length)
    save_plot(plot_positions(table, kind, footer=f"config {config_hash(text)}"), output)
    _written(output, as_json)


def _source(config: str, overrides: tuple[str, ...], allow: tuple[str, ...]) -> tuple[Any, str]:
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
    model = load(config, device="cpu", dtype="fp32", allow=allow)
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


@click.command()
@click.argument("model")
@click.option("--text", help="What the model reads; of an encoder-decoder the source.")
@click.option("--file", help="The image or WAV file that it reads in place of a text.")
@click.option("--target", help="What an encoder-decoder makes of it (default: its own best output).")
@click.option("--layer", type=int, help="Only this layer, counted from 0.")
@click.option("--head", type=int, help="Only this head of --layer, counted from 0.")
@click.option("--stack", type=click.Choice(["encoder", "decoder"]), help="Default: the decoder, where there is one.")
@click.option(
    "--kind", type=click.Choice(["self", "cross"]), help="cross: the decoder reads the source.  [default: self]"
)
@click.option("--align", is_flag=True, help="Cross-attention averaged over the heads of --layer (default: the last).")
@output_option
@model_options
@json_option
def attention(
    model: str,
    text: str | None,
    file: str | None,
    target: str | None,
    layer: int | None,
    head: int | None,
    stack: Any,
    kind: Any,
    align: bool,
    output: Path,
    loading: dict[str, Any],
    as_json: bool,
) -> None:
    """Who attends to whom in MODEL (a run, a checkpoint, a published model) while it reads a text, image or recording.

    All heads of all layers, or of --layer; one head with --layer and --head. Cross-attention with --align or --layer is
    an alignment: each row is the target token that is being predicted; with an image it is drawn upon it, with a
    recording below its log-mel features. JSON has the weights of one head or alignment.
    """
    from qkv.config.errors import UsageError
    from qkv.evaluate.runs import config_hash
    from qkv.generate.reader import WRITERS
    from qkv.inspect.attention import check_number
    from qkv.inspect.plots import check_format, save_plot
    from qkv.model import load

    check_format(output)
    if head is not None and layer is None:
        raise UsageError("--head is a head of one layer", hint=f"--layer N --head {head}")
    if align and kind == "self":
        raise UsageError("an alignment is read from cross-attention", hint="--align without --kind self")
    if (text is None) == (file is None):
        raise UsageError("what is to be read is a text, or an image or WAV file", hint="--text TEXT, or --file FILE")
    loaded = load(model, **loading)
    reads = next(iter(loaded.network.config.stacks.values())).input
    media = reads.kind in WRITERS
    if media != (file is not None):
        what = reads.reads if media else "no files"
        raise UsageError(f"the model reads {what}", hint="--file FILE" if media else "--text TEXT")
    found = loaded.attention(file or text, target, stack=stack, kind="cross" if align else kind or "self")
    if layer is not None:
        check_number("layer", layer, len(found.layers))
    footer = f"config {config_hash(loaded.config.to_yaml())}"
    if align or head is not None or (found.kind == "cross" and layer is not None):
        axes, more = _draw_matrix(found, layer, head, footer)
    else:
        axes, more = _draw_grid(found, layer, footer)
    save_plot(axes, output)
    _written(output, as_json, rows=found.rows, columns=found.columns, **more)


def _draw_matrix(
    found: StackAttention, layer: int | None, head: int | None, footer: str
) -> tuple[Axes, dict[str, Any]]:
    """One head, or the mean over the heads of one layer (None: the last), with its numbers."""
    from qkv.inspect.attention import alignment

    number = len(found.layers) - 1 if layer is None else layer
    weights_TS = alignment(found.layers, layer=number, head=head)
    what = f"mean of {found.layers[number].shape[0]} heads" if head is None else f"head {head}"
    axes = _draw_weights(found, weights_TS, title=f"{_name(found)}, layer {number}, {what}", footer=footer)
    more = {"shape": list(weights_TS.shape), "weights": weights_TS.tolist()}
    return axes, more if found.grid is None else more | {"grid": list(found.grid)}


def _draw_weights(found: StackAttention, weights_TS: Tensor, **words: Any) -> Axes:
    """A matrix of tokens, or what cross-attention reads of an image or recording drawn upon it."""
    from qkv.inspect.attention_plots import (
        plot_alignment,
        plot_attention_head,
        plot_image_alignment,
        plot_sound_alignment,
    )

    if found.kind == "self":
        return plot_attention_head(weights_TS, found.rows, found.columns, **words)
    if found.source is None:
        return plot_alignment(weights_TS, found.rows, found.columns, **words)
    source = found.source.float().cpu()
    if found.grid is None:
        return plot_sound_alignment(weights_TS, found.rows, source, **words)[0]
    return plot_image_alignment(weights_TS, found.rows, source, found.grid, **words)[0]


def _draw_grid(found: StackAttention, layer: int | None, footer: str) -> tuple[Axes, dict[str, Any]]:
    """All heads of one layer, or of all (None)."""
    from qkv.inspect.attention_plots import plot_attention_grid

    numbers = list(range(len(found.layers))) if layer is None else [layer]
    heads = max(found.layers[number].shape[0] for number in numbers)
    what = f"{len(numbers)} layers" if layer is None else f"layer {layer}"
    axes = plot_attention_grid(
        (found.layers[number].weights() for number in numbers),
        layers=numbers,
        title=f"{_name(found)}, {what}, {heads} heads",
        footer=footer,
    )
    return axes, {"shape": [len(numbers), heads, len(found.rows), len(found.columns)]}


def _name(found: StackAttention) -> str:
    return f"{found.stack} {found.kind}-attention".capitalize()
