"""`qkv chat`."""

from __future__ import annotations

import json
import math
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qkv.cli.common import json_lines_option, model_options, print_json, sampling_options
from qkv.config.errors import NotFoundError, QkvError, UsageError, nearest, printable

if TYPE_CHECKING:
    from qkv.generate.text import Generation
    from qkv.model import Model

_HELP = """\
/set NAME VALUE  change temperature, top_k, top_p, min_p, repetition_penalty, max_new_tokens, seed or system
/set             show them
/probs           how likely the tokens of the last answer were, and what else was
/save FILE       write the conversation, as JSON
/reset           begin anew
/inspect         (not there yet)
/quit, /exit     end, as does Ctrl-D; Ctrl-C stops an answer
//...            a message that begins with /"""
_SETTINGS: dict[str, Callable[[str], Any]] = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "max_new_tokens": int,
    "seed": int,
    "system": str,
}
_ALTERNATIVES = 5


@click.command()
@click.argument("model")
@click.option("--system", help="A message to the model before the conversation.")
@click.option(
    "--template", type=click.Path(path_type=Path), help="A chat template (Jinja) in place of the model's own."
)
@click.option("--max-new-tokens", default=512, show_default=True, help="At most so many in an answer.")
@sampling_options(temperature=0.7)
@click.option("--seed", type=int, help="The same seed gives the same answers; default: another one each time.")
@model_options
@json_lines_option
def chat(
    model: str, system: str | None, template: Path | None, loading: dict[str, Any], as_json: bool, **settings: Any
) -> None:
    """Talk with MODEL (anything `qkv generate` takes that has a chat template).

    In a terminal, line after line; /help tells what else can be typed. What comes through a pipe is one message, and
    the answer goes to stdout. With --json an answer is an object with `text`, `token_ids`, ..., `seed`.
    """
    from qkv.model import load

    source = None if template is None else _text_of(template)
    talk = _Conversation(load(model, **loading), model, system, source, settings, as_json)
    if sys.stdin.isatty():
        talk.run(_typed_lines(quiet=as_json))
    else:
        talk.ask(_piped_message())


def _text_of(path: Path) -> str:
    from qkv.tokenizer.text import read_blocks

    return "".join(read_blocks(path))


def _piped_message() -> str:
    from qkv.tokenizer.text import read_stream

    message = "".join(read_stream(sys.stdin.buffer, "stdin")).removesuffix("\n")
    if not message.strip():
        raise UsageError("there is no message on standard input", hint='echo "Hello" | qkv chat MODEL')
    return message


def _typed_lines(*, quiet: bool) -> Iterator[str]:
    """What is typed, line by line, until Ctrl-D; Ctrl-C takes back the line."""
    with suppress(ImportError):
        import readline  # noqa: F401  # input() edits lines with it

    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    if not quiet:
        click.echo("/help tells what can be typed, Ctrl-D ends", err=True)
    while True:
        try:
            yield input("" if quiet else "> ")
        except KeyboardInterrupt:
            click.echo("\n(Ctrl-D or /quit ends)", err=True)
        except EOFError:
            click.echo(err=True)
            return


