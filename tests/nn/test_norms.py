"""Norms in whole networks: Peri-LN, OLMo-2's output norms and full-width QK-norm; the gradient of RMSNorm."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Olmo2Config, Olmo2ForCausalLM

from qkv.config.model import ModelConfig
from qkv.config.parts import RMSNormConfig
from qkv.nn import Transformer
from qkv.nn.build import Dims
from qkv.nn.mask import Causal
from qkv.nn.norm import RMSNorm

from .matrix import assert_equal, one_thread  # noqa: F401

V = 23


def network(**changes: Any) -> Transformer:
    tree: dict[str, Any] = {
        "vocab_size": V,
        "max_seq_len": 32,
        "d_model": 16,
        "num_layers": 2,
        "attention": {"num_heads": 4},
        "feed_forward": {"kind": "swiglu", "d_ff": 24},
        "init": {"kind": "normal", "std": 0.3},
    }
    generator = torch.Generator().manual_seed(0)
    net = Transformer(ModelConfig.model_validate(tree | changes), generator=generator).eval().requires_grad_(False)
    for name, parameter in net.named_parameters():
        if "norm" in name:
            parameter.normal_(1.0, 0.3, generator=generator)
    return net


def ids_of(rows: int, length: int) -> Tensor:
    return torch.randint(0, V, (rows, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_peri_ln_is_sandwich_with_a_normed_embedding_and_a_final_norm(kind: str) -> None:
    """Kim et al. 2025, arXiv 2502.02732, equation 3: x0 = N(embedding), x = x + N(F(N(x))), N of the last."""
    net = network(norm={"kind": kind, "placement": "sandwich"}, embedding={"norm": True}, position={"kind": "none"})
    ids = ids_of(2, 7)
    x = net.decoder_embedding.norm(net.decoder_embedding.input(ids))
    for block in net.decoder.blocks:
        attention, feed_forward = block.self_attention, block.feed_forward
        x = x + attention.norm_out(attention.function(attention.norm_in(x), mask=Causal()))
        x = x + feed_forward.norm_out(feed_forward.function(feed_forward.norm_in(x)))
    assert_equal(net(ids), net.head(net.decoder.final_norm(x)))


def olmo2(kv_heads: int) -> tuple[Transformer, Olmo2ForCausalLM]:
    """OLMo-2 with random weights, and the same network here."""
    config = Olmo2Config(
        vocab_size=V,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=32,
        pad_token_id=None,
        rms_norm_eps=1e-5,
        attn_implementation="eager",
    )
    net = network(
        attention={"num_heads": 4, "num_kv_heads": kv_heads, "qk_norm": "full"},
        norm={"kind": "rmsnorm", "placement": "output", "rounding": "after-weight", "eps": 1e-5},
        position={"kind": "rope", "theta": config.rope_parameters["rope_theta"]},
    )
    names = {"decoder_embedding.input": "model.embed_tokens", "decoder.final_norm": "model.norm", "head": "lm_head"}
    attention = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
    attention |= {"query_norm": "q_norm", "key_norm": "k_norm"}
    feed_forward = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    for layer in range(2):
        ours, theirs = f"decoder.blocks.{layer}", f"model.layers.{layer}"
        names[f"{ours}.self_attention.norm_out"] = f"{theirs}.post_attention_layernorm"
        names[f"{ours}.feed_forward.norm_out"] = f"{theirs}.post_feedforward_layernorm"
        names |= {f"{ours}.self_attention.function.{a}": f"{theirs}.self_attn.{b}" for a, b in attention.items()}
        names |= {f"{ours}.feed_forward.function.{a}": f"{theirs}.mlp.{b}" for a, b in feed_forward.items()}
    oracle = Olmo2ForCausalLM(config).eval().requires_grad_(False)
    weights = {f"{names[name.removesuffix('.weight')]}.weight": value for name, value in net.state_dict().items()}
    oracle.load_state_dict(weights)
    return net, oracle


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_output_norms_and_full_width_qk_norm_give_the_logits_of_olmo_2(kv_heads: int) -> None:
    net, oracle = olmo2(kv_heads)
    ids = ids_of(2, 11)
    assert_equal(net(ids), oracle(ids).logits)


def test_a_qk_norm_over_all_heads_is_not_one_per_head() -> None:
    full, per_head = (network(attention={"num_heads": 4, "qk_norm": kind}) for kind in ("full", "per-head"))
    weights = per_head.state_dict()
    wide = {name: value.repeat(4) for name, value in weights.items() if "query_norm" in name or "key_norm" in name}
    full.load_state_dict(weights | wide)
    ids = ids_of(2, 11)
    assert not torch.allclose(full(ids), per_head(ids), rtol=1e-2)


# --- the gradient of RMSNorm on a CPU, which is our own ---------------------------------------------------------------


def rms_norm(**options: Any) -> RMSNorm:
    return RMSNorm(RMSNormConfig(**options), Dims(12))


@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rounding", ["before-weight", "after-weight"])
def test_rms_norm_and_its_gradients_are_those_of_torch(
    rounding: Literal["before-weight", "after-weight"], dtype: torch.dtype, unit_offset: bool
) -> None:
    norm = rms_norm(rounding=rounding, unit_offset=unit_offset).to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        norm.weight.normal_(1.0, 0.3, generator=generator)
    x = torch.randn(3, 5, 12, generator=generator).to(dtype).requires_grad_()
    gradient = torch.randn(3, 5, 12, generator=generator).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    weight = norm.weight.to(wide) + (1.0 if unit_offset else 0.0)
    expected = F.rms_norm(x.to(wide), (12,), eps=norm.eps)
    if rounding == "before-weight":
        expected, weight = expected.to(dtype), weight.to(dtype)
    expected = (expected * weight).to(dtype)
    out = norm(x)
    rtol = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    with torch.no_grad():
        assert torch.equal(out, norm(x))  # trained and evaluated, it is one function
    torch.testing.assert_close(out, expected, rtol=rtol, atol=rtol)
    ours, theirs = (torch.autograd.grad(y, (x, norm.weight), gradient) for y in (out, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=4 * rtol)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of vmap, for an operation in place
def test_rms_norm_can_be_differentiated_again_and_in_batches_of_functions() -> None:
    norm, generator = rms_norm().double(), torch.Generator().manual_seed(0)
    x = torch.randn(2, 12, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(12, dtype=torch.float64, generator=generator, requires_grad=True)

    def weighted(x: Tensor, weight: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(norm, {"weight": weight}, x)
        return out

    assert torch.autograd.gradcheck(weighted, (x, weight))
    assert torch.autograd.gradgradcheck(weighted, (x, weight))
    each = torch.func.vmap(torch.func.grad(lambda row: norm(row).square().sum()))(x)
    alone = [torch.autograd.grad(norm(row).square().sum(), row)[0] for row in x]
    torch.testing.assert_close(each, torch.stack(alone))
