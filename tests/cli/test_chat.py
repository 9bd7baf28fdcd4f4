"""`qkv chat`: through a pipe, and line by line."""

from __future__ import annotations

import builtins
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from generate import tiny
from generate.test_chat import TEMPLATE, talking

from qkv.cli import main
from qkv.model import Model

Answer = tuple[int, str, str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "folder"
    talking().save(path)
    return str(path)


@pytest.fixture
def pipe(folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Answer]:
    """`echo TEXT | qkv chat FOLDER OPTIONS`: exit status, stdout, stderr."""

    def run(text: str, *options: str, model: str = folder) -> Answer:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        with pytest.raises(SystemExit) as stop:
            main(["chat", model, *options])
        return int(stop.value.code or 0), *capsys.readouterr()

    return run


@pytest.fixture
def type_lines(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Answer]:
    """A terminal in which these lines are typed (an exception: that key), and Ctrl-D."""

    def run(lines: list[Any], *options: str) -> Answer:
        waiting = iter([*lines, EOFError()])

        def typed(prompt: str = "") -> str:
            line = next(waiting)
            if isinstance(line, BaseException):
                raise line
            return str(line)

        terminal = io.TextIOWrapper(io.BytesIO())
        monkeypatch.setattr(terminal, "isatty", lambda: True)
        monkeypatch.setattr(sys, "stdin", terminal)
        monkeypatch.setattr(builtins, "input", typed)
        with pytest.raises(SystemExit) as stop:
            main(["chat", folder, "--seed", "1", "--max-new-tokens", "6", *options])
        return int(stop.value.code or 0), *capsys.readouterr()

    return run


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[dict[str, str]], dict[str, Any]]]:
    """(messages, options) of all answers that were asked for."""
    seen = []
    stream = Model.chat_stream

    def chat_stream(self: Model, messages: Any, **options: Any) -> Any:
        seen.append((list(messages), dict(options)))
        return stream(self, messages, **options)

    monkeypatch.setattr(Model, "chat_stream", chat_stream)
    return seen


def expected(*contents: str, **options: Any) -> str:
    """The answer to messages of user and assistant in turn."""
    messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(contents)]
    usual = {"temperature": 0.7, "max_new_tokens": 6, "seed": 1}
    return talking().chat(messages, **{**usual, **options}).text


# --- through a pipe ---------------------------------------------------------------------------------------------------


def test_one_message_through_a_pipe_gives_one_answer(pipe: Callable[..., Answer]) -> None:
    code, out, _ = pipe("hi\n", "--seed", "1", "--max-new-tokens", "6")
    assert (code, out) == (0, expected("hi") + "\n")
    assert pipe("one\ntwo\n", "--seed", "1", "--max-new-tokens", "6")[1] == expected("one\ntwo") + "\n"


def test_json_has_the_fields_of_an_answer(pipe: Callable[..., Answer]) -> None:
    code, out, err = pipe("hi", "--json", "--seed", "4", "--temperature", "0", "--max-new-tokens", "5")
    found = json.loads(out)
    answer = talking().chat([{"role": "user", "content": "hi"}], temperature=0, max_new_tokens=5)
    assert (code, err) == (0, "")
    assert (found["text"], found["token_ids"], found["seed"]) == (answer.text, answer.token_ids, 4)
    assert {"prompt_tokens", "completion_tokens", "finish_reason", "seconds"} < set(found)


def test_every_option_reaches_the_model(pipe: Callable[..., Answer], asked: list[Any]) -> None:
    options = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "seed": 9}
    flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    assert pipe("hi", "--system", "Be brief.", "--max-new-tokens", "3", *flags)[0] == 0
    ((messages, given),) = asked
    assert messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert {**options, "max_new_tokens": 3}.items() <= given.items()


def test_an_empty_pipe_is_wrong_usage(pipe: Callable[..., Answer]) -> None:
    code, _, err = pipe(" \n")
    assert code == 2
    assert "there is no message" in err


def test_a_model_without_a_template_asks_for_one(pipe: Callable[..., Answer], tmp_path: Path) -> None:
    tiny.model(max_seq_len=96).save(tmp_path / "plain")
    code, _, err = pipe("hi", model=str(tmp_path / "plain"))
    assert code == 2
    assert "no chat template" in err
    assert "--template FILE" in err
    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    given = ("--template", str(tmp_path / "mine.jinja"), "--seed", "1", "--max-new-tokens", "6")
    assert pipe("hi", *given, model=str(tmp_path / "plain"))[1] == expected("hi") + "\n"
    assert pipe("hi", "--template", str(tmp_path / "none"))[0] == 3


# --- in a terminal ----------------------------------------------------------------------------------------------------


def test_the_history_is_kept(type_lines: Callable[..., Answer]) -> None:
    first = expected("one")
    code, out, _ = type_lines(["one", "", "two"])
    assert (code, out) == (0, f"{first}\n{expected('one', first, 'two', seed=2)}\n")


def test_the_oldest_turns_are_cut_and_it_is_said(type_lines: Callable[..., Answer], asked: list[Any]) -> None:
    code, _, err = type_lines(["x" * 30, "y" * 30, "z" * 30], "--system", "s")
    assert code == 0
    assert "the context is full: the oldest 2 messages are left out" in err
    assert [message["content"][0] for message in asked[-1][0]] in (
        ["s", "z"],
        ["s", "y", asked[-1][0][2]["content"][0], "z"],
    )


