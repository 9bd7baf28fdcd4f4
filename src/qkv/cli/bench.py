"""`qkv bench train`."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from qkv.cli import LazyGroup
from qkv.cli.common import allow_option, json_option, print_json

if TYPE_CHECKING:
    from qkv.train.speed import TrainingSpeed

KINDS = {"train": ("qkv.cli.bench:train", "Speed and memory of training, and what takes the time.")}


@click.group(cls=LazyGroup, table=KINDS)
def bench() -> None:
    """Speed beside the machine's own measured limits."""


@click.command()
@click.argument("config")
@click.argument("overrides", nargs=-1, metavar="[key=value]...")
@click.option("--steps", type=click.IntRange(min=1), default=20, show_default=True, help="Measured steps.")
@allow_option
@json_option
def train(config: str, overrides: tuple[str, ...], steps: int, allow: tuple[str, ...], as_json: bool) -> None:
    """How fast the model that CONFIG (a file or a preset) describes trains here, and where the time goes.

    A key=value overrides a key of the configuration. Without data.train it learns from random data of the model's
    shapes, as long as its context. Nothing is kept. Ctrl-C stops, and shows what was measured until then.
    """
    from qkv.config.run import Config
    from qkv.inspect.summary import sized
    from qkv.train.speed import measure_training

    tree = Config.load(config, *overrides, allow=allow or None)
    assumed: dict[str, int] = {}
    if not tree.data.train:
        model, assumed = sized(tree)
        tree = tree.model_copy(update={"model": model})
    speed = measure_training(tree, steps, lambda text: click.echo(text, err=True))
    if as_json:
        print_json(_known(speed, assumed))
        return
    for name, value in _rows(speed, assumed):
        click.echo(f"{name:<26}{value}")
    if speed.parts is not None:
        click.echo(f"\npart of a step, eager     share  (the profiler changed its time by {speed.parts.overhead:+.0%})")
        for name, share in speed.parts.shares.items():
            click.echo(f"{name:<26}{share:.3f}")
    if speed.interrupted:
        click.echo("stopped by Ctrl-C: what is missing was not measured", err=True)


def _known(speed: TrainingSpeed, assumed: dict[str, int]) -> dict[str, Any]:
    rates = speed.tokens_per_second
    derived = {
        "tokens_per_second": {"median": statistics.median(rates), "min": min(rates), "max": max(rates)},
        "flops_per_second": speed.flops_per_second,
        "ratio": speed.ratio,
    }
    return {**derived, **asdict(speed), "assumed": assumed}


def _rows(speed: TrainingSpeed, assumed: dict[str, int]) -> list[tuple[str, str]]:
    rates, rate = speed.tokens_per_second, speed.flops_per_second
    tokens = f"{statistics.median(rates):,.0f} (median of {len(rates)} steps, {min(rates):,.0f} to {max(rates):,.0f})"
    rows = [
        ("trained on", "random data of the model's shapes" if speed.made_data else "the data of the configuration"),
        ("computed", "; ".join(speed.compute)),
        ("tokens/s", tokens),
        ("tokens per step", f"{statistics.median(speed.tokens):,.0f}"),
    ]
    if rate is not None:
        rows.append(("GFLOP/s", f"{rate / 1e9:,.1f}"))
    if speed.matrix_rate is not None:
        rows.append(("matrix rate, GFLOP/s", f"{speed.matrix_rate / 1e9:,.1f}: plain products of the same shapes"))
        rows.append(("ratio", f"{speed.ratio:.2f}"))
    if speed.peak_memory is not None:
        rows.append(("peak memory", f"{speed.peak_memory / 1e6:,.0f} MB"))
    rows.append(("first step after", f"{speed.first_step:.1f} s"))
    return rows + [("assumed", f"{key}={size}: the data decide") for key, size in assumed.items()]
