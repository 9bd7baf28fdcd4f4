"""`qkv parity`."""

from __future__ import annotations

import math
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qkv.cli.common import allow_option, computes, json_option, print_json, torch_bin_option
from qkv.config.errors import UsageError

if TYPE_CHECKING:
    from qkv.evaluate.parity import Implementation, Parity
    from qkv.model import Model


@click.command()
@click.argument("model")
@click.option("--against", default="hf", show_default=True, help="hf: the library transformers; or another model.")
@click.option(
    "--tolerance", type=click.FloatRange(min=0), help="Of logits (default: 1e-3; of small models 1e-5 of the largest)."
)
@torch_bin_option
@allow_option
@json_option
@click.pass_context
@computes
def parity(
    context: click.Context,
    model: str,
    against: str,
    tolerance: float | None,
    torch_bin: bool,
    allow: tuple[str, ...],
    as_json: bool,
) -> None:
    """Compare MODEL, number by number, with what the library transformers makes of the same weights.

    Told are the largest differences of logits and log-probabilities on a few fixed inputs, of one pass and token by
    token with a cache, and of the vectors after each layer. Both sides compute in float32 on the CPU. A Hugging Face
    folder is read by the library itself; any other model is written as one first. Exits with 1 above the tolerance.
    """
    from qkv.evaluate.parity import Ours, Transformers, compare
    from qkv.evaluate.probes import probes
    from qkv.model import load

    loaded = load(model, device="cpu", dtype="fp32", torch_bin=torch_bin, allow=allow)
    with ExitStack() as stack:
        if against == "hf":
            beside = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="qkv-")))
            theirs = Transformers(_published(model, loaded, beside))
            reference: Implementation = theirs
            avoid = theirs.pad_ids
        else:
            other = load(against, device="cpu", dtype="fp32", torch_bin=torch_bin, allow=allow)
            reference = Ours(other.network)
            avoid = []
        some = probes(
            loaded.network,
            loaded.tokenizer,
            loaded.source_tokenizer,
            start_ids=loaded.config.generation.start_ids,
            avoid=avoid,
        )
        found = compare(loaded.network, reference, some, tolerance=tolerance)
    if as_json:
        print_json(_numbers({**asdict(found), "first_layer": found.first_layer, "ok": found.ok}))
    else:
        _show(found)
    context.exit(0 if found.ok else 1)


def _published(name: str, model: Model, beside: Path) -> Path:
    """The Hugging Face folder of a model: its own, or one written in the folder `beside`."""
    from qkv.checkpoint.fetch import named_model

    path = named_model(name)
    if (path / "config.json").is_file() and list(path.glob("*.safetensors")):
        return path
    try:
        model.save_hf(beside / "model")
    except UsageError as error:
        raise UsageError(error.what, where=error.where, hint="--against MODEL, to compare it with another") from None
    return beside / "model"


def _numbers(told: Any) -> Any:
    """The same, with None for what is no number: JSON has no infinity."""
    if isinstance(told, dict):
        return {name: _numbers(value) for name, value in told.items()}
    if isinstance(told, list):
        return [_numbers(value) for value in told]
    return None if isinstance(told, float) and not math.isfinite(told) else told


def _show(found: Parity) -> None:
    from qkv.evaluate.parity import LAYER_TOLERANCE

    click.echo(f"{'':<24}{'largest difference':<20}{'of the largest value':<22}tolerance")
    for one in (found.logits, found.logprobs, found.cached):
        if one is not None:
            verdict = "" if one.absolute <= found.tolerance else "  DIFFERS"
            click.echo(f"{one.name:<24}{one.absolute:<20.2e}{one.relative:<22.2e}{found.tolerance:.1e}{verdict}")
    for one in found.layers:
        verdict = "" if one.relative <= LAYER_TOLERANCE else "  DIFFERS"
        click.echo(f"{one.name:<24}{one.absolute:<20.2e}{one.relative:<22.2e}{verdict}".rstrip())
    click.echo(f"{found.sequences} sequences, {found.tokens} tokens", err=True)
    if not found.ok:
        first = found.first_layer
        where = f"from {first} on" if first else f"in no layer by more than {LAYER_TOLERANCE:.0e} of its largest value"
        click.echo(f"the models differ, {where}", err=True)
