"""Plots of positions and masks, and what all plots share. Functions return Matplotlib axes and touch no global state.

Without `axes` they draw on a figure of their own (`axes.figure`), which `save_plot` writes as PNG, SVG or PDF.
"""

from __future__ import annotations

import logging
import math
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import font_manager, get_cachedir, rc_context
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogFormatter, MaxNLocator
from numpy.typing import NDArray
from torch import Tensor

from qkv.config.errors import QkvError, UsageError
from qkv.config.stack import StackConfig
from qkv.nn.build import Dims, build
from qkv.nn.mask import Causal, Documents, Mask, Padding, Prefix, Rule, Window
from qkv.nn.position import Learned, Position, Sinusoidal
from qkv.nn.transformer import Transformer

FORMATS = (".png", ".svg", ".pdf")
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's, told apart by colour-blind readers too."""

HIDDEN = "#e8e8e8"
_STYLE: Any = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 12,
    "axes.labelsize": 11,
    "font.size": 10,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "text.parse_math": False,
}
FOOTER: dict[str, Any] = {"fontsize": 7.5, "color": "0.45"}


CHINESE_FONTS = (
    "Noto Sans CJK SC",
    "Noto Sans SC",
    "Noto Sans CJK TC",
    "Noto Sans CJK JP",
    "Source Han Sans SC",
    "PingFang SC",
    "Hiragino Sans GB",
    "Microsoft YaHei",
    "WenQuanYi Zen Hei",
    "WenQuanYi Micro Hei",
    "SimHei",
)
"""Fonts for what Matplotlib's own cannot draw, where they are installed. Of a collection it knows the first font only,
which is Noto's Japanese one: it has the Chinese characters too."""

log = logging.getLogger("qkv")


@cache
def _fonts() -> tuple[str, ...]:
    installed = {entry.name for entry in font_manager.fontManager.ttflist}
    return ("DejaVu Sans", *(name for name in CHINESE_FONTS if name in installed))


def drawable(text: str) -> str:
    """The text with characters that no font here can draw written as codes: a name must not become a row of boxes."""
    fonts = [font_manager.get_font(font_manager.findfont(name)) for name in _fonts()]
    known = {character: any(font.get_char_index(ord(character)) for font in fonts) for character in set(text)}
    if any(not drawn and unicodedata.name(character, "").startswith("CJK") for character, drawn in known.items()):
        _say_no_chinese()
    return "".join(character if known[character] else f"U+{ord(character):04X} " for character in text).rstrip()


@cache
def _say_no_chinese() -> None:
    """Say, once per process, what it takes to draw Chinese."""
    log.warning(
        "no font here draws Chinese, so plots show codes: install %s and remove Matplotlib's font list in %s",
        CHINESE_FONTS[0],
        get_cachedir(),
    )


def style() -> Any:
    return rc_context({**_STYLE, "font.family": list(_fonts())})


def check_format(path: Path) -> None:
    """Raise UsageError unless the name ends in .png, .svg or .pdf."""
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"plots are written as PNG, SVG or PDF, not `{path.suffix or path.name}`", hint="-o plot.png")


def save_plot(axes: Axes, path: Path) -> None:
    """Write the figure that holds `axes`. Raises UsageError for another kind of file, QkvError where it cannot be."""
    check_format(path)
    figure = axes.get_figure(root=True)
    assert figure is not None
    try:
        with style():
            figure.savefig(path, dpi=160, metadata={"Creator": "qkv"} if path.suffix.lower() != ".png" else None)
    except OSError as error:
        raise QkvError(f"the plot cannot be written: {error.strerror or error}", where=str(path)) from None


def new_figure(width: float, height: float) -> Figure:
    """A figure of its own, in inches, that no window or global list knows."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def new_axes(axes: Axes | None, width: float, height: float) -> Axes:
    return new_figure(width, height).add_subplot() if axes is None else axes


def write_footer(axes: Axes, text: str, below: int = 38) -> None:
    """Small print, so many points below the axes."""
    place: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points"}
    axes.annotate(text, (1, 0), (0, -below), ha="right", va="top", **place, **FOOTER)


def round_ticks() -> MaxNLocator:
    return MaxNLocator(8, steps=[1, 2, 5, 10], integer=True)


class _PlainLogFormatter(LogFormatter):
    """Labels the ticks that Matplotlib would, as plain numbers: its own are formulas, which `style` has not parsed."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:.12g}" if super().__call__(x, pos) else ""


def label_log_axis(axis: Axis) -> None:
    """Plain numbers at the ticks of a logarithmic axis."""
    axis.set_major_formatter(_PlainLogFormatter())
    axis.set_minor_formatter(_PlainLogFormatter())


# --- positions --------------------------------------------------------------------------------------------------------


