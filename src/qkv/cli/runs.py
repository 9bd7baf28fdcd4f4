"""`qkv runs`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from qkv.cli.common import json_option, print_json


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), default="runs", metavar="[DIR]")
@json_option
def runs(folder: Path, as_json: bool) -> None:
    """List the runs in DIR (default: runs), oldest first: steps, losses, and how each ended.

    The newest is marked with *. A run that is still going on counts as interrupted. Damaged files are named, and the
    list goes on.
    """
    from qkv.evaluate.runs import list_runs

    found = list_runs(folder)
    if as_json:
        print_json({"runs": [asdict(run) for run in found]})
        return
    if not found:
        click.echo(f"no runs in {folder}", err=True)
        return
    width = max(len(run.name) for run in found)
    click.echo(f"  {'run':<{width}}  {'step':>13}  {'loss':>8}  {'best val':>8}  state")
    for run in found:
        step = f"{run.step:,}/{'?' if run.steps is None else f'{run.steps:,}'}"
        losses = "  ".join(f"{'-' if value is None else f'{value:.4f}':>8}" for value in (run.loss, run.best_val_loss))
        click.echo(f"{'*' if run.newest else ' '} {run.name:<{width}}  {step:>13}  {losses}  {run.state}")
    for run in found:
        for problem in run.problems:
            click.echo(f"{run.path}: {problem}", err=True)
