"""Conversations: what a model is asked, where its answer ends, and what is left out when there is too much."""

from __future__ import annotations

from typing import Any

import pytest

from qkv.config.errors import UsageError
from qkv.generate.chat import chat_ids, within_context
from qkv.model import Model
from qkv.tokenizer import Tokenizer
from qkv.tokenizer.chat import ChatTemplate

from . import tiny

TEMPLATE = (
    "{% for message in messages %}{{ bos_token ~ message.role[0] ~ message.content ~ '<mask>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token }}a{{ style }}{% endif %}"
)
HELLO = [{"role": "user", "content": "hi"}]


def talking(**changes: Any) -> Model:
    """A tiny model whose template ends turns with <mask>, which ends no other text."""
    plain = tiny.byte_tokenizer()
    tokenizer = Tokenizer(plain._text, kind=plain.kind, roles=plain.roles, chat_template=TEMPLATE)
    return tiny.model(tokenizer, max_seq_len=96, **changes)


def test_an_answer_is_what_follows_the_text_of_the_template() -> None:
    model = talking()
    options: dict[str, Any] = {"max_new_tokens": 9, "seed": 3, "top_k": 20}
    answer = model.chat(HELLO, **options)
    prompt = model.generate("<bos>uhi<mask><bos>a", parse_special=True, **options)
    assert tiny.same(answer, prompt)
    assert answer.prompt_tokens == prompt.prompt_tokens == 7
    stream = model.chat_stream(HELLO, **options)
    assert "".join(stream) == answer.text
    assert stream.generation is not None
    assert stream.generation.token_ids == answer.token_ids


def test_an_answer_ends_with_the_turn() -> None:
    model = talking()
    mask = model.tokenizer.mask_id if model.tokenizer else None
    model.network = tiny.Scripted(b"yes", after=7)  # then <eos>
    assert model.chat(HELLO).text == "yes"
    model.network.script = [*b"yes", mask, *b"no"]  # type: ignore[assignment]
    answer = model.chat(HELLO)
    assert (answer.text, answer.token_ids[-1], answer.finish_reason) == ("yes", mask, "stop")
    assert model.generate("<bos>uhi<mask><bos>a", parse_special=True).text.startswith("yesno")


def test_a_template_and_its_variables_can_be_given() -> None:
    model = talking()
    assert model.chat(HELLO, variables={"style": "!"}, max_new_tokens=1).prompt_tokens == 8
    assert (
        model.chat(HELLO, template=ChatTemplate("{{ messages[0].content }}", {}), max_new_tokens=1).prompt_tokens == 3
    )


def test_line_ends_of_messages_are_those_of_files() -> None:
    model = talking()
    assert chat_ids(model.tokenizer, [{"role": "user", "content": "\ufeffa\r\nb"}]) == chat_ids(
        model.tokenizer, [{"role": "user", "content": "a\nb"}]
    )


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: Model(tiny.network(), None, tiny.model().config), "no tokenizer"),
        (tiny.model, "no chat template"),
        (lambda: talking(family="encoder", head={"kind": "masked-language-model"}), "generate text\n  try fill-mask"),
        (lambda: talking(family="encoder", head={"kind": "none"}), "generate text\n  try embed"),
    ],
)
def test_a_model_that_does_not_converse_says_why(model: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        model().chat(HELLO)


def test_an_option_that_there_is_not_is_named() -> None:
    for option in ("parse_special", "temprature"):
        with pytest.raises(UsageError, match=f"no option '{option}'"):
            talking().chat(HELLO, **{option: 1})  # type: ignore[arg-type]


def test_a_conversation_longer_than_the_context_is_refused_with_both_numbers() -> None:
    with pytest.raises(UsageError, match=r"105 tokens and the model's context is 96"):
        talking().chat([{"role": "user", "content": "x" * 100}])


def said(*lengths: int, system: bool = False) -> list[dict[str, str]]:
    talk = [{"role": ("user", "assistant")[n % 2], "content": "x" * length} for n, length in enumerate(lengths)]
    return [{"role": "system", "content": "be brief"}, *talk] if system else talk


def count(messages: Any) -> list[int]:
    return [0] * sum(len(message["content"]) for message in messages)


@pytest.mark.parametrize(
    ("messages", "room", "kept"),
    [
        (said(5, 5, 5), 15, [5, 5, 5]),
        (said(5, 5, 5), 14, [5]),
        (said(5, 5, 5, 5, 5), 24, [5, 5, 5]),
        (said(5, 5, 5, 5, 5), 14, [5]),
        (said(5, 5, 5, system=True), 15, [8, 5]),
    ],
)
def test_the_oldest_turns_are_left_out_when_there_is_no_room(messages: Any, room: int, kept: list[int]) -> None:
    found, left_out = within_context(messages, count, room)
    assert [len(message["content"]) for message in found] == kept
    assert left_out == len(messages) - len(kept)
    assert [message for message in messages if message in found][-1] == messages[-1]


def test_a_message_that_does_not_fit_alone_is_refused() -> None:
    with pytest.raises(UsageError, match="30 tokens, and the model's context room for 20"):
        within_context(said(5, 5, 30), count, 20)
