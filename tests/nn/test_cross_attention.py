"""Cross-attention behind a gate, and in some of the layers only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from qkv.config.errors import UsageError
from qkv.config.finetune import folded
from qkv.config.model import ModelConfig
from qkv.config.residuals import DeepNormConfig
from qkv.inspect.attention import read_attention
from qkv.nn import Transformer

from .matrix import assert_equal, one_thread  # noqa: F401

V, WIDTH = 23, 5
LAYERS = [{"cross_attention": None}, {"cross_attention": {"num_kv_heads": 1}}, {}]
"""Of a pattern: no cross-attention, of its own shape, of self-attention's."""


def tree(**changes: Any) -> dict[str, Any]:
    tree = {
        "family": "encoder-decoder",
        "vocab_size": V,
        "max_seq_len": 24,
        "d_model": 16,
        "num_layers": 3,
        "attention": {"num_heads": 4, "num_kv_heads": 2},
        "init": {"kind": "normal", "std": 0.3},
        "encoder": {"d_model": 32, "input": {"kind": "features", "width": WIDTH}},
    }
    return tree | changes


def network(**changes: Any) -> Transformer:
    config = ModelConfig.model_validate(tree(**changes))
    return Transformer(config, generator=torch.Generator().manual_seed(0)).eval()


def source(seed: int = 0) -> Tensor:
    return torch.randn(2, 7, WIDTH, generator=torch.Generator().manual_seed(seed))


def ids_of(length: int = 6) -> Tensor:
    return torch.randint(0, V, (2, length), generator=torch.Generator().manual_seed(1))


def text_only(net: Transformer, **changes: Any) -> Transformer:
    """A decoder of its own, with the same weights but for those that read the source."""
    given = {key: value for key, value in tree(**changes).items() if key not in ("encoder", "cross_gate", "decoder")}
    text = Transformer(ModelConfig.model_validate(given | {"family": "decoder"})).eval()
    state = net.state_dict()
    text.load_state_dict({name: state[name] for name in text.state_dict()})
    return text


# --- gates ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["pre", "sandwich", "output"])
@torch.no_grad()
def test_at_first_the_logits_are_those_of_the_text_alone(placement: str) -> None:
    norm = {"kind": "rmsnorm", "placement": placement}
    net = network(cross_gate=True, norm=norm)
    assert torch.equal(net(ids_of(), source=source()), text_only(net, norm=norm)(ids_of()))


@torch.no_grad()
def test_a_gate_multiplies_what_is_written_by_tanh() -> None:
    gated, plain = network(cross_gate=True), network()
    for block in gated.decoder.blocks:
        block.cross_attention.gate.weight.fill_(40.0)  # whose tanh is 1
    missing, unexpected = plain.load_state_dict(gated.state_dict(), strict=False)
    assert not missing
    assert len(unexpected) == 3
    assert_equal(gated(ids_of(), source=source()), plain(ids_of(), source=source()))
    for block in gated.decoder.blocks:
        block.cross_attention.gate.weight.fill_(0.3)
    for block in plain.decoder.blocks:
        block.cross_attention.function.output.weight.mul_(torch.tensor(0.3).tanh())
    assert_equal(gated(ids_of(), source=source()), plain(ids_of(), source=source()))


def test_a_closed_gate_learns_first_and_then_what_it_lets_through() -> None:
    net = network(cross_gate=True)
    cross = net.decoder.blocks[0].cross_attention
    net(ids_of(), source=source(), labels=ids_of()).loss_sum.backward()
    assert cross.gate.weight.grad != 0
    assert not cross.function.query.weight.grad.any()
    with torch.no_grad():
        cross.gate.weight.fill_(0.1)
    net(ids_of(), source=source(), labels=ids_of()).loss_sum.backward()
    assert cross.function.query.weight.grad.any()
    assert net.encoder.blocks[0].self_attention.function.query.weight.grad.any()


# --- some layers only -------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_pattern_says_which_layers_read_the_source() -> None:
    net = network(decoder={"layers": LAYERS, "num_layers": 4})
    having = [block.attention("cross") is not None for block in net.decoder.blocks]
    assert having == [False, True, True, False]
    assert [len(block) for block in net.decoder.blocks] == [2, 3, 3, 2]
    assert [net.decoder.blocks[layer].attention("cross").num_kv_heads for layer in (1, 2)] == [1, 2]
    config = net.config
    assert ModelConfig.model_validate(config.model_dump(mode="json")) == config
    assert ModelConfig.model_validate(folded(config)) == config


@torch.no_grad()
def test_a_layer_without_cross_attention_has_the_same_function_as_in_a_decoder() -> None:
    net = network(decoder={"layers": [{"cross_attention": None}] * 2 + [{}]})
    text = text_only(net)
    for block in net.decoder.blocks[:2]:
        assert block.attention("cross") is None
    net.decoder.blocks[2].cross_attention.function.output.weight.zero_()
    assert torch.equal(net(ids_of(), source=source()), text(ids_of()))


@torch.no_grad()
def test_cached_equals_the_full_forward_when_the_first_layer_reads_no_source() -> None:
    net, lengths = network(decoder={"layers": LAYERS}), torch.tensor([7, 3])
    full = net(ids_of(), source=source(), source_lengths=lengths)
    cache = net.new_cache(2)
    first = net(ids_of()[:, :3], source=source(), source_lengths=lengths, cache=cache)
    assert_equal(torch.cat([first, *(net(step, cache=cache) for step in ids_of()[:, 3:].split(1, 1))], 1), full)
    cache.select([1, 1, 0], 1)
    more = net(ids_of(1)[:1].expand(3, 1), cache=cache)
    again = torch.cat([ids_of(), ids_of(1)[:1].expand(2, 1)], 1)
    assert_equal(more[[2, 0]], net(again, source=source(), source_lengths=lengths)[:, -1:])


def test_deepnorm_counts_the_sublayers_there_are() -> None:
    post = {"norm": {"placement": "post"}, "residual": {"kind": "deepnorm"}}
    for layers, sublayers in ((None, 9), (LAYERS, 8)):
        decoder = ModelConfig.model_validate(tree(**post, decoder={"layers": layers})).decoder
        assert decoder is not None
        assert isinstance(decoder.residual, DeepNormConfig)
        assert decoder.residual.alpha == pytest.approx(sublayers**0.25)


def test_the_attention_that_there_is_can_be_looked_at() -> None:
    net, inputs = network(decoder={"layers": LAYERS}), {"source": source()[:1]}
    assert len(read_attention(net, ids_of()[:1], kind="cross", **inputs)) == 2
    with pytest.raises(UsageError, match="layer 0 has no cross-attention"):
        read_attention(net, ids_of()[:1], kind="cross", layers=[0], **inputs)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"cross_gate": True, "residual": {"kind": "none"}}, "cross_gate.*residual.kind"),
        ({"decoder": {"layers": [{"cross_attention": None}]}}, "no layer would read"),
        ({"encoder": {"layers": [{"cross_attention": {}}]}}, "an encoder attends to no source"),
        ({"family": "decoder", "encoder": None, "cross_gate": True}, "there is no cross-attention"),
    ],
)
def test_what_cannot_be_meant_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        ModelConfig.model_validate(tree(**changes))
