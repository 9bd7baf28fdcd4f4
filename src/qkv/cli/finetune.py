"""`qkv finetune`."""

from __future__ import annotations

from pathlib import Path

import click

from qkv.cli.common import allow_option, computes, json_option
from qkv.cli.train import tell_end


@click.command()
@click.argument("model")
@click.argument("config")
@click.argument("overrides", nargs=-1, metavar="[key=value]...")
@click.option("--run-dir", type=click.Path(path_type=Path), help="The run folder (default: a new one under runs/).")
@allow_option
@json_option
@computes
def finetune(
    model: str,
    config: str,
    overrides: tuple[str, ...],
    run_dir: Path | None,
    allow: tuple[str, ...],
    as_json: bool,
) -> None:
    """Train MODEL (a run, a checkpoint, a published model) on, as CONFIG (a file or a preset) says, in a new run.

    CONFIG needs no `model` section: shape and tokenizer are MODEL's. It may give MODEL another head, other dropouts and
    another context. Ctrl-C saves and says how to go on.
    """
    from qkv.cli.progress import Progress
    from qkv.train.finetune import finetune as train_on

    with Progress(as_json) as progress:
        run = train_on(
            model, config, *overrides, run_dir=run_dir, name=Path(config).stem, listener=progress, allow=allow
        )
    if not as_json:
        tell_end(run.path)
