"""Mixtures of experts: routers against transformers', laws that hold without an oracle, and balance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from transformers import DeepseekV3Config, GptOssConfig, Llama4TextConfig, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, load_balancing_loss_func
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from qkv.config.feed_forward import DenseFeedForwardConfig, MixtureOfExpertsConfig
from qkv.config.model import ModelConfig
from qkv.nn import Dims, FeedForward, MixtureOfExperts, Transformer, build
from qkv.nn.experts import balance, correct_biases, record_routing, routers_of

D_MODEL, D_FF, EXPERTS = 12, 20, 8


def mixture(**keys: Any) -> MixtureOfExperts:
    """A mixture with random weights, every one of which matters."""
    config = MixtureOfExpertsConfig.model_validate({"num_experts": EXPERTS, "d_ff": D_FF, **keys}).complete(D_MODEL)
    part: MixtureOfExperts = build(config, Dims(D_MODEL))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.normal_(0.0, 0.4, generator=generator)
    return part.eval()


def tokens(rows: int = 3, length: int = 7) -> Tensor:
    return torch.randn(rows, length, D_MODEL, generator=torch.Generator().manual_seed(1))


# --- against transformers ---------------------------------------------------------------------------------------------

WIDTHS = {"hidden_size": D_MODEL, "num_local_experts": EXPERTS, "experts_implementation": "eager"}
QWEN = {**WIDTHS, "num_experts": EXPERTS, "moe_intermediate_size": D_FF, "num_experts_per_tok": 3}
DEEPSEEK = {
    **WIDTHS,
    "n_routed_experts": EXPERTS,
    "moe_intermediate_size": D_FF,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
SIGMOID_GROUPS = {"score": "sigmoid", "num_groups": 4, "top_groups": 2, "group_score": "top-2-sum", "scale": 2.5}
ORACLES: dict[str, tuple[nn.Module, dict[str, Any]]] = {
    "mixtral": (MixtralSparseMoeBlock(MixtralConfig(**WIDTHS, intermediate_size=D_FF)), {}),
    "qwen2-moe": (
        Qwen2MoeSparseMoeBlock(Qwen2MoeConfig(**QWEN, shared_expert_intermediate_size=28, norm_topk_prob=False)),
        {"top_k": 3, "shared": {"d_ff": 28, "gated": True}, "router": {"normalise": False}},
    ),
    "qwen3-moe": (Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**QWEN, norm_topk_prob=True)), {"top_k": 3}),
    "gpt-oss": (
        GptOssMLP(GptOssConfig(**WIDTHS, intermediate_size=D_FF, num_experts_per_tok=3)),
        {"top_k": 3, "expert": {"kind": "swiglu_oss", "bias": True, "limit": 7.0}, "router": {"bias": True}},
    ),
    "deepseek-v3": (
        DeepseekV3MoE(DeepseekV3Config(**DEEPSEEK)),
        {"top_k": 3, "shared": {"d_ff": 2 * D_FF}, "router": {**SIGMOID_GROUPS, "correction_bias": True}},
    ),
    "deepseek-v3-unnormalised": (
        DeepseekV3MoE(DeepseekV3Config(**DEEPSEEK, norm_topk_prob=False)),
        {
            "top_k": 3,
            "shared": {"d_ff": 2 * D_FF},
            "router": {**SIGMOID_GROUPS, "correction_bias": True, "normalise": False},
        },
    ),
    "llama4": (
        Llama4TextMoe(Llama4TextConfig(**WIDTHS, intermediate_size=D_FF, num_experts_per_tok=1)),
        {
            "top_k": 1,
            "shared": {"d_ff": D_FF},
            "router": {"score": "sigmoid", "normalise": False, "multiplies": "input"},
        },
    ),
}


def take(ours: MixtureOfExperts, theirs: dict[str, Tensor], *, transposed: bool, interleaved: bool) -> None:
    """Our weights, of what transformers calls them. transposed: experts are [E, in, out]; interleaved: gate and up take
    turns."""
    own = {
        "weight": ours.router.weight,
        "bias": ours.router.bias,
        "e_score_correction_bias": ours.router.correction_bias,
        "down_proj": ours.experts.down,
        "down_proj_bias": ours.experts.down_bias,
        "shared_expert_gate.weight": ours.shared_gate.weight if ours.shared_gate is not None else None,
    }
    for name, value in theirs.items():
        last, experts = name.rpartition(".")[2], "experts." in name and "shared" not in name
        if experts and last in ("gate_up_proj", "down_proj") and transposed:
            value = value.mT
        if last.startswith("gate_up_proj"):
            gate, up = (value[:, 0::2], value[:, 1::2]) if interleaved else value.chunk(2, dim=1)
            suffix = "_bias" if last.endswith("bias") else ""
            pairs = [(getattr(ours.experts, f"gate{suffix}"), gate), (getattr(ours.experts, f"up{suffix}"), up)]
        elif "shared_expert" in name and name != "shared_expert_gate.weight":
            part = name.split(".")[1].removesuffix("_proj")
            pairs = [(getattr(ours.shared, part).weight, value)]
        else:
            pairs = [(own[name if name in own else last], value)]
        for mine, wanted in pairs:
            assert mine.shape == wanted.shape, name
            mine.copy_(wanted)


@pytest.mark.parametrize("family", ORACLES)
def test_the_result_is_that_of_transformers(family: str) -> None:
    theirs, keys = ORACLES[family]
    ours, x = mixture(**keys), tokens()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for value in theirs.state_dict().values():
            value.normal_(0.0, 0.5, generator=generator)
        layout = {"transposed": family in ("gpt-oss", "llama4"), "interleaved": family == "gpt-oss"}
        take(ours, theirs.state_dict(), **layout)
        expected = theirs.eval()(x)
        expected = expected[0] if isinstance(expected, tuple) else expected
        torch.testing.assert_close(ours(x), expected.view(x.shape), rtol=1e-5, atol=1e-5)


def test_the_load_balance_loss_is_that_of_transformers() -> None:
    part, x = mixture(top_k=3, router={"balance_loss": 1.0}), tokens(rows=1)
    record_routing(part)
    part(x)
    logits = nn.functional.linear(x[0], part.router.weight)
    theirs = load_balancing_loss_func((logits,), EXPERTS, top_k=3)  # which counts each of the three as a whole token
    torch.testing.assert_close(balance(part, None), theirs / 3)


# --- laws -------------------------------------------------------------------------------------------------------------

ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "sigmoid": {"score": "sigmoid"},
    "sqrt-softplus": {"score": "sqrt-softplus", "bias": True},
    "groups": {**SIGMOID_GROUPS, "scale": 1.0, "correction_bias": True},
    "groups by their best": {"num_groups": 2, "top_groups": 1},
}


def make_alike(part: MixtureOfExperts) -> FeedForward:
    """Give all experts the first one's weights, and return it as a feed-forward."""
    experts = part.experts
    dense = FeedForward(DenseFeedForwardConfig(kind=experts.kind, d_ff=D_FF, bias=True), Dims(D_MODEL))
    with torch.no_grad():
        for name in ("gate", "up", "down"):
            for suffix, own in (("", "weight"), ("_bias", "bias")):
                mine = getattr(experts, name + suffix)
                mine.copy_(mine[0].clone().expand_as(mine))
                getattr(getattr(dense, name), own).copy_(mine[0])
    return dense