class _Conversation:
    """What has been said, and how answers are made."""

    def __init__(
        self,
        model: Model,
        name: str,
        system: str | None,
        template: str | None,
        settings: dict[str, Any],
        as_json: bool,
    ) -> None:
        from qkv.generate.chat import chat_ids
        from qkv.generate.decode import check_prompts
        from qkv.tokenizer.chat import ChatTemplate

        self._model, self._name, self._system, self._json = model, name, system, as_json
        self._context = check_prompts(model.network, [])
        roles = {} if model.tokenizer is None else model.tokenizer.roles
        self._template = None if template is None else ChatTemplate(template, roles)
        self._settings = settings
        if settings["seed"] is None:
            settings["seed"] = secrets.randbits(32)
        self._said: list[dict[str, str]] = []
        self._answers = 0
        self._last: Generation | None = None
        chat_ids(model.tokenizer, [{"role": "user", "content": "a"}], self._template)  # can one talk with it at all?

    def run(self, lines: Iterator[str]) -> None:
        """Answer each line, until one says /quit. A mistake is one line; the conversation goes on."""
        for line in lines:
            try:
                if line.startswith("/") and not line.startswith("//"):
                    if not self._command(*(line[1:].strip() or "help").split(maxsplit=1)):
                        return
                elif line.strip():
                    self.ask(line.removeprefix("/"))
            except QkvError as error:
                click.echo(f"error: {error}", err=True)

    def ask(self, message: str) -> None:
        """Answer a message on stdout; what did not come to an answer was not said."""
        from qkv.generate.chat import chat_ids, within_context

        self._said.append({"role": "user", "content": message})
        try:
            tokenizer = self._model.tokenizer
            room = self._context - min(self._settings["max_new_tokens"], self._context // 4)  # for the answer
            kept, left_out = within_context(
                [*self._before, *self._said], lambda some: chat_ids(tokenizer, some, self._template), room
            )
            if left_out:
                self._said = [dict(each) for each in kept[len(self._before) :]]
                click.echo(f"(the context is full: the oldest {left_out} messages are left out)", err=True)
            text = self._answer(kept)
        except BaseException:
            self._said.pop()
            raise
        self._said.append({"role": "assistant", "content": text})

    @property
    def _before(self) -> list[dict[str, str]]:
        return [] if self._system is None else [{"role": "system", "content": self._system}]

    def _answer(self, messages: Any) -> str:
        """Write the answer as it comes; Ctrl-C ends it there."""
        options = dict(self._settings)
        seed = options["seed"] = (options["seed"] + self._answers) % 2**64  # another one for each answer
        self._answers += 1
        shown = printable if sys.stdout.isatty() else str  # a model's text must not steer the terminal
        stream = self._model.chat_stream(messages, template=self._template, logprobs=_ALTERNATIVES, **options)
        text = ""
        try:
            for piece in stream:
                text += piece
                if not self._json:
                    click.echo(shown(piece), nl=False)
        except KeyboardInterrupt:
            click.echo(" (stopped)" if not self._json else "(stopped)", err=True)
            if not sys.stdin.isatty():
                raise
        self._last = stream.generation
        if not self._json:
            click.echo()
            if self._last is not None and self._last.finish_reason == "length":
                full = self._last.completion_tokens < options["max_new_tokens"]
                where = "where the context is full" if full else f"at max_new_tokens {options['max_new_tokens']}"
                click.secho(f"(the answer is cut off {where})", dim=True, err=True)
        elif self._last is not None:
            told = {key: value for key, value in asdict(self._last).items() if value is not None}
            print_json({**{key: told[key] for key in told if "logprobs" not in key}, "seed": seed})
        return text

    # --- commands -----------------------------------------------------------------------------------------------------

    def _command(self, name: str, rest: str = "") -> bool:
        """Do what a line with / says; whether the conversation goes on."""
        commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: click.echo(_HELP, err=True),
            "set": self._set,
            "probs": self._probs,
            "save": self._save,
            "reset": self._reset,
            "inspect": lambda _: click.echo("the inspector is not there yet; /probs shows the last answer", err=True),
        }
        if name in ("quit", "exit"):
            return False
        if name not in commands:
            guess = nearest(name, [*commands, "quit"])
            raise UsageError(f"there is no command /{name}", hint=f"/{guess}" if guess else "/help")
        commands[name](rest)
        return True

    def _set(self, words: str) -> None:
        name, _, value = words.partition(" ")
        known = {**self._settings, "system": self._system}
        if name and name not in known:
            raise UsageError(f"there is no setting {name!r}", hint=nearest(name, known) or ", ".join(known))
        if not value.strip():
            for each in [name] if name else known:
                click.echo(f"{each:<20}{'-' if known[each] is None else known[each]}", err=True)
            return
        try:
            number = _SETTINGS[name](value.strip())
        except ValueError:
            raise UsageError(f"{name} is a number, not {value!r}", hint=f"/set {name} {known[name]}") from None
        if name == "system":
            self._system = number
            return
        from qkv.generate.arguments import check_count
        from qkv.generate.sampling import Sampling

        changed = {**self._settings, name: number}
        check_count("max_new_tokens", changed["max_new_tokens"])
        check_count("seed", changed["seed"])
        Sampling(**{key: setting for key, setting in changed.items() if key not in ("max_new_tokens", "seed")})
        self._settings = changed

    def _probs(self, _: str) -> None:
        """The tokens of the last answer, each with the likeliest ones in its place."""
        if self._last is None or not self._last.logprobs:
            raise UsageError("there is no whole answer to look at", hint="a message")
        for token in self._last.logprobs:
            others = "  ".join(f"{_visible(each.token)} {_percent(each.logprob)}" for each in token.top)
            click.echo(f"{_visible(token.token):<16}{_percent(token.logprob):>7}   {others}", err=True)

    def _save(self, words: str) -> None:
        if not words.strip():
            raise UsageError("save where?", hint="/save FILE")
        path = Path(words.strip()).expanduser()
        told = {"model": self._name, "messages": [*self._before, *self._said]}
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(json.dumps(told, ensure_ascii=False, indent=2) + "\n")
        except FileExistsError:
            raise UsageError("there is such a file already", where=str(path), hint="another name") from None
        except FileNotFoundError:
            raise NotFoundError("there is no such folder", where=str(path.parent)) from None
        except OSError as error:
            raise QkvError(f"the file cannot be written: {error.strerror}", where=str(path)) from None
        click.echo(f"{path}: {len(told['messages'])} messages", err=True)

    def _reset(self, _: str) -> None:
        self._said, self._last = [], None
        click.echo("(a new conversation)", err=True)


def _visible(token: str) -> str:
    return printable(token).replace("\n", "\\n").replace(" ", "␣") or "(end)"


def _percent(logprob: float) -> str:
    return f"{100 * math.exp(logprob):.1f}%"
