"""What each part computes, by its formula or by a property that needs no reference."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm
from transformers.models.whisper.modeling_whisper import sinusoids

from qkv.config.attention import StandardAttentionConfig
from qkv.config.errors import ConfigError, UsageError
from qkv.config.feed_forward import DenseFeedForwardConfig
from qkv.config.model import ModelConfig
from qkv.config.parts import LayerNormConfig, NormConfig, RMSNormConfig
from qkv.config.positions import RopeConfig, SinusoidalConfig
from qkv.config.residuals import PlainResidualConfig
from qkv.nn import (
    IGNORE,
    Attention,
    Dims,
    FeedForward,
    Output,
    RMSNorm,
    Stack,
    Sublayer,
    Transformer,
    build,
    use_kernel,
)
from qkv.nn.mask import Causal, Documents, Padding
from qkv.nn.position import RotaryPhases

from .matrix import one_thread  # noqa: F401

V = 23
FAMILIES = ("decoder", "encoder", "encoder-decoder")


def network(family: str = "decoder", seed: int = 0, **changes: Any) -> Transformer:
    """A small network in eval mode and float64, with weights of a size that makes every part matter."""
    tree: dict[str, Any] = {
        "family": family,
        "vocab_size": V,
        "max_seq_len": 32,
        "d_model": 16,
        "num_layers": 2,
        "attention": {"num_heads": 4},
        "init": {"kind": "normal", "std": 0.3},
    }
    generator = torch.Generator().manual_seed(seed)
    return Transformer(ModelConfig.model_validate(tree | changes), generator=generator).double().eval()


def ids_of(rows: int = 2, length: int = 6, seed: int = 0) -> Tensor:
    return torch.randint(0, V, (rows, length), generator=torch.Generator().manual_seed(seed))


def inputs_of(family: str, rows: int = 2, length: int = 6) -> dict[str, Tensor]:
    inputs = {"ids": ids_of(rows, length)}
    return inputs | ({"source": ids_of(rows, 5, seed=1)} if family == "encoder-decoder" else {})


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drawn(module: nn.Module, seed: int = 0) -> Any:
    """The module in float64 and eval mode with every parameter random."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.5, generator=generator)
    return module.double().eval()


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# --- positions --------------------------------------------------------------------------------------------------------


def test_without_positions_an_encoder_treats_its_input_as_a_set() -> None:
    ids, order = ids_of(2, 7), torch.tensor([3, 0, 6, 1, 5, 2, 4])
    plain, with_rope = network("encoder", position={"kind": "none"}), network("encoder")
    close(plain(ids[:, order]), plain(ids)[:, order])
    assert not torch.allclose(with_rope(ids[:, order]), with_rope(ids)[:, order], rtol=1e-2)


ROPES = pytest.mark.parametrize(
    "config",
    [RopeConfig(), RopeConfig(layout="interleaved"), RopeConfig(fraction=0.5, theta=100.0)],
    ids=["half", "interleaved", "partial"],
)


def rotated(config: RopeConfig, x_BHTD: Tensor, positions: Tensor) -> Tensor:
    return build(config, Dims(x_BHTD.shape[-1])).phases(positions, x_BHTD.dtype).rotate(x_BHTD)


@ROPES
def test_rope_makes_scores_depend_on_the_distance_only(config: RopeConfig) -> None:
    q, k = randn(1, 3, 5, 8), randn(1, 3, 5, 8, seed=1)
    positions = torch.tensor([[0, 1, 5, 20, 21]])

    def scores(shift: int) -> Tensor:
        return rotated(config, q, positions + shift) @ rotated(config, k, positions + shift).transpose(-1, -2)

    for shift in (1, 37, 500):
        close(scores(shift), scores(0))
    moved_apart = rotated(config, q, positions + 1) @ rotated(config, k, positions).transpose(-1, -2)
    assert not torch.allclose(moved_apart, scores(0), rtol=1e-2)


@ROPES
def test_rope_turns_each_pair_of_channels_by_its_angle(config: RopeConfig) -> None:
    x, p = randn(1, 1, 1, 8), 13
    y, width = rotated(config, x, torch.tensor([[p]]))[0, 0, 0], int(8 * config.fraction)
    expected = x[0, 0, 0].clone()
    for pair in range(width // 2):
        a, b = (2 * pair, 2 * pair + 1) if config.layout == "interleaved" else (pair, pair + width // 2)
        angle = p * config.theta ** (-2 * pair / width)
        expected[a] = x[0, 0, 0, a] * math.cos(angle) - x[0, 0, 0, b] * math.sin(angle)
        expected[b] = x[0, 0, 0, b] * math.cos(angle) + x[0, 0, 0, a] * math.sin(angle)
    close(y, expected)


@ROPES
def test_rope_keeps_norms_and_turns_nothing_at_position_0(config: RopeConfig) -> None:
    x = randn(2, 3, 5, 8)
    close(rotated(config, x, torch.arange(5)[None] + 100).norm(dim=-1), x.norm(dim=-1))
    close(rotated(config, x, torch.zeros(1, 5, dtype=torch.long)), x)


def test_partial_rope_leaves_the_other_channels_alone() -> None:
    x, positions = randn(1, 2, 4, 8), torch.arange(4)[None] + 3
    partial = rotated(RopeConfig(fraction=0.5), x, positions)
    assert torch.equal(partial[..., 4:], x[..., 4:])
    close(partial[..., :4], rotated(RopeConfig(), x[..., :4], positions))


def test_the_layouts_of_rope_differ_by_a_permutation_of_channels() -> None:
    x, positions = randn(1, 2, 4, 8), torch.arange(4)[None] + 3
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    interleaved = rotated(RopeConfig(layout="interleaved"), x, positions)
    close(interleaved[..., order], rotated(RopeConfig(), x[..., order], positions))


def test_values_do_not_turn() -> None:
    attention = drawn(build(StandardAttentionConfig(num_heads=2), Dims(8)))
    x = randn(1, 1, 8)
    phases = build(RopeConfig(), Dims(4)).phases(torch.tensor([[17]]), torch.float64)
    close(attention(x, phases=phases), attention(x))


@pytest.mark.parametrize("family", ["decoder", "encoder", "encoder-decoder"])
def test_with_rope_all_positions_may_shift_together(family: str) -> None:
    net, inputs = network(family), inputs_of(family)
    logits = net(**inputs)
    close(net(**inputs, positions=torch.arange(6)[None] + 40), logits, 1e-10)
    assert not torch.allclose(net(**inputs, positions=2 * torch.arange(6)[None]), logits, rtol=1e-2)


def test_positions_do_not_collide_in_a_bfloat16_model() -> None:
    net = network(position={"kind": "rope"}).bfloat16()
    seen: list[RotaryPhases] = []
    attention = net.decoder.blocks[0].self_attention.function
    attention.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["phases"]), with_kwargs=True)
    net(ids_of(1, 2), positions=torch.tensor([[256, 257]]))
    assert seen[0].cos.dtype == torch.float32
    angle = torch.tensor([256.0, 257.0])  # of the first pair, which turns by 1 per position
    close(seen[0].cos[0, 0, :, 0], angle.cos(), 1e-5)


