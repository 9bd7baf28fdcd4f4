"""ALiBi: MPT's slopes, BLOOM's logits, and a bias that is the distance alone, whatever is cached or hidden."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BloomConfig, BloomForCausalLM
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from qkv.config.errors import UsageError
from qkv.config.model import ModelConfig
from qkv.config.positions import AlibiConfig
from qkv.nn import Dims, Transformer, build
from qkv.nn.kernels import KernelName, use_kernel
from qkv.nn.mask import Causal, Documents, Mask
from qkv.nn.score import Scoring

from .matrix import assert_equal, one_thread  # noqa: F401

V = 23
HEADS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20, 71)


def network(family: str = "decoder", **changes: Any) -> Transformer:
    tree: dict[str, Any] = {
        "family": family,
        "vocab_size": V,
        "max_seq_len": 64,
        "d_model": 24,
        "num_layers": 2,
        "attention": {"num_heads": 6, "num_kv_heads": 2},
        "position": {"kind": "alibi"},
        "init": {"kind": "normal", "std": 0.3},
    }
    generator = torch.Generator().manual_seed(0)
    return Transformer(ModelConfig.model_validate(tree | changes), generator=generator).eval().requires_grad_(False)


def ids_of(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, V, (rows, length), generator=torch.Generator().manual_seed(seed))


def alibi(heads: int) -> Any:
    return build(AlibiConfig(), Dims(8, num_heads=heads))


def bias_of(heads: int, mask: Mask) -> Tensor:
    """[B, H, T, S]."""
    return alibi(heads).phases(mask.q_slots[None], torch.float32).bias.tensor(mask)


def square(length: int) -> Mask:
    return Mask.square(None, length, torch.device("cpu"))


# --- the numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", HEADS)
def test_the_bias_of_the_last_query_is_that_of_mpt(heads: int) -> None:
    expected = build_mpt_alibi_tensor(heads, 10)  # [H, 1, S], of the last query
    torch.testing.assert_close(bias_of(heads, square(10))[0, :, -1:], expected, rtol=1e-6, atol=1e-9)


def test_slopes_are_those_of_the_paper() -> None:
    slopes = alibi(8).slopes(torch.device("cpu"), torch.float64)
    assert slopes.tolist() == [2.0**-i for i in range(1, 9)]
    tail = alibi(12).slopes(torch.device("cpu"), torch.float64)[8:]
    assert tail.tolist() == pytest.approx([2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5])


def test_a_score_loses_its_heads_slope_for_each_slot_of_distance_to_either_side() -> None:
    bias, m = bias_of(3, square(9))[0], alibi(3).slopes(torch.device("cpu"))
    torch.testing.assert_close(bias[:, 4, 5:] - bias[:, 4, 4:-1], -m[:, None].expand(3, 4))
    torch.testing.assert_close(bias[:, 4, 1:5] - bias[:, 4, :4], m[:, None].expand(3, 4))
    assert not bias.diagonal(dim1=1, dim2=2).any()
    assert torch.equal(bias, bias.transpose(1, 2))
    part = alibi(3).phases(torch.arange(9)[None], torch.float32).bias
    assert torch.equal(part.tile(square(9), slice(3, 6), slice(2, 9))[0], bias[:, 3:6, 2:])
    assert torch.equal(part.head(2).tensor(square(9))[0], bias[2:])


def test_the_bias_of_tokens_behind_a_cache_is_that_of_their_slots() -> None:
    whole = bias_of(3, square(20))
    assert torch.equal(bias_of(3, Mask(None, torch.tensor([18, 19]), 20, aligned=True)), whole[:, :, 18:])
    uneven = alibi(3).phases(torch.zeros(2, 1), torch.float32).bias
    by_row = uneven.tensor(Mask(None, torch.tensor([[19], [4]]), 20, aligned=False))
    assert torch.equal(by_row[:, :, 0], whole[0][:, [19, 4]].transpose(0, 1))


def test_nothing_is_learned_and_nothing_is_saved() -> None:
    assert list(alibi(4).parameters()) == []
    assert alibi(4).state_dict() == {}


# --- in networks ------------------------------------------------------------------------------------------------------


def bloom_weights(oracle: BloomForCausalLM, heads: int) -> dict[str, Tensor]:
    """BLOOM's weights under our names; its rows of q, k and v stand head by head."""
    theirs = oracle.state_dict()
    names = {"transformer.word_embeddings": "decoder_embedding.input", "transformer.ln_f": "decoder.final_norm"}
    names["transformer.word_embeddings_layernorm"] = "decoder_embedding.norm"
    parts = {
        "input_layernorm": "self_attention.norm_in",
        "self_attention.dense": "self_attention.function.output",
        "post_attention_layernorm": "feed_forward.norm_in",
        "mlp.dense_h_to_4h": "feed_forward.function.up",
        "mlp.dense_4h_to_h": "feed_forward.function.down",
    }
    ours = {}
    for layer in range(oracle.config.n_layer):
        at, to = f"transformer.h.{layer}", f"decoder.blocks.{layer}"
        names |= {f"{at}.{a}": f"{to}.{b}" for a, b in parts.items()}
        for end in ("weight", "bias"):
            rows = theirs[f"{at}.self_attention.query_key_value.{end}"].unflatten(0, (heads, 3, -1))
            for index, name in enumerate(("query", "key", "value")):
                ours[f"{to}.self_attention.function.{name}.{end}"] = rows[:, index].flatten(0, 1)
    for name, value in theirs.items():
        owner, _, end = name.rpartition(".")
        if owner in names:
            ours[f"{names[owner]}.{end}"] = value
    return ours


