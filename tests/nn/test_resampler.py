"""Learned queries as an encoder: what they compute, and a decoder that reads what they become."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from transformers import IdeficsConfig
from transformers.models.idefics.perceiver import IdeficsPerceiverResampler

from qkv.config.errors import UsageError
from qkv.config.model import ModelConfig
from qkv.inspect.attention import read_attention
from qkv.nn import Transformer
from qkv.nn.resampler import Resampler

from .matrix import assert_equal, one_thread, set_kernel  # noqa: F401

V, WIDTH, QUERIES = 23, 5, 3
LENGTHS = torch.tensor([7, 2, 4])


def tree(**encoder: Any) -> dict[str, Any]:
    return {
        "family": "encoder-decoder",
        "vocab_size": V,
        "max_seq_len": 24,
        "d_model": 16,
        "num_layers": 2,
        "attention": {"num_heads": 4},
        "init": {"kind": "normal", "std": 0.3},
        "encoder": {
            "d_model": 32,
            "input": {"kind": "features", "width": WIDTH},
            "position": {"kind": "sinusoidal"},
            "num_queries": QUERIES,
        }
        | encoder,
    }


def network(**encoder: Any) -> Transformer:
    config = ModelConfig.model_validate(tree(**encoder))
    return Transformer(config, generator=torch.Generator().manual_seed(0)).eval()


def features(rows: int = 3, length: int = 7, seed: int = 0) -> Tensor:
    return torch.randn(rows, length, WIDTH, generator=torch.Generator().manual_seed(seed))


def ids_of(rows: int = 3, length: int = 6) -> Tensor:
    return torch.randint(0, V, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("per_head", [False, True], ids=["plain", "qk-norm"])
@torch.no_grad()
def test_it_computes_what_idefics_does(per_head: bool) -> None:
    """The one of `transformers`, whose layers have the same norms and matrices."""
    theirs_config = IdeficsConfig(
        vision_config={"embed_dim": 16}, perceiver_config={"qk_layer_norms_perceiver": per_head}
    )
    theirs = IdeficsPerceiverResampler(theirs_config, 16, 2, 4, 4, QUERIES).double().eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in theirs.parameters():
        parameter.normal_(0.0, 0.5, generator=generator)
    config = ModelConfig.model_validate(
        tree(
            d_model=16,
            position={"kind": "none"},
            norm={"kind": "layernorm"},
            attention={"num_heads": 4, "qk_norm": "per-head" if per_head else "none"},
            feed_forward={"kind": "relu", "d_ff": 64},
        )
    )
    assert config.encoder is not None
    ours = Resampler(config.encoder).double().eval()
    names = {
        "context_layer_norm": "self_attention.norm_input",
        "latents_layer_norm": "self_attention.norm_in",
        "q_proj": "self_attention.function.query",
        "k_proj": "self_attention.function.key",
        "v_proj": "self_attention.function.value",
        "output_proj": "self_attention.function.output",
        "q_layer_norm": "self_attention.function.query_norm",
        "k_layer_norm": "self_attention.function.key_norm",
        "ln": "feed_forward.norm_in",
        "fc": "feed_forward.function.up",
        "c_proj": "feed_forward.function.down",
    }
    state = {"queries.weight": theirs.latents}
    for name, value in theirs.state_dict().items():
        if name.startswith("layer_norm"):
            state[name.replace("layer_norm", "final_norm")] = value
        elif name.startswith("blocks"):
            _, layer, _, part, kind = name.split(".")
            state[f"blocks.{layer}.{names[part]}.{kind}"] = value
    ours.load_state_dict(state)
    x = torch.randn(2, 7, 16, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_the_memory_has_one_vector_per_query_whatever_the_input() -> None:
    net = network()
    for length in (1, 7, 20):
        assert net.encode(features(length=length)).shape == (3, QUERIES, 32)


@torch.no_grad()
def test_padding_of_the_input_reaches_nothing() -> None:
    net, x = network(), features()
    logits = net(ids_of(), source=x, source_lengths=LENGTHS)
    dirty = x.masked_fill((torch.arange(7) >= LENGTHS[:, None])[..., None], float("nan"))
    assert torch.equal(net(ids_of(), source=dirty, source_lengths=LENGTHS), logits)
    for row, length in enumerate(LENGTHS.tolist()):
        alone = net(ids_of()[row : row + 1], source=x[row : row + 1, :length])
        assert_equal(logits[row : row + 1], alone)


@torch.no_grad()
def test_without_positions_the_order_of_the_input_means_nothing() -> None:
    net, x = network(position={"kind": "none"}), features()
    assert_equal(net.encode(x.flip(1)), net.encode(x))
    assert (network().encode(x.flip(1)) - network().encode(x)).abs().max() > 1e-3


@torch.no_grad()
def test_cached_equals_the_full_forward() -> None:
    net = network()
    full = net(ids_of(), source=features(), source_lengths=LENGTHS)
    cache = net.new_cache(3)
    first = net(ids_of()[:, :4], source=features(), source_lengths=LENGTHS, cache=cache)
    assert_equal(torch.cat([first, *(net(step, cache=cache) for step in ids_of()[:, 4:].split(1, 1))], 1), full)


@torch.no_grad()
def test_every_kernel_gives_the_same_memory() -> None:
    net, found = network(), {}
    for kernel in ("math", "tiled", "sdpa"):
        set_kernel(net, kernel)  # type: ignore[arg-type]
        found[kernel] = net.encode(features(), LENGTHS)
    assert_equal(found["tiled"], found["math"])
    assert_equal(found["sdpa"], found["math"])


@pytest.mark.parametrize(
    "encoder",
    [
        {"norm": {"placement": "post"}},
        {"norm": {"placement": "sandwich"}, "residual": {"kind": "layerscale", "start": 0.5}},
        {"attention": {"num_heads": 4, "num_kv_heads": 2, "value_residual": "learned"}},
        {"attention": {"kind": "latent", "num_heads": 4}},
        {"share_layers": True},
    ],
    ids=["post", "sandwich-layerscale", "value-residual", "latent", "shared"],
)
def test_gradients_reach_every_parameter_of_the_encoder(encoder: dict[str, Any]) -> None:
    net = network(**encoder)
    net(ids_of(), source=features(), labels=ids_of()).loss_sum.backward()
    assert net.encoder is not None
    for name, parameter in net.encoder.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name


def test_the_queries_attend_to_themselves_and_the_input() -> None:
    layers = read_attention(network(), ids_of(1), stack="encoder", source=features(1))
    assert [layer.shape for layer in layers] == [(4, QUERIES, QUERIES + 7)] * 2


def test_packed_sources_are_refused() -> None:
    net, packed = network(), torch.zeros(3, 7, dtype=torch.int64)
    with pytest.raises(UsageError, match="learned queries"):
        net(ids_of(), source=features(), documents=packed[:, :6], source_documents=packed)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"encoder": {"num_queries": 3, "position": {"kind": "rope"}}}, "position.kind"),
        ({"encoder": {"num_queries": 3, "attention": {"window": 2}}}, "attention.window"),
        ({"encoder": {"num_queries": 3, "parallel": "one-norm"}}, "parallel"),
        ({"num_queries": 3}, "num_queries"),
        ({"decoder": {"num_queries": 3}}, "decoder.num_queries"),
        ({"family": "encoder", "num_queries": 3}, "family"),
    ],
)
def test_what_learned_queries_cannot_be_is_refused(changes: dict[str, Any], says: str) -> None:
    whole = {"family": "encoder-decoder", "vocab_size": V, "position": {"kind": "none"}} | changes
    with pytest.raises(ValidationError, match=f"contradict(.|\n)*{says}|{says}(.|\n)*contradict"):
        ModelConfig.model_validate(whole)
