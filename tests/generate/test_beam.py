"""Beam search against all there is: exhaustive search, a plain search to the end, greedy decoding, transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nn.parity_weights import copy_weights, llama, randomise
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from qkv import Config
from qkv.config.errors import QkvError, UsageError
from qkv.generate import Beams, Hypothesis, beam_search
from qkv.generate.beam import likeliest
from qkv.nn import Cache, Transformer

from .test_decode import KINDS, PROMPTS, SOURCE_LENGTHS, SOURCES
from .tiny import CONTEXT, config, decode, network

EOS = 0
Text = tuple[int, ...]


class Table(Transformer):
    """Its logits are drawn for each text anew, so that a search can rely on nothing."""

    def __init__(self, seed: int, vocab_size: int = 4, spread: float = 2.0) -> None:
        super().__init__(config(vocab_size=vocab_size))
        self.seed, self.spread = seed, spread
        self.known: dict[Text, Tensor] = {}
        self.steps = 0

    def logits_after(self, ids: Text) -> Tensor:
        if ids not in self.known:
            generator = torch.Generator().manual_seed(hash((self.seed, *ids)) % 2**63)
            size = self.config.vocab_size
            assert size is not None
            self.known[ids] = self.spread * torch.randn(size, generator=generator)
        return self.known[ids]

    def logprobs(self, ids: Text) -> list[float]:
        return self.logits_after(ids).log_softmax(-1).tolist()

    def forward(self, ids: Tensor, *, lengths: Tensor | None = None, **_: Any) -> Tensor:  # type: ignore[override]
        self.steps += 1
        counts = [ids.shape[1]] * len(ids) if lengths is None else lengths.tolist()
        rows = [tuple(row[:count]) for row, count in zip(ids.tolist(), counts, strict=True)]
        return torch.stack([self.logits_after(row) for row in rows])[:, None]


def find(made: Transformer, prompts: Sequence[Sequence[int]], beams: Beams, **options: Any) -> list[list[Hypothesis]]:
    defaults: dict[str, Any] = {"max_new_tokens": 10, "eos_ids": [EOS], "use_cache": not isinstance(made, Table)}
    return beam_search(made, prompts, beams, **{**defaults, **options})


def texts(found: list[Hypothesis]) -> list[list[int]]:
    return [one.token_ids for one in found]


def alike(one: list[Hypothesis], other: list[Hypothesis]) -> bool:
    """The same texts, with scores equal but for the last digits of float32."""
    return [(h.token_ids, h.finish_reason) for h in one] == [(h.token_ids, h.finish_reason) for h in other] and all(
        math.isclose(a.score, b.score, abs_tol=1e-4) and math.isclose(a.logprob, b.logprob, abs_tol=1e-4)
        for a, b in zip(one, other, strict=True)
    )


# --- oracles ----------------------------------------------------------------------------------------------------------


def gnmt(logprob: float, length: int, a: float) -> float:
    return logprob / ((5 + length) ** a / 6**a)


def power(logprob: float, length: int, a: float) -> float:
    return logprob / length**a


RANKINGS: dict[str, Callable[[float, int, float], float]] = {"gnmt": gnmt, "power": power}


def all_texts(table: Table, prompt: Text, limit: int) -> list[tuple[Text, float]]:
    """Every text of at most `limit` tokens that ends with EOS or is full, with its log-probability."""
    result = []
    open_ = [((), 0.0)]
    for length in range(1, limit + 1):
        longer = [
            ((*ids, token_id), logprob + value)
            for ids, logprob in open_
            for token_id, value in enumerate(table.logprobs(prompt + ids))
        ]
        result += [(ids, value) for ids, value in longer if ids[-1] == EOS or length == limit]
        open_ = [(ids, value) for ids, value in longer if ids[-1] != EOS]
    return result


def to_the_end(
    table: Table, prompt: Text, size: int, limit: int, rank: Callable[[float, int], float]
) -> list[tuple[Text, float]]:
    """A plain beam search that never stops early, one text at a time: all that finished, best first."""
    finished: list[tuple[Text, float]] = []
    open_: list[tuple[Text, float]] = [((), 0.0)]
    for length in range(1, limit + 1):
        longer = [
            ((*ids, token_id), logprob + value)
            for ids, logprob in open_
            for token_id, value in enumerate(table.logprobs(prompt + ids))
        ]
        longer.sort(key=lambda one: -one[1])
        finished += [(ids, value) for ids, value in longer[:size] if ids[-1] == EOS or length == limit]
        open_ = [(ids, value) for ids, value in longer if ids[-1] != EOS][:size]
        if size == 1 and finished:
            break
    return sorted(finished, key=lambda one: -rank(one[1], len(one[0])))


penalties = st.sampled_from([0.0, 0.3, 0.6, 1.0, 2.0])
kinds = st.sampled_from(["gnmt", "power"])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 4), st.integers(1, 4), penalties, kinds, st.integers(1, 4))
def test_a_beam_that_holds_everything_finds_what_exhaustive_search_finds(
    seed: int, vocab_size: int, limit: int, a: float, kind: Any, n_best: int
) -> None:
    table = Table(seed, vocab_size)
    expected = sorted(all_texts(table, (1,), limit), key=lambda one: -RANKINGS[kind](one[1], len(one[0]), a))
    beams = Beams(vocab_size**limit + n_best, n_best, a, kind)
    (found,) = find(table, [(1,)], beams, max_new_tokens=limit)
    assert texts(found) == [list(ids) for ids, _ in expected[:n_best]]
    for one, (ids, logprob) in zip(found, expected, strict=False):
        assert one.logprob == pytest.approx(logprob, abs=1e-5)
        assert one.score == pytest.approx(RANKINGS[kind](logprob, len(ids), a), abs=1e-5)
        assert one.finish_reason == ("stop" if ids[-1] == EOS else "length")


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(2, 6),
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 8)), min_size=1, max_size=4),
    st.integers(1, 4),
    penalties,
    kinds,
    st.sampled_from([0.5, 2.0, 4.0]),
)
def test_stopping_early_in_a_batch_finds_what_searching_alone_to_the_end_finds(
    seed: int, vocab_size: int, asked: list[tuple[int, int]], size: int, a: float, kind: Any, spread: float
) -> None:
    """Prompts and limits differ from row to row."""
    table = Table(seed, vocab_size, spread)
    prompts, limits = [(1,) * length for length, _ in asked], [limit for _, limit in asked]
    found = find(table, prompts, Beams(size, size, a, kind), max_new_tokens=limits)
    for prompt, limit, hypotheses in zip(prompts, limits, found, strict=True):
        expected = to_the_end(table, prompt, size, limit, partial(RANKINGS[kind], a=a))
        assert texts(hypotheses) == [list(ids) for ids, _ in expected[:size]]


def test_the_search_stops_where_nothing_can_win_any_more() -> None:
    table = Table(seed=3, spread=4.0)
    find(table, [(1,)], Beams(2, length_penalty=0.0), max_new_tokens=40)
    assert table.steps < 20


@pytest.mark.parametrize("a", [0.0, 0.6, 1.5])
def test_n_best_does_not_change_the_first(a: float) -> None:
    for table in map(partial(Table, vocab_size=6), range(8)):
        wanted = [find(table, [(1,), (2, 3)], Beams(4, n, a)) for n in (1, 2, 3, 4)]
        for found in wanted:
            assert [hypotheses[0] for hypotheses in found] == [hypotheses[0] for hypotheses in wanted[0]]
        assert [len(found[0]) for found in wanted] == [1, 2, 3, 4]
        for found in wanted[3]:
            assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
            assert len({tuple(ids) for ids in texts(found)}) == 4


# --- ties -------------------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 400), st.integers(1, 12), st.integers(1, 8))
def test_of_equal_logits_the_smaller_ids_come_first(seed: int, vocab_size: int, count: int, values: int) -> None:
    logits = torch.randint(values, (3, vocab_size), generator=torch.Generator().manual_seed(seed)).float()
    expected = logits.sort(descending=True, stable=True).indices[:, :count]
    assert torch.equal(likeliest(logits, count), expected)


def test_of_equal_candidates_the_better_hypothesis_goes_first_then_the_smaller_id() -> None:
    """All texts are equally likely here."""
    table = Table(0, vocab_size=200, spread=0.0)
    for prompts in ([(1,)], [(3, 3), (1,)]):
        found = find(table, prompts, Beams(3, 3), max_new_tokens=2, eos_ids=[])[-1]
        assert texts(found) == [[0, 0], [0, 1], [0, 2]]
    # those that ended first stay first
    found = find(table, [(1,)], Beams(3, 3, length_penalty=0.0), max_new_tokens=1, eos_ids=[1])[0]
    assert [(one.token_ids, one.finish_reason) for one in found] == [([0], "length"), ([1], "stop"), ([2], "length")]


# --- against greedy decoding ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_one_beam_is_greedy_decoding(kind: str, use_cache: bool) -> None:
    made = network(**KINDS[kind])
    eos = decode(made, PROMPTS).generated[0][7]
    greedy = decode(made, PROMPTS, eos_ids=[eos])
    found = find(made, PROMPTS, Beams(1, length_penalty=1.0), max_new_tokens=20, eos_ids=[eos], use_cache=use_cache)
    assert [one.token_ids for (one,) in found] == greedy.generated
    assert [one.finish_reason for (one,) in found] == greedy.finish_reasons
    assert set(greedy.finish_reasons) == {"stop", "length"}


def test_a_log_probability_is_the_sum_of_the_models_own() -> None:
    made = network()
    for prompt, hypotheses in zip(PROMPTS, find(made, PROMPTS, Beams(3, 3)), strict=True):
        for one in hypotheses:
            with torch.no_grad():
                logprobs = made(torch.tensor([prompt + one.token_ids]))[0].log_softmax(-1)
            places = range(len(prompt) - 1, len(prompt) + len(one.token_ids) - 1)
            expected = sum(float(logprobs[place, i]) for place, i in zip(places, one.token_ids, strict=True))
            assert one.logprob == pytest.approx(expected, abs=1e-4)
            assert one.score == pytest.approx(gnmt(one.logprob, len(one.token_ids), 0.6), abs=1e-9)


# --- caches and batches -----------------------------------------------------------------------------------------------


def encoder_decoder(**changes: Any) -> dict[str, Any]:
    return {"family": "encoder-decoder", **changes}


NETWORKS: dict[str, dict[str, Any]] = {
    **KINDS,
    "one-kv-head": {"attention": {"num_heads": 4, "num_kv_heads": 1}},
    "encoder-decoder": encoder_decoder(),
    "encoder-decoder-2017": encoder_decoder(
        position={"kind": "sinusoidal"}, norm={"kind": "layernorm", "placement": "post"}, attention={"num_heads": 4}
    ),
    "encoder-decoder-learned": encoder_decoder(position={"kind": "learned"}),
}


def asked(kind: str) -> tuple[Transformer, list[list[int]], dict[str, Any]]:
    """A network, prompts of unequal length or sources of unequal length, and an EOS that some texts meet."""
    made = network(**NETWORKS[kind])
    prompts, source = PROMPTS, {}
    if kind.startswith("encoder-decoder"):
        prompts, source = [[257]] * 3, {"source": SOURCES, "source_lengths": SOURCE_LENGTHS}
    endless = beam_search(made, prompts, Beams(3), max_new_tokens=6, **source)
    limits = [10, 4, 7, 10][: len(prompts)]
    return made, prompts, {**source, "eos_ids": [endless[0][0].token_ids[4]], "max_new_tokens": limits}


@pytest.mark.parametrize("kind", NETWORKS)
def test_cached_hypotheses_that_change_places_equal_those_without_a_cache(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, prompts, options = asked(kind)
    moves: list[list[int]] = []
    select = Cache.select

    def watched(cache: Cache, rows: Sequence[int], rows_per_source: int = 1) -> None:
        moves.append(list(rows))
        select(cache, rows, rows_per_source)

    monkeypatch.setattr(Cache, "select", watched)
    cached = find(made, prompts, Beams(3, 3), **options)
    assert any(len(set(rows)) < len(rows) for rows in moves[1:]), "no hypothesis took another's place"
    assert len({len(rows) for rows in moves[1:]}) > 1, "no input left the batch"
    whole = find(made, prompts, Beams(3, 3), use_cache=False, **options)
    assert all(alike(one, other) for one, other in zip(cached, whole, strict=True))


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("kind", NETWORKS)
def test_an_input_is_searched_as_if_alone(kind: str, use_cache: bool) -> None:
    made, prompts, options = asked(kind)
    together = find(made, prompts, Beams(3, 2), use_cache=use_cache, **options)
    for number, prompt in enumerate(prompts):
        own = {**options, "max_new_tokens": options["max_new_tokens"][number]}
        if "source" in options:
            length = int(SOURCE_LENGTHS[number])
            own |= {"source": SOURCES[number : number + 1, :length], "source_lengths": None}
        assert alike(find(made, [prompt], Beams(3, 2), use_cache=use_cache, **own)[0], together[number])


def test_a_step_is_one_call_for_all_inputs_and_keys_of_a_source_are_held_once() -> None:
    made = network(family="encoder-decoder")
    reads: list[tuple[int, ...]] = []
    queries: list[tuple[int, ...]] = []
    made.register_forward_pre_hook(lambda _, args: reads.append(tuple(args[0].shape)))
    cross = made.decoder.blocks[0].cross_attention.function
    cross.kernel.register_forward_pre_hook(lambda _, args: queries.append((*args[0].shape[::2], *args[1].shape[::2])))
    source = {"source": SOURCES, "source_lengths": SOURCE_LENGTHS}
    find(made, [[257]] * 3, Beams(5), max_new_tokens=4, eos_ids=[], **source)
    assert reads == [(3, 1), (15, 1), (15, 1), (15, 1)]
    assert queries == [(3, 1, 3, 4)] + 3 * [(3, 5, 3, 4)]  # rows and tokens of queries, then of keys


def test_inputs_that_are_done_leave_the_batch() -> None:
    made, prompts, options = asked("encoder-decoder")
    rows: list[int] = []
    made.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    find(made, prompts, Beams(3), **{**options, "max_new_tokens": [2, 6, 4], "eos_ids": []})
    assert rows == [3, 9, 6, 6, 3, 3]


def test_features_are_a_source_too() -> None:
    made = network(family="encoder-decoder", encoder={"input": {"kind": "features", "width": 5}})
    source = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(0))
    found = find(made, [[257]] * 2, Beams(3), source=source)
    for row in (0, 1):
        assert alike(find(made, [[257]], Beams(3), source=source[row : row + 1])[0], found[row])
    assert texts(found[0]) != texts(found[1])


# --- limits -----------------------------------------------------------------------------------------------------------


def test_a_text_ends_where_the_context_is_full() -> None:
    made = network()
    prompts = [[1] * CONTEXT, [1] * (CONTEXT - 1), [2] * (CONTEXT - 4)]
    found = find(made, prompts, Beams(3), max_new_tokens=10**9, eos_ids=[])
    assert [(len(one.token_ids), one.finish_reason) for (one,) in found] == [(n, "length") for n in (0, 1, 4)]
    assert found[0] == [Hypothesis([], 0.0, 0.0, "length")]
    assert find(made, [[1]], Beams(3), max_new_tokens=0) == [found[0]]
    assert find(made, [], Beams(3)) == []


def test_ids_that_only_pad_the_vocabulary_are_never_chosen() -> None:
    made = network()
    everything = [i for hypotheses in find(made, PROMPTS, Beams(4, 4)) for one in hypotheses for i in one.token_ids]
    cut = find(made, PROMPTS, Beams(4, 4), vocab_size=100)
    assert max(everything) >= 100
    assert max(i for hypotheses in cut for one in hypotheses for i in one.token_ids) < 100


def test_a_beam_wider_than_the_vocabulary_finds_what_there_is() -> None:
    found = find(Table(0, vocab_size=2), [(1,)], Beams(9, 9), max_new_tokens=2)[0]
    assert sorted(texts(found)) == [[0], [1, 0], [1, 1]]


def test_every_token_may_end_a_text() -> None:
    found = find(Table(0), [(1,)], Beams(3, 3), eos_ids=range(4))[0]
    assert [len(ids) for ids in texts(found)] == [1, 1, 1]
    assert {one.finish_reason for one in found} == {"stop"}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_stop_with_the_step(value: float) -> None:
    made = network()
    steps: list[int] = []

    def spoil(module: nn.Module, args: Any, logits: Tensor) -> None:
        steps.append(1)
        if len(steps) == 3:
            logits[4, 0, 7] = value  # the second input's second hypothesis

    made.head.register_forward_hook(spoil)
    with pytest.raises(QkvError, match=r"not finite at step 3 \(prompt 1\)"):
        find(made, PROMPTS, Beams(3))
    assert len(find(made, PROMPTS, Beams(3))) == 4  # and works again


def test_training_mode_is_put_back_and_dropout_is_off() -> None:
    made = network(dropout=0.5)
    expected = find(made, PROMPTS, Beams(3))
    made.train()
    assert find(made, PROMPTS, Beams(3)) == expected
    assert all(module.training for module in made.modules())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"beam_size": 0}, "beam_size"),
        ({"beam_size": -1}, "beam_size"),
        ({"beam_size": 2.0}, "beam_size"),
        ({"beam_size": True}, "beam_size"),
        ({"beam_size": "4"}, "beam_size"),
        ({"beam_size": 10**6}, "beam_size is at most 1,000, not 1000000"),
        ({"n_best": 0}, "n_best"),
        ({"n_best": 5}, "n_best=5 .*beam_size=4"),
        ({"length_penalty": -0.1}, "length_penalty"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"length_penalty": float("inf")}, "length_penalty"),
        ({"length_penalty": 11}, "length_penalty"),
        ({"length_penalty": "1"}, "length_penalty"),
        ({"length_penalty": None}, "length_penalty"),
        ({"length_penalty_kind": "wu"}, "length_penalty_kind is gnmt or power, not 'wu'"),
    ],
)
def test_a_value_that_means_nothing_is_refused_by_name(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Beams(**options)


def test_what_cannot_be_searched_is_refused_before_the_model_runs() -> None:
    made = network()
    made.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    for prompts, options, said in (
        ([[257], [1] * (CONTEXT + 1)], {}, f"prompt 1 has {CONTEXT + 1} tokens"),
        ([[]], {}, "prompt 0 is empty"),
        ([[260]], {}, "260"),
        ([[257]], {"max_new_tokens": -1}, "max_new_tokens"),
        ([[257]], {"max_new_tokens": [2.5]}, "max_new_tokens"),
    ):
        with pytest.raises(UsageError, match=said):
            find(made, prompts, Beams(2), **options)
    with pytest.raises(UsageError, match="family encoder"):
        find(network(family="encoder"), [[257]], Beams(2))


# --- against transformers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("a", [0.0, 1.0, 1.7])
@pytest.mark.parametrize("size", [2, 5])
def test_the_search_of_transformers_finds_the_same(size: int, a: float) -> None:
    """Its length penalty is a power of the tokens generated, and early_stopping="never" is its exact stop."""
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "attention_bias": False}
    no_ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    oracle = LlamaForCausalLM(LlamaConfig(**sizes, **heads, **no_ids, max_position_embeddings=64)).eval()
    randomise(oracle, std=0.4)
    own = (
        "vocab_size=40",
        "d_model=32",
        "num_layers=2",
        "max_seq_len=64",
        "tie_embeddings=none",
        "feed_forward.d_ff=56",
    )
    made = Transformer(
        Config.load(
            "llama-tiny", "tokenizer=null", *(f"model.{one}" for one in own), "model.attention.num_heads=4"
        ).model
    ).eval()
    copy_weights(oracle, made, llama)
    prompts = torch.randint(40, (6, 5), generator=torch.Generator().manual_seed(1))
    eos = find(made, prompts.tolist(), Beams(size), max_new_tokens=12, eos_ids=[])[0][0].token_ids[6]
    found = find(made, prompts.tolist(), Beams(size, size, a, "power"), max_new_tokens=12, eos_ids=[eos])
    reasons = set()
    for prompt, hypotheses in zip(prompts, found, strict=True):
        theirs = oracle.generate(
            prompt[None],
            attention_mask=torch.ones(1, 5, dtype=torch.long),
            num_beams=size,
            num_return_sequences=size,
            length_penalty=a,
            early_stopping="never",
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=eos,
            pad_token_id=eos,
            return_dict_in_generate=True,
            output_scores=True,
        )
        for one, ids, score in zip(hypotheses, theirs.sequences[:, 5:], theirs.sequences_scores, strict=True):
            assert ids[: len(one.token_ids)].tolist() == one.token_ids
            assert float(score) == pytest.approx(one.score, abs=1e-4)
            reasons.add(one.finish_reason)
    assert reasons == {"stop", "length"}