def position_table(source: StackConfig | Transformer, length: int | None = None) -> tuple[Tensor, str]:
    """What is added to the embedding at each position, [P, M] float32, and its kind.

    source: a stack's configuration (sinusoidal positions need no weights) or a network (its first stack that adds any).
    length: P (None: the whole context). Raises UsageError for kinds that are not added, and where weights are missing.
    """
    if isinstance(source, Transformer):
        embeddings = [source.encoder_embedding, source.decoder_embedding]
        positions = [embedding.position for embedding in embeddings if embedding is not None]
        config = next(iter(source.config.stacks.values()))
        position: Position = next((p for p in positions if isinstance(p, Sinusoidal | Learned)), positions[0])
    else:
        config = source
        with torch.device("meta"):
            width = config.embedding.width or config.d_model
            position = build(config.position, Dims(width, d_out=1, max_seq_len=config.max_seq_len))
    if isinstance(position, Sinusoidal):
        wanted = _length(length, config.max_seq_len)
        return position.table(torch.arange(wanted)), "sinusoidal"
    if not isinstance(position, Learned):
        raise UsageError(
            f"positions of kind {config.position.kind} are not added to the embedding, so there is no table to draw",
            hint="model.position.kind=sinusoidal or learned",
        )
    if position.weight.is_meta:
        raise UsageError("learned positions are in a model's weights, and this is a configuration", hint="a run folder")
    table_PM = position.weight[position.offset :].detach()
    return table_PM[: _length(length, table_PM.shape[0])].float().cpu(), "learned"


def _length(wanted: int | None, context: int) -> int:
    if wanted is None:
        return context
    if not 1 <= wanted <= context:
        raise UsageError(f"there are positions 1 to {context} to draw, got {wanted}")
    return wanted


def plot_positions(
    table_PM: Tensor | NDArray[np.floating], kind: str, axes: Axes | None = None, *, footer: str = ""
) -> Axes:
    """The heat-map of positions, red below zero and blue above: position downwards, dimension to the right."""
    values = np.asarray(table_PM, dtype=np.float32)
    limit = 1.0 if kind == "sinusoidal" else max(float(np.abs(values).max()), 1e-12)
    with style():
        axes = new_axes(axes, 8.0, 5.2)
        image = axes.imshow(
            values, cmap="RdBu", vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest", origin="upper"
        )
        axes.spines[:].set_visible(False)
        axes.set_xlabel("dimension")
        axes.set_ylabel("position")
        axes.set_title(f"{kind.capitalize()} positions: {values.shape[0]} positions, {values.shape[1]} dimensions")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(round_ticks())
        figure = axes.get_figure()
        assert figure is not None
        figure.colorbar(image, ax=axes, label="value added to the embedding", pad=0.02)
        if footer:
            write_footer(axes, footer)
    return axes


# --- masks ------------------------------------------------------------------------------------------------------------


def mask_examples() -> dict[str, tuple[Rule, str]]:
    """Title -> rule and what it means, for 12 slots."""
    documents = torch.tensor([[0] * 4 + [1] * 5 + [2] * 3])
    return {
        "causal": (Causal(), "the past and itself"),
        "causal, window of 4": (Causal() & Window(4), "the last 4 slots"),
        "prefix of 5": (Causal() | Prefix(torch.tensor([5])), "both ways in the prefix, then causal"),
        "causal, 3 documents": (Causal() & Documents(documents, documents), "the past of its own document"),
        "both ways, window of 3": (Window(3), "2 slots to either side"),
        "both ways, 8 tokens and padding": (Padding(torch.tensor([8])), "every slot that holds a token"),
    }


def plot_masks(length: int = 12) -> list[Axes]:
    """Who may attend to whom under each kind of mask: a panel per rule, from the rules that the model itself uses."""
    examples = mask_examples()
    columns = 3
    rows = math.ceil(len(examples) / columns)
    with style():
        figure = new_figure(9.6, 3.5 * rows + 0.5)
        grid: list[Axes] = list(figure.subplots(rows, columns).flat)
        for axes, (title, (rule, meaning)) in zip(grid, examples.items(), strict=True):
            allowed_TS = Mask.square(rule, length, torch.device("cpu")).tensor()[0, 0].numpy()
            axes.imshow(allowed_TS, cmap=ListedColormap([HIDDEN, COLORS[0]]), vmin=0, vmax=1)
            axes.set_title(title, fontsize=11)
            axes.set_xlabel(f"key slot\n{meaning}", fontsize=9.5)
            axes.set_ylabel("query slot", fontsize=9.5)
            axes.set_xticks(range(0, length, 2))
            axes.set_yticks(range(0, length, 2))
            axes.set_xticks(np.arange(-0.5, length), minor=True)
            axes.set_yticks(np.arange(-0.5, length), minor=True)
            axes.grid(which="minor", color="white", linewidth=1.2)
            axes.tick_params(which="both", length=0, labelsize=8.5)
            axes.spines[:].set_visible(False)
        figure.legend(
            handles=[Patch(color=COLORS[0], label="may attend"), Patch(color=HIDDEN, label="hidden")],
            loc="outside lower center",
            ncols=2,
            fontsize=10,
        )
    return grid
