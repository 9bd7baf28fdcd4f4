"""Translation: like a search for each source alone, in order, and any number of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from qkv.config.errors import QkvError, UsageError
from qkv.config.run import Config
from qkv.generate import Alternative, Beams, Hypothesis, Translation, beam_search, translate
from qkv.generate.translate import READ_AHEAD
from qkv.model import Model
from qkv.nn import Transformer
from qkv.tokenizer import Tokenizer

from .tiny import CONTEXT, byte_tokenizer, model, network

BOS, EOS = 257, 258
TEXTS = ["a long sentence of many words", "short", "", "two words", " \t", "x", "another long one", "short"]


def encoder_decoder(**changes: Any) -> Transformer:
    return network(family="encoder-decoder", **changes)


def translator(**changes: Any) -> Model:
    return model(family="encoder-decoder", **changes)


def found_by(made: Transformer, sources: Any, **options: Any) -> list[list[Hypothesis]]:
    return list(translate(made, sources, **{"start_ids": [BOS], "eos_ids": [EOS], "max_new_tokens": 8, **options}))


def rounded(found: Any) -> Any:
    """Without the last digits of float32."""
    if isinstance(found, Translation):
        return [found.source_tokens, *map(rounded, found.hypotheses)]
    return [found.token_ids, round(found.score, 3), found.finish_reason]


def sources(count: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (count,), generator=generator).tolist()
    return [torch.randint(250, (length,), generator=generator).tolist() for length in lengths]


# --- order and batches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 2, 5, 100])
def test_every_source_is_translated_as_if_alone_and_in_order(batch_size: int) -> None:
    made, rows = encoder_decoder(), sources(23)
    together = found_by(made, rows, batch_size=batch_size, n_best=2)
    for row, hypotheses in zip(rows, together, strict=True):
        (alone,) = beam_search(made, [[BOS]], Beams(4, 2), max_new_tokens=8, eos_ids=[EOS], source=torch.tensor([row]))
        assert list(map(rounded, hypotheses)) == list(map(rounded, alone))


def test_a_batch_holds_sources_of_like_length() -> None:
    made = encoder_decoder()
    shapes: list[tuple[int, ...]] = []
    made.encoder_embedding.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
    found_by(made, [[1] * length for length in (9, 2, 8, 1, 2, 9)], batch_size=2)
    assert shapes == [(2, 2), (2, 8), (2, 9)]


def test_any_number_of_sources_streams_through_a_bounded_window() -> None:
    made, read = encoder_decoder(), []
    endless = (read.append(1) or row for row in itertools.cycle(sources(5)))
    found = translate(made, endless, start_ids=[BOS], batch_size=3, max_new_tokens=2, beam_size=2)
    assert not read, "something was read before an answer was wanted"
    window = READ_AHEAD * 3
    for number in range(2 * window + 1):
        next(found)
        assert len(read) == (number // window + 1) * window


def test_a_batch_larger_than_can_be_counted_holds_all_sources() -> None:
    made, rows = encoder_decoder(), sources(5)
    options: dict[str, Any] = {"start_ids": [BOS], "max_new_tokens": 2, "beam_size": 2}
    assert list(translate(made, rows, batch_size=10**30, **options)) == list(translate(made, rows, **options))


def test_with_a_batch_of_one_each_source_is_answered_when_it_is_read() -> None:
    made, read = encoder_decoder(), []
    found = translate(made, (read.append(1) or row for row in sources(9)), start_ids=[BOS], batch_size=1, beam_size=2)
    for number in range(1, 4):
        next(found)
        assert len(read) == number


def test_features_of_unequal_length_are_translated_as_if_alone() -> None:
    made = encoder_decoder(encoder={"input": {"kind": "features", "width": 5}})
    features = [torch.randn(length, 5, generator=torch.Generator().manual_seed(length)) for length in (6, 2, 4)]
    together = found_by(made, features)
    for one, (best,) in zip(features, together, strict=True):
        assert rounded(best) == rounded(found_by(made, [one])[0][0])
    assert len({tuple(best.token_ids) for (best,) in together}) == 3


# --- limits -----------------------------------------------------------------------------------------------------------


def test_by_default_a_translation_has_at_most_twice_the_sources_tokens_and_16() -> None:
    made = encoder_decoder()
    found = found_by(made, [[1] * length for length in (1, 5, 30)], eos_ids=[], max_new_tokens=None, beam_size=2)
    assert [len(best.token_ids) for (best,) in found] == [18, 26, CONTEXT - 1]  # the last: all that the context holds
    assert {best.finish_reason for (best,) in found} == {"length"}


def test_a_source_without_tokens_is_empty_and_the_model_does_not_run() -> None:
    made = encoder_decoder()
    made.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    assert found_by(made, [[], []]) == [[Hypothesis([], 0.0, 0.0, "stop")]] * 2
    assert found_by(made, []) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"beam_size": 0}, "beam_size"),
        ({"n_best": 5}, "n_best"),
        ({"length_penalty": -1}, "length_penalty"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 2.5}, "batch_size"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"length_penalty_kind": "x"}, "length_penalty_kind"),
    ],
)
def test_a_wrong_option_is_refused_at_once_and_not_at_the_first_answer(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        translate(encoder_decoder(), [], start_ids=[BOS], **options)
    with pytest.raises(UsageError, match=said):
        translator().translate_stream([], **options)


@pytest.mark.parametrize("family", ["decoder", "encoder"])
def test_what_is_no_encoder_decoder_does_not_translate(family: str) -> None:
    with pytest.raises(UsageError, match=f"family {family} does not translate"):
        translate(network(family=family), [], start_ids=[BOS])
    for use in (model(family=family).translate, model(family=family).translate_stream):
        with pytest.raises(UsageError, match=f"family {family} does not translate"):
            use(["a"])


# --- texts ------------------------------------------------------------------------------------------------------------


def test_a_text_gives_a_translation_and_a_list_a_list() -> None:
    made = translator()
    one = made.translate("two words", n_best=3, max_new_tokens=8)
    assert isinstance(one, Translation)
    assert one.source_tokens == 11  # BOS and EOS included
    assert one.text == byte_tokenizer().decode(one.token_ids)
    assert len(one.hypotheses) == 3
    best = one.hypotheses[0]
    assert best == Alternative(one.token_ids, one.score, one.logprob, one.finish_reason, one.text)
    assert one.score == max(each.score for each in one.hypotheses)
    assert [each.text for each in one.hypotheses] == [
        byte_tokenizer().decode(each.token_ids) for each in one.hypotheses
    ]
    (listed,) = made.translate(["two words"], n_best=3, max_new_tokens=8)
    assert listed == one
    assert made.translate([BOS, *b"two words", EOS], n_best=3, max_new_tokens=8) == one
    assert made.translate([]) == []


@pytest.mark.parametrize("batch_size", [2, 32])
def test_a_text_is_translated_as_if_alone_and_a_stream_is_a_list(batch_size: int) -> None:
    made = translator()
    together = made.translate(TEXTS, batch_size=batch_size, max_new_tokens=8)
    streamed = list(made.translate_stream(iter(TEXTS), batch_size=batch_size, max_new_tokens=8))
    assert streamed == together
    for text, found in zip(TEXTS, together, strict=True):
        assert rounded(found) == rounded(made.translate(text, max_new_tokens=8))


def test_one_beam_is_greedy_generation() -> None:
    made = translator()
    for text in ("a long sentence", "x"):
        greedy = made.generate(text, temperature=0, max_new_tokens=12)
        found = made.translate(text, beam_size=1, max_new_tokens=12)
        assert (found.token_ids, found.text) == (greedy.token_ids, greedy.text)


@pytest.mark.parametrize("blank", ["", " ", "\t \u3000", "\r"])
def test_a_blank_text_has_an_empty_translation_for_which_the_model_does_not_run(blank: str) -> None:
    made = translator()
    made.network.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    empty = Alternative([], 0.0, 0.0, "stop", "")
    assert made.translate(blank, n_best=2) == Translation(**vars(empty), source_tokens=0, hypotheses=[empty])
    assert [found.text for found in made.translate_stream([blank, blank])] == ["", ""]


def test_a_text_longer_than_the_context_is_refused_before_the_model_runs_with_both_numbers() -> None:
    made = translator()
    made.network.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    texts = ["fine", "x" * (CONTEXT - 1)]
    for use in (made.translate, made.generate):
        with pytest.raises(UsageError, match=f"source 1 has {CONTEXT + 1} tokens.*{CONTEXT}"):
            use(texts)


@pytest.mark.parametrize("batch_size", [1, 2, 32])
def test_a_bad_line_is_named_after_all_lines_before_it_have_been_answered(batch_size: int) -> None:
    made, lines = translator(), ["a"] * (READ_AHEAD * 2 + 1)
    found = made.translate_stream([*lines, "x" * (CONTEXT - 1), "b"], batch_size=batch_size, max_new_tokens=2)
    assert len(list(itertools.islice(found, len(lines)))) == len(lines)
    with pytest.raises(QkvError, match=f"line {len(lines) + 1} has {CONTEXT + 1} tokens.*{CONTEXT}"):
        next(found)


@pytest.mark.parametrize("wrong", [None, 5, b"abc", [None], ["a", 1], ["a", b"b"], {"a": 1}, [[1, 2.5]], [260]])
def test_what_is_no_source_is_refused(wrong: Any) -> None:
    with pytest.raises(UsageError):
        translator().translate(wrong)


def test_one_text_is_no_stream_of_lines() -> None:
    with pytest.raises(UsageError, match="no stream of lines"):
        translator().translate_stream("abc")


def test_an_unknown_option_is_named_with_the_nearest_one() -> None:
    for name, near in (("beam_sise", "beam_size"), ("num_beams", "beam_size"), ("nbest", "n_best")):
        with pytest.raises(UsageError, match=name) as caught:
            translator().translate("a", **{name: 2})
        assert caught.value.hint == near


def test_features_give_one_translation_per_row() -> None:
    made = translator(encoder={"input": {"kind": "features", "width": 5}})
    source = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(0))
    found = made.translate(source, max_new_tokens=4)
    assert [one.source_tokens for one in found] == [6, 6]
    assert rounded(found[1]) == rounded(made.translate(source[1:], max_new_tokens=4)[0])
    for wrong in (source[0], "text", [1, 2], ["a"]):
        with pytest.raises(UsageError, match="the encoder reads features"):
            made.translate(wrong)


# --- a tokenizer of its own for the source ----------------------------------------------------------------------------


def two_tongues() -> tuple[Model, Tokenizer]:
    letters = Tokenizer.train(["abcdefgh"], kind="char", special={"bos": "<s>", "eos": "</s>", "unk": "<unk>"})
    made = encoder_decoder(encoder={"vocab_size": letters.vocab_size}, decoder={"vocab_size": 260})
    return Model(made, byte_tokenizer(), Config(model=made.config), source_tokenizer=letters), letters


def test_sources_are_read_by_the_source_tokenizer_wherever_they_are_read() -> None:
    made, letters = two_tongues()
    assert made.source_tokenizer is letters
    assert made.tokenizer is byte_tokenizer()
    read: list[Sequence[int]] = []
    made.network.encoder_embedding.register_forward_pre_hook(lambda _, args: read.append(args[0][0].tolist()))
    found = made.translate("abc", max_new_tokens=5)
    made.generate("abc", max_new_tokens=5, seed=0)
    made.generate("abc", max_new_tokens=5, beam_size=2)
    made.score("abc", "xyz")
    assert [len(row) for row in read] == [5] * 4
    assert all(letters.decode(row) == "abc" for row in read)
    assert found.text == byte_tokenizer().decode(found.token_ids)


def test_without_one_the_tokenizer_reads_both() -> None:
    made = translator()
    assert made.source_tokenizer is made.tokenizer
