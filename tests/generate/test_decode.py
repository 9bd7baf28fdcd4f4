"""Decoding: alone or in a batch, cached or not, to the end of the context."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from qkv.config.errors import QkvError, UsageError
from qkv.generate import Decoding, Sampling

from .tiny import CONTEXT, GREEDY, byte_tokenizer, decode, greedy_by_hand, network, scripted

PROMPTS = [[257, 10, 20, 30, 40, 50, 60], [257], [257, 99, 98], [257, 1, 2, 3]]
SEEDS = [5, 2**64 - 1, 0, 5]
WARM = Sampling(temperature=0.8, top_k=50, top_p=0.95, repetition_penalty=1.2, presence_penalty=0.1)

KINDS: dict[str, dict[str, Any]] = {
    "rope": {},
    "learned": {"position": {"kind": "learned"}},
    "sinusoidal": {"position": {"kind": "sinusoidal"}},
    "none": {"position": {"kind": "none"}},
    "window": {"attention": {"num_heads": 4, "window": 3}},
    "post-norm": {"norm": {"kind": "layernorm", "placement": "post"}},
}


def encoder_decoder(**changes: Any) -> Any:
    return network(family="encoder-decoder", **changes)


SOURCES = torch.tensor([[5, 6, 7, 8], [9, 9, 0, 0], [1, 2, 3, 0]])
SOURCE_LENGTHS = torch.tensor([4, 2, 3])


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_in_a_batch_equals_the_plain_loop_alone(kind: str, use_cache: bool) -> None:
    made = network(**KINDS[kind])
    found = decode(made, PROMPTS, max_new_tokens=12, use_cache=use_cache).generated
    assert found == [greedy_by_hand(made, prompt, 12) for prompt in PROMPTS]


@pytest.mark.parametrize("kind", KINDS)
def test_sampling_in_a_batch_with_a_cache_equals_alone_without(kind: str) -> None:
    made = network(**KINDS[kind])
    together = decode(made, PROMPTS, seeds=SEEDS, sampling=WARM).generated
    for prompt, seed, ids in zip(PROMPTS, SEEDS, together, strict=True):
        assert decode(made, [prompt], seeds=[seed], sampling=WARM, use_cache=False).generated == [ids]
    assert together[0] != together[3]  # the same seed says different things to different prompts


def test_a_row_that_ends_leaves_the_others_as_they_are() -> None:
    made = network()
    full = decode(made, PROMPTS, seeds=SEEDS, sampling=WARM).generated
    eos = full[0][3]
    ended = decode(made, PROMPTS, seeds=SEEDS, sampling=WARM, eos_ids=[eos])
    for whole, ids, reason in zip(full, ended.generated, ended.finish_reasons, strict=True):
        if eos in whole:
            assert (ids, reason) == (whole[: whole.index(eos) + 1], "stop")
        else:
            assert (ids, reason) == (whole, "length")
    assert len(ended.generated[0]) == 4
    assert "length" in ended.finish_reasons


def test_rows_that_have_ended_leave_the_cached_batch() -> None:
    made = network()
    full = decode(made, PROMPTS).generated
    rows: list[int] = []
    made.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    decoding = Decoding(made, PROMPTS, sampling=GREEDY, seeds=SEEDS, max_new_tokens=6)
    for token in decoding:
        if len(decoding.generated[token.row]) == token.row + 1:
            decoding.stop(token.row)
    assert rows == [4, 3, 2, 1]
    assert decoding.generated == [ids[: row + 1] for row, ids in enumerate(full)]


@pytest.mark.parametrize("use_cache", [True, False])
def test_stopping_a_row_from_outside_ends_it_and_no_other(use_cache: bool) -> None:
    made = network()
    full = decode(made, PROMPTS).generated
    decoding = Decoding(made, PROMPTS, sampling=GREEDY, seeds=SEEDS, max_new_tokens=20, use_cache=use_cache)
    for token in decoding:
        if token.row == 2 and len(decoding.generated[2]) == 5:
            decoding.stop(2)
    assert decoding.generated == [full[0], full[1], full[2][:5], full[3]]
    assert decoding.finish_reasons == ["length", "length", "stop", "length"]


def test_equal_seeds_draw_alike_and_others_differ() -> None:
    made = network()
    ids = decode(made, [[257, 3]] * 4, seeds=[1, 2, 1, 3], sampling=Sampling()).generated
    assert ids[0] == ids[2]
    assert len({tuple(row) for row in ids}) == 3


@pytest.mark.parametrize("use_cache", [True, False])
def test_generation_ends_where_prompt_and_new_tokens_fill_the_context(use_cache: bool) -> None:
    """Rows of all lengths, one of which is full from the start, and none holds up another."""
    made = network()
    lengths = [CONTEXT, CONTEXT - 1, 3, CONTEXT - 7]
    prompts = [[257, *range(length - 1)] for length in lengths]
    decoding = decode(made, prompts, max_new_tokens=10**9, use_cache=use_cache)
    assert [len(ids) for ids in decoding.generated] == [0, 1, CONTEXT - 3, 7]
    assert decoding.finish_reasons == ["length"] * 4
    assert decoding.generated[2] == greedy_by_hand(made, prompts[2], CONTEXT - 3)


def test_a_prompt_longer_than_the_context_is_refused_before_the_model_runs() -> None:
    made = network()
    made.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    with pytest.raises(UsageError, match=f"prompt 1 has {CONTEXT + 1} tokens.* {CONTEXT}"):
        decode(made, [[257], [1] * (CONTEXT + 1)])
    assert decode(made, [[1] * CONTEXT]).generated == [[]]
    assert decode(made, [[257]], max_new_tokens=0).finish_reasons == ["length"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"max_new_tokens": 2.5}, "max_new_tokens"),
        ({"logprobs": -1}, "logprobs"),
        ({"seeds": [-1]}, "seed"),
        ({"seeds": [2**64]}, "seed"),
        ({"seeds": [1, 2]}, "seed"),
    ],
)
def test_arguments_out_of_range_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        decode(network(), [[257]], **options)


@pytest.mark.parametrize(("prompt", "said"), [([], "empty"), ([257, 260], "260"), ([-1], "-1")])
def test_prompts_that_cannot_be_read_are_refused(prompt: list[int], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        decode(network(), [[257], prompt])


def test_models_that_do_not_generate_say_so() -> None:
    with pytest.raises(UsageError, match="family encoder"):
        decode(network(family="encoder"), [[257]])
    with pytest.raises(UsageError, match="classifier"):
        decode(network(head={"kind": "classifier", "num_classes": 2}), [[257]])


def test_only_the_last_positions_pass_the_head_and_a_cached_step_reads_one_token() -> None:
    made = network()
    heads, reads = [], []
    made.head.register_forward_hook(lambda module, args, out: heads.append(out.shape[1]))
    made.decoder.register_forward_pre_hook(lambda module, args: reads.append(args[0].shape[1]))
    decode(made, PROMPTS, max_new_tokens=4)
    assert heads == [1, 1, 1, 1]
    assert reads == [7, 1, 1, 1]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_stop_with_the_step(value: float) -> None:
    made = network()
    steps: list[int] = []

    def spoil(module: nn.Module, args: Any, logits: torch.Tensor) -> None:
        steps.append(1)
        if len(steps) == 3:
            logits[1, 0, 7] = value

    made.head.register_forward_hook(spoil)
    with pytest.raises(QkvError, match=r"not finite at step 3 \(prompt 1\)"):
        decode(made, PROMPTS)
    assert len(decode(made, PROMPTS).generated[0]) == 20  # and works again


def test_training_mode_is_put_back_module_by_module_and_dropout_is_off() -> None:
    made = network(dropout=0.5)
    expected = decode(made, PROMPTS).generated
    made.train()
    made.head.eval()
    modes = [module.training for module in made.modules()]
    assert decode(made, PROMPTS).generated == expected
    assert [module.training for module in made.modules()] == modes
    made.head.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        decode(made, PROMPTS)
    assert [module.training for module in made.modules()] == modes


def test_no_global_generator_is_touched() -> None:
    made = network()
    before = (torch.get_rng_state().clone(), np.random.get_state()[1].copy(), random.getstate())
    first = decode(made, PROMPTS, sampling=Sampling(), seeds=SEEDS).generated
    after = (torch.get_rng_state(), np.random.get_state()[1], random.getstate())
    assert torch.equal(before[0], after[0])
    assert (before[1] == after[1]).all()
    assert before[2] == after[2]
    torch.manual_seed(123)
    assert decode(made, PROMPTS, sampling=Sampling(), seeds=SEEDS).generated == first


def test_log_probabilities_are_the_models_own_before_penalties_and_temperature() -> None:
    made = network()
    prompt = [257, 4, 5]
    tokens = []
    for token in Decoding(made, [prompt], sampling=WARM, seeds=[3], max_new_tokens=6, logprobs=4):
        tokens.append(token)
    ids = prompt + [token.token_id for token in tokens]
    with torch.no_grad():
        expected = made(torch.tensor([ids]))[0].log_softmax(-1)
    for place, token in enumerate(tokens, len(prompt) - 1):
        assert token.logprob == pytest.approx(expected[place, token.token_id].item(), abs=1e-4)
        best = expected[place].topk(4)
        assert [token_id for token_id, _ in token.top] == best.indices.tolist()
        assert [value for _, value in token.top] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert any(token.logprob < token.top[0][1] for token in tokens)


def test_ids_that_only_pad_the_vocabulary_are_never_chosen() -> None:
    made = network()
    assert max(map(max, decode(made, PROMPTS).generated)) >= 100
    assert max(map(max, decode(made, PROMPTS, vocab_size=100).generated)) < 100


# --- encoder-decoder --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_cache", [True, False])
def test_an_encoder_decoder_decodes_each_source_as_if_alone(use_cache: bool) -> None:
    made = encoder_decoder()
    found = decode(
        made, [[257]] * 3, max_new_tokens=8, use_cache=use_cache, source=SOURCES, source_lengths=SOURCE_LENGTHS
    ).generated
    for row, length in enumerate(SOURCE_LENGTHS.tolist()):
        assert found[row] == greedy_by_hand(made, [257], 8, source=SOURCES[row : row + 1, :length])
    assert len({tuple(ids) for ids in found}) == 3


def test_the_source_is_encoded_once() -> None:
    made = encoder_decoder()
    calls: list[int] = []
    made.encoder.register_forward_hook(lambda *_: calls.append(1))
    decode(made, [[257]] * 3, max_new_tokens=5, source=SOURCES, source_lengths=SOURCE_LENGTHS)
    assert len(calls) == 1


def test_features_are_read_like_ids() -> None:
    made = encoder_decoder(encoder={"input": {"kind": "features", "width": 5}})
    source = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(0))
    found = decode(made, [[257]] * 2, max_new_tokens=6, source=source).generated
    assert found == [greedy_by_hand(made, [257], 6, source=source[row : row + 1]) for row in (0, 1)]


def test_a_scripted_network_says_its_script() -> None:
    """The tests of stop strings rest on this."""
    made = scripted("abc").network
    for use_cache in (True, False):
        decoding = decode(made, [[257, 112]], eos_ids=[byte_tokenizer().eos_id], use_cache=use_cache)
        assert decoding.generated == [[*b"abc", 258]]