def test_sinusoids_follow_their_formula() -> None:
    sinusoidal = build(SinusoidalConfig(), Dims(12))
    positions = torch.tensor([0, 1, 7, 300])
    table = sinusoidal.table(positions, torch.float64)
    for row, p in enumerate(positions.tolist()):
        for i in range(6):
            angle = p / 10000 ** (2 * i / 12)
            assert table[row, 2 * i] == pytest.approx(math.sin(angle), abs=1e-12)
            assert table[row, 2 * i + 1] == pytest.approx(math.cos(angle), abs=1e-12)
    close(sinusoidal.table(positions).double(), table, 1e-4)
    x = randn(1, 4, 12)
    close(sinusoidal.add(x, positions[None]), x + table)


@pytest.mark.parametrize("k", [1, 5, 40])
def test_one_linear_map_moves_every_sinusoid_by_k(k: int) -> None:
    table = build(SinusoidalConfig(), Dims(12)).table(torch.arange(100), torch.float64)
    turns = [
        torch.tensor([[math.cos(a), math.sin(a)], [-math.sin(a), math.cos(a)]], dtype=torch.float64)
        for a in (k * 10000 ** (-2 * i / 12) for i in range(6))
    ]
    close(table[:-k] @ torch.block_diag(*turns).T, table[k:])


def test_the_layouts_of_sinusoids_are_those_of_the_published_models() -> None:
    positions = torch.arange(60)
    paper = build(SinusoidalConfig(), Dims(12)).table(positions)
    marian = build(SinusoidalConfig(layout="concatenated"), Dims(12)).table(positions)
    assert torch.equal(marian, torch.cat([paper[:, 0::2], paper[:, 1::2]], 1))
    theirs = MarianSinusoidalPositionalEmbedding(60, 12)
    close(marian, theirs.create_weight(), 2e-6)
    whisper = build(SinusoidalConfig(layout="tensor2tensor"), Dims(12)).table(positions)
    close(whisper, sinusoids(60, 12), 2e-6)
    assert not torch.allclose(whisper, marian, atol=0.5)


@pytest.mark.parametrize("offset", [0, 2])
def test_learned_positions_are_rows_of_a_table(offset: int) -> None:
    net = network(position={"kind": "learned", "offset": offset})
    embedding, ids = net.decoder_embedding, ids_of(1, 3)
    positions = torch.tensor([[4, 0, 31]])
    assert embedding.position.weight.shape == (32 + offset, 16)
    close(embedding(ids, positions), embedding.input.weight[ids] + embedding.position.weight[positions + offset])


# --- norms ------------------------------------------------------------------------------------------------------------


def test_norms_follow_their_formulas() -> None:
    x = randn(2, 3, 8)
    rms = drawn(build(RMSNormConfig(eps=1e-3), Dims(8)))
    close(rms(x), x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * rms.weight)
    layer = drawn(build(LayerNormConfig(eps=1e-3), Dims(8)))
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    close(layer(x), centred / (variance + 1e-3).sqrt() * layer.weight + layer.bias)
    assert build(LayerNormConfig(bias=False), Dims(8)).bias is None


@pytest.mark.parametrize("config", [RMSNormConfig(eps=1e-12), LayerNormConfig(eps=1e-12)], ids=["rms", "layer"])
def test_a_norm_ignores_the_scale_of_its_input(config: NormConfig) -> None:
    norm, x = drawn(build(config, Dims(8))), randn(2, 3, 8)
    for c in (0.01, 3.0, 1000.0):
        close(norm(c * x), norm(x), 1e-7)


def test_layernorm_ignores_a_shift_and_rmsnorm_does_not() -> None:
    x = randn(2, 3, 8)
    layer, rms = drawn(build(LayerNormConfig(), Dims(8))), drawn(build(RMSNormConfig(), Dims(8)))
    close(layer(x + 5.0), layer(x), 1e-10)
    assert not torch.allclose(rms(x + 5.0), rms(x), rtol=1e-2)


def test_rmsnorm_rounds_before_it_multiplies() -> None:
    norm = drawn(build(RMSNormConfig(), Dims(64))).bfloat16()
    x = randn(50, 64).bfloat16()
    wide = x.float()
    normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    assert torch.equal(norm(x), normalised.bfloat16() * norm.weight)
    assert not torch.equal(norm(x), (normalised * norm.weight.float()).bfloat16())


