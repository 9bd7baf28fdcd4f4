"""Multi-token prediction: further blocks predict further tokens in training, and nobody else notices them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch.nn import functional as F

from qkv.config.model import ModelConfig
from qkv.nn import IGNORE, Transformer, use_kernel
from qkv.nn.experts import correct_biases, routers_of

from .matrix import one_thread  # noqa: F401

V, T = 19, 9
MOE = {"kind": "moe", "num_experts": 4, "d_ff": 10, "router": {"balance_loss": 0.5, "correction_bias": True}}
SMALL: dict[str, Any] = {
    "vocab_size": V,
    "max_seq_len": 16,
    "d_model": 16,
    "num_layers": 2,
    "attention": {"num_heads": 4, "num_kv_heads": 2},
    "feed_forward": {"d_ff": 20},
    "init": {"kind": "normal", "std": 0.2},
}


def network(depth: int = 2, **changes: Any) -> Transformer:
    tree = {**SMALL, "mtp": {"depth": depth, "weight": 0.3}, **changes}
    return Transformer(ModelConfig.model_validate(tree), generator=torch.Generator().manual_seed(0)).train()


def ids_of(rows: int, length: int = T, seed: int = 0) -> Tensor:
    return torch.randint(0, V, (rows, length), generator=torch.Generator().manual_seed(seed))


def row_of(rows: int, length: int = T, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Ids and the labels of a language model."""
    ids = ids_of(rows, length + 1, seed)
    return ids[:, :-1], ids[:, 1:]


def further(net: Transformer, ids: Tensor, labels: Tensor, **arguments: Tensor) -> Tensor:
    """The further tokens' loss in a training step, summed."""
    loss: Tensor = net(ids, labels=labels, **arguments).mtp_sum
    return loss


# --- what it computes -------------------------------------------------------------------------------------------------


def by_formula(net: Transformer, ids_T: Tensor, next_T: Tensor) -> float:
    """Equations 21 to 25 of arXiv 2412.19437 for one sequence, without 1/T; next_T: the token after each."""
    assert net.mtp is not None
    h_TM = hidden(net, ids_T)
    total = 0.0
    for k, module in enumerate(net.mtp.depths, 1):
        kept = len(ids_T) - k
        both_TE = torch.cat(
            [module.norm_hidden(h_TM[:kept]), module.norm_embedding(net.decoder_embedding.input.weight[ids_T[k:]])], -1
        )
        h_TM = module.stack((both_TE @ module.projection.weight.T)[None])[0]
        log_p_TV = (h_TM @ net.head.weight.T).log_softmax(-1)
        total -= float(log_p_TV[torch.arange(kept), next_T[k:]].sum())
    return net.config.mtp.weight / len(net.mtp.depths) * total


def hidden(net: Transformer, ids_T: Tensor) -> Tensor:
    """The main model's hidden vectors [T, M]."""
    embedded = net.decoder_embedding(ids_T[None], torch.arange(len(ids_T))[None])
    return net.decoder(embedded)[0]


@torch.no_grad()
@pytest.mark.parametrize("tie", ["none", "head"])
def test_the_loss_is_that_of_the_paper(tie: str) -> None:
    net = network(depth=3, tie_embeddings=tie)
    ids, labels = row_of(2)
    expected = sum(by_formula(net, *pair) for pair in zip(ids, labels, strict=True))
    assert float(further(net, ids, labels)) == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
