"""Plots of attention: all heads, one head, alignments with texts, images and sound. See `qkv.inspect.plots`.

Shapes: T query slots, S key slots, H heads; C channels, H and W height and width in pixels of images, F frames and S
mels of sound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import LinearSegmentedColormap, PowerNorm, to_rgba
from numpy.typing import NDArray
from torch import Tensor

from qkv.config.errors import UsageError
from qkv.data.audio import HOP, SAMPLE_RATE
from qkv.inspect.plots import COLORS, FOOTER, HIDDEN, drawable, new_axes, new_figure, round_ticks, style, write_footer

CAUTION = "Attention weights are not causes: ablate to check"
MOST_LABELS = 60
"""Tokens up to which an axis is labelled with them; beyond, with their numbers. With more keys the colours follow the
square root: weights that many share would be as white as none."""
MOST_CELLS = 512
"""A side of more tokens is drawn in blocks: the keys of a block are summed and its queries averaged."""
MOST_PANELS = 59
"""Tokens that are drawn upon an image, one panel each."""
THUMBNAIL = 64
"""The same for each head of a grid, whose colours follow the square root."""

Weights = Tensor | NDArray[np.floating]


def plot_attention_head(
    weights_TS: Weights,
    rows: Sequence[str],
    columns: Sequence[str],
    axes: Axes | None = None,
    *,
    title: str = "Self-attention of one head",
    footer: str = "",
) -> Axes:
    """One head as a matrix: who attends (rows, [T]) to whom (columns, [S]), labelled with their tokens."""
    names = "query: the token that attends", "key: the token attended to"
    return _plot_matrix(weights_TS, rows, columns, names, axes, title, footer)


def plot_alignment(
    weights_TS: Weights,
    rows: Sequence[str],
    columns: Sequence[str],
    axes: Axes | None = None,
    *,
    title: str = "Alignment by cross-attention",
    footer: str = "",
) -> Axes:
    """What of the source (columns, [S]) is read while each target token (rows, [T]) is predicted.

    The matrix is that of `qkv.inspect.attention.alignment`.
    """
    names = "target: the token being predicted", "source: the token attended to"
    return _plot_matrix(weights_TS, rows, columns, names, axes, title, footer)


def plot_image_alignment(
    weights_TS: Weights,
    rows: Sequence[str],
    image_CHW: Weights,
    grid: tuple[int, int],
    *,
    title: str = "Alignment by cross-attention",
    footer: str = "",
) -> list[Axes]:
    """Where in an image the model looked while each token (rows, [T]) was predicted: the image alone, then a panel per
    token with the attention to each patch drawn upon it, on one scale, and the share that went elsewhere, which is to
    the class token, registers and sinks.

    The last columns of the weights are the patches of `grid`, row by row. The image is drawn from its smallest value,
    black, to its largest, white. Of a long text the first `MOST_PANELS` tokens are drawn, and the footer says so.
    """
    patches = grid[0] * grid[1]
    if weights_TS.shape[0] != len(rows) or weights_TS.shape[1] < patches:
        raise UsageError(f"weights of {list(weights_TS.shape)} do not fit {len(rows)} rows and {patches} patches")
    if len(rows) > MOST_PANELS:
        footer = f"the first {MOST_PANELS} of {len(rows)} tokens" + (f"; {footer}" if footer else "")
    maps_TNN = np.asarray(weights_TS, dtype=np.float32)[:MOST_PANELS, -patches:].reshape(-1, *grid)
    height, width = image_CHW.shape[1:]
    columns = min(len(maps_TNN) + 1, 6)
    lines = math.ceil((len(maps_TNN) + 1) / columns)
    paint = LinearSegmentedColormap.from_list("look", [to_rgba(COLORS[1], 0.0), to_rgba(COLORS[1], 0.9)])
    with style():
        side = min(max(height / width, 0.25), 2.0)
        figure = new_figure(2.0 * columns + 1.2, max((2.0 * side + 0.45) * lines + 0.7, 2.2))
        panels: list[Axes] = list(np.atleast_1d(figure.subplots(lines, columns)).flat)
        for panel in panels:
            panel.set_axis_off()
        for panel in panels[: len(maps_TNN) + 1]:
            panel.imshow(_picture(image_CHW), cmap="gray", extent=(0, width, height, 0))
        panels[0].set_title("what is read", fontsize=10)
        for panel, token, map_NN in zip(panels[1:], rows, maps_TNN, strict=False):
            drawn = panel.imshow(
                map_NN, cmap=paint, vmin=0, vmax=maps_TNN.max(), extent=(0, width, height, 0), interpolation="nearest"
            )
            elsewhere = 1 - map_NN.sum()
            share = f" ({elsewhere:.0%} elsewhere)" if elsewhere >= 0.005 else ""
            panel.set_title(_label(token) + share, fontsize=10)
        figure.colorbar(drawn, ax=panels, label="attention weight", pad=0.02)
        figure.suptitle(title)
        figure.supxlabel(_caution(footer), x=0.99, ha="right", **FOOTER)  # below a panel it would push others away
    return panels[: len(maps_TNN) + 1]


def plot_sound_alignment(
    weights_TS: Weights,
    rows: Sequence[str],
    features_FS: Weights,
    *,
    title: str = "Alignment by cross-attention",
    footer: str = "",
) -> list[Axes]:
    """When in a recording the model listened while each token (rows, [T]) was predicted: the log-mel features that it
    reads, and below them, over the same seconds, the attention of each token to the vectors that become of two frames
    each (the columns of the weights, [S])."""
    frames, mels = features_FS.shape
    if tuple(weights_TS.shape) != (len(rows), (frames + 1) // 2):
        raise UsageError(f"weights of {list(weights_TS.shape)} do not fit {len(rows)} rows and {frames} frames")
    small_1TS, blocks = _in_blocks(weights_TS[None], MOST_CELLS)
    frame = HOP / SAMPLE_RATE
    with style():
        tall = min(max(0.22 * len(rows), 1.2), 9.0)
        figure = new_figure(8.4, tall + 3.2)
        sound, below = figure.subplots(2, 1, sharex=True, height_ratios=[1.6, tall])
        place = (-0.5 * frame, (frames - 0.5) * frame, -0.5, mels - 0.5)
        sound.imshow(np.asarray(features_FS).T, cmap="Greys", aspect="auto", origin="lower", extent=place)
        sound.spines[:].set_visible(False)
        sound.set_ylabel("mel")
        sound.set_title(title)
        _draw_weights(below, small_1TS[0], "", blocks, root=weights_TS.shape[1] > MOST_LABELS, unit=2 * frame)
        below.xaxis.tick_bottom()
        below.xaxis.set_label_position("bottom")
        below.set_xlabel("seconds" + _told("keys", blocks[1]))
        _name_axis(below.yaxis, rows, "token being predicted", blocks[0], "queries")
        write_footer(below, _caution(footer))
    return [sound, below]


def plot_attention_grid(
    weights: Iterable[Weights],
    axes: Axes | None = None,
    *,
    layers: Sequence[int] | None = None,
    title: str = "Attention",
    footer: str = "",
) -> Axes:
    """All heads at a glance, on one scale: a line per layer of its heads' matrices, from [H, T, S] of each layer.

    weights: taken one by one, so that a generator need not hold them all. layers: their numbers (None: 0, 1, ...).
    """
    thumbnails, blocks = [], (1, 1)
    for weights_HTS in weights:
        small_HTS, blocks = _in_blocks(weights_HTS, THUMBNAIL)
        thumbnails.append(small_HTS)
    if not thumbnails:
        raise UsageError("a grid of no layers cannot be drawn")
    heads = max(len(small_HTS) for small_HTS in thumbnails)
    tall, wide = thumbnails[0].shape[1:]
    grid = np.full((len(thumbnails), tall, heads, wide), np.nan, dtype=np.float32)  # not every layer has as many heads
    for line, small_HTS in zip(grid, thumbnails, strict=True):
        line[:, : len(small_HTS)] = small_HTS.transpose(1, 0, 2)
    with style():
        axes = new_axes(axes, min(max(1.2 * heads + 2.0, 4.5), 14.0), min(max(1.2 * len(thumbnails) + 1.3, 3.0), 14.0))
        _draw_weights(axes, grid.reshape(len(thumbnails) * tall, heads * wide), title, root=True)
        numbers = range(len(thumbnails)) if layers is None else layers
        for axis, size, names in ((axes.xaxis, wide, range(heads)), (axes.yaxis, tall, numbers)):
            step = math.ceil(len(names) / 32)
            axis.set_ticks(
                [(n + 0.5) * size - 0.5 for n in range(0, len(names), step)], [str(n) for n in names[::step]]
            )
            axis.set_ticks([n * size - 0.5 for n in range(len(names) + 1)], minor=True)
        axes.grid(which="minor", color="0.75", linewidth=0.8)
        axes.tick_params(which="both", length=0)
        axes.set_xlabel("head" + _told("keys", blocks[1]))
        axes.set_ylabel("layer" + _told("queries", blocks[0]))
        _small_print(axes, footer)
    return axes


def _plot_matrix(
    weights_TS: Weights,
    rows: Sequence[str],
    columns: Sequence[str],
    names: tuple[str, str],
    axes: Axes | None,
    title: str,
    footer: str,
) -> Axes:
    if tuple(weights_TS.shape) != (len(rows), len(columns)):
        raise UsageError(f"weights of {list(weights_TS.shape)} do not fit {len(rows)} rows and {len(columns)} columns")
    small_1TS, blocks = _in_blocks(weights_TS[None], MOST_CELLS)
    with style():
        sizes = [min(max(0.2 * len(tokens), 3.0), 9.0) for tokens in (columns, rows)]
        axes = new_axes(axes, sizes[0] + 2.4, sizes[1] + 1.8)
        _draw_weights(axes, small_1TS[0], title, blocks, root=len(columns) > MOST_LABELS)
        whats = ((axes.xaxis, columns, names[1], blocks[1], "keys"), (axes.yaxis, rows, names[0], blocks[0], "queries"))
        for axis, tokens, name, block, what in whats:
            _name_axis(axis, tokens, name, block, what)
        if len(columns) <= MOST_LABELS:
            for label in axes.get_xticklabels():
                label.set_rotation(90 if len(label.get_text()) > 1 else 0)
        axes.tick_params(length=2)
        _small_print(axes, footer)
    return axes


def _name_axis(axis: Axis, tokens: Sequence[str], name: str, block: int, what: str) -> None:
    """Write the tokens at an axis, or their numbers where they are many."""
    if len(tokens) > MOST_LABELS:
        axis.set_major_locator(round_ticks())
        axis.set_label_text(f"{name}, by number{_told(what, block)}")
    else:
        axis.set_ticks(range(len(tokens)), [_label(token) for token in tokens], fontsize=8)
        axis.set_label_text(name)


def _draw_weights(
    axes: Axes,
    weights_TS: NDArray[np.floating],
    title: str,
    blocks: tuple[int, int] = (1, 1),
    *,
    root: bool,
    unit: float = 1.0,
) -> None:
    """The image and its colour bar; the axes count tokens, whatever the blocks, and the columns, each `unit` wide, are
    named on top."""
    height, width = (size * block for size, block in zip(weights_TS.shape, blocks, strict=True))
    colors = colormaps["Blues"].with_extremes(bad=HIDDEN)
    scale = PowerNorm(0.5 if root else 1.0, vmin=0)
    place = (-0.5 * unit, (width - 0.5) * unit, height - 0.5, -0.5)
    image = axes.imshow(weights_TS, cmap=colors, norm=scale, aspect="auto", extent=place, interpolation="nearest")
    axes.spines[:].set_visible(False)
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.set_title(title)
    figure = axes.get_figure()
    assert figure is not None
    figure.colorbar(image, ax=axes, label="attention weight" + ("\n(square-root scale)" if root else ""), pad=0.02)


def _in_blocks(weights: Weights, cells: int) -> tuple[NDArray[np.floating], tuple[int, int]]:
    """[H, T, S] with at most so many rows and columns, and the sizes of the blocks. Rows still sum to 1."""
    values = np.asarray(weights, dtype=np.float32)
    tall, wide = (math.ceil(count / cells) for count in values.shape[1:])
    starts = np.arange(0, values.shape[1], tall)
    counts = np.diff(starts, append=values.shape[1])
    lines = np.add.reduceat(values, starts, axis=1) / counts[:, None]
    return np.add.reduceat(lines, np.arange(0, values.shape[2], wide), axis=2), (tall, wide)


def _told(what: str, block: int) -> str:
    if block == 1:
        return ""
    return f" ({'sums' if what == 'keys' else 'means'} of {block} {what})"


def _label(token: str) -> str:
    """A token for an axis: one line, spaces visible, cut where it is long."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in token).replace(" ", "␣")
    shown = drawable(shown)
    return shown if len(shown) <= 20 else f"{shown[:18]}.."


def _small_print(axes: Axes, footer: str) -> None:
    write_footer(axes, _caution(footer), below=6)


def _caution(footer: str) -> str:
    return f"{CAUTION}; {footer}" if footer else CAUTION


def _picture(image_CHW: Weights) -> NDArray[np.floating]:
    """An image for Matplotlib, 0 .. 1: [H, W, 3], or grey [H, W] where there are not three channels."""
    values: NDArray[np.floating] = np.asarray(image_CHW, dtype=np.float32)
    values = (values - values.min()) / max(float(np.ptp(values)), 1e-12)
    return values.transpose(1, 2, 0) if len(values) == 3 else values.mean(0)
