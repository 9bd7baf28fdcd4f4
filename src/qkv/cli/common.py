"""What commands share: `--json`, and where output goes (results on stdout, words for people on stderr)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])


def json_option(command: Command) -> Command:
    """`--json`: one object on stdout."""
    return click.option("--json", "as_json", is_flag=True, help="Machine output: one JSON object on stdout.")(command)


def allow_option(command: Command) -> Command:
    """`--allow-package`: which packages a model folder may run code of."""
    return click.option(
        "--allow-package", "allow", multiple=True, metavar="NAME", help="Let a model folder use this package's parts."
    )(command)


def print_json(value: Any) -> None:
    """One JSON object on one line of stdout, with Chinese readable."""
    click.echo(json.dumps(value, ensure_ascii=False))
