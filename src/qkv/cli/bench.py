"""`qkv bench`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qkv.cli import LazyGroup
from qkv.cli.common import allow_option, computes, json_option, model_options, print_json, quantize_option
from qkv.config.errors import UsageError, counted

if TYPE_CHECKING:
    from qkv.evaluate.speed import DecodeSpeed, PrefillSpeed, Speed
    from qkv.nn.transformer import Transformer
    from qkv.train.speed import TrainingSpeed

KINDS = {
    "train": ("qkv.cli.bench:train", "Speed and memory of training, and what takes the time."),
    "prefill": ("qkv.cli.bench:prefill", "Speed of reading a prompt, beside plain products of matrices."),
    "decode": ("qkv.cli.bench:decode", "Speed of writing token by token, beside plain reading of memory."),
}


@click.group(cls=LazyGroup, table=KINDS)
def bench() -> None:
    """Speed beside the machine's own measured limits."""


@click.command()
@click.argument("config")
@click.argument("overrides", nargs=-1, metavar="[key=value]...")
@click.option("--steps", type=click.IntRange(min=1), default=20, show_default=True, help="Measured steps.")
@allow_option
@json_option
@computes
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
    speed = measure_training(tree, steps, _tell)
    if as_json:
        print_json(_known(speed, assumed, flops_per_second=speed.flops_per_second))
        return
    _print(_training_rows(speed), assumed)
    if speed.parts is not None:
        click.echo(f"\npart of a step, eager     share  (the profiler changed its time by {speed.parts.overhead:+.0%})")
        for name, share in speed.parts.shares.items():
            click.echo(f"{name:<26}{share:.3f}")
    _tell_of_ctrl_c(speed)


def _inference_options(command: Callable[..., None]) -> Callable[..., None]:
    """What `prefill` and `decode` take."""
    options = (
        click.argument("model"),
        click.argument("overrides", nargs=-1, metavar="[key=value]..."),
        click.option("--batch-size", type=click.IntRange(min=1), default=1, show_default=True, help="Rows at once."),
        click.option("--turns", type=click.IntRange(min=1), default=5, show_default=True, help="Measured turns."),
        quantize_option,
        model_options,
        json_option,
    )
    for option in reversed(options):
        command = option(command)
    return command


_prompt_option = click.option(
    "--prompt-tokens", type=click.IntRange(min=1), help="Of each row (default: 512, or as many as the context allows)."
)