@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
def test_experts_that_are_all_alike_are_one_feed_forward(router: dict[str, Any]) -> None:
    part, x = mixture(top_k=3, expert={"bias": True}, router=router), tokens()
    dense = make_alike(part)
    torch.testing.assert_close(part(x), dense(x), rtol=1e-5, atol=1e-5)


def test_scores_that_are_not_normalised_weigh_by_their_sum() -> None:
    part, x = mixture(top_k=3, expert={"bias": True}, router={"normalise": False, "scale": 2.0}), tokens()
    dense = make_alike(part)
    chosen = nn.functional.linear(x, part.router.weight).softmax(-1).topk(3).values.sum(-1, keepdim=True)
    torch.testing.assert_close(part(x), 2.0 * chosen * dense(x), rtol=1e-5, atol=1e-5)


def test_choosing_every_expert_is_the_weighted_sum_of_all() -> None:
    part, x = mixture(top_k=EXPERTS, expert={"kind": "relu"}), tokens()
    scores = nn.functional.linear(x, part.router.weight).softmax(-1)
    hidden = torch.einsum("btm,efm->btef", x, part.experts.up).relu()
    expected = torch.einsum("btef,emf,bte->btm", hidden, part.experts.down, scores)
    torch.testing.assert_close(part(x), expected, rtol=1e-5, atol=1e-5)


def test_a_token_s_result_does_not_depend_on_the_others() -> None:
    part, x = mixture(), tokens()
    torch.testing.assert_close(part(x[1:2, 3:4]), part(x)[1:2, 3:4], rtol=1e-5, atol=1e-6)


def test_a_correction_bias_moves_the_choice_and_not_the_weights() -> None:
    part, x = mixture(top_k=1, router={"score": "sigmoid", "normalise": False, "correction_bias": True}), tokens()
    with torch.no_grad():
        part.router.correction_bias.zero_()
        part.router.correction_bias[5] = 10.0
        weights, chosen = part.router(x)
        assert (chosen == 5).all()
        torch.testing.assert_close(weights[..., 0], (x @ part.router.weight[5]).sigmoid())


