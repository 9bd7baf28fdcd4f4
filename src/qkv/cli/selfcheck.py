"""`qkv selfcheck`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from qkv.cli.common import json_option, model_options, print_json

if TYPE_CHECKING:
    from qkv.evaluate.selfcheck import Check


@click.command()
@click.argument("model")
@click.option("--no-compile", is_flag=True, help="Leave compiled code out, which takes longest to check.")
@model_options
@json_option
@click.pass_context
def selfcheck(context: click.Context, model: str, no_compile: bool, loading: dict[str, Any], as_json: bool) -> None:
    """Check that MODEL answers the same however it is run: alone, in a batch, cached, prefilled in chunks, streamed,
    compiled, and by every kernel.

    Each line has the largest difference from the plain way, one sequence at a time without a cache. In float32 a
    tolerance is promised, 1e-3 (of small models 1e-5 of the largest logit); of bfloat16 and quantised weights the
    differences are reported. Exits with 1 where one is above its tolerance.
    """
    from qkv.evaluate.selfcheck import selfcheck as checks_of
    from qkv.model import load

    loaded = load(model, **loading)
    checks = checks_of(
        loaded.network,
        loaded.tokenizer,
        loaded.source_tokenizer,
        start_ids=loaded.config.generation.start_ids,
        eos_ids=loaded.eos_ids,
        compiled=not no_compile,
    )
    if not as_json:
        click.echo(f"{'':<36}{'largest difference':<20}{'tolerance':<14}verdict")
    found = []
    for check in checks:
        found.append(check)
        if not as_json:
            click.echo(_line(check))
    sound = all(check.ok for check in found)
    if as_json:
        print_json({"checks": [{**asdict(check), "ok": check.ok} for check in found], "ok": sound})
    context.exit(0 if sound else 1)


def _line(check: Check) -> str:
    if check.difference is None:
        return f"{check.name:<36}{'':<34}{'FAILED: ' if check.failed else ''}{check.note}"
    tokens = check.unit == "tokens"
    difference = f"{check.difference:.0f} tokens" if tokens else f"{check.difference:.1e}"
    tolerance = "not promised" if check.tolerance is None else "0" if tokens else f"{check.tolerance:.1e}"
    verdict = "FAILED" if not check.ok else "" if check.tolerance is None else "ok"
    return f"{check.name:<36}{difference:<20}{tolerance:<14}{verdict}".rstrip()