@pytest.mark.parametrize("heads", [4, 6])
@pytest.mark.parametrize("kernel", ["math", "sdpa", "tiled"])
def test_logits_are_those_of_bloom(heads: int, kernel: KernelName) -> None:
    config = BloomConfig(vocab_size=V, hidden_size=24, n_layer=2, n_head=heads, initializer_range=0.3)
    torch.manual_seed(0)
    oracle = BloomForCausalLM(config).eval()
    net = network(
        num_layers=2,
        attention={"num_heads": heads, "bias": True},
        feed_forward={"kind": "gelu_tanh", "bias": True},
        norm={"kind": "layernorm", "eps": config.layer_norm_epsilon},
        embedding={"norm": True},
        tie_embeddings="head",
    )
    missing = net.load_state_dict(bloom_weights(oracle, heads), strict=False)
    assert (missing.missing_keys, missing.unexpected_keys) == (["head.weight"], [])
    use_kernel(net, kernel)
    ids = ids_of(2, 17)
    with torch.no_grad():
        assert_equal(net(ids), oracle(ids).logits)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("capacity", [None, 40])
def test_cached_in_chunks_equals_the_full_forward(window: int | None, capacity: int | None) -> None:
    net = network(attention={"num_heads": 6, "num_kv_heads": 2, "window": window})
    ids = ids_of(2, 30)
    cache = net.new_cache(2, capacity)
    logits = torch.cat([net(ids[:, a:b], cache=cache) for a, b in ((0, 7), (7, 8), (8, 27), (27, 30))], 1)
    assert_equal(logits, net(ids))


@pytest.mark.parametrize("kernel", ["math", "sdpa", "tiled"])
@pytest.mark.parametrize("family", ["decoder", "encoder"])
def test_a_packed_document_equals_the_document_alone(family: str, kernel: KernelName) -> None:
    net = network(family, attention={"num_heads": 5, "head_dim": 4, "window": 6})
    use_kernel(net, kernel)
    first, second = ids_of(1, 7), ids_of(1, 9, seed=1)
    packed = net(torch.cat((first, second), 1), documents=torch.tensor([[0] * 7 + [1] * 9]))
    assert_equal(packed[:, :7], net(first))
    assert_equal(packed[:, 7:], net(second))


def test_every_kernel_adds_it_under_every_mask() -> None:
    documents = torch.tensor([[0] * 5 + [1] * 6])
    for rule in (None, Causal(), Causal() & Documents(documents, documents)):
        mask = Mask.square(rule, 11, torch.device("cpu"))
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(2, heads, 11, 8, generator=generator) for heads in (6, 2, 2))
        scores = q.unflatten(1, (2, 3)) @ k.unsqueeze(2).transpose(-1, -2) * 0.4
        scores = scores.flatten(1, 2) + bias_of(6, mask)
        weights = scores.masked_fill(~mask.tensor(), float("-inf")).softmax(-1)
        expected = (weights.unflatten(1, (2, 3)) @ v.unsqueeze(2)).flatten(1, 2)
        net = torch.nn.ModuleList([network().decoder.blocks[0].attention("self")])
        for kernel in ("math", "sdpa", "tiled"):
            use_kernel(net, kernel)  # type: ignore[arg-type]
            bias = alibi(6).phases(torch.arange(11)[None], torch.float32).bias
            torch.testing.assert_close(
                net[0].kernel(q, k, v, mask, Scoring(0.4, bias=bias)), expected, rtol=1e-5, atol=1e-6
            )


def test_without_it_a_decoder_of_one_layer_reads_a_set() -> None:
    ids = ids_of(1, 8)
    swapped = ids[:, [1, 0, *range(2, 8)]]
    net, plain = network(num_layers=1), network(num_layers=1, position={"kind": "none"})
    assert_equal(plain(swapped)[:, -1:], plain(ids)[:, -1:])
    assert not torch.allclose(net(swapped)[:, -1], net(ids)[:, -1], rtol=1e-3)


def test_a_source_has_no_distance() -> None:
    net = network("encoder-decoder")
    received: list[Any] = []
    for kind in ("self", "cross"):
        kernel = net.decoder.blocks[0].attention(kind).kernel
        kernel.register_forward_pre_hook(lambda _, args: received.append(args[4].bias))
    net(ids_of(2, 9), source=ids_of(2, 7, seed=1))
    assert received[0] is not None
    assert received[1] is None


def test_layers_may_have_positions_of_different_kinds() -> None:
    kinds = ({}, {"position": {"kind": "rope"}}, {"position": {"kind": "none"}}, {"position": {"kind": "relative"}})
    net = network(num_layers=5, layers=list(kinds))
    assert [type(part).__name__ for part in net.decoder.positions] == ["Alibi", "Rope", "NoPosition", "Relative"]
    assert net.decoder.position_of_layer == [0, 1, 2, 3, 0]
    ids, cache = ids_of(2, 21), net.new_cache(2)
    assert_equal(torch.cat([net(ids[:, :9], cache=cache), net(ids[:, 9:], cache=cache)], 1), net(ids))


@pytest.mark.parametrize("family", ["decoder", "encoder"])
def test_given_positions_are_refused_for_they_would_change_nothing(family: str) -> None:
    with pytest.raises(UsageError, match="positions"):
        network(family)(ids_of(2, 9), positions=torch.arange(9)[None])


def test_a_bfloat16_network_tells_near_keys_apart_far_into_a_text() -> None:
    last = Mask(None, torch.tensor([4000]), 4001, aligned=True)
    bias = alibi(8).phases(torch.tensor([[4000]]), torch.bfloat16).bias.tensor(last)
    assert bias.dtype == torch.float32
    torch.testing.assert_close(bias[0, 0, 0, -3:], torch.tensor([-1.0, -0.5, 0.0]))