def test_a_depth_is_the_layer_of_transformers() -> None:
    """Which takes the halves of M_k the other way round."""
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_layers import MtpLayer
    from transformers.models.llama import modeling_llama as llama

    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=20, num_attention_heads=4, num_key_value_heads=2, attn_implementation="eager"
    )
    theirs = MtpLayer(config, llama.LlamaDecoderLayer, llama.LlamaRMSNorm, 0).eval()
    module = network(depth=1).eval().mtp.depths[0]
    block = module.stack.blocks[0]
    attention, dense = block.self_attention.function, block.feed_forward.function
    pairs = {
        "enorm": module.norm_embedding,
        "hnorm": module.norm_hidden,
        "post_norm": module.stack.final_norm,
        "mtp_block.input_layernorm": block.self_attention.norm_in,
        "mtp_block.post_attention_layernorm": block.feed_forward.norm_in,
        "mtp_block.self_attn.q_proj": attention.query,
        "mtp_block.self_attn.k_proj": attention.key,
        "mtp_block.self_attn.v_proj": attention.value,
        "mtp_block.self_attn.o_proj": attention.output,
        "mtp_block.mlp.gate_proj": dense.gate,
        "mtp_block.mlp.up_proj": dense.up,
        "mtp_block.mlp.down_proj": dense.down,
    }
    for part in pairs.values():
        part.weight.add_(0.2 * torch.randn(part.weight.shape, generator=torch.Generator().manual_seed(1)))
    weights = {f"{name}.weight": part.weight for name, part in pairs.items()}
    theirs.load_state_dict(weights | {"eh_proj.weight": module.projection.weight.roll(16, dims=1)})
    h, x = torch.randn(2, 2, 7, 16, generator=torch.Generator().manual_seed(2))
    positions = torch.arange(7)[None]
    causal = torch.full((7, 7), float("-inf")).triu(1)[None, None]
    expected = theirs(x, h, llama.LlamaRotaryEmbedding(config)(x, positions), causal, positions, None)
    module.stack.positions[0].to(torch.float32)
    torch.testing.assert_close(module(h, x, positions), expected, rtol=1e-5, atol=1e-5)


# --- who notices ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_ordinary_loss_and_the_logits_are_those_without_it() -> None:
    net, plain = network(depth=2), network(depth=0)
    assert plain.mtp is None
    assert plain.load_state_dict(net.state_dict(), strict=False).missing_keys == []
    ids, labels = row_of(2)
    output, expected = net(ids, labels=labels), plain(ids, labels=labels)
    assert torch.equal(output.loss_sum, expected.loss_sum)
    assert output.target_count == expected.target_count
    assert expected.mtp_sum is None
    assert torch.equal(net(ids), plain(ids))
    assert net.eval()(ids, labels=labels).mtp_sum is None, "validation asks for the next token"


def test_gradients_reach_every_part() -> None:
    net, (ids, labels) = network(depth=2, tie_embeddings="none"), row_of(2)
    further(net, ids, labels).backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


# --- who sees what ----------------------------------------------------------------------------------------------------