@click.command()
@_prompt_option
@_inference_options
def prefill(
    model: str,
    overrides: tuple[str, ...],
    loading: dict[str, Any],
    quantize: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """How fast MODEL reads a prompt here, beside plain products of matrices of the same shapes.

    MODEL is a model with weights, or a CONFIG (a file or a preset) whose weights are random; a key=value overrides a
    key of the latter. An encoder-decoder reads the prompt as its source. The prompt is random. Ctrl-C stops, and shows
    what was measured until then.
    """
    from qkv.evaluate.speed import measure_prefill

    network, assumed = _network(model, overrides, loading, quantize)
    speed = measure_prefill(network, tell=_tell, **options)
    if as_json:
        print_json(_known(speed, assumed, flops_per_second=speed.flops_per_second))
        return
    _print(_prefill_rows(speed), assumed)
    _tell_of_ctrl_c(speed)


@click.command()
@_prompt_option
@click.option(
    "--new-tokens", type=click.IntRange(min=1), help="Of each row (default: 32, or as many as the context allows)."
)
@_inference_options
def decode(
    model: str,
    overrides: tuple[str, ...],
    loading: dict[str, Any],
    quantize: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """How fast MODEL writes token by token here, beside how fast the machine reads as many bytes.

    MODEL is a model with weights, or a CONFIG (a file or a preset) whose weights are random; a key=value overrides a
    key of the latter. It writes the likeliest tokens after a random prompt, which an encoder-decoder reads as its
    source; reading the prompt is not counted. Ctrl-C stops, and shows what was measured until then.
    """
    from qkv.evaluate.speed import measure_decode

    network, assumed = _network(model, overrides, loading, quantize)
    speed = measure_decode(network, tell=_tell, **options)
    if as_json:
        times = _spread(speed.milliseconds_per_token)
        print_json(_known(speed, assumed, milliseconds_per_token=times, bytes_per_second=speed.bytes_per_second))
        return
    _print(_decode_rows(speed), assumed)
    _tell_of_ctrl_c(speed)


def _network(
    model: str, overrides: tuple[str, ...], loading: dict[str, Any], quantize: str | None
) -> tuple[Transformer, dict[str, int]]:
    """The network of a model, or a configuration's with random weights; and the sizes that are assumed."""
    from qkv.checkpoint.fetch import named_model

    path = named_model(model)
    if path.is_dir() or path.suffix in (".gguf", ".bin") or "#" in Path(model).name:
        from qkv.model import load

        if overrides:
            raise UsageError("a model with weights cannot be overridden", where=overrides[0], hint="a CONFIG")
        return load(model, quantize=quantize, **loading).network, {}
    import torch

    from qkv.config.run import Config
    from qkv.inspect.summary import sized
    from qkv.nn.device import choose_device, choose_weight_dtype
    from qkv.nn.transformer import Transformer

    tree = Config.load(model, *overrides, allow=loading["allow"] or None)
    if quantize is not None:
        raise UsageError("random weights have no blocks to keep", hint="a GGUF file, or no --quantize")
    config, assumed = sized(tree)
    device = choose_device(loading["device"])
    _tell("random weights")
    network = Transformer(config, device=device, generator=torch.Generator(device).manual_seed(0))
    return network.to(choose_weight_dtype(loading["dtype"], device)).eval(), assumed


# --- what is told -----------------------------------------------------------------------------------------------------


def _tell(text: str) -> None:
    click.echo(text, err=True)


def _tell_of_ctrl_c(speed: TrainingSpeed | Speed) -> None:
    if speed.interrupted:
        _tell("stopped by Ctrl-C: what is missing was not measured")


def _print(rows: list[tuple[str, str]], assumed: dict[str, int]) -> None:
    for name, value in rows + [("assumed", f"{key}={size}: the data decide") for key, size in assumed.items()]:
        click.echo(f"{name:<26}{value}")


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _known(
    speed: TrainingSpeed | PrefillSpeed | DecodeSpeed, assumed: dict[str, int], **derived: Any
) -> dict[str, Any]:
    common = {"tokens_per_second": _spread(speed.tokens_per_second), "ratio": speed.ratio}
    return {**common, **derived, **asdict(speed), "assumed": assumed}


def _of(values: Sequence[float], what: str, digits: int = 0) -> str:
    low, high = min(values), max(values)
    spread = f"median of {len(values)} {what}s, {low:,.{digits}f} to {high:,.{digits}f}"
    if len(values) == 1:
        spread = f"1 {what}"
    return f"{statistics.median(values):,.{digits}f} ({spread})"


def _training_rows(speed: TrainingSpeed) -> list[tuple[str, str]]:
    return [
        ("trained on", "random data of the model's shapes" if speed.made_data else "the data of the configuration"),
        ("computed", "; ".join(speed.compute)),
        ("tokens/s", _of(speed.tokens_per_second, "step")),
        ("tokens per step", f"{statistics.median(speed.tokens):,.0f}"),
        *_product_rows(speed),
        *_memory_rows(speed),
        ("first step after", f"{speed.first_step:.1f} s"),
    ]


def _prefill_rows(speed: PrefillSpeed) -> list[tuple[str, str]]:
    return [
        ("computed", "; ".join(speed.compute)),
        ("read", _rows_of(speed, f"{speed.prompt_tokens:,} tokens")),
        ("tokens/s", _of(speed.tokens_per_second, "turn")),
        *_product_rows(speed),
        *_memory_rows(speed),
    ]


def _decode_rows(speed: DecodeSpeed) -> list[tuple[str, str]]:
    rows = [
        ("computed", "; ".join(speed.compute)),
        ("written", _rows_of(speed, f"{speed.new_tokens:,} tokens after {speed.prompt_tokens:,}")),
        ("tokens/s", _of(speed.tokens_per_second, "turn", 1)),
        ("ms per token", _of(speed.milliseconds_per_token, "turn", 2)),
    ]
    if speed.weight_bytes is not None and speed.cache_bytes is not None and speed.bytes_per_second is not None:
        parts = f"{speed.weight_bytes / 1e6:,.1f} of weights, {speed.cache_bytes / 1e6:,.1f} of the cache"
        rows.append(("MB read per step", f"{(speed.weight_bytes + speed.cache_bytes) / 1e6:,.1f}: {parts}"))
        rows.append(("GB/s", f"{speed.bytes_per_second / 1e9:,.2f}"))
    if speed.memory_rate is not None:
        rows.append(("memory rate, GB/s", f"{speed.memory_rate / 1e9:,.2f}: reading as many bytes, and nothing else"))
        rows.append(("ratio", _ratio(speed.ratio)))
    return rows + _memory_rows(speed)


def _rows_of(speed: Speed, tokens: str) -> str:
    return f"{tokens} in {counted(speed.batch_size, 'row')}"


def _ratio(ratio: float | None) -> str:
    beyond = ratio is not None and ratio > 1.1
    return f"{ratio:.2f}{': beyond the limit, which other work must have lowered; measure again' if beyond else ''}"


def _product_rows(speed: TrainingSpeed | PrefillSpeed) -> list[tuple[str, str]]:
    rows = []
    if speed.flops_per_second is not None:
        rows.append(("GFLOP/s", f"{speed.flops_per_second / 1e9:,.1f}"))
    if speed.matrix_rate is not None:
        rows.append(("matrix rate, GFLOP/s", f"{speed.matrix_rate / 1e9:,.1f}: plain products of the same shapes"))
        rows.append(("ratio", _ratio(speed.ratio)))
    return rows


def _memory_rows(speed: TrainingSpeed | Speed) -> list[tuple[str, str]]:
    return [] if speed.peak_memory is None else [("peak memory", f"{speed.peak_memory / 1e6:,.0f} MB")]
