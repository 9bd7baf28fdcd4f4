"""`qkv runs`, `qkv runs diff`, `qkv runs report`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qkv.cli import LazyGroup
from qkv.cli.common import json_option, print_json
from qkv.config.errors import counted

if TYPE_CHECKING:
    from qkv.evaluate.run_differences import Difference

COMMANDS = {
    "list": ("qkv.cli.runs:list_", "The runs in a folder: steps, losses, and how each ended. The default."),
    "diff": ("qkv.cli.runs:diff", "How two runs differ: configuration, machine, data, metrics."),
    "report": ("qkv.cli.runs:report", "Write a run's report.md anew from its files."),
}
ROWS = 8
"""Steps that people are shown of a metric; JSON has them all."""


class _Runs(LazyGroup):
    """`qkv runs [DIR]` is `qkv runs list [DIR]`."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        other = args[:1] and (args[0] in self.table or args[0] in context.help_option_names)
        if not other and not context.resilient_parsing:  # a completion in progress is told the commands
            args = ["list", *args]
        return super().parse_args(context, args)


@click.group(cls=_Runs, table=COMMANDS)
def runs() -> None:
    """List the runs in DIR (default: runs), compare two, or write a report.

    `qkv runs [DIR]` lists; a folder with the name of a command is written ./NAME.
    """


@click.command("list")
@click.argument("folder", type=click.Path(path_type=Path), required=False, metavar="[DIR]")
@json_option
def list_(folder: Path | None, as_json: bool) -> None:
    """List the runs in DIR (default: runs), oldest first: steps, losses, and how each ended.

    The newest is marked with *. Damaged files are named, and the list goes on.
    """
    from qkv.evaluate.runs import list_runs

    usual = Path("runs")
    # who names no folder and has trained nothing yet has made no mistake
    found = list_runs(folder or usual) if folder or usual.exists() else []
    if as_json:
        print_json({"runs": [asdict(run) for run in found]})
        return
    if not found:
        hint = "" if folder else " yet\n  try `qkv train`, which makes them there, or `qkv runs DIR` for another folder"
        click.echo(f"no runs in {folder or usual}{hint}", err=True)
        return
    width = max(len(run.name) for run in found)
    click.echo(f"  {'run':<{width}}  {'step':>13}  {'loss':>8}  {'best val at step':>17}  state")
    for run in found:
        step = f"{run.step:,}/{'?' if run.steps is None else f'{run.steps:,}'}"
        loss = "-" if run.loss is None else f"{run.loss:.4f}"
        best = "-" if run.best_val_loss is None else f"{run.best_val_loss:.4f} at {run.best_val_step:,}"
        click.echo(f"{'*' if run.newest else ' '} {run.name:<{width}}  {step:>13}  {loss:>8}  {best:>17}  {run.state}")
    for run in found:
        for problem in run.problems:
            click.echo(f"{run.path}: {problem}", err=True)


@click.command()
@click.argument("first", type=click.Path(path_type=Path), metavar="A")
@click.argument("second", type=click.Path(path_type=Path), metavar="B")
@json_option
def diff(first: Path, second: Path, as_json: bool) -> None:
    """How the runs A and B differ: configuration, machine, data, and the metrics of the steps that both logged."""
    from qkv.evaluate.run_differences import diff_runs

    found = diff_runs(first, second)
    if as_json:
        print_json(found.as_dict())
        return
    click.echo(f"A  {first}\nB  {second}")
    _tell_differences("configuration", found.config)
    _tell_differences("machine", found.environment)
    prints = found.data_fingerprints
    if None in prints:
        click.echo("\ndata: unknown, as not both can be read")
    else:
        same = "the same" if prints[0] == prints[1] else "not the same"
        click.echo(f"\ndata: {same} ({', '.join(str(one)[:12] for one in prints)})")
    for key, rows in found.metrics.items():
        _tell_metric(key, rows, [len(run.metrics.series(key)[0]) for run in (found.first, found.second)])
    if not found.metrics:
        click.echo("\nmetrics: neither has any")
    for problem in found.problems:
        click.echo(problem, err=True)


def _tell_differences(what: str, differences: list[Difference] | None) -> None:
    if not differences:
        click.echo(f"\n{what}: {'the same' if differences == [] else 'unknown, as not both can be read'}")
        return
    click.echo(f"\n{what}")
    width = max(len(difference.key) for difference in differences)
    for difference in differences:
        click.echo(f"  {difference.key:<{width}}  {difference.shown(0)} -> {difference.shown(1)}")


def _tell_metric(key: str, rows: list[tuple[int, float, float]], logged: list[int]) -> None:
    """A metric at the steps that both runs logged. logged: how many steps either did."""
    if not rows:
        click.echo(f"\n{key}: {counted(logged[0], 'step')} of A, {counted(logged[1], 'step')} of B, none in common")
        return
    if all(one == other for _, one, other in rows):
        every = "the one step" if len(rows) == 1 else f"all {counted(len(rows), 'step')}"
        click.echo(f"\n{key}: the same at {every} that both logged")
        return
    shown = _some(rows)
    some = "" if len(shown) == len(rows) else f", {len(shown)} of them shown"
    click.echo(f"\n{key}: {counted(len(rows), 'step')} that both logged{some}")
    click.echo(f"{'at step':>24}{'A':>14}{'B':>14}{'B - A':>14}")
    for step, one, other in shown:
        click.echo(f"{step:>24,}{one:>14.6g}{other:>14.6g}{other - one:>+14.4g}")


def _some(rows: list[Any]) -> list[Any]:
    """The first, the last and some between, evenly spaced."""
    if len(rows) <= ROWS:
        return rows
    return [rows[round(n * (len(rows) - 1) / (ROWS - 1))] for n in range(ROWS)]


@click.command()
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN")
@json_option
def report(run: Path, as_json: bool) -> None:
    """Write RUN/report.md anew from the files of the run, whether it has ended or not.

    Files that are missing or damaged are named in it.
    """
    from qkv.train.report import write_report

    path = write_report(run)
    if as_json:
        print_json({"path": str(path)})
    else:
        click.echo(f"wrote {path}", err=True)
