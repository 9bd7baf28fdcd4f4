"""Sinks, gates and differential attention: what the published models compute, and what each is without its own part."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import DiffLlamaConfig, GptOssConfig, Qwen3NextConfig
from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention

from qkv.config.attention import DifferentialAttentionConfig, StandardAttentionConfig
from qkv.config.model import ModelConfig
from qkv.config.parts import RMSNormConfig
from qkv.inspect.attention import attention_weights
from qkv.nn import Attention, DifferentialAttention, Dims, Transformer, build
from qkv.nn.kernels import KernelName, use_kernel
from qkv.nn.mask import Causal, Window

from .matrix import one_thread  # noqa: F401

M, H, G, D, T = 16, 4, 2, 6, 7
SHAPE: dict[str, Any] = {"num_heads": H, "num_kv_heads": G, "head_dim": D}
PUBLISHED: dict[str, Any] = {
    "hidden_size": M,
    "num_attention_heads": H,
    "num_key_value_heads": G,
    "head_dim": D,
    "num_hidden_layers": 2,
    "attn_implementation": "eager",
}
PROJECTIONS = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "output"}
IN_FLOAT32: dict[str, Any] = {"rtol": 1e-5, "atol": 2e-6}
"""Some numbers the oracle computes in float32 whatever it is given."""
every_kernel = pytest.mark.parametrize("kernel", ["math", "tiled", "sdpa"])


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drawn(module: torch.nn.Module) -> Any:
    """In float64, every parameter random."""
    module = module.double().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.5, generator=generator)
    return module


def attention_of(layer: int = 0, kind: str = "standard", **options: Any) -> Any:
    config = (DifferentialAttentionConfig if kind == "differential" else StandardAttentionConfig)(**SHAPE | options)
    norm = RMSNormConfig(eps=1e-4, unit_offset=True)
    return drawn(build(config, Dims(M, layer=layer, norm=norm)))


def filled(ours: Attention, theirs: dict[str, Tensor]) -> Attention:
    """With these weights, by qkv's names, every one of them."""
    assert theirs.keys() == dict(ours.named_parameters()).keys()
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            assert parameter.shape == theirs[name].shape, name
            parameter.copy_(theirs[name])
    return ours


def renamed(oracle: torch.nn.Module, **names: str) -> dict[str, Tensor]:
    """The oracle's parameters under qkv's names."""
    names = PROJECTIONS | names
    parts = ((name.partition("."), parameter.detach()) for name, parameter in oracle.named_parameters())
    return {names.get(first, first) + dot + rest: parameter for (first, dot, rest), parameter in parts}


def ask(oracle: torch.nn.Module, x: Tensor, window: int | None = None, angles: int = D) -> Tensor:
    """What the oracle makes of x under a causal mask, with no turning by position."""
    seen = torch.ones(T, T, dtype=torch.bool).tril()
    if window is not None:
        seen = seen.triu(1 - window)
    hidden = torch.zeros(T, T, dtype=x.dtype).masked_fill(~seen, float("-inf"))[None, None]
    one = torch.ones(1, T, angles, dtype=x.dtype)
    return oracle(x, position_embeddings=(one, 0 * one), attention_mask=hidden)[0]


# --- sinks ------------------------------------------------------------------------------------------------------------


