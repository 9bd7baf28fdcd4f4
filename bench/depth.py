"""What depth does to the signal and to the gradient, before any training.

    python bench/depth.py [-o depth.png] [--layers 48] [--seed 0] [--json FILE]

A decoder of 48 layers (d_model 64, 4 heads, Xavier initialisation, float32) reads 16 x 128 bytes of the demo's held-out
text and its loss is differentiated once. For each layer:

- gradient norm: of the layer's norms, attention and feed-forward together, without what the stream brings along;
- signal gain: root mean square of what would leave the residual stream after this layer, over the same of the embedding
  passed straight through (of several streams: of their sum, over as many copies of the embedding).

Norms of placement post follow every addition, so their gain says only how small the embedding was. Without residual,
each sublayer's output replaces the stream. Hyper-Connections, mHC and Attention Residuals begin as the pre-norm
network, exactly or nearly, and so does their gradient.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter
from torch import Tensor, nn

import qkv
from qkv.config.paths import cache_folder
from qkv.data.bundled import python_text
from qkv.data.tokenizers import tokenizer_for
from qkv.inspect.plots import COLORS, check_format, save_plot

VARIANTS = {
    "no residual": ("model.residual.kind=none",),
    "plain, pre-norm": (),
    "plain, post-norm": ("model.norm.placement=post",),
    "hyper-connections": ("model.residual.kind=hyper-connections",),
    "mhc": ("model.residual.kind=mhc",),
    "attention-residuals": ("model.residual.kind=attention-residuals",),
}
LINES = ("-", "-", "-", "--", ":", "-.")
"""Curves that lie on one another remain visible."""
BATCH, CONTEXT = 16, 128

Curves = dict[str, dict[str, list[float]]]


def measure(overrides: tuple[str, ...], layers: int, seed: int) -> dict[str, list[float]]:
    """Gradient norm and signal gain after each layer, from below."""
    config = qkv.Config.load(
        "decoder-tiny",
        "model.d_model=64",
        f"model.num_layers={layers}",
        f"model.max_seq_len={CONTEXT}",
        "model.feed_forward.d_ff=192",
        "model.attention.num_kv_heads=4",
        "model.tie_embeddings=none",
        "model.init.kind=xavier",
        *overrides,
    )
    network = qkv.Transformer(config.model, generator=torch.Generator().manual_seed(seed))
    stack = network.decoder
    assert stack is not None
    sizes: list[Tensor] = []

    def note(_: nn.Module, __: Any, state: Any) -> None:
        with torch.no_grad():
            sizes.append(stack.residual.exit(state).square().mean().sqrt())

    for block in stack.layers:
        block.register_forward_hook(note)
    stack.register_forward_pre_hook(lambda module, inputs: note(module, inputs, stack.residual.enter(inputs[0])))
    ids = batch(config)
    network(ids[:, :-1], labels=ids[:, 1:]).loss.backward()
    gradients = [
        nn.utils.get_total_norm([p.grad for name, p in block.named_parameters() if ".site." not in name]).item()
        for block in stack.layers
    ]
    return {"gradient": gradients, "gain": [(size / sizes[0]).item() for size in sizes[1:]]}


def batch(config: qkv.Config) -> Tensor:
    """[16, 129] ids of the held-out text."""
    text = python_text(cache_folder() / "demo").held_out.read_text(encoding="utf-8")
    ids = tokenizer_for(config, cache_folder()).encode(text[: 2 * BATCH * (CONTEXT + 1)])
    return torch.tensor(ids[: BATCH * (CONTEXT + 1)]).view(BATCH, CONTEXT + 1)


def report(curves: Curves, layers: int) -> None:
    """Two markdown tables."""
    shown = sorted({1, *range(layers // 6, layers + 1, max(1, layers // 6)), layers})
    for name, title in (("gradient", "gradient norm of layer"), ("gain", "signal gain after layer")):
        last = "| first / last |" if name == "gradient" else "|"
        print(f"| {title} | {' | '.join(map(str, shown))} {last}\n|{'---|' * (len(shown) + last.count('|'))}")
        for variant, curve in curves.items():
            values = curve[name]
            ratio = f" {values[0] / values[-1]:.2g} |" if name == "gradient" else ""
            print(f"| {variant} | {' | '.join(f'{values[layer - 1]:.2g}' for layer in shown)} |{ratio}")
        print()


def plot(curves: Curves, path: Path) -> None:
    """Both quantities over the layers, on logarithmic axes."""
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, name, title in zip(
        figure.subplots(1, 2),
        ("gradient", "gain"),
        ("Gradient norm of each layer", "Signal, relative to the embedding"),
        strict=True,
    ):
        for color, line, (variant, curve) in zip(COLORS, LINES, curves.items(), strict=False):
            axes.plot(range(1, len(curve[name]) + 1), curve[name], line, color=color, linewidth=1.6, label=variant)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(LogFormatter())
        axes.set_xlabel("layer")
        axes.set_title(title, fontsize=12)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.9")
        axes.set_axisbelow(True)
    figure.axes[0].legend(fontsize=9, frameon=False)
    save_plot(figure.axes[0], path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="write the plot here (PNG, SVG or PDF)")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write every figure here")
    options = parser.parse_args()
    if options.output:
        check_format(options.output)
    curves = {name: measure(overrides, options.layers, options.seed) for name, overrides in VARIANTS.items()}
    report(curves, options.layers)
    if options.json:
        options.json.write_text(json.dumps(curves, indent=1) + "\n", encoding="utf-8")
    if options.output:
        plot(curves, options.output)


if __name__ == "__main__":
    main()