@pytest.mark.parametrize(
    ("config", "theirs"),
    [
        (RMSNormConfig(), LlamaRMSNorm),
        (RMSNormConfig(), T5LayerNorm),
        (RMSNormConfig(rounding="after-weight"), Olmo2RMSNorm),
        (RMSNormConfig(rounding="after-weight", unit_offset=True), Gemma2RMSNorm),
        (RMSNormConfig(rounding="after-weight", unit_offset=True), Gemma3RMSNorm),
    ],
    ids=["llama", "t5", "olmo2", "gemma2", "gemma3"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_rmsnorm_rounds_as_the_published_models_do(
    config: RMSNormConfig, theirs: type[nn.Module], dtype: torch.dtype
) -> None:
    norm, oracle = drawn(build(config, Dims(64))).to(dtype), theirs(64, eps=1e-6).to(dtype)
    with torch.no_grad():
        oracle.weight.copy_(norm.weight)
    x = randn(50, 64).to(dtype)
    assert torch.equal(norm(x), oracle(x))


def test_a_norm_with_unit_offset_starts_as_one_without() -> None:
    x = randn(2, 8)
    plain, offset = (build(RMSNormConfig(unit_offset=given), Dims(8)).double() for given in (False, True))
    assert torch.equal(offset(x), plain(x))
    plain.weight.data.copy_(drawn(offset).weight.data + 1.0)
    close(offset(x), plain(x))


PLACEMENTS: dict[str, Callable[..., Tensor]] = {
    "pre": lambda x, f, n: x + f(n["norm_in"](x)),
    "post": lambda x, f, n: n["norm_stream"](x + f(x)),
    "sandwich": lambda x, f, n: x + n["norm_out"](f(n["norm_in"](x))),
    "output": lambda x, f, n: x + n["norm_out"](f(x)),
}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_placement_puts_norms_where_it_says(placement: Any) -> None:
    function = nn.Linear(8, 8)
    site = build(PlainResidualConfig(), Dims(8)).new_site(0, 0)
    sublayer = drawn(Sublayer(RMSNormConfig(placement=placement), Dims(8), site, 0.0, function=function))
    norms = dict(sublayer.named_children())
    x = randn(2, 3, 8)
    close(sublayer(x, None), PLACEMENTS[placement](x, function, norms))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_stack_whose_sublayers_give_zero_is_the_identity_unless_post_norm(family: str, placement: str) -> None:
    net = network(family, norm={"kind": "layernorm", "placement": placement})
    for module in net.modules():
        if isinstance(module, Attention):
            module.output.weight.data.zero_()
        if isinstance(module, FeedForward):
            module.down.weight.data.zero_()
    for stack in (net.encoder, net.decoder):
        if isinstance(stack, Stack):
            x = randn(2, 5, 16)
            memory = {"memory_BSN": randn(2, 4, 16)} if stack is net.decoder and net.encoder else {}
            if placement == "post":
                assert isinstance(stack.final_norm, nn.Identity)
                assert not torch.allclose(stack(x, **memory), x, rtol=1e-2)
            else:
                close(stack(x, **memory), F.layer_norm(x, (16,), stack.final_norm.weight, stack.final_norm.bias))


def test_without_residual_each_sublayer_replaces_the_stream() -> None:
    net = network(residual={"kind": "none"}, position={"kind": "none"})
    x = randn(2, 5, 16)
    expected = x
    for block in net.decoder.blocks:
        attention, feed_forward = block.self_attention, block.feed_forward
        expected = attention.function(attention.norm_in(expected), mask=Causal())
        expected = feed_forward.function(feed_forward.norm_in(expected))
    close(net.decoder(x), net.decoder.final_norm(expected))


# --- attention --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_heads", [2, 1])
@pytest.mark.parametrize("qk_norm", ["none", "per-head"])
def test_grouped_queries_equal_full_heads_with_repeated_keys_and_values(kv_heads: int, qk_norm: Any) -> None:
    few = drawn(
        build(StandardAttentionConfig(num_heads=4, num_kv_heads=kv_heads, bias=True, qk_norm=qk_norm), Dims(16))
    )
    full = build(StandardAttentionConfig(num_heads=4, bias=True, qk_norm=qk_norm), Dims(16)).double().eval()
    state = few.state_dict()
    for name in ("key.weight", "key.bias", "value.weight", "value.bias"):
        blocks = state[name].unflatten(0, (kv_heads, 4))
        state[name] = blocks.repeat_interleave(4 // kv_heads, 0).flatten(0, 1)
    full.load_state_dict(state)
    x = randn(2, 5, 16)
    phases = build(RopeConfig(), Dims(4)).phases(torch.arange(5)[None], torch.float64)
    close(full(x, mask=Causal(), phases=phases), few(x, mask=Causal(), phases=phases))


def kernel_inputs(attention: Attention, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """The queries and keys that the kernel receives."""
    seen: list[tuple[Any, ...]] = []
    handle = attention.kernel.register_forward_pre_hook(lambda _, args: seen.append(args))
    attention(*args, **kwargs)
    handle.remove()
    return seen[0][0], seen[0][1]


@pytest.mark.parametrize("qk_norm", ["none", "per-head", "full"])
def test_qk_norm_bounds_the_scores(qk_norm: Any) -> None:
    attention = drawn(build(StandardAttentionConfig(num_heads=4, head_dim=6, qk_norm=qk_norm), Dims(16)))
    for name, parameter in attention.named_parameters():
        if "norm" in name:
            parameter.data.fill_(1.0)
    phases = build(RopeConfig(), Dims(6)).phases(torch.arange(50)[None], torch.float64)
    q, k = kernel_inputs(attention, 100 * randn(1, 50, 16), phases=phases)
    largest = float((q @ k.transpose(-1, -2)).detach().abs().max() * attention.scale)
    if qk_norm == "none":
        assert largest > 1000
    if qk_norm == "per-head":
        assert 0.8 * 6 * attention.scale < largest <= 6 * attention.scale
    if qk_norm == "full":
        assert largest <= 4 * 6 * attention.scale
        close(q.square().sum((1, 3)), torch.full((1, 50), 4 * 6.0, dtype=torch.float64), 1e-6)


@pytest.mark.parametrize("qk_norm", ["per-head", "full"])
def test_qk_norm_comes_before_the_positions(qk_norm: Any) -> None:
    attention = drawn(build(StandardAttentionConfig(num_heads=2, qk_norm=qk_norm), Dims(8)))
    phases = build(RopeConfig(), Dims(4)).phases(torch.arange(3)[None] + 5, torch.float64)
    x = randn(1, 3, 8)
    q, k = kernel_inputs(attention, x, phases=phases)
    for actual, linear, norm in ((q, attention.query, attention.query_norm), (k, attention.key, attention.key_norm)):
        heads = linear(x).unflatten(-1, (2, 4)) if qk_norm == "per-head" else linear(x)
        normed = norm(heads) if qk_norm == "per-head" else norm(heads).unflatten(-1, (2, 4))
        close(actual, phases.rotate(normed.transpose(1, 2)))


def test_attention_averages_values_by_scaled_scores() -> None:
    attention = drawn(build(StandardAttentionConfig(num_heads=2, head_dim=3, bias=True), Dims(8)))
    x, y = randn(1, 4, 8), randn(1, 5, 8, seed=1)
    expected = []
    for head in range(2):
        part = slice(3 * head, 3 * head + 3)
        q, k, v = attention.query(x)[..., part], attention.key(y)[..., part], attention.value(y)[..., part]
        expected.append((q @ k.transpose(-1, -2) / math.sqrt(3)).softmax(-1) @ v)
    close(attention(x, y), attention.output(torch.cat(expected, -1)))


def test_biases_stand_where_the_configuration_says() -> None:
    def biases(bias: Any) -> list[bool]:
        attention = build(StandardAttentionConfig(num_heads=2, bias=bias), Dims(8))
        return [getattr(attention, name).bias is not None for name in ("query", "key", "value", "output")]

    assert biases(False) == [False] * 4
    assert biases(True) == [True] * 4
    assert biases("qkv") == [True, True, True, False]


def test_cross_attention_ignores_the_order_of_a_source_moved_with_its_mask() -> None:
    attention = drawn(build(StandardAttentionConfig(num_heads=4), Dims(16, d_source=10)))
    x, y = randn(2, 3, 16), randn(2, 6, 10, seed=1)
    here, there = torch.zeros(2, 6, dtype=torch.long), torch.tensor([[0, 0, 1, 0, 1, 1], [1, 0, 0, 0, 0, 1]])
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    out = attention(x, y, mask=Documents(here, there))
    close(attention(x, y[:, order], mask=Documents(here, there[:, order])), out)
    assert not torch.allclose(attention(x, y[:, order], mask=Documents(here, there)), out, rtol=1e-2)


def test_every_layer_has_its_own_window_and_position() -> None:
    layers = [
        {"attention": {"window": 2}},
        {"position": {"kind": "none"}},
        {"position": {"theta": 100.0}, "attention": {"window": 3}},
    ]
    net = network(num_layers=4, layers=layers)
    seen: list[dict[str, Any]] = []
    for block in net.decoder.blocks:
        function = block.self_attention.function
        function.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs), with_kwargs=True)
    net(ids_of(1, 6))
    back = torch.arange(6)[:, None] - torch.arange(6)
    for index, (window, theta) in enumerate([(2, 1e4), (6, None), (3, 100.0), (2, 1e4)]):
        assert torch.equal(seen[index]["mask"].tensor()[0, 0], (back >= 0) & (back < window))
        phases = seen[index]["phases"]
        assert isinstance(phases, RotaryPhases) == (theta is not None)
        if theta is not None:
            close(phases.cos[0, 0, :, 1], torch.cos(torch.arange(6).double() * theta**-0.5))


@pytest.mark.parametrize(("family", "changed"), [("decoder", [4, 5, 6]), ("encoder", [2, 3, 4, 5, 6])])
def test_a_window_of_three_shows_three_keys_to_one_side(family: str, changed: list[int]) -> None:
    net = network(family, num_layers=1, attention={"num_heads": 4, "window": 3})
    ids = ids_of(1, 9)
    other = ids.clone()
    other[0, 4] = (ids[0, 4] + 1) % V
    differs = (net(other) != net(ids)).any(-1)[0]
    assert differs.nonzero().flatten().tolist() == changed


@pytest.mark.parametrize(("family", "changed"), [("decoder", [3, 4, 5]), ("encoder", [0, 1, 2, 3, 4, 5])])
def test_a_decoder_sees_the_past_and_an_encoder_everything(family: str, changed: list[int]) -> None:
    net, ids = network(family, num_layers=1), ids_of(1, 6)
    other = ids.clone()
    other[0, 3] = (ids[0, 3] + 1) % V
    differs = (net(other) != net(ids)).any(-1)[0]
    assert differs.nonzero().flatten().tolist() == changed


def test_an_encoder_decoder_without_source_positions_ignores_the_order_of_its_source() -> None:
    net = network("encoder-decoder", encoder={"position": {"kind": "none"}})
    inputs, lengths = inputs_of("encoder-decoder"), torch.tensor([4, 4])
    order = torch.tensor([2, 0, 3, 1, 4])
    logits = net(**inputs, source_lengths=lengths)
    close(net(inputs["ids"], source=inputs["source"][:, order], source_lengths=lengths), logits)


def test_cross_attention_reads_a_source_of_another_width() -> None:
    net = network("encoder-decoder", encoder={"d_model": 24})
    inputs = inputs_of("encoder-decoder")
    cross = net.decoder.blocks[0].cross_attention.function
    assert cross.key.weight.shape == (16, 24)
    assert cross.query.weight.shape == (16, 16)
    assert net.encode(inputs["source"]).shape == (2, 5, 24)
    logits = net(**inputs)
    assert logits.shape == (2, 6, V)
    other = net(inputs["ids"], source=inputs["source"].roll(1, 0))
    assert not torch.allclose(other, logits, rtol=1e-2)


def test_every_decoder_token_sees_the_whole_source() -> None:
    net, inputs = network("encoder-decoder"), inputs_of("encoder-decoder")
    source = inputs["source"].clone()
    source[:, -1] = (source[:, -1] + 1) % V
    changed = (net(inputs["ids"], source=source) - net(**inputs)).abs().amax(-1)
    assert (changed > 1e-3).all()


@pytest.mark.parametrize(
    ("bias", "biased"),
    [(True, "qkvo"), (False, ""), ("qkv", "qkv"), ("qvo", "qvo")],
)
def test_projections_have_the_biases_that_are_named(bias: Any, biased: str) -> None:
    attention = build(StandardAttentionConfig(num_heads=2, bias=bias), Dims(8))
    projections = {"q": attention.query, "k": attention.key, "v": attention.value, "o": attention.output}
    assert "".join(name for name, projection in projections.items() if projection.bias is not None) == biased


@pytest.mark.parametrize("kernel", ["math", "sdpa", "tiled"])
def test_scores_are_scaled_and_capped_as_said(kernel: Any) -> None:
    attention = drawn(build(StandardAttentionConfig(num_heads=2, scale=0.9, softcap=1.5), Dims(8)))
    use_kernel(attention, kernel)
    x = randn(2, 5, 8)
    q, k, v = (
        part(x).unflatten(-1, (2, 4)).transpose(1, 2) for part in (attention.query, attention.key, attention.value)
    )
    scores = 1.5 * torch.tanh(q @ k.transpose(-1, -2) * 0.9 / 1.5)
    assert scores.abs().max() > 1.2
    scores = scores.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), float("-inf"))
    expected = attention.output((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
    close(attention(x, mask=Causal()), expected)


# --- feed-forward -----------------------------------------------------------------------------------------------------

KINDS = ("swiglu", "geglu", "geglu_tanh", "relu", "gelu", "gelu_tanh", "silu")


def feed_forward(kind: Any) -> Any:
    return drawn(build(DenseFeedForwardConfig(kind=kind, d_ff=12, bias=True), Dims(8)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_feed_forward_acts_on_each_token_by_itself(kind: str) -> None:
    part, x = feed_forward(kind), randn(2, 5, 8)
    changed = x.clone()
    changed[:, 2] += 1.0
    same = torch.arange(5) != 2
    assert torch.equal(part(changed)[:, same], part(x)[:, same])
    assert not torch.allclose(part(changed)[:, 2], part(x)[:, 2], rtol=1e-2)
    close(part(x[1, 3]), part(x)[1, 3])


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


FORMULAS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "swiglu": lambda part, x: part.gate(x) * torch.sigmoid(part.gate(x)) * part.up(x),
    "geglu": lambda part, x: gelu(part.gate(x)) * part.up(x),
    "relu": lambda part, x: part.up(x).clamp(min=0),
    "gelu": lambda part, x: gelu(part.up(x)),
    "gelu_tanh": lambda part, x: gelu_tanh(part.up(x)),
    "geglu_tanh": lambda part, x: gelu_tanh(part.gate(x)) * part.up(x),
    "silu": lambda part, x: part.up(x) * torch.sigmoid(part.up(x)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_feed_forward_follows_its_formula(kind: str) -> None:
    part, x = feed_forward(kind), randn(2, 5, 8)
    close(part(x), part.down(FORMULAS[kind](part, x)))


def test_a_feed_forward_equals_two_convolutions_of_width_1() -> None:
    part, x = feed_forward("relu"), randn(2, 5, 8)
    hidden = F.conv1d(x.transpose(1, 2), part.up.weight[..., None], part.up.bias).relu()
    close(part(x), F.conv1d(hidden, part.down.weight[..., None], part.down.bias).transpose(1, 2))


def test_swiglu_whose_gated_half_gives_ones_is_a_silu_feed_forward() -> None:
    part, x = feed_forward("swiglu"), randn(2, 5, 8)
    part.up.weight.data.zero_()
    part.up.bias.data.fill_(1.0)
    close(part(x), part.down(F.silu(part.gate(x))))


# --- embedding --------------------------------------------------------------------------------------------------------


def test_the_embedding_is_the_normed_sum_of_scaled_tokens_positions_and_segments() -> None:
    net = network(
        "encoder",
        position={"kind": "sinusoidal"},
        embedding={"scale": "sqrt-d-model", "norm": True, "num_segments": 3},
        norm={"kind": "layernorm"},
    )
    part, ids = net.encoder_embedding, ids_of()
    segments = torch.tensor([[0, 0, 1, 1, 2, 2], [2, 1, 0, 2, 1, 0]])
    positions = torch.arange(6)[None]
    signal = part.position.table(positions, torch.float64)
    for given, used in ((segments, segments), (None, torch.zeros_like(ids))):
        total = part.input.weight[ids] * 4.0 + part.segments.weight[used] + signal
        close(part(ids, positions, given), F.layer_norm(total, (16,), part.norm.weight, part.norm.bias))
    assert not torch.allclose(net(ids, segments=segments), net(ids), rtol=1e-2)


@pytest.mark.parametrize(("scale", "factor"), [("sqrt-d-model", 4.0), (1.0, 1.0), (0.5, 0.5)])
def test_token_embeddings_are_scaled(scale: Any, factor: float) -> None:
    part, ids = network(embedding={"scale": scale}).decoder_embedding, ids_of()
    close(part(ids, torch.arange(6)[None]), part.input.weight[ids] * factor)


def test_features_are_projected_to_the_model_width() -> None:
    net = network("encoder", input={"kind": "features", "width": 5})
    features = randn(2, 6, 5)
    part = net.encoder_embedding.input
    close(net.encoder_embedding(features, torch.arange(6)[None]), features @ part.weight.T + part.bias)
    assert net(features).shape == (2, 6, V)


# --- tying ------------------------------------------------------------------------------------------------------------

TIES = pytest.mark.parametrize(
    ("family", "tie", "expected"),
    [
        ("decoder", "head", 1),
        ("encoder", "head", 1),
        ("encoder-decoder", "none", 3),
        ("encoder-decoder", "head", 2),
        ("encoder-decoder", "source-target", 2),
        ("encoder-decoder", "all", 1),
    ],
)


def matrices(net: Transformer) -> list[nn.Parameter]:
    """The vocabulary matrices: each embedding's and the head's."""
    embeddings = [part.input.weight for part in (net.encoder_embedding, net.decoder_embedding) if part is not None]
    return [*embeddings, net.head.weight]  # type: ignore[list-item]


def assert_tied(net: Transformer, expected: int) -> None:
    assert len({id(matrix) for matrix in matrices(net)}) == expected
    assert len({matrix.data_ptr() for matrix in matrices(net)}) == expected
    listed = [parameter for parameter in net.parameters() if parameter.shape == (V, 16)]
    assert len(listed) == expected
    assert {id(parameter) for parameter in listed} == {id(matrix) for matrix in matrices(net)}


@TIES
def test_a_tied_matrix_is_one_parameter_and_stays_one(family: str, tie: str, expected: int) -> None:
    net = network(family, tie_embeddings=tie)
    assert_tied(net, expected)
    assert_tied(net.to(torch.bfloat16), expected)
    assert_tied(net.to(torch.float64), expected)
    assert_tied(copy.deepcopy(net), expected)
    assert_tied(pickle.loads(pickle.dumps(net)), expected)


@TIES
def test_a_tied_matrix_stays_one_through_meta_and_loading(family: str, tie: str, expected: int) -> None:
    net = network(family, tie_embeddings=tie)
    empty = Transformer(net.config, device="meta").to_empty(device="cpu").double().eval()
    assert_tied(empty, expected)
    empty.load_state_dict(net.state_dict())
    assert_tied(empty, expected)
    inputs = inputs_of(family)
    assert torch.equal(empty(**inputs), net(**inputs))


@TIES
def test_a_tied_matrix_stays_one_when_loading_replaces_parameters(family: str, tie: str, expected: int) -> None:
    net = network(family, tie_embeddings=tie)
    empty = Transformer(net.config, device="meta").eval()
    empty.load_state_dict(net.state_dict(), assign=True)
    assert_tied(empty, expected)
    inputs = inputs_of(family)
    assert torch.equal(empty(**inputs), net(**inputs))


@TIES
def test_the_gradient_of_a_tied_matrix_is_the_sum_of_the_untied_ones(family: str, tie: str, expected: int) -> None:
    tied, inputs = network(family, tie_embeddings=tie), inputs_of(family)
    untied = network(family)
    with torch.no_grad():
        for mine, theirs in zip(matrices(untied), matrices(tied), strict=True):
            mine.copy_(theirs)
    other = {name: value for name, value in tied.state_dict().items() if value.shape != (V, 16)}
    untied.load_state_dict(other, strict=False)
    for net in (tied, untied):
        net(**inputs, labels=ids_of(seed=5)).loss_sum.backward()
    for one in {id(matrix): matrix for matrix in matrices(tied)}.values():
        parts = [theirs.grad for mine, theirs in zip(matrices(tied), matrices(untied), strict=True) if mine is one]
        assert all(part.abs().max() > 0 for part in parts)
        close(one.grad, sum(parts))


# --- heads and labels -------------------------------------------------------------------------------------------------


def test_the_masked_language_model_head_follows_its_formula() -> None:
    net = network("encoder", norm={"kind": "layernorm"}, tie_embeddings="head")
    drawn(net.head)
    head, h = net.head, net.encode(ids_of())
    assert head.bias.shape == (V,)
    hidden = F.layer_norm(gelu(head.dense(h)), (16,), head.norm.weight, head.norm.bias)
    logits = net(ids_of())
    assert logits.shape == (2, 6, V)
    close(logits, hidden @ net.encoder_embedding.input.weight.T + head.bias)


@pytest.mark.parametrize("bias", [False, True])
def test_the_language_model_head_is_a_matrix_and_perhaps_a_bias(bias: bool) -> None:
    net = network(head={"kind": "language-model", "bias": bias})
    drawn(net.head)
    hidden: list[Tensor] = []
    net.decoder.register_forward_hook(lambda _, args, out: hidden.append(out))
    logits = net(ids_of())
    close(logits, hidden[0] @ net.head.weight.T + (net.head.bias if bias else 0.0))


@pytest.mark.parametrize(("scale", "factor"), [("rsqrt-d-model", 0.25), (3.0, 3.0)])
def test_the_language_model_head_scales_and_caps(scale: Any, factor: float) -> None:
    plain = network(head={"kind": "language-model"})
    net = network(head={"kind": "language-model", "scale": scale, "softcap": 2.0})
    logits = plain(ids_of())
    close(net(ids_of()), 2.0 * torch.tanh(logits * factor / 2.0))
    close(net(ids_of(), logits="last"), net(ids_of())[:, -1:])


@pytest.mark.parametrize("family", ["encoder", "decoder"])
@pytest.mark.parametrize("pooling", ["first", "mean", "last"])
@pytest.mark.parametrize("pooler", [False, True], ids=["bare", "pooler"])
def test_a_classifier_pools_real_tokens_only(family: str, pooling: str, pooler: bool) -> None:
    net = network(family, head={"kind": "classifier", "num_classes": 3, "pooling": pooling, "pooler": pooler})
    ids, lengths = ids_of(3, 6), torch.tensor([6, 1, 4])
    scores = net(ids, lengths=lengths)
    assert scores.shape == (3, 3)
    stack = net.encoder if family == "encoder" else net.decoder
    hidden: list[Tensor] = []
    stack.register_forward_hook(lambda _, args, out: hidden.append(out))
    for row, length in enumerate(lengths.tolist()):
        close(scores[row], net(ids[row : row + 1, :length])[0])
        h = hidden.pop()[0]
        vector = {"first": h[0], "mean": h.mean(0), "last": h[-1]}[pooling]
        vector = torch.tanh(net.head.pooler.dense(vector)) if pooler else vector
        close(scores[row], net.head.output(vector))
    out = net(ids, lengths=lengths, labels=torch.tensor([2, IGNORE, 0]))
    assert out.target_count == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_head_hidden_vectors_come_out(family: str) -> None:
    net, inputs = network(family, head={"kind": "none"}), inputs_of(family)
    assert net(**inputs).shape == (2, 6, 16)
    assert net(**inputs, lengths=torch.tensor([2, 6]), logits="last").shape == (2, 1, 16)


@pytest.mark.parametrize("family", FAMILIES)
def test_labels_give_the_summed_loss_of_the_targets(family: str) -> None:
    net, inputs = network(family), inputs_of(family)
    labels = ids_of(seed=7)
    labels[0, :2] = IGNORE
    labels[1, 5] = IGNORE
    out = net(**inputs, labels=labels)
    probabilities = net(**inputs).softmax(-1).detach()
    expected, count = 0.0, 0
    for row in range(2):
        for token in range(6):
            if labels[row, token] != IGNORE:
                expected -= math.log(probabilities[row, token, labels[row, token]])
                count += 1
    assert isinstance(out, Output)
    assert out.target_count.item() == count == 9
    assert out.loss_sum.item() == pytest.approx(expected, rel=1e-5)
    assert out.aux == {}


def test_the_losses_of_parts_of_a_batch_add_up() -> None:
    net, ids, labels = network(), ids_of(4), ids_of(4, seed=7)
    labels[0, :5] = IGNORE
    whole = net(ids, labels=labels)
    parts = [net(ids[rows], labels=labels[rows]) for rows in (slice(0, 1), slice(1, 4))]
    assert sum(int(part.target_count) for part in parts) == whole.target_count == 19
    assert sum(part.loss_sum.item() for part in parts) == pytest.approx(whole.loss_sum.item(), rel=1e-6)


def test_labels_that_are_all_ignored_give_a_loss_of_zero_and_no_gradient() -> None:
    net = network()
    out = net(ids_of(), labels=torch.full((2, 6), IGNORE))
    assert out.loss_sum == 0
    assert out.target_count == 0
    out.loss_sum.backward()
    assert all(parameter.grad is None or (parameter.grad == 0).all() for parameter in net.parameters())


def test_label_smoothing_spreads_a_share_over_the_vocabulary() -> None:
    net, labels = network(), ids_of(seed=7)
    logs = net(ids_of()).log_softmax(-1).detach()
    plain, spread = -logs.gather(-1, labels[..., None]).sum(), -logs.mean(-1).sum()
    net.label_smoothing = 0.1
    assert net(ids_of(), labels=labels).loss_sum.item() == pytest.approx(float(0.9 * plain + 0.1 * spread), rel=1e-5)


def test_the_loss_is_summed_in_float32_under_bfloat16() -> None:
    net, labels = network().bfloat16(), ids_of(seed=7)
    out = net(ids_of(), labels=labels)
    assert out.loss_sum.dtype == torch.float32
    exact = F.cross_entropy(net(ids_of()).double().flatten(0, 1), labels.flatten(), reduction="sum")
    assert out.loss_sum.item() == pytest.approx(exact.item(), rel=1e-5)


# --- initialisation ---------------------------------------------------------------------------------------------------

WIDTH, SOURCE_WIDTH, HIDDEN, HEADS, HEAD_DIM, DEPTH = 64, 48, 160, 4, 24, 3


def big(init: dict[str, Any], **changes: Any) -> Transformer:
    tree: dict[str, Any] = {
        "family": "encoder-decoder",
        "vocab_size": 150,
        "max_seq_len": 64,
        "d_model": WIDTH,
        "num_layers": DEPTH,
        "position": {"kind": "learned"},
        "attention": {"num_heads": HEADS, "head_dim": HEAD_DIM, "bias": True},
        "feed_forward": {"d_ff": HIDDEN, "bias": True},
        "norm": {"kind": "layernorm"},
        "encoder": {"d_model": SOURCE_WIDTH},
        "init": init,
    }
    return Transformer(ModelConfig.model_validate(tree | changes), generator=torch.Generator().manual_seed(0))


STD: dict[str, Callable[[str, Tensor], float]] = {
    "normal": lambda role, weight: 0.05,
    "gpt2": lambda role, weight: 0.05 / (math.sqrt(2 * DEPTH) if role in ("output", "down") else 1.0),
    "xavier": lambda role, weight: (
        weight.shape[1] ** -0.5 if role == "table" else math.sqrt(2 / (weight.shape[0] + weight.shape[1]))
    ),
    "t5": lambda role, weight: {
        "query": (weight.shape[1] * HEAD_DIM) ** -0.5,
        "output": (HEADS * HEAD_DIM) ** -0.5,
        "down": HIDDEN**-0.5,
        "table": 1.0,
    }.get(role, weight.shape[1] ** -0.5),
}
"""Kind -> the standard deviation of a weight by its role: the last part of its module's name, or a table."""


@pytest.mark.parametrize("kind", STD)
def test_weights_start_with_the_spread_their_kind_says(kind: str) -> None:
    net = big({"kind": kind} | ({"std": 0.05} if kind in ("normal", "gpt2") else {}))
    roles = set()
    for name, parameter in net.named_parameters():
        if parameter.dim() == 1:
            assert (parameter == (0.0 if name.endswith("bias") else 1.0)).all(), name
            continue
        role = name.split(".")[-2]
        if role in ("input", "position", "head"):
            role = "table"
        roles.add(role)
        expected = STD[kind](role, parameter)
        assert parameter.std().item() == pytest.approx(expected, rel=0.05), name
        assert abs(parameter.mean().item()) < 5 * expected / parameter.numel() ** 0.5, name
        if kind == "xavier" and role != "table":
            assert parameter.abs().max() <= math.sqrt(3) * expected + 1e-6
    assert roles == {"query", "key", "value", "output", "gate", "up", "down", "table"}


@pytest.mark.parametrize(("kind", "spread"), [("normal", 0.02), ("xavier", 0.0), ("t5", SOURCE_WIDTH**-0.5)])
def test_relative_positions_start_with_the_spread_their_kind_says(kind: str, spread: float) -> None:
    net = big({"kind": kind}, position={"kind": "relative", "num_buckets": 512, "max_distance": 1024})
    assert net.encoder.positions[0].table.weight.std().item() == pytest.approx(spread, rel=0.05)


@pytest.mark.parametrize("kind", STD)
def test_norms_that_add_to_1_start_at_0(kind: str) -> None:
    net = big({"kind": kind}, norm={"kind": "rmsnorm", "unit_offset": True})
    weights = [module.weight for module in net.modules() if isinstance(module, RMSNorm)]
    assert len(weights) == 17
    assert not any(weight.any() for weight in weights)


def test_writers_of_shared_layers_are_scaled_by_the_number_of_layers() -> None:
    net = big({"kind": "gpt2", "std": 0.05}, share_layers=True)
    weight = net.decoder.blocks[0].feed_forward.function.down.weight
    assert weight.std().item() == pytest.approx(0.05 / math.sqrt(2 * DEPTH), rel=0.05)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("residual", ["plain", "none"])
@pytest.mark.parametrize("init", ["normal", "gpt2"])
def test_the_loss_starts_at_that_of_guessing(family: str, residual: str, init: str) -> None:
    changes = {"encoder": {}} if family == "encoder-decoder" else {"encoder": None}
    net = big({"kind": init}, family=family, residual={"kind": residual}, **changes)
    ids = torch.randint(0, 150, (4, 32), generator=torch.Generator().manual_seed(0))
    out = net(ids, **({"source": ids} if family == "encoder-decoder" else {}), labels=ids.roll(1, 0))
    assert out.loss_sum.item() / out.target_count.item() == pytest.approx(math.log(150), rel=0.05)


def test_a_generator_makes_the_weights_reproducible_and_leaves_the_global_one_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, same, other = network(seed=1), network(seed=1), network(seed=2)
    assert torch.equal(torch.get_rng_state(), before)
    for (name, a), b, c in zip(first.named_parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        if a.dim() > 1:
            assert not torch.equal(a, c), name


def test_without_a_generator_the_global_one_draws_the_weights() -> None:
    config = network().config
    torch.manual_seed(5)
    first = Transformer(config).head.weight
    torch.manual_seed(5)
    assert torch.equal(Transformer(config).head.weight, first)
    assert not torch.equal(Transformer(config).head.weight, first)


# --- dropout ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"dropout": 0.5},
        {"embedding": {"dropout": 0.5}},
        {"attention": {"num_heads": 4, "dropout": 0.5}},
        {"feed_forward": {"dropout": 0.5}},
        {"feed_forward": {"output_dropout": 0.5}},
    ],
    ids=["sublayers", "embedding", "attention-weights", "hidden", "feed-forward-output"],
)
def test_dropout_acts_in_training_only(changes: dict[str, Any]) -> None:
    plain, net = network(), network(**changes)
    expected = plain(ids_of())
    assert torch.equal(net(ids_of()), expected)
    assert torch.equal(plain.train()(ids_of()), expected)
    net.train()
    torch.manual_seed(0)
    first, second = net(ids_of()), net(ids_of())
    assert not torch.allclose(first, second, rtol=1e-2)
    assert not torch.allclose(first, expected, rtol=1e-2)


# --- arguments that cannot be meant -----------------------------------------------------------------------------------


def refusals() -> Iterator[Any]:
    """(family, changes of the configuration, arguments, what the message names)."""
    two, six = torch.tensor([2, 3]), ids_of()
    source = {"source": ids_of(2, 5)}
    both = {**source, "ids": six}
    three_rows = torch.tensor([1, 1, 1])

    def case(name: str, family: str, arguments: dict[str, Any], *words: str, **changes: Any) -> Any:
        return pytest.param(family, changes, arguments, words, id=name)

    yield case("id-too-large", "decoder", {"ids": torch.tensor([[1, V]])}, str(V), "ids")
    yield case("id-negative", "decoder", {"ids": torch.tensor([[1, -4]])}, "-4", str(V))
    yield case("encoder-id-too-large", "encoder", {"ids": torch.tensor([[1, 99]])}, "99", str(V))
    yield case("source-id-too-large", "encoder-decoder", {"ids": six, "source": six + 40}, "source", str(V))
    yield case("too-long", "decoder", {"ids": ids_of(1, 33)}, "33", "32")
    yield case("encoder-too-long", "encoder", {"ids": ids_of(1, 40)}, "40", "32")
    yield case("source-too-long", "encoder-decoder", {"ids": six, "source": ids_of(2, 41)}, "41", "32")
    yield case("source-missing", "encoder-decoder", {"ids": six}, "source")
    yield case("source-superfluous", "decoder", both, "source", "encoder")
    yield case("source-of-an-encoder", "encoder", both, "source")
    yield case("one-side-packed", "encoder-decoder", {**both, "documents": six * 0}, "source_documents")
    yield case("length-too-large", "decoder", {"ids": six, "lengths": torch.tensor([2, 7])}, "6", "7")
    yield case("length-negative", "encoder", {"ids": six, "lengths": torch.tensor([-1, 6])}, "6", "-1")
    yield case("source-length-too-large", "encoder-decoder", {**both, "source_lengths": torch.tensor([6, 5])}, "5", "6")
    yield case("ids-of-one-axis", "decoder", {"ids": six[0]}, "[6]")
    yield case("labels-of-another-shape", "decoder", {"ids": six, "labels": six[:, :3]}, "[2, 3]", "[2, 6]")
    features = {"kind": "features", "width": 4}
    yield case("features-as-ids", "encoder", {"ids": six}, "[2, 6]", input=features)
    yield case("features-of-another-width", "encoder", {"ids": randn(2, 6, 3)}, "3", "4", input=features)
    # arguments that do not fit each other
    yield case("rows-of-source", "encoder-decoder", {"ids": six, "source": ids_of(3, 5)}, "3", "2")
    yield case("rows-of-lengths", "decoder", {"ids": six, "lengths": three_rows}, "3", "2")
    yield case("rows-of-source-lengths", "encoder-decoder", {**both, "source_lengths": three_rows}, "3", "2")
    yield case("shape-of-documents", "decoder", {"ids": six, "documents": ids_of(2, 9)}, "9", "6")
    yield case(
        "shape-of-source-documents",
        "encoder-decoder",
        {**both, "documents": six * 0, "source_documents": ids_of(2, 9)},
        "9",
        "5",
    )
    # arguments that do not fit the model
    yield case("source-lengths-superfluous", "decoder", {"ids": six, "source_lengths": two}, "source_lengths")
    yield case("segments-superfluous", "decoder", {"ids": six, "segments": six * 0}, "segments")
    yield case(
        "segment-too-large", "decoder", {"ids": six, "segments": six * 0 + 2}, "2", embedding={"num_segments": 2}
    )
    yield case("labels-out-of-range", "decoder", {"ids": six, "labels": six + 90}, "labels", str(V))
    yield case("float-ids", "decoder", {"ids": six.double()}, "ids", "float")
    yield case("a-list", "decoder", {"ids": [[1, 2]]}, "ids", "tensor")
    yield case("bool-documents", "decoder", {"ids": six, "documents": six > 1}, "documents", "bool")
    yield case("no-token", "decoder", {"ids": six[:, :0]}, "ids", "no token")
    yield case("logits-misspelt", "decoder", {"ids": six, "logits": "lsat"}, "logits", "lsat")
    yield case("labels-without-a-head", "decoder", {"ids": six, "labels": six}, "head", head={"kind": "none"})


@pytest.mark.parametrize(("family", "changes", "arguments", "words"), list(refusals()))
def test_arguments_that_cannot_be_meant_are_refused_by_name(
    family: str, changes: dict[str, Any], arguments: dict[str, Any], words: tuple[str, ...]
) -> None:
    net = network(family, **changes).float()
    floats = {
        key: value.float() for key, value in arguments.items() if torch.is_tensor(value) and value.is_floating_point()
    }
    arguments = {**arguments, **floats}
    with pytest.raises(UsageError) as refused:
        net(**arguments)
    for word in words:
        assert word in str(refused.value)


def test_a_cache_of_other_rows_is_refused_with_both_numbers() -> None:
    net = network()
    with pytest.raises(UsageError, match=r"3 rows.* 2"):
        net(ids_of(2), cache=net.new_cache(3))


@pytest.mark.parametrize(("batch", "length"), [(0, 8), (2, 0), (2, -5), (2, 8.5)])
def test_a_cache_of_no_size_is_refused(batch: int, length: Any) -> None:
    with pytest.raises(UsageError, match="whole number"):
        network().new_cache(batch, length)


def test_a_cache_of_another_depth_is_refused_with_both_numbers() -> None:
    with pytest.raises(UsageError, match=r"3 layers.* 2"):
        network()(ids_of(2), cache=network(num_layers=3).new_cache(2))


def test_a_full_cache_is_refused_with_both_numbers_and_keeps_what_it_holds() -> None:
    net = network()
    cache = net.new_cache(2, 7)
    net(ids_of(2, 6), cache=cache)
    with pytest.raises(UsageError, match=r"7 tokens.* 8 "):
        net(ids_of(2, 2), cache=cache)
    expected = net(torch.cat([ids_of(2, 6), ids_of(2, 1)], 1))[:, -1:]
    close(net(ids_of(2, 1), cache=cache), expected)


def test_a_context_that_a_cache_fills_is_refused_with_both_numbers() -> None:
    net = network()
    cache = net.new_cache(1)
    net(ids_of(1, 30), cache=cache)
    with pytest.raises(UsageError, match=r"33.*32"):
        net(ids_of(1, 3), cache=cache)


def test_an_encoder_has_no_cache_and_a_decoder_no_encoder() -> None:
    with pytest.raises(UsageError, match="encoder"):
        network("encoder").new_cache(1)
    with pytest.raises(UsageError, match="encoder"):
        network("decoder").encode(ids_of())
    net = network()
    with pytest.raises(UsageError, match="documents"):
        net(ids_of(), documents=ids_of() * 0, cache=net.new_cache(2))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_network_without_a_vocabulary_size_is_refused(family: str) -> None:
    with pytest.raises(ConfigError, match="vocab_size"):
        network(family, vocab_size=None)


def test_a_head_without_a_vocabulary_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="vocab_size"):
        network("encoder", vocab_size=None, input={"kind": "features", "width": 4})


def test_padding_rules_reach_the_kernel() -> None:
    net = network("encoder")
    seen: list[Any] = []
    net.encoder.blocks[0].self_attention.function.kernel.register_forward_pre_hook(lambda _, args: seen.append(args[3]))
    net(ids_of(), lengths=torch.tensor([2, 6]))
    assert isinstance(seen[0].rule, Padding)
