"""Where texts begin and end by the model's `generation` section, and what is never written."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from qkv.config.errors import UsageError
from qkv.config.run import Config, GenerationConfig
from qkv.generate import Beams, Sampling, Suppression, beam_search
from qkv.generate.sampling import distribution
from qkv.model import Model
from qkv.nn import Transformer

from .tiny import GREEDY, byte_tokenizer, decode, model, network, same

PROMPTS = [[257, 5, 6], [257, 7], [257, 1, 2, 3, 4]]
NEVER, NOT_FIRST = frozenset(range(0, 250, 3)), frozenset(range(1, 250, 3))
SUPPRESS = Suppression(NEVER, NOT_FIRST)


def masked_greedy(made: Transformer, prompt: list[int], count: int, **source: Tensor) -> tuple[list[int], float]:
    """The oracle: the likeliest id that may be written, token by token, and the log-probability of all."""
    ids, total = list(prompt), 0.0
    for step in range(count):
        with torch.no_grad():
            scores_V = made(torch.tensor([ids]), **source)[0, -1]
        scores_V[list(NEVER | NOT_FIRST if step == 0 else NEVER)] = -math.inf
        total += float(scores_V.log_softmax(-1).max())
        ids.append(int(scores_V.argmax()))
    return ids[len(prompt) :], total


def translator(**generation: Any) -> Model:
    made = network(family="encoder-decoder")
    config = Config.model_validate({"model": made.config, "generation": generation})
    return Model(made, byte_tokenizer(), config)


@pytest.mark.parametrize("use_cache", [True, False])
def test_the_likeliest_id_that_may_be_written_is_taken_in_a_batch_as_alone(use_cache: bool) -> None:
    made = network()
    expected = [masked_greedy(made, prompt, 8)[0] for prompt in PROMPTS]
    options: dict[str, Any] = {"max_new_tokens": 8, "suppress": SUPPRESS, "use_cache": use_cache}
    assert decode(made, PROMPTS, **options).generated == expected
    assert [decode(made, [prompt], **options).generated[0] for prompt in PROMPTS] == expected
    assert expected != decode(made, PROMPTS, max_new_tokens=8).generated
    assert any(token_id in NOT_FIRST for ids in expected for token_id in ids[1:])


@pytest.mark.parametrize("beam_size", [1, 3])
def test_beams_never_hold_what_is_suppressed(beam_size: int) -> None:
    made = network()
    beams = Beams(beam_size, beam_size, length_penalty=0)
    options: dict[str, Any] = {"max_new_tokens": 6, "eos_ids": [258], "suppress": SUPPRESS}
    found = beam_search(made, PROMPTS, beams, **options)
    for prompt, hypotheses in zip(PROMPTS, found, strict=True):
        for one in hypotheses:
            assert not NEVER & set(one.token_ids)
            assert one.token_ids[0] not in NOT_FIRST
        assert beam_search(made, [prompt], beams, **options, use_cache=False)[0][0].token_ids == hypotheses[0].token_ids
    if beam_size == 1:
        ids, logprob = masked_greedy(made, PROMPTS[0], 6)
        assert (found[0][0].token_ids, found[0][0].logprob) == (ids, pytest.approx(logprob, abs=1e-4))


def test_no_temperature_and_no_penalty_brings_back_what_is_suppressed() -> None:
    made = network()
    wild = Sampling(temperature=1e30, repetition_penalty=100, presence_penalty=-100)
    found = decode(made, PROMPTS, sampling=wild, suppress=SUPPRESS, max_new_tokens=40)
    assert not NEVER & {token_id for ids in found.generated for token_id in ids}
    scores_V = SUPPRESS(torch.zeros(1, 260), first=False)[0]
    left_V = distribution(scores_V, Sampling(top_k=255, top_p=0.9999, frequency_penalty=3), [4], [0, 4])
    assert (left_V[sorted(NEVER)] == -math.inf).all()


def test_log_probabilities_are_of_what_may_be_written() -> None:
    made = model()
    made.config = made.config.model_copy(update={"generation": GenerationConfig(suppress_ids=tuple(range(2, 260)))})
    found = made.generate("ab", max_new_tokens=3, temperature=0, logprobs=5)
    for entry in found.logprobs:
        assert {other.token_id for other in entry.top} == {0, 1}
        assert sum(math.exp(other.logprob) for other in entry.top) == pytest.approx(1)


def test_ids_beyond_the_vocabulary_are_no_matter_and_a_vocabulary_without_rest_is_refused() -> None:
    made = network()
    plain = decode(made, PROMPTS).generated
    assert decode(made, PROMPTS, suppress=Suppression([260, 9999])).generated == plain
    everything = Suppression(range(100), range(100, 260))
    with pytest.raises(UsageError, match="all 260 ids"):
        decode(made, PROMPTS, suppress=everything)
    with pytest.raises(UsageError, match="all 260 ids"):
        beam_search(made, PROMPTS, Beams(), max_new_tokens=3, suppress=everything)


# --- by the configuration ---------------------------------------------------------------------------------------------


def test_a_decoder_starts_from_the_configured_ids() -> None:
    made, usual = translator(start_ids=[256, 7]), translator()
    source = torch.tensor([[257, *b"abc", 258]])
    ids = decode(made.network, [[256, 7]], source=source, eos_ids=[258], max_new_tokens=9).generated[0]
    assert made.generate("abc", temperature=0, max_new_tokens=9).token_ids == ids
    assert usual.generate("abc", temperature=0, max_new_tokens=9).token_ids != ids
    stream = made.stream("abc", temperature=0, max_new_tokens=9)
    assert "".join(stream) == stream.generation.text == byte_tokenizer().decode(ids)
    beams = made.translate("abc", beam_size=3, max_new_tokens=9)
    expected = beam_search(
        made.network, [[256, 7]], Beams(3), source=source, eos_ids=[258], max_new_tokens=9, vocab_size=260
    )
    assert beams.token_ids == expected[0][0].token_ids
    assert made.score("abc", "xy") != pytest.approx(usual.score("abc", "xy"))


def test_a_configured_start_needs_no_tokenizer() -> None:
    made = translator(start_ids=[3])
    bare = Model(made.network, None, made.config)
    assert bare.generate([257, 97, 258], temperature=0, max_new_tokens=5).token_ids == (
        made.generate([257, 97, 258], temperature=0, max_new_tokens=5).token_ids
    )
    with pytest.raises(UsageError, match="starts from BOS"):
        Model(made.network, None, Config(model=made.network.config)).generate([257, 97, 258])


def test_any_configured_end_ends_a_text_and_is_not_shown() -> None:
    plain = model().generate("ab", temperature=0, max_new_tokens=12)
    third = plain.token_ids[2]
    at = plain.token_ids.index(third) + 1
    made = model()
    made.config = made.config.model_copy(update={"generation": GenerationConfig(eos_ids=(259, third))})
    for found in (
        made.generate("ab", temperature=0, max_new_tokens=12),
        made.generate(["ab", "c"], temperature=0, max_new_tokens=12, use_cache=False)[0],
    ):
        assert (found.token_ids, found.finish_reason) == (plain.token_ids[:at], "stop")
        assert found.text == byte_tokenizer().decode(plain.token_ids[: at - 1])
    stream = made.stream("ab", temperature=0, max_new_tokens=12)
    assert "".join(stream) == stream.generation.text
    assert same(stream.generation, found)


def test_a_search_ends_with_any_configured_end() -> None:
    made = translator(eos_ids=[65, 66, 258])
    found = made.translate("abc", beam_size=3, n_best=3, max_new_tokens=30)
    for one in found.hypotheses:
        assert not {65, 66, 258} & set(one.token_ids[:-1])
        if one.finish_reason == "stop":
            assert one.token_ids[-1] in (65, 66, 258)
            assert one.text == byte_tokenizer().decode(one.token_ids[:-1])
    assert any(one.finish_reason == "stop" for one in found.hypotheses)
    assert made.generate("abc", beam_size=3).text == made.translate("abc", beam_size=3, max_new_tokens=128).text


def test_what_is_suppressed_is_not_written_by_any_way_of_writing() -> None:
    made = translator(suppress_ids=sorted(NEVER), begin_suppress_ids=sorted(NOT_FIRST))
    source = {"source": torch.tensor([[257, *b"abc", 258]])}
    expected = masked_greedy(made.network, [257], 6, **source)[0]
    assert made.generate("abc", temperature=0, max_new_tokens=6).token_ids == expected
    stream = made.stream("abc", temperature=0, max_new_tokens=6)
    assert list(stream) and stream.generation.token_ids == expected  # noqa: PT018
    assert made.translate("abc", beam_size=1, max_new_tokens=6).token_ids == expected
    for one in made.translate(["abc", "de"], beam_size=4, n_best=4, max_new_tokens=6):
        assert not NEVER & {token_id for each in one.hypotheses for token_id in each.token_ids}
    assert made.score("abc", bytes([3, 70]).decode()).logprobs[0] == -math.inf
    assert made.score("abc", bytes([4, 70]).decode()).logprobs[0] == -math.inf
    assert made.score("abc", bytes([70, 4]).decode()).logprobs[1] > -math.inf
    assert model().score("a", "b") == decode_score([257, 97], 98)


def decode_score(ids: list[int], last: int) -> Any:
    with torch.no_grad():
        return pytest.approx(float(network()(torch.tensor([ids]))[0, -1].log_softmax(-1)[last]), abs=1e-5)


def test_greedy_is_the_only_way_of_one_id() -> None:
    only = Suppression(set(range(260)) - {9})
    assert decode(network(), PROMPTS, sampling=GREEDY, suppress=only, max_new_tokens=3).generated == [[9] * 3] * 3
