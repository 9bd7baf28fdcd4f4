"""Rotary positions beyond the length a model was first trained on, compared with transformers, and what a cache may do.

The original length is 16 tokens in every case, and sequences go well beyond it.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from qkv.config.errors import UsageError
from qkv.config.model import ModelConfig
from qkv.config.positions import DynamicScalingConfig, RopeConfig
from qkv.nn import Dims, Transformer, build
from qkv.nn.position import RotaryPhases, exponents_of, total_lengths
from qkv.nn.rope_scaling import unscaled

from .matrix import assert_equal, one_thread  # noqa: F401

ORIGINAL, CONTEXT, HEAD, THETA = 16, 64, 16, 500.0
SHORT, LONG = [1.0, 1.1, 1.3, 1.5, 1.6, 1.8, 2.0, 2.5], [1.0, 1.5, 2.0, 2.7, 3.1, 3.5, 3.9, 4.0]

# our kind and keys, what they are called in transformers where they are called otherwise
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"kind": "linear", "factor": 3.0},
    "dynamic": {"kind": "dynamic", "factor": 3.0},
    "yarn": {"kind": "yarn", "factor": 4.0},
    "yarn-mscale": {"kind": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn-factor-given": {"kind": "yarn", "factor": 4.0, "attention_factor": 1.7, "mscale": 0.7},
    "yarn-not-truncated": {"kind": "yarn", "factor": 4.0, "beta_fast": 3.0, "beta_slow": 0.4, "truncate": False},
    "longrope": {"kind": "longrope", "short_factor": SHORT, "long_factor": LONG},
    "longrope-factor": {"kind": "longrope", "short_factor": SHORT, "long_factor": LONG, "factor": 7.0},
    "longrope-given": {"kind": "longrope", "short_factor": SHORT, "long_factor": LONG, "attention_factor": 0.9},
    "llama3": {"kind": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
every_scaling = pytest.mark.parametrize("name", SCALINGS)
by_length = pytest.mark.parametrize("name", ["dynamic", "longrope"])


def ours(name: str) -> dict[str, Any]:
    original = {} if name == "linear" else {"original_max_seq_len": ORIGINAL}
    return {"kind": "rope", "theta": THETA, "scaling": SCALINGS[name] | original}


def theirs(name: str) -> LlamaConfig:
    keys = {key: value for key, value in SCALINGS[name].items() if key != "kind"}
    parameters = {"rope_type": SCALINGS[name]["kind"], "rope_theta": THETA, **keys}
    if name not in ("linear", "dynamic"):
        parameters["original_max_position_embeddings"] = ORIGINAL
    # dynamic scaling takes the context for the original length
    context = ORIGINAL if name == "dynamic" else CONTEXT
    return LlamaConfig(
        hidden_size=2 * HEAD,
        num_attention_heads=2,
        max_position_embeddings=context,
        rope_parameters=parameters,
    )


def rope(name: str) -> Any:
    return build(RopeConfig.model_validate(ours(name)), Dims(HEAD, max_seq_len=CONTEXT))


# --- angles -----------------------------------------------------------------------------------------------------------


@every_scaling
@pytest.mark.parametrize("length", [ORIGINAL, ORIGINAL + 1, 50])
def test_frequencies_and_attention_factor_are_those_of_transformers(name: str, length: int) -> None:
    config = theirs(name)
    expected, factor = ROPE_INIT_FUNCTIONS[SCALINGS[name]["kind"]](config, torch.device("cpu"), seq_len=length)
    scaling = rope(name).scaling
    exponents = exponents_of(HEAD, torch.device("cpu"), torch.float32)
    actual = scaling.frequencies(THETA, exponents, torch.tensor([[length]]))
    torch.testing.assert_close(actual.flatten(), expected, rtol=1e-6, atol=0)
    assert scaling.attention_factor == pytest.approx(factor, rel=1e-12)


@every_scaling
@pytest.mark.parametrize("length", [ORIGINAL, 50])
def test_cos_and_sin_are_those_of_transformers(name: str, length: int) -> None:
    positions = torch.arange(length)[None]
    cos, sin = LlamaRotaryEmbedding(theirs(name))(torch.zeros(1), positions)
    phases = rope(name).phases(positions, torch.float32)
    assert isinstance(phases, RotaryPhases)
    sin[..., : HEAD // 2] *= -1  # there the sign is in what the sine is multiplied by
    torch.testing.assert_close(phases.cos[0, 0], cos[0], rtol=0, atol=5e-6)
    torch.testing.assert_close(phases.sin[0, 0], sin[0], rtol=0, atol=5e-6)


@every_scaling
def test_scores_depend_on_the_distance_only_and_grow_by_the_attention_factor_squared(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 1, HEAD, generator=generator, dtype=torch.float64) for _ in range(2))
    position, total = rope(name), torch.tensor([[60]])

    def score(p: int, q_p: int) -> Tensor:
        a, b = (position.phases(torch.tensor([[place]]), torch.float64, total) for place in (p, q_p))
        return (a.rotate(q) * b.rotate(k)).sum()

    torch.testing.assert_close(score(40, 17), score(23, 0), rtol=1e-9, atol=1e-9)
    factor = position.scaling.attention_factor
    torch.testing.assert_close(score(9, 9), factor**2 * (q * k).sum(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["yarn", "llama3"])
def test_fast_channels_keep_their_frequency_and_slow_ones_are_stretched(name: str) -> None:
    config = ours(name)
    config["scaling"]["original_max_seq_len"] = 1024
    exponents = exponents_of(32, torch.device("cpu"), torch.float64)
    position = build(RopeConfig.model_validate(config), Dims(32))
    stretch = THETA**-exponents / position.scaling.frequencies(THETA, exponents, None)
    assert stretch[0] == pytest.approx(1.0)
    assert stretch[-1] == pytest.approx(SCALINGS[name]["factor"])
    assert (stretch.diff() >= -1e-9).all()
    assert len(stretch.unique()) > 4


@by_length
def test_positions_of_half_precision_models_do_not_collide(name: str) -> None:
    phases = rope(name).phases(torch.tensor([[256, 257]]), torch.bfloat16)
    assert isinstance(phases, RotaryPhases)
    assert phases.cos.dtype == torch.float32
    assert not torch.equal(phases.cos[0, 0, 0], phases.cos[0, 0, 1])


# --- how long a sequence is -------------------------------------------------------------------------------------------


def test_the_length_of_a_sequence_is_that_of_its_real_tokens_in_its_document() -> None:
    positions = torch.arange(6)[None]
    assert total_lengths(positions).tolist() == [[6]]
    assert total_lengths(positions + 40).tolist() == [[46]]
    assert total_lengths(positions, torch.tensor([2, 6, 0])).tolist() == [[2], [6], [1]]
    documents = torch.tensor([[7, 7, 7, 7, 2, 2], [0, 1, 1, 1, 1, 1]])
    restarting = torch.tensor([[0, 1, 2, 3, 0, 1], [0, 0, 1, 2, 3, 4]])
    assert total_lengths(restarting, None, documents).tolist() == [[4, 4, 4, 4, 2, 2], [1, 5, 5, 5, 5, 5]]
    assert total_lengths(restarting, torch.tensor([6, 4]), documents).tolist()[1] == [1, 3, 3, 3, 3, 3]


def network(name: str, family: str = "decoder", **changes: Any) -> Transformer:
    tree: dict[str, Any] = {
        "family": family,
        "vocab_size": 23,
        "max_seq_len": CONTEXT,
        "d_model": 32,
        "num_layers": 2,
        "attention": {"num_heads": 2},
        "position": ours(name),
        "init": {"kind": "normal", "std": 0.3},
    }
    generator = torch.Generator().manual_seed(0)
    return Transformer(ModelConfig.model_validate(tree | changes), generator=generator).eval().requires_grad_(False)


def ids_of(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 23, (rows, length), generator=torch.Generator().manual_seed(seed))


@by_length
@pytest.mark.parametrize("family", ["decoder", "encoder"])
def test_a_sequence_is_as_long_alone_as_in_a_padded_batch_and_packed(name: str, family: str) -> None:
    net, ids, lengths = network(name, family), ids_of(3, 30), [10, 30, 17]
    logits = net(ids, lengths=torch.tensor(lengths))
    alone = [net(ids[row : row + 1, :length]) for row, length in enumerate(lengths)]
    for row, length in enumerate(lengths):
        assert_equal(logits[row : row + 1, :length], alone[row])
    packed = torch.cat([ids[row, :length] for row, length in enumerate(lengths)])[None]
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    for part, expected in zip(net(packed, documents=documents).split(lengths, 1), alone, strict=True):
        assert_equal(part, expected)


@by_length
def test_a_longer_sequence_changes_what_its_first_tokens_see(name: str) -> None:
    net, ids = network(name), ids_of(1, 30)
    assert_equal(net(ids[:, :ORIGINAL])[:, :10], net(ids[:, :10]))
    assert not torch.allclose(net(ids)[:, :10], net(ids[:, :10]), rtol=1e-2)


# --- caches -----------------------------------------------------------------------------------------------------------


def in_chunks(net: Transformer, ids: Tensor, ends: list[int], cache: Any) -> Tensor:
    return torch.cat([net(ids[:, a:b], cache=cache) for a, b in itertools.pairwise([0, *ends])], 1)


@every_scaling
def test_cached_in_chunks_equals_the_full_forward_up_to_the_original_length(name: str) -> None:
    net, ids = network(name), ids_of(2, ORIGINAL)
    for capacity in (None, ORIGINAL + 3):
        assert_equal(in_chunks(net, ids, [5, 6, 13, ORIGINAL], net.new_cache(2, capacity)), net(ids))


@pytest.mark.parametrize("name", [name for name in SCALINGS if name != "dynamic"])
def test_cached_from_a_long_prompt_on_equals_the_full_forward(name: str) -> None:
    net, ids = network(name), ids_of(2, 30)
    for capacity in (None, 40):
        assert_equal(in_chunks(net, ids, [ORIGINAL + 1, ORIGINAL + 2, 25, 30], net.new_cache(2, capacity)), net(ids))


CROSSINGS = [(name, *counts) for name in ("dynamic", "longrope") for counts in ((ORIGINAL, 1), (5, 12), (1, 30))]
"""Kind, tokens in the cache, tokens more."""


@pytest.mark.parametrize(("name", "held", "more"), [*CROSSINGS, ("dynamic", 20, 1)])
def test_a_cache_whose_keys_are_no_longer_right_is_refused_and_stays_as_it_was(name: str, held: int, more: int) -> None:
    net, ids = network(name), ids_of(2, 60)
    cache = net.new_cache(2)
    net(ids[:, :held], cache=cache)
    with pytest.raises(UsageError, match=f"{name}.*{ORIGINAL}"):
        net(ids[:, held : held + more], cache=cache)
    assert cache.lengths_B.tolist() == [held, held]
    if held < ORIGINAL:
        expected = net(ids[:, : held + 1])[:, -1:]
        assert_equal(net(ids[:, held : held + 1], cache=cache), expected)


def test_one_row_that_grows_too_long_is_refused() -> None:
    net, ids = network("longrope"), ids_of(2, 30)
    cache = net.new_cache(2)
    net(ids[:, :20], lengths=torch.tensor([20, ORIGINAL - 1]), cache=cache)
    net(ids[:, 20:21], cache=cache)
    with pytest.raises(UsageError, match="longrope"):
        net(ids[:, 21:22], cache=cache)
    # padding is no token: the shorter row gets none, and the longer one goes on
    logits = net(ids[:, 21:22], lengths=torch.tensor([1, 0]), cache=cache)
    assert_equal(logits[:1], net(ids[:1, :22])[:, -1:])


# --- what is no kind of its own ---------------------------------------------------------------------------------------


def test_deepseeks_factor_on_all_scores_is_said_by_the_scale() -> None:
    """DeepSeek-V3 multiplies 1 / sqrt(D) by m(mscale_all_dim)^2, and cos and sin by 1 where mscale is the same."""
    scaling = {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 1e4}
    scaling |= {"original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "q_lora_rank": 4, "kv_lora_rank": 4}
    oracle = DeepseekV3Attention(DeepseekV3Config(rope_parameters=scaling, **sizes), layer_idx=0)
    m = 0.1 * math.log(40.0) + 1
    assert oracle.scaling == pytest.approx(oracle.qk_head_dim**-0.5 * m**2)
    yarn = {"kind": "yarn", "factor": 40.0, "original_max_seq_len": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}
    plain = {**yarn, "mscale": None, "mscale_all_dim": None}  # cos and sin times m: scores times m^2 where all turn
    tree = {"vocab_size": 23, "d_model": 16, "num_layers": 2, "max_seq_len": 64, "init": {"kind": "normal", "std": 0.3}}
    logits = []
    for scale, kind in ((8**-0.5 * m**2, yarn), (None, plain)):
        config = {**tree, "attention": {"num_heads": 2, "scale": scale}, "position": {"kind": "rope", "scaling": kind}}
        network = Transformer(ModelConfig.model_validate(config), generator=torch.Generator().manual_seed(0))
        logits.append(network.requires_grad_(False)(torch.arange(20)[None] % 23))
    assert_equal(*logits)


def test_ntk_aware_scaling_is_another_theta() -> None:
    """base' = base s^(r / (r - 2)): dynamic NTK where the sequence is exactly as long as the factor says."""
    s, width = 3.0, 8
    exponents = exponents_of(width, torch.device("cpu"), torch.float64)
    config = DynamicScalingConfig(factor=1.0, original_max_seq_len=16)
    dynamic = build(config, Dims(width)).frequencies(1e4, exponents, torch.tensor([[48]]))[0, 0]
    torch.testing.assert_close(unscaled(1e4 * s ** (width / (width - 2)), exponents), dynamic)