def test_only_experts_of_the_best_groups_are_chosen() -> None:
    part = mixture(top_k=2, router={"num_groups": 4, "top_groups": 1})
    _, chosen = part.router(tokens(8, 16))
    groups = chosen // (EXPERTS // 4)
    assert torch.equal(groups[..., 0], groups[..., 1])
    assert len(groups.unique()) == 4


def test_the_router_computes_in_float32_whatever_the_precision() -> None:
    part, x = mixture(), tokens().bfloat16()
    exact, chosen = part.router(x.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weights, same = part.router(x)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, exact)
    assert torch.equal(same, chosen)
    assert part.bfloat16()(x).dtype == torch.bfloat16


def test_an_expert_that_no_token_chose_has_a_gradient_of_zero() -> None:
    part = mixture(top_k=1, router={"correction_bias": True})
    part.router.correction_bias.data[3] = 10.0
    part(tokens()).sum().backward()
    largest = part.experts.down.grad.abs().amax((1, 2))
    assert (largest > 0).tolist() == [expert == 3 for expert in range(EXPERTS)]


@pytest.mark.parametrize("kind", ["swiglu", "geglu", "swiglu_oss"])
def test_a_limit_bounds_the_gate_from_above_and_the_other_projection_on_both_sides(kind: str) -> None:
    dense = FeedForward(DenseFeedForwardConfig(kind=kind, d_ff=D_FF, limit=0.3), Dims(D_MODEL))
    gate, up = dense.gate(tokens()).clamp(max=0.3), dense.up(tokens()).clamp(-0.3, 0.3)
    by_hand = {
        "swiglu": nn.functional.silu(gate) * up,
        "geglu": nn.functional.gelu(gate) * up,
        "swiglu_oss": (up + 1) * gate * torch.sigmoid(1.702 * gate),
    }
    torch.testing.assert_close(dense.hidden(tokens()), by_hand[kind])


# --- balance ----------------------------------------------------------------------------------------------------------

BALANCED = {"kind": "moe", "num_experts": 4, "d_ff": 10, "router": {"balance_loss": 0.5, "correction_bias": True}}
SMALL = {"vocab_size": 19, "max_seq_len": 16, "d_model": 8, "num_layers": 2, "attention": {"num_heads": 2}}


def small(**keys: Any) -> Transformer:
    tree = {**SMALL, "feed_forward": BALANCED, **keys}
    return Transformer(ModelConfig.model_validate(tree), generator=torch.Generator().manual_seed(0)).train()


def some_ids(rows: int, length: int) -> Tensor:
    return torch.randint(0, 19, (rows, length), generator=torch.Generator().manual_seed(3))


def test_even_choices_have_a_loss_of_one_and_a_single_favourite_the_number_of_experts() -> None:
    part, x = mixture(top_k=1, num_experts=2, router={"balance_loss": 1.0}), torch.ones(1, 4, D_MODEL)
    x[:, ::2] = -1.0
    with torch.no_grad():
        part.router.weight[0], part.router.weight[1] = 5.0, -5.0
    record_routing(part)
    part(x)
    assert balance(part, None).item() == pytest.approx(1.0)
    record_routing(part)
    part(x[:, 1::2])
    assert balance(part, None).item() == pytest.approx(2.0)


@pytest.mark.parametrize("family", ["decoder", "encoder", "encoder-decoder"])
def test_the_loss_and_the_loads_are_those_of_the_real_tokens_of_every_row(family: str) -> None:
    network, ids, lengths = small(family=family), some_ids(3, 9), torch.tensor([9, 4, 6])
    source = {"source": ids, "source_lengths": lengths} if family == "encoder-decoder" else {}
    whole = network(ids, labels=ids, lengths=lengths, **source).aux["load_balance"]
    loads = [router.load_E for router in routers_of(network)]
    for router in routers_of(network):
        router.load_E = None
    alone = 0.0
    for row, length in enumerate(lengths):
        part = ids[row : row + 1, :length]
        alone += network(part, labels=part, **({"source": part} if source else {})).aux["load_balance"]
    torch.testing.assert_close(whole, alone)
    assert len(loads) == (4 if family == "encoder-decoder" else 2)
    for router, load in zip(routers_of(network), loads, strict=True):
        assert torch.equal(router.load_E, load)
        assert load.sum() == 2 * lengths.sum()


def test_layers_that_share_a_router_are_balanced_one_by_one() -> None:
    ids = some_ids(2, 8)
    network = small(share_layers=True)
    network(ids, labels=ids)
    (router,) = routers_of(network)
    assert router.load_E.sum() == 2 * 2 * ids.numel()


