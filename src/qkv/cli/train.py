"""`qkv train`."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qkv.cli.common import allow_option, computes, json_option
from qkv.config.errors import UsageError

if TYPE_CHECKING:
    from qkv.config.run import Config


@click.command()
@click.argument("config", required=False)
@click.argument("overrides", nargs=-1, metavar="[key=value]...")
@click.option("--run-dir", type=click.Path(path_type=Path), help="The run folder (default: a new one under runs/).")
@click.option("--resume", type=click.Path(path_type=Path), help="Go on with this run, inside its folder.")
@click.option("--tensorboard", is_flag=True, help="Write event files for TensorBoard into the run folder too.")
@allow_option
@json_option
@computes
def train(
    config: str | None,
    overrides: tuple[str, ...],
    run_dir: Path | None,
    resume: Path | None,
    tensorboard: bool,
    allow: tuple[str, ...],
    as_json: bool,
) -> None:
    """Train the model that CONFIG (a file or a preset) describes.

    A key=value overrides a key of the configuration: train.steps=200. With --resume no CONFIG is needed, and only
    train.steps and train.skip_non_finite may change. Ctrl-C saves and says how to go on.
    """
    from qkv.cli.progress import Progress
    from qkv.config.load import preset_of
    from qkv.config.run import Config
    from qkv.train.loop import fit
    from qkv.train.resume import resume as go_on

    with ExitStack() as stack:
        listeners: list[Callable[[dict[str, Any]], None]] = [stack.enter_context(Progress(as_json))]
        if tensorboard:
            from qkv.train.tensorboard import TensorBoard

            listeners.append(stack.enter_context(TensorBoard()))

        def tell(event: dict[str, Any]) -> None:
            for listener in listeners:
                listener(event)

        if resume is not None:
            run = go_on(resume, **_changes(config, overrides, run_dir), listener=tell, allow=allow)
        elif config is None:
            raise UsageError("which CONFIG? a file or a preset", hint="`qkv presets`, `qkv new PRESET`")
        else:
            tree = Config.load(config, *overrides, allow=allow or None)
            run = fit(tree, run_dir=run_dir, name=Path(config).stem, preset=preset_of(config), listener=tell)
    if not as_json:
        tell_end(run.path)


def tell_end(run: Path) -> None:
    """Where a run that has just ended here is, and what to do with it."""
    from qkv.checkpoint.store import find_checkpoint
    from qkv.config.base import EVERY_PACKAGE, packages_of
    from qkv.config.run import Config

    config = Config.load(find_checkpoint(run, newest=True) / "config.yaml", allow=EVERY_PACKAGE)
    packages = "".join(f" --allow-package {name}" for name in packages_of(config))
    click.echo(f"{run}\ntry it: {_use(run, config)}{packages}", err=True)


def _use(run: Path, config: Config) -> str:
    """The command that does what the model has learnt."""
    place = shlex.quote(str(run))
    match config.objective.kind:
        case "translate" if config.data.kind == "images":
            return f"qkv caption {place} IMAGE"
        case "translate" if config.data.kind == "audio":
            return f"qkv transcribe {place} AUDIO"
        case "classify" if config.data.kind in ("images", "audio"):
            return f"qkv classify {place} FILE"
        case "translate":
            return f"qkv translate {place} FILE"
        case "classify":
            return f"qkv classify {place} TEXT"
        case "masked":
            return f'qkv fill-mask {place} "TEXT with a [MASK]"'
        case _:
            return f"qkv generate {place} --prompt TEXT"


_MAY_CHANGE = {"train.steps": "steps", "train.skip_non_finite": "skip_non_finite"}


def _changes(config: str | None, overrides: tuple[str, ...], run_dir: Path | None) -> dict[str, int]:
    """The overrides that a resumed run takes."""
    if run_dir is not None:
        raise UsageError("--resume goes on inside its own folder", hint="leaving --run-dir out")
    changes = {}
    for text in [*([config] if config else []), *overrides]:
        key, equals, value = text.partition("=")
        if not equals:
            raise UsageError("--resume goes on with the run's own configuration", hint=f"leaving `{text}` out")
        if key in _MAY_CHANGE and not value.isdecimal():
            raise UsageError(f"`{key}` is a whole number, got `{value}`")
        if key not in _MAY_CHANGE:
            names = " and ".join(f"{name}=N" for name in _MAY_CHANGE)
            raise UsageError(f"only {names} may change when a run goes on, got `{text}`")
        changes[_MAY_CHANGE[key]] = int(value)
    return changes
