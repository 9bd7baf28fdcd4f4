"""What commands share: options, and where output goes (results on stdout, words for people on stderr)."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any, TypeVar

import click

from qkv.config.errors import QkvError

Command = TypeVar("Command", bound=Callable[..., Any])


def json_option(command: Command) -> Command:
    """`--json`: one object on stdout."""
    return click.option("--json", "as_json", is_flag=True, help="Machine output: one JSON object on stdout.")(command)


def json_lines_option(command: Command) -> Command:
    """`--json` of commands that answer one text after the other."""
    return click.option("--json", "as_json", is_flag=True, help="Machine output: a JSON object per text and line.")(
        command
    )


def allow_option(command: Command) -> Command:
    """`--allow-package`: which packages a model folder may run code of."""
    return click.option(
        "--allow-package", "allow", multiple=True, metavar="NAME", help="Let a model folder use this package's parts."
    )(command)


def torch_bin_option(command: Command) -> Command:
    """`--torch-bin`: whether weights that are a pickle may be read."""
    return click.option(
        "--torch-bin", is_flag=True, help="Read a pytorch_model.bin, by a loader that builds tensors and runs no code."
    )(command)


def quantize_option(command: Command) -> Command:
    """`--quantize`: whether blocks of a file stay blocks."""
    return click.option("--quantize", type=click.Choice(["keep"]), help="keep: a GGUF file's blocks stay as they are.")(
        command
    )


def computes(command: Callable[..., None]) -> Callable[..., None]:
    """For commands that compute: with no more threads than this process has cores (see `qkv.nn.threads`)."""

    @functools.wraps(command)
    def run(*given: Any, **options: Any) -> None:
        from qkv.nn.threads import keep_to_cores

        keep_to_cores()
        command(*given, **options)

    return run


def sampling_options(*, temperature: float) -> Callable[[Command], Command]:
    """How tokens are drawn, for the commands that write; `temperature` is this one's default."""
    options = (
        ("--temperature", temperature, "Below 1 safer, above 1 bolder; 0: most likely."),
        ("--top-k", 0, "Only the K most likely tokens; 0: all."),
        ("--top-p", 1.0, "Only the likeliest tokens that reach P together."),
        ("--min-p", 0.0, "No token less likely than P times the likeliest."),
        ("--repetition-penalty", 1.0, "Above 1: fewer tokens seen before."),
    )

    def add(command: Command) -> Command:
        for name, default, text in reversed(options):
            command = click.option(name, default=default, show_default=True, help=text)(command)
        return command

    return add


def model_options(command: Callable[..., None]) -> Callable[..., None]:
    """`--device`, `--dtype`, `--torch-bin` and `--allow-package` of commands that run a model; they come to the command
    as `loading`, the options of `qkv.load`."""
    command_that_computes = computes(command)

    @functools.wraps(command)
    def run(*, device: str, dtype: str, torch_bin: bool, allow: tuple[str, ...], **options: Any) -> None:
        command_that_computes(
            loading={"device": device, "dtype": dtype, "torch_bin": torch_bin, "allow": allow}, **options
        )

    dtypes = click.Choice(["auto", "fp32", "bf16"])
    return click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or mps.")(
        click.option("--dtype", type=dtypes, default="auto", show_default=True)(torch_bin_option(allow_option(run)))
    )


def bad_bytes_option(command: Callable[..., None]) -> Callable[..., None]:
    """`--bad-bytes`, by which name errors call it too."""

    @functools.wraps(command)
    def run(**options: Any) -> None:
        try:
            command(**options)
        except QkvError as error:
            if error.hint:
                error.hint = error.hint.replace("data.bad_bytes=", "bad_bytes=").replace("bad_bytes=", "--bad-bytes ")
            raise

    return click.option(
        "--bad-bytes",
        type=click.Choice(["error", "replace", "drop"]),
        default="error",
        show_default=True,
        help="Bytes that are not UTF-8: stop and name them, put U+FFFD, or leave them out.",
    )(run)


def json_line(value: Any) -> str:
    """A JSON object on one line, with Chinese readable."""
    return json.dumps(value, ensure_ascii=False)


def print_json(value: Any) -> None:
    """One JSON object on one line of stdout."""
    click.echo(json_line(value))