def depths_of(net: Transformer, ids: Tensor, **arguments: Tensor) -> list[Tensor]:
    """The hidden vectors [B, T, M] of each depth in a training step."""
    kept: list[Tensor] = []
    assert net.mtp is not None
    handles = [module.register_forward_hook(lambda m, a, out: kept.append(out)) for module in net.mtp.depths]
    net(ids, labels=ids, **arguments)
    for handle in handles:
        handle.remove()
    return kept


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, {"position": {"kind": "learned"}}, {"layers": [{"attention": {"window": 3}}]}])
def test_at_depth_k_a_slot_sees_k_tokens_ahead_and_no_further(changes: dict[str, Any]) -> None:
    net, ids = network(depth=3, **changes), ids_of(2)
    before = depths_of(net, ids)
    for changed in (3, 5, 8):
        others = ids.clone()
        others[:, changed] = (others[:, changed] + 1) % V
        for k, (old, new) in enumerate(zip(before, depths_of(net, others), strict=True), 1):
            first = changed - k
            assert torch.equal(new[:, :first], old[:, :first])
            assert not torch.allclose(new[:, first], old[:, first], rtol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("feed_forward", [SMALL["feed_forward"], MOE], ids=["dense", "moe"])
def test_a_padded_row_and_a_packed_document_have_the_loss_they_have_alone(feed_forward: dict[str, Any]) -> None:
    net = network(depth=2, feed_forward=feed_forward)
    lengths = (9, 4, 1)
    parts = [row_of(1, length, seed=length) for length in lengths]
    alone = [float(further(net, *part)) for part in parts]
    ids, labels = torch.zeros(3, T, dtype=torch.long), torch.full((3, T), IGNORE)
    for row, (one, targets) in enumerate(parts):
        ids[row, : lengths[row]], labels[row, : lengths[row]] = one[0], targets[0]
    padded = further(net, ids, labels, lengths=torch.tensor(lengths))
    assert float(padded) == pytest.approx(sum(alone), rel=1e-5)
    ids[1, 4:] = ids[2, 1:] = 7
    assert torch.equal(further(net, ids, labels, lengths=torch.tensor(lengths)), padded)

    packed = [torch.cat([part[side] for part in parts], dim=1) for side in (0, 1)]
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    assert float(further(net, *packed, documents=documents)) == pytest.approx(sum(alone), rel=1e-5)


@torch.no_grad()
def test_experts_are_balanced_by_the_tokens_that_are_there() -> None:
    net = network(depth=2, feed_forward=MOE)
    ids, labels = row_of(3)
    lengths = torch.tensor([9, 4, 1])
    assert net(ids, labels=labels, lengths=lengths).aux["load_balance"] > 0
    *_, first, second = routers_of(net)
    assert first.load_E.sum() == 2 * (8 + 3 + 0)
    assert second.load_E.sum() == 2 * (7 + 2 + 0)
    correct_biases(net)
    assert first.correction_bias.abs().max() > 0
    net(ids, labels=labels)
    assert routers_of(net)[-1].load_E.sum() == 2 * 3 * 7


@torch.no_grad()
@pytest.mark.parametrize(
    "changes",
    [
        {"residual": {"kind": "hyper-connections", "streams": 2}},
        {"residual": {"kind": "attention-residuals"}},
        {"residual": {"kind": "deepnorm"}, "norm": {"placement": "post"}},
        {"attention": {"num_heads": 4, "value_residual": "learned"}},
        {"attention": {"kind": "latent", "num_heads": 4, "kv_rank": 8, "nope_dim": 4, "rope_dim": 4, "value_dim": 4}},
        {"embedding": {"width": 12}, "parallel": "one-norm", "position": {"kind": "alibi"}},
        {"share_layers": True, "position": {"kind": "relative"}},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_it_goes_with_every_kind_of_block(changes: dict[str, Any]) -> None:
    net, (ids, labels) = network(depth=2, **changes), row_of(2)
    assert net.mtp is not None
    loss = further(net, ids, labels)
    assert loss.isfinite()
    copied = copy.deepcopy(net)
    use_kernel(copied, "math")
    torch.testing.assert_close(further(copied, ids, labels), loss, rtol=1e-5, atol=0)


def test_a_row_of_one_token_has_no_further_loss() -> None:
    net, (ids, labels) = network(depth=2), row_of(2, 1)
    loss = further(net, ids, labels)
    loss.backward()
    assert loss == 0


def test_compiled_it_is_one_graph_and_gives_the_same() -> None:
    torch._dynamo.reset()
    net = network(depth=2)
    fast = torch.compile(net, backend="aot_eager", fullgraph=True)
    ids, labels = row_of(2)
    lengths = torch.tensor([5, 9])
    labels = labels.masked_fill(torch.arange(T) >= lengths[:, None], IGNORE)
    loss, expected = (further(one, ids, labels, lengths=lengths) for one in (fast, net))
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    net.zero_grad()
    expected.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in net.named_parameters()}
    net.zero_grad()
    loss.backward()
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6)
    torch._dynamo.reset()


def test_label_smoothing_acts_on_every_depth() -> None:
    net, (ids, labels) = network(depth=1), row_of(2)
    sharp = further(net, ids, labels)
    net.label_smoothing = 0.5
    with torch.no_grad():
        h_BTM, targets_BT = net.mtp(
            torch.stack([hidden(net, one) for one in ids]),
            F.embedding(ids, net.decoder_embedding.input.weight),
            labels,
            torch.arange(T)[None],
        )[0]
        log_p = net.head(h_BTM).log_softmax(-1)[:, : T - 1]
        smooth = -(0.5 * log_p.gather(2, targets_BT[:, : T - 1, None])[..., 0] + 0.5 * log_p.mean(2)).sum()
    assert further(net, ids, labels).item() == pytest.approx(0.3 * smooth.item(), rel=1e-5)
    assert not torch.isclose(further(net, ids, labels), sharp)


# --- where it makes no sense ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"family": "encoder"}, "family"),
        ({"family": "encoder-decoder"}, "family"),
        ({"prefix": True}, "prefix"),
        ({"head": {"kind": "classifier", "num_classes": 2}}, "head.kind"),
        ({"head": {"kind": "none"}}, "head.kind"),
        ({"max_seq_len": 2}, "max_seq_len"),
    ],
)
def test_where_it_makes_no_sense_it_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=rf"`mtp.depth`.*`{named}`"):
        ModelConfig.model_validate({**SMALL, "mtp": {"depth": 2}, **changes})