def test_nothing_is_noted_outside_training() -> None:
    network, ids = small().eval(), some_ids(2, 8)
    assert network(ids, labels=ids).aux == {}
    network.train()(ids)
    assert all(router.record is None and router.load_E is None for router in routers_of(network))


def test_a_network_without_a_balance_loss_has_no_further_losses() -> None:
    ids = some_ids(2, 8)
    assert small(feed_forward={"kind": "moe", "num_experts": 4, "d_ff": 10})(ids, labels=ids).aux == {}


def test_a_step_moves_biases_towards_experts_that_had_fewer_tokens() -> None:
    part = mixture(num_experts=4, router={"correction_bias": True, "correction_rate": 0.25})
    before = part.router.correction_bias.clone()
    part.router.load_E = torch.tensor([1.0, 5.0, 3.0, 3.0])
    correct_biases(part)
    torch.testing.assert_close(part.router.correction_bias - before, torch.tensor([0.25, -0.25, 0.0, 0.0]))
    correct_biases(part)  # no step since
    torch.testing.assert_close(part.router.correction_bias - before, torch.tensor([0.25, -0.25, 0.0, 0.0]))


def test_correcting_biases_evens_out_the_loads() -> None:
    part, x = mixture(top_k=1, router={"score": "sigmoid", "correction_bias": True, "correction_rate": 0.02}), tokens(8)
    spreads = []
    for _ in range(60):
        record_routing(part)
        part(x + 0.5)
        balance(part, None)
        spreads.append(float(part.router.load_E.std()))
        correct_biases(part)
    assert sum(spreads[-5:]) < 0.5 * sum(spreads[:5])


# --- parameters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["normal", "xavier", "gpt2", "t5"])
def test_every_expert_starts_as_a_matrix_of_its_own(kind: str) -> None:
    keys = {"feed_forward": {"kind": "moe", "num_experts": 3, "d_ff": 300}, "d_model": 100, "init": {"kind": kind}}
    mixed, dense = small(**keys), small(**keys | {"feed_forward": {"kind": "swiglu", "d_ff": 300}})
    experts, one = (net.decoder.blocks[0].feed_forward.function for net in (mixed, dense))
    for name in ("gate", "up", "down"):
        for matrix in getattr(experts.experts, name):
            torch.testing.assert_close(matrix.std(), getattr(one, name).weight.std(), rtol=0.03, atol=0)
    assert not torch.equal(experts.experts.up[0], experts.experts.up[1])


def test_compiled_blocks_compute_the_same_in_a_fixed_number_of_graphs() -> None:
    network, ids = small(num_layers=1), some_ids(2, 8)
    expected = network(ids, labels=ids)
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    network.decoder.blocks[0].compile(backend=count)
    output = network(ids, labels=ids)
    torch.testing.assert_close(output.loss_sum, expected.loss_sum)
    torch.testing.assert_close(output.aux["load_balance"], expected.aux["load_balance"])
    first = len(graphs)
    other = some_ids(3, 8)[1:]
    network(other, labels=other)
    assert len(graphs) == first == 5


@torch.no_grad()
def test_a_network_in_half_precision_keeps_its_correction_biases_in_float32() -> None:
    network = small()
    for router in routers_of(network):
        router.correction_bias.copy_(torch.tensor([0.1, 0.2, 0.3, 0.4]))
        router.correction_bias.grad = torch.full((4,), 0.1)
    ids = some_ids(2, 8)
    expected = network.eval()(ids)
    network.to(torch.bfloat16)
    for router in routers_of(network):
        assert torch.equal(router.correction_bias, torch.tensor([0.1, 0.2, 0.3, 0.4]))
        assert router.correction_bias.grad.dtype == torch.float32
        assert router.weight.dtype == torch.bfloat16
    assert (network(ids).float() - expected).abs().max() < 0.2 * expected.abs().max()
    assert network.double().decoder.blocks[0].feed_forward.function.router.correction_bias.dtype == torch.float64


# --- configuration ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"top_k": 9}, "top_k"),
        ({"router": {"num_groups": 3}}, "num_groups"),
        ({"router": {"num_groups": 2, "top_groups": 3}}, "top_groups"),
        ({"top_k": 3, "router": {"num_groups": 4}}, "top_k"),
        ({"router": {"num_groups": 8, "top_groups": 2, "group_score": "top-2-sum"}}, "group_score"),
        ({"expert": {"kind": "relu", "limit": 7.0}}, "limit"),
    ],
)
def test_a_contradiction_is_named(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=f"`feed_forward.*{named}`"):
        ModelConfig.model_validate({"feed_forward": {"kind": "moe", **keys}})
