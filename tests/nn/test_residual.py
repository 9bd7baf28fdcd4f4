"""Residual streams that carry one hidden vector: what they compute, and how their networks start."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from qkv.config.model import ModelConfig
from qkv.nn import Transformer
from qkv.nn.build import apply
from qkv.nn.mask import Causal

from .matrix import assert_equal, one_thread  # noqa: F401

V = 23
SCALED = ("value", "output", "gate", "up", "down")
"""What DeepNorm's beta multiplies."""


def network(kind: str, family: str = "decoder", **changes: Any) -> Transformer:
    tree: dict[str, Any] = {
        "family": family,
        "vocab_size": V,
        "max_seq_len": 32,
        "d_model": 16,
        "num_layers": 2,
        "attention": {"num_heads": 4, "num_kv_heads": 2},
        "norm": {"placement": "post" if kind == "deepnorm" else "pre"},
        "position": {"kind": "none"},
        "init": {"kind": "normal", "std": 0.3},
        "residual": {"kind": kind},
    }
    config = ModelConfig.model_validate(tree | changes)
    return Transformer(config, generator=torch.Generator().manual_seed(0)).eval()


def hidden(length: int = 5) -> Tensor:
    return torch.randn(2, length, 16, generator=torch.Generator().manual_seed(1))


def randomise_scales(net: Transformer) -> None:
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if ".site." in name:
                parameter.normal_(generator=generator)


# --- ReZero, LayerScale -----------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_rezero_stack_is_the_identity_at_first() -> None:
    net = network("rezero", "encoder-decoder")
    assert net.encoder is not None
    assert net.decoder is not None
    x, memory = hidden(5), hidden(7)
    assert torch.equal(net.encoder(x), net.encoder.final_norm(x))
    assert torch.equal(net.decoder(x, memory_BSN=memory), net.decoder.final_norm(x))


@pytest.mark.parametrize(("kind", "shape", "first"), [("rezero", (), 0.0), ("layerscale", (16,), 0.25)])
@torch.no_grad()
def test_each_sublayer_has_a_scale_of_its_own(kind: str, shape: tuple[int, ...], first: float) -> None:
    net = network(kind, residual={"kind": kind} | ({"start": first} if first else {}))
    scales = [parameter for name, parameter in net.named_parameters() if ".site." in name]
    assert len(scales) == 4
    assert all(scale.shape == shape and (scale == first).all() for scale in scales)
    randomise_scales(net)
    x = expected = hidden()
    for block in net.decoder.blocks:
        for part, given in ((block.self_attention, {"mask": Causal()}), (block.feed_forward, {})):
            expected = expected + part.site.write.scale * part.function(part.norm_in(expected), **given)
    assert_equal(net.decoder(x), net.decoder.final_norm(expected))


@pytest.mark.parametrize("kind", ["rezero", "layerscale"])
@torch.no_grad()
def test_with_scales_of_one_a_network_of_the_same_seed_is_the_plain_one(kind: str) -> None:
    net, plain = network(kind), network("plain")
    for name, parameter in net.named_parameters():
        if ".site." in name:
            parameter.fill_(1.0)
    assert torch.equal(net.decoder(hidden()), plain.decoder(hidden()))


@pytest.mark.parametrize("kind", ["rezero", "layerscale", "deepnorm"])
def test_gradients_reach_every_parameter(kind: str) -> None:
    net = network(kind, "encoder-decoder")
    randomise_scales(net)
    ids = torch.randint(0, V, (2, 6), generator=torch.Generator().manual_seed(3))
    net(ids, source=ids, labels=ids).loss_sum.backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name


# --- DeepNorm ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_deepnorm_of_alpha_one_and_beta_one_is_ordinary_post_norm() -> None:
    net = network("deepnorm", residual={"kind": "deepnorm", "alpha": 1, "beta": 1})
    plain = network("plain", norm={"placement": "post"})
    assert torch.equal(net.decoder(hidden()), plain.decoder(hidden()))


@pytest.mark.parametrize("parallel", ["none", "one-norm"])
@torch.no_grad()
def test_deepnorm_normalises_a_multiple_of_the_stream_and_the_output(parallel: str) -> None:
    net = network("deepnorm", residual={"kind": "deepnorm", "alpha": 3}, parallel=parallel)
    x = expected = hidden()
    for block in net.decoder.blocks:
        if parallel == "none":
            attended = block.self_attention.function(expected, mask=Causal())
            expected = block.self_attention.norm_stream(3 * expected + attended)
            part, out = block.feed_forward, block.feed_forward.function(expected)
        else:
            part = block.parallel
            out = part.attention(expected, mask=Causal()) + part.feed_forward(expected)
        expected = apply(part.norm_stream, 3 * expected + out)
    assert_equal(net.decoder(x), expected)


@pytest.mark.parametrize("family", ["decoder", "encoder"])
def test_the_constants_of_one_stack_are_the_papers(family: str) -> None:
    config = network("deepnorm", family, num_layers=18).config.residual
    assert config.alpha == pytest.approx(36**0.25)
    assert config.beta == pytest.approx(144**-0.25)


def test_the_constants_of_two_stacks_are_the_papers() -> None:
    net = network("deepnorm", "encoder-decoder", encoder={"num_layers": 5}, decoder={"num_layers": 3})
    encoder, decoder = net.config.encoder, net.config.decoder
    assert encoder is not None
    assert decoder is not None
    assert encoder.residual.alpha == pytest.approx(0.81 * (5**4 * 3) ** (1 / 16))
    # of the paper; torchscale 0.3 has 1.15 here
    assert encoder.residual.beta == pytest.approx(0.87 * (5**4 * 3) ** (-1 / 16))
    assert decoder.residual.alpha == pytest.approx(9**0.25)
    assert decoder.residual.beta == pytest.approx(36**-0.25)
    for stack, own in ((net.encoder, encoder), (net.decoder, decoder)):
        assert stack is not None
        alphas = {part.site.write.alpha for block in stack.blocks for part in block.children()}
        assert alphas == {own.residual.alpha}


@pytest.mark.parametrize("init", ["normal", "gpt2", "xavier", "t5"])
def test_beta_multiplies_values_outputs_and_feed_forward_matrices_whatever_the_init(init: str) -> None:
    stacks = {"encoder": {"num_layers": 1}, "decoder": {"num_layers": 2}}
    net = network("deepnorm", "encoder-decoder", init={"kind": init}, **stacks)
    plain = network("plain", "encoder-decoder", init={"kind": init}, norm={"placement": "post"}, **stacks)
    betas = {"encoder": net.config.encoder.residual.beta, "decoder": net.config.decoder.residual.beta}
    assert betas["encoder"] != betas["decoder"]
    seen = set()
    for (name, parameter), unscaled in zip(net.named_parameters(), plain.parameters(), strict=True):
        stack, matrix = name.split(".")[0], name.split(".")[-2]
        factor = betas[stack] if matrix in SCALED else 1.0
        seen.add(matrix if factor != 1.0 else None)
        torch.testing.assert_close(parameter, unscaled * factor)
    assert seen == {*SCALED, None}