@every_kernel
@pytest.mark.parametrize("window", [None, 3])
@torch.no_grad()
def test_sinks_are_those_of_gpt_oss(kernel: KernelName, window: int | None) -> None:
    config = GptOssConfig(**PUBLISHED, attention_bias=True, layer_types=["full_attention"] * 2)
    oracle = drawn(GptOssAttention(config, 0))
    theirs = renamed(oracle)
    ours = filled(attention_of(sinks=True, bias=True), theirs | {"sinks.weight": theirs.pop("sinks")})
    use_kernel(ours, kernel)
    x = randn(2, T, M)
    mask = Causal() if window is None else Causal() & Window(window)
    torch.testing.assert_close(ours(x, mask=mask), ask(oracle, x, window, D // 2), rtol=1e-9, atol=1e-9)


def network(**attention: Any) -> Transformer:
    tree = {"vocab_size": 23, "d_model": M, "num_layers": 3, "attention": SHAPE | attention}
    tree["init"] = {"kind": "normal", "std": 0.3}
    return Transformer(ModelConfig.model_validate(tree), generator=torch.Generator().manual_seed(0)).eval()


def test_sinks_start_as_a_key_at_a_right_angle_and_are_learned() -> None:
    net = network(sinks=True)
    ids = torch.arange(10)[None]
    net(ids, labels=ids).loss_sum.backward()
    for layer, weights_HTS in enumerate(attention_weights(net, ids)):
        sinks = net.decoder.blocks[layer].attention("self").sinks.weight
        assert sinks.tolist() == [0.0] * H
        assert (sinks.grad != 0).all()
        assert weights_HTS.sum(-1).max() < 1


# --- gates ------------------------------------------------------------------------------------------------------------


@every_kernel
@torch.no_grad()
def test_a_gate_is_that_of_qwen3_next(kernel: KernelName) -> None:
    oracle = drawn(Qwen3NextAttention(Qwen3NextConfig(**PUBLISHED, attention_bias=True, rms_norm_eps=1e-4), 0))
    theirs = renamed(oracle, q_norm="query_norm", k_norm="key_norm")
    for part in ("weight", "bias"):  # of each head, the query and then the gate
        both = theirs[f"query.{part}"].unflatten(0, (H, 2, D))
        theirs |= {f"query.{part}": both[:, 0].flatten(0, 1), f"gate.{part}": both[:, 1].flatten(0, 1)}
    ours = filled(attention_of(gate="elementwise", bias=True, qk_norm="per-head"), theirs)
    use_kernel(ours, kernel)
    x = randn(2, T, M)
    torch.testing.assert_close(ours(x, mask=Causal()), ask(oracle, x), **IN_FLOAT32)


def without(part: str, attention: Attention) -> Attention:
    plain = copy.deepcopy(attention)
    setattr(plain, part, None)
    return plain


@pytest.mark.parametrize("gate", ["elementwise", "per-head"])
@pytest.mark.parametrize("kind", ["standard", "differential"])
@torch.no_grad()
def test_a_gate_of_zeros_halves_and_an_open_one_is_none(gate: str, kind: str) -> None:
    attention = attention_of(gate=gate, kind=kind, bias="qkv")
    x, plain = randn(2, T, M), without("gate", attention)
    attention.gate.weight.zero_()
    attention.gate.bias.zero_()
    assert torch.equal(attention(x), plain(x) / 2)
    attention.gate.bias.fill_(1e3)
    assert torch.equal(attention(x), plain(x))


@torch.no_grad()
def test_a_gate_per_head_is_one_number_for_the_channels_of_a_head() -> None:
    attention = attention_of(gate="per-head", bias=True)
    attention.gate.weight.zero_()
    attention.gate.bias.copy_(torch.tensor([1e3, -1e3, 1e3, -1e3]))
    x, plain = randn(2, T, M), without("gate", attention)
    plain.output.weight.unflatten(1, (H, D))[:, 1::2] = 0
    torch.testing.assert_close(attention(x), plain(x), rtol=1e-12, atol=1e-12)


# --- differential attention -------------------------------------------------------------------------------------------


@every_kernel
@pytest.mark.parametrize("layer", [0, 3])
@torch.no_grad()
def test_differential_attention_is_that_of_diffllama(kernel: KernelName, layer: int) -> None:
    oracle = drawn(DiffLlamaAttention(DiffLlamaConfig(**PUBLISHED, rms_norm_eps=1e-4), layer))
    ours = filled(attention_of(layer, "differential"), renamed(oracle))
    use_kernel(ours, kernel)
    x = randn(2, T, M)
    torch.testing.assert_close(ours(x, mask=Causal()), ask(oracle, x), **IN_FLOAT32)


@torch.no_grad()
def test_with_a_lambda_of_zero_the_first_half_of_the_heads_attends() -> None:
    ours = attention_of(kind="differential")
    for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
        getattr(ours, name).zero_()
    ours.first_lambda = torch.zeros(())
    assert ours.factor() == 0
    x = randn(1, T, M)
    found_HTD = (ours.query(x), ours.key(x), ours.value(x))
    q, k, v = (part[0].unflatten(-1, (-1, D)).transpose(0, 1) for part in found_HTD)
    values_TE = torch.cat((v[0], v[1]), dim=-1)
    heads = [(q[j] @ k[0].T / math.sqrt(D)).softmax(-1) @ values_TE for j in range(H // 2)]
    normed = [head / (head.square().mean(-1, keepdim=True) + 1e-4).sqrt() for head in heads]
    torch.testing.assert_close(ours(x)[0], ours.output(torch.cat(normed, dim=-1)), rtol=1e-10, atol=1e-10)


def test_lambda_starts_near_that_of_its_layer() -> None:
    net = network(kind="differential", head_dim=64)
    for layer, block in enumerate(net.decoder.blocks):
        attention = block.attention("self")
        assert isinstance(attention, DifferentialAttention)
        assert attention.factor().item() == pytest.approx(0.8 - 0.6 * math.exp(-0.3 * layer), abs=0.5)
        vectors = torch.cat([getattr(attention, f"lambda_{name}").detach() for name in ("q1", "k1", "q2", "k2")])
        assert float(vectors.std()) == pytest.approx(0.1, rel=0.2)


def test_layers_of_any_lambda_are_one_graph() -> None:
    torch._dynamo.reset()
    counter, net = CompileCounterWithBackend("eager"), network(kind="differential")
    fast, ids = copy.deepcopy(net), torch.arange(10)[None]
    for block in fast.decoder.blocks:
        block.compile(backend=counter)
    for run in (net, fast):
        run(ids, labels=ids).loss_sum.backward()
    for (name, parameter), other in zip(net.named_parameters(), fast.parameters(), strict=True):
        assert parameter.grad.abs().max() > 0, name
        torch.testing.assert_close(other.grad, parameter.grad, rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("heads", [{"num_kv_heads": 1}, {"num_heads": 3, "num_kv_heads": 3}])
def test_heads_without_a_partner_are_refused(heads: dict[str, int]) -> None:
    with pytest.raises(ValidationError, match=r"attention\.kind.*attention\.num_kv_heads.*pairs"):
        network(kind="differential", **heads)