def test_a_message_that_is_too_long_is_one_error_and_not_remembered(
    type_lines: Callable[..., Answer], asked: list[Any]
) -> None:
    code, _, err = type_lines(["x" * 200, "hi"])
    assert code == 0
    assert "205 tokens" in err
    assert [messages for messages, _ in asked] == [[{"role": "user", "content": "hi"}]]


def test_settings_change_what_follows(type_lines: Callable[..., Answer], asked: list[Any]) -> None:
    lines = ["hi", "/set temperature 0", "/set max_new_tokens 2", "/set system Be brief.", "/set", "there"]
    code, _, err = type_lines(lines)
    assert code == 0
    assert (asked[0][1]["temperature"], asked[1][1]["temperature"], asked[1][1]["max_new_tokens"]) == (0.7, 0, 2)
    assert asked[1][0][0] == {"role": "system", "content": "Be brief."}
    assert "temperature         0.0" in err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/set temperature hot", "temperature is a number"),
        ("/set temperature -1", "temperature"),
        ("/set top_p 2", "top_p"),
        ("/set max_new_tokens -1", "max_new_tokens"),
        ("/set temprature 1", "there is no setting 'temprature'\n  try temperature"),
        ("/sav x", "there is no command /sav\n  try /save"),
        ("/probs", "there is no whole answer"),
        ("/set temperature", "temperature         0.7"),
        ("/save", "save where?"),
        ("/save /nowhere/at/all.json", "there is no such folder"),
        ("/inspect", "not there yet"),
        ("/help", "/set NAME VALUE"),
        ("/", "/set NAME VALUE"),
    ],
)
def test_a_line_with_a_slash_is_answered_on_stderr_and_the_conversation_goes_on(
    line: str, message: str, type_lines: Callable[..., Answer]
) -> None:
    code, out, err = type_lines([line, "hi"])
    assert (code, out) == (0, expected("hi") + "\n")
    assert message in err


def test_two_slashes_begin_a_message_with_one(type_lines: Callable[..., Answer], asked: list[Any]) -> None:
    type_lines(["//help"])
    assert asked[0][0] == [{"role": "user", "content": "/help"}]


def test_probabilities_of_the_last_answer_are_shown(type_lines: Callable[..., Answer]) -> None:
    _, _, err = type_lines(["hi", "/probs"])
    lines = [line for line in err.splitlines() if line.count("%") == 6]
    assert len(lines) == 6  # tokens, each with itself and five others


def test_a_conversation_is_saved_and_not_written_over(type_lines: Callable[..., Answer], tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    code, _, err = type_lines(["hi", f"/save {path}", f"/save {path}"], "--system", "s")
    told = json.loads(path.read_text(encoding="utf-8"))
    assert code == 0
    assert [message["role"] for message in told["messages"]] == ["system", "user", "assistant"]
    assert "there is such a file already" in err


def test_reset_forgets(type_lines: Callable[..., Answer], asked: list[Any]) -> None:
    type_lines(["one", "/reset", "two"])
    assert [message["content"] for message in asked[1][0]] == ["two"]


@pytest.mark.parametrize("line", ["/quit", "/exit"])
def test_quit_ends(line: str, type_lines: Callable[..., Answer]) -> None:
    assert type_lines([line, "hi"])[:2] == (0, "")


def test_an_answer_that_is_cut_off_says_so(pipe: Callable[..., Answer]) -> None:
    _, out, err = pipe("hi", "--max-new-tokens", "3", "--seed", "1")
    assert (len(out.splitlines()), err) == (1, "(the answer is cut off at max_new_tokens 3)\n")
    assert pipe("hi", "--max-new-tokens", "3", "--seed", "1", "--json")[2] == ""


def test_ctrl_c_takes_back_a_line(type_lines: Callable[..., Answer]) -> None:
    code, out, err = type_lines([KeyboardInterrupt(), "hi"])
    assert (code, out) == (0, expected("hi") + "\n")
    assert "Ctrl-D" in err


def test_ctrl_c_stops_an_answer_and_what_was_said_of_it_stays(
    type_lines: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(Iterator[str]):
        generation = None

        def __init__(self) -> None:
            self.left = ["some", "thing"]

        def __next__(self) -> str:
            if not self.left:
                raise KeyboardInterrupt
            return self.left.pop(0)

    seen: list[Any] = []

    def chat_stream(self: Model, messages: Any, **options: Any) -> Any:
        seen.append(list(messages))
        return Interrupted()

    monkeypatch.setattr(Model, "chat_stream", chat_stream)
    code, out, err = type_lines(["one", "two"])
    assert (code, out) == (0, "something\nsomething\n")
    assert err.count("(stopped)") == 2
    assert [message["content"] for message in seen[1]] == ["one", "something", "two"]


def test_json_lines_in_a_terminal(type_lines: Callable[..., Answer]) -> None:
    _, out, err = type_lines(["one", "two"], "--json")
    assert [json.loads(line)["seed"] for line in out.splitlines()] == [1, 2]
    assert err.strip() == ""
