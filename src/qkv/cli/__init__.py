"""The command line: parse, call, print.

Commands are imported when they are run; `qkv --help` reads only this table.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, TextIO, cast

import click

from qkv.config.errors import QkvError, nearest

COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("qkv.cli.demo:demo", "Train a small model on bundled text and see it work."),
    "new": ("qkv.cli.presets:new", "Write a preset as a configuration file to edit."),
    "presets": ("qkv.cli.presets:presets", "List the presets."),
    "show": ("qkv.cli.show:show", "Diagram, shapes, parameters, FLOPs and memory of a model."),
    "tokenizer": ("qkv.cli.tokenizer:tokenizer", "Train a tokenizer; encode, decode, explain."),
    "data": ("qkv.cli.data:data", "Prepare training data, and look at a real batch."),
    "train": ("qkv.cli.train:train", "Train a model, or go on with a run."),
    "finetune": ("qkv.cli.finetune:finetune", "Train a model on, with other data or for another task."),
    "eval": ("qkv.cli.evaluate:evaluate", "How good a model is: perplexity, BLEU, accuracy, error rates."),
    "generate": ("qkv.cli.generate:generate", "Continue a prompt."),
    "chat": ("qkv.cli.chat:chat", "Talk with a model."),
    "translate": ("qkv.cli.translate:translate", "Translate line by line."),
    "fill-mask": ("qkv.cli.fill_mask:fill_mask", "Guess masked words."),
    "classify": ("qkv.cli.classify:classify", "Tell which class a text belongs to."),
    "embed": ("qkv.cli.embed:embed", "Turn texts into vectors."),
    "caption": ("qkv.cli.caption:caption", "Write what is in images."),
    "transcribe": ("qkv.cli.transcribe:transcribe", "Write down what is said in a recording."),
    "fetch": ("qkv.cli.fetch:fetch", "Fetch a small public model, to be used by its name."),
    "convert": ("qkv.cli.convert:convert", "Write a model in another format."),
    "parity": ("qkv.cli.parity:parity", "Compare a model, number by number, with transformers or another model."),
    "selfcheck": ("qkv.cli.selfcheck:selfcheck", "Check that a model answers the same however it is run."),
    "runs": ("qkv.cli.runs:runs", "List the runs."),
    "plot": ("qkv.cli.plot:plot", "Plot losses, positions, masks and attention."),
    "bench": ("qkv.cli.bench:bench", "Measure speed beside the machine's own limits."),
    "doctor": ("qkv.cli.doctor:doctor", "Check this machine: threads, precision, compiler, kernels."),
    "completion": ("qkv.cli.completion:completion", "Print the completion script of a shell."),
}
"""Command -> where it is defined, and its line in `qkv --help`."""


@dataclass
class Frame:
    """What `main` and the commands share."""

    debug: bool = False


def _set_debug(context: click.Context, _: click.Parameter, value: bool) -> None:
    frame = context.find_root().obj
    if value and isinstance(frame, Frame):
        frame.debug = True


def with_debug(command: click.Command) -> click.Command:
    """The command, and all below it, with `--debug`: an option, so that `--prompt --debug` is still a prompt."""
    if not any("--debug" in option.opts for option in command.params):
        option = click.Option(
            ["--debug"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_set_debug,
            help="Show the traceback of an error.",
        )
        command.params.append(option)
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            with_debug(inner)
    return command


class LazyGroup(click.Group):
    """A group whose commands are imported on use. `commands_table` maps a name to (module:attribute, help line)."""

    def __init__(self, *args: object, table: dict[str, tuple[str, str]], **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.table = table

    def list_commands(self, context: click.Context) -> list[str]:
        return list(self.table)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in self.table:
            return None
        module, _, attribute = self.table[name][0].partition(":")
        return with_debug(getattr(import_module(module), attribute))

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        unknown = bool(args) and not args[0].startswith("-") and args[0] not in self.table
        if unknown and not context.resilient_parsing:  # a completion in progress must not complain
            guess = nearest(args[0], self.table)
            hint = f" Did you mean `{guess}`?" if guess else f" See `{context.command_path} --help`."
            raise click.UsageError(f"there is no command `{args[0]}`.{hint}", context)
        return super().resolve_command(context, args)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in self.table.items()])


@click.group(
    cls=LazyGroup,
    table=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Every command takes --json for machine output and --debug, anywhere after it, for tracebacks.",
)
@click.version_option(package_name="qkv")
def cli() -> None:
    """Transformers of all three families from one configuration: train them, run them, look inside them."""


with_debug(cli)


class StdoutError(Exception):
    """Stdout cannot be written. Not an OSError: those may be about any file, and click has its own way with them."""


class _Stdout:
    """Stdout, whose failures are told from those of other files."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            raise StdoutError from error

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            raise StdoutError from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _as_utf_8(argument: str) -> str:
    """A word of the command line as UTF-8, whatever the locale is; the name of a file stays as the system spells it."""
    decoded = os.fsencode(argument).decode("utf-8", "surrogateescape")
    if decoded != argument:
        with suppress(OSError):  # too long for a name
            if Path(argument).exists():
                return argument
    return decoded


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 wrong usage, 3 not found, 4 needs permission, 5 conflict."""
    whole_process = arguments is None
    arguments = [_as_utf_8(argument) for argument in sys.argv[1:]] if arguments is None else list(arguments)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="replace")  # LC_ALL=C and Windows default to something else
    stdout = sys.stdout
    if stdout is not None:
        sys.stdout = cast(TextIO, _Stdout(stdout))
    try:
        _run(arguments)
    finally:
        sys.stdout = stdout
        if whole_process:
            with suppress(ValueError):  # not in the main thread
                signal.signal(signal.SIGINT, signal.SIG_DFL)  # python, as it ends, would print a traceback of Ctrl-C


def _run(arguments: list[str]) -> NoReturn:
    frame = Frame()
    try:
        status = cli.main(args=arguments, prog_name="qkv", standalone_mode=False, obj=frame)
        if sys.stdout is not None:
            sys.stdout.flush()
        sys.exit(status or 0)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort) as stop:
        # click turns Ctrl-C into an Abort without words; the trainer's own has some
        click.echo(str(stop.__cause__ or stop) or "interrupted", err=True)
        sys.exit(130)
    except StdoutError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or python tries again as it ends
        if isinstance(error.__cause__, BrokenPipeError):  # `qkv ... | head`
            sys.exit(0)
        click.echo(f"error: stdout cannot be written: {getattr(error.__cause__, 'strerror', '')}", err=True)
        sys.exit(1)
    except QkvError as error:
        if frame.debug:
            raise
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    except OSError as error:  # a name that is too long, a folder that is closed: not ours
        if frame.debug:
            raise
        where = None if error.filename is None else f"{error.filename!s:.200}"
        click.echo(f"error: {QkvError(f'the system refuses: {error.strerror or error}', where=where)}", err=True)
        sys.exit(1)
    except Exception as error:  # a fault of ours: say so in one line, keep the details for those who ask
        if frame.debug:
            raise
        click.echo(f"error: {_unforeseen(error)}", err=True)
        sys.exit(1)


def _unforeseen(error: Exception) -> QkvError:
    """What people read of an error that no part of qkv names."""
    if isinstance(error, MemoryError) or "allocate memory" in str(error) or "out of memory" in str(error):
        return QkvError("the machine has too little memory for this", hint="a smaller model, or less of it at once")
    return QkvError(f"qkv itself failed: {type(error).__name__}: {error}", hint="the same command with --debug")
