"""Multi-head latent attention: both of its forms, what a cache keeps, and DeepSeek-V3's numbers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from qkv.config.attention import LatentAttentionConfig
from qkv.config.model import ModelConfig
from qkv.config.positions import RopeConfig
from qkv.nn import Dims, LatentAttention, Transformer, build, use_kernel
from qkv.nn.cache import LayerCache
from qkv.nn.mask import Causal

from .matrix import one_thread  # noqa: F401
from .parity_weights import randomise

V, M, H = 23, 16, 4
RANKS = {"kv_rank": 10, "nope_dim": 6, "rope_dim": 4, "value_dim": 5}
YARN = {"kind": "yarn", "factor": 40.0, "original_max_seq_len": 16, "mscale": 0.7, "mscale_all_dim": 1.3}


@pytest.fixture(autouse=True)
def _without_gradients(request: pytest.FixtureRequest) -> Iterator[None]:
    with torch.set_grad_enabled("gradient" in request.node.name):
        yield


def network(attention: dict[str, Any] | None = None, **changes: Any) -> Transformer:
    tree: dict[str, Any] = {
        "vocab_size": V,
        "max_seq_len": 64,
        "d_model": M,
        "num_layers": 2,
        "attention": {"kind": "latent", "num_heads": H, **RANKS, **(attention or {})},
        "init": {"kind": "normal", "std": 0.4},
    }
    generator = torch.Generator().manual_seed(0)
    return Transformer(ModelConfig.model_validate(tree | changes), generator=generator).double().eval()


def ids_of(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, V, (rows, length), generator=torch.Generator().manual_seed(seed))


def equal(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


# --- the function -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scaling", [None, YARN], ids=["plain", "yarn"])
@pytest.mark.parametrize("q_rank", [None, 7], ids=["no-q-rank", "q-rank"])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_it_is_that_of_deepseek_v3(q_rank: int | None, layout: str, scaling: dict[str, Any] | None) -> None:
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
    if scaling is not None:
        parameters |= {**scaling, "rope_type": "yarn", "original_max_position_embeddings": 16}
        del parameters["kind"], parameters["original_max_seq_len"]
    theirs = DeepseekV3Config(
        hidden_size=M,
        num_attention_heads=H,
        num_key_value_heads=H,
        q_lora_rank=q_rank,
        kv_lora_rank=RANKS["kv_rank"],
        qk_nope_head_dim=RANKS["nope_dim"],
        qk_rope_head_dim=RANKS["rope_dim"],
        v_head_dim=RANKS["value_dim"],
        rope_interleave=layout == "interleaved",
        rope_parameters=parameters,
        attn_implementation="eager",
    )
    oracle = randomise(DeepseekV3Attention(theirs, layer_idx=0)).eval()
    ours = LatentAttention(LatentAttentionConfig(num_heads=H, q_rank=q_rank, **RANKS), Dims(M)).eval()
    weights = {name: weight.detach() for name, weight in oracle.named_parameters()}
    up = weights.pop("kv_b_proj.weight").unflatten(0, (H, -1)).split((RANKS["nope_dim"], RANKS["value_dim"]), 1)
    names = {
        "q_proj": "query_up",
        "q_a_proj": "query_down",
        "q_a_layernorm": "query_norm",
        "q_b_proj": "query_up",
        "kv_a_proj_with_mqa": "latent_down",
        "kv_a_layernorm": "latent_norm",
        "o_proj": "output",
    }
    renamed = {f"{names[name.removesuffix('.weight')]}.weight": weight for name, weight in weights.items()}
    ours.load_state_dict(renamed | {"key_up.weight": up[0].flatten(0, 1), "value_up.weight": up[1].flatten(0, 1)})
    x, positions = torch.randn(2, 21, M, generator=torch.Generator().manual_seed(1)), torch.arange(21)[None]
    hidden = torch.full((21, 21), float("-inf")).triu(1)[None, None]
    expected = oracle(x, DeepseekV3RotaryEmbedding(theirs)(x, positions), hidden)[0]
    rope = build(RopeConfig.model_validate({"layout": layout, "scaling": scaling}), Dims(RANKS["rope_dim"]))
    actual = ours(x, mask=Causal(), phases=rope.phases(positions, torch.float32))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("kernel", ["math", "tiled", "sdpa"])
@pytest.mark.parametrize("position", ["rope", "alibi", "none"])
def test_the_absorbed_form_equals_the_expanded_one(kernel: str, position: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net, ids = network({"q_rank": 7}, position={"kind": position}), ids_of(2, 9)
    use_kernel(net, kernel)  # type: ignore[arg-type]
    expanded = net(ids)
    monkeypatch.setattr(LatentAttention, "_expanded", LatentAttention._absorbed)
    equal(net(ids), expanded)


def test_one_token_is_read_absorbed_and_a_prompt_expanded() -> None:
    net, shapes = network(), []
    net.decoder.blocks[0].attention("self").kernel.register_forward_pre_hook(
        lambda _, args: shapes.append((tuple(args[1].shape), tuple(args[2].shape)))
    )
    cache = net.new_cache(2)
    net(ids_of(2, 5), cache=cache)
    net(ids_of(2, 1), cache=cache)
    net(ids_of(2, 2), cache=cache)
    assert shapes[0] == ((2, H, 5, 10), (2, H, 5, 5))  # nope + rope, value
    assert shapes[1] == ((2, 1, 6, 14), (2, 1, 6, 10))  # kv_rank + rope, kv_rank
    assert shapes[2] == ((2, H, 8, 10), (2, H, 8, 5))


def test_scores_of_two_positions_depend_on_their_distance_only() -> None:
    net, ids = network(), ids_of(1, 8)
    equal(net(ids, positions=torch.arange(8)[None] + 9), net(ids))
    assert float((net(ids, positions=2 * torch.arange(8)[None]) - net(ids)).abs().max()) > 0.01


def test_every_parameter_gets_a_gradient() -> None:
    net = network({"q_rank": 7}, family="encoder-decoder")
    net(ids_of(2, 6), source=ids_of(2, 4), labels=ids_of(2, 6, seed=1)).loss_sum.backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert bool((parameter.grad != 0).any()), name


# --- the cache --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [None, 30], ids=["growing", "static"])
@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
def test_any_chunks_of_ragged_rows_equal_the_full_forward(capacity: int | None, family: str) -> None:
    net, prompt, lengths = network(family=family), ids_of(3, 6), torch.tensor([6, 2, 4])
    source = {"source": ids_of(3, 5, seed=2)} if family == "encoder-decoder" else {}
    cache = net.new_cache(3, capacity)
    net(prompt, **source, lengths=lengths, cache=cache)
    cache.select([2, 0, 1])
    parts = [ids_of(3, count, seed=3 + count) for count in (1, 3, 1)]
    steps = torch.cat([net(part, cache=cache) for part in parts], 1)
    for row, old in enumerate([2, 0, 1]):
        whole = torch.cat([prompt[old, : lengths[old]], *(part[row] for part in parts)])[None]
        alone = {name: value[old : old + 1] for name, value in source.items()}
        equal(steps[row], net(whole, **alone)[0, -5:])


@pytest.mark.parametrize("heads", [1, 4])
def test_a_cache_keeps_the_latent_vectors_and_nothing_of_any_head(heads: int) -> None:
    net = network({"num_heads": heads}, position={"kind": "none"})
    cache, inputs = net.new_cache(2), []
    attention = net.decoder.blocks[0].attention("self")
    attention.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    net(ids_of(2, 5), cache=cache)
    (layer, _) = cache.layers
    assert isinstance(layer, LayerCache)
    assert layer.k_BGSD.shape[1::2] == (1, 14)
    assert layer.v_BGSD.numel() == 0
    c, r = attention.latent_down(inputs[0]).split((10, 4), -1)
    equal(layer.k_BGSD[:, 0, :5], torch.cat((attention.latent_norm(c), r), -1))


def test_compiled_decoding_has_a_graph_for_prompts_and_one_for_single_tokens() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    net = network(num_layers=1).float()
    fast = copy.deepcopy(net)
    fast.decoder.blocks[0].compile(backend=counter, fullgraph=True)
    logits = []
    for run in (fast, net):
        cache = run.new_cache(2, 20)
        steps = [run(ids_of(2, 1, seed), cache=cache) for seed in range(4)]
        logits.append(torch.cat([run(ids_of(2, 6), cache=cache), *steps, run(ids_of(2, 1), cache=cache)], 1))
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
    assert counter.frame_count <= 3
    torch._dynamo.reset()


# --- the configuration ------------------------------------------------------------------------------------------------


def test_sizes_not_given_are_those_of_deepseek_v2() -> None:
    config = LatentAttentionConfig(num_heads=4).complete(64)
    assert (config.nope_dim, config.rope_dim, config.value_dim, config.kv_rank) == (16, 8, 16, 64)
    assert config.complete(64) == config


@pytest.mark.parametrize(
    ("attention", "position", "named"),
    [
        ({"num_kv_heads": 2}, {}, ("attention.kind", "attention.num_kv_heads")),
        ({}, {"fraction": 0.5}, ("position.fraction", "attention.kind")),
        ({"rope_dim": 3}, {}, ("position.fraction", "attention.rope_dim")),
        ({"num_heads": 3, "nope_dim": None}, {}, ("d_model", "attention.num_heads")),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(attention: dict[str, Any], position: dict[str, Any], named: tuple[str, str]) -> None:
    with pytest.raises(ValidationError, match="contradict") as refused:
        network(attention, position={"kind": "rope", **position})
    for key in named:
        assert f"`{key}`" in str(refused.value)
