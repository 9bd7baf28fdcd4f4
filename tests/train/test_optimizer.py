"""Which weights are updated how, and what the optimisers remember."""

from __future__ import annotations

import re
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from qkv.config.errors import DamagedError, QkvError
from qkv.config.model import ModelConfig
from qkv.config.training import AdamConfig, AdamWConfig, MuonConfig, OptimizerConfig, ScheduleFreeConfig
from qkv.nn.transformer import Transformer
from qkv.train.optimizer import Optimizer, build_optimizer

DECAYING: list[OptimizerConfig] = [AdamWConfig(), MuonConfig(), ScheduleFreeConfig()]
KINDS: list[OptimizerConfig] = [*DECAYING, AdamConfig()]
IDS = ["adamw", "muon", "schedule-free", "adam"]


def network(**changes: Any) -> Transformer:
    """Biases, norms, learned positions and a tied head: something of everything."""
    model = {
        "vocab_size": 50,
        "max_seq_len": 8,
        "d_model": 32,
        "num_layers": 2,
        "tie_embeddings": "head",
        "position": {"kind": "learned"},
        "norm": {"kind": "layernorm"},
        "attention": {"num_heads": 2, "bias": True, "qk_norm": "per-head"},
        "feed_forward": {"kind": "gelu", "d_ff": 48, "bias": True},
        **changes,
    }
    return Transformer(ModelConfig.model_validate(model), generator=torch.Generator().manual_seed(0))


FAMILIES: dict[str, dict[str, Any]] = {
    "tied decoder": {},
    "untied decoder": {"tie_embeddings": "none"},
    "encoder": {"family": "encoder", "embedding": {"norm": True, "num_segments": 2}},
    "encoder-decoder of one matrix": {"family": "encoder-decoder", "tie_embeddings": "all"},
}


def draw_gradients(of: Transformer, seed: int = 0, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in of.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator) * scale


def groups(optimizer: Optimizer) -> list[tuple[str, dict[str, Any], list[str]]]:
    """(kind, group, the names of its parameters) of every group."""
    return [
        (type(inner).__name__, group, [optimizer.names[id(parameter)] for parameter in group["params"]])
        for inner in optimizer.optimizers
        for group in inner.param_groups
    ]


def muon_names(optimizer: Optimizer) -> list[str]:
    return [name for kind, _, names in groups(optimizer) if kind == "Muon" for name in names]


def after_steps(config: OptimizerConfig, count: int, **changes: Any) -> tuple[Transformer, Optimizer]:
    trained = network(**changes)
    optimizer = build_optimizer(config, trained)
    for seed in range(count):
        draw_gradients(trained, seed)
        optimizer.step(1.0)
    return trained, optimizer


@pytest.mark.parametrize("config", KINDS, ids=IDS)
@pytest.mark.parametrize("changes", FAMILIES.values(), ids=FAMILIES.keys())
def test_every_parameter_is_updated_exactly_once(config: OptimizerConfig, changes: dict[str, Any]) -> None:
    built = network(**changes)
    optimizer = build_optimizer(config, built)
    given = sorted(name for _, _, names in groups(optimizer) for name in names)
    assert given == sorted(dict(built.named_parameters()))
    assert given == sorted(set(given))
    identities = [id(p) for inner in optimizer.optimizers for group in inner.param_groups for p in group["params"]]
    assert len(identities) == len(set(identities)) == len({id(p) for p in built.parameters()})


@pytest.mark.parametrize("config", DECAYING, ids=IDS[:3])
def test_weight_decay_acts_on_matrices_only(config: OptimizerConfig) -> None:
    """With a gradient of zero, decay is all that is left of a step."""
    config = config.model_copy(update={"weight_decay": 0.5, "lr": 0.1})
    built = network()
    before = {name: weight.detach().clone().uniform_(0.5, 1.0) for name, weight in built.named_parameters()}
    for name, weight in built.named_parameters():
        weight.data = before[name].clone()
        weight.grad = torch.zeros_like(weight)
    optimizer = build_optimizer(config, built)
    lr_of = {name: group["lr"] for _, group, names in groups(optimizer) for name in names}
    optimizer.step(1.0)
    for name, weight in built.named_parameters():
        kept = 1 - lr_of[name] * 0.5 if weight.dim() >= 2 else 1.0
        torch.testing.assert_close(weight.detach(), before[name] * kept, rtol=1e-5, atol=0, msg=name)


def test_muon_takes_the_matrices_inside_blocks_and_adamw_all_else() -> None:
    for changes in FAMILIES.values():
        built = network(**changes)
        taken = set(muon_names(build_optimizer(MuonConfig(), built)))
        assert taken == {name for name, p in built.named_parameters() if ".blocks." in name and p.dim() == 2}
        assert {name.split(".")[-2] for name in taken} == {"query", "key", "value", "output", "up", "down"}


PARTS: dict[str, dict[str, Any]] = {
    "latent": {
        "position": {"kind": "rope"},
        "attention": {"kind": "latent", "num_heads": 2, "q_rank": 12, "kv_rank": 8, "rope_dim": 4},
    },
    "gates": {"attention": {"num_heads": 2, "gate": "per-head"}},
    "differential": {"attention": {"kind": "differential", "num_heads": 2}},
    "experts": {"feed_forward": {"kind": "moe", "num_experts": 4, "d_ff": 24, "shared": {"d_ff": 24, "gated": True}}},
    "hyper-connections": {"residual": {"kind": "hyper-connections"}},
    "mhc": {"residual": {"kind": "mhc"}},
    "attention-residuals": {"residual": {"kind": "attention-residuals"}},
    "layerscale": {"residual": {"kind": "layerscale"}},
    "relative": {"position": {"kind": "relative"}},
}
DIVIDED = {"latent": {"latent_down": 2}, "experts": {"gate": 4, "up": 4, "down": 4}}
"""How many matrices each of these is."""


@pytest.mark.parametrize("part", PARTS)
def test_muon_takes_every_matrix_of_every_part_by_itself(part: str) -> None:
    built = network(**PARTS[part])
    optimizer = build_optimizer(MuonConfig(), built)
    expected = []
    for name, parameter in built.named_parameters():
        last = name.removesuffix(".weight").split(".")[-1]
        matrices = ".blocks." in name and parameter.dim() >= 2 and not name.endswith("_bias")
        if matrices and ".site." not in name and "shared_gate" not in name:
            count = DIVIDED.get(part, {}).get(last, 0) if parameter.dim() == 3 or last == "latent_down" else 0
            expected += [f"{name}.{number}" for number in range(count)] or [name]
    assert sorted(muon_names(optimizer)) == sorted(expected)
    sizes = [p.numel() for inner in optimizer.optimizers for group in inner.param_groups for p in group["params"]]
    assert sum(sizes) == sum(parameter.numel() for parameter in built.parameters())


@pytest.mark.parametrize("part", DIVIDED)
def test_a_piece_of_a_parameter_is_updated_as_a_parameter_of_its_own(part: str) -> None:
    built = network(**PARTS[part])
    optimizer = build_optimizer(MuonConfig(lr=1.0, weight_decay=0.0), built)
    before = {piece.name: piece.matrix.detach().clone() for piece in optimizer.pieces}
    draw_gradients(built)
    optimizer.step(1.0)
    for piece in optimizer.pieces:
        assert piece.whole.grad is not None
        alone = torch.nn.Parameter(before[piece.name])
        alone.grad = piece.whole.grad[piece.place].clone()
        torch.optim.Muon([alone], lr=1.0, weight_decay=0.0).step()
        assert torch.equal(piece.whole[piece.place], alone), piece.name


def test_muon_and_adamw_have_learning_rates_of_their_own() -> None:
    kinds = groups(build_optimizer(MuonConfig(lr=0.5, adam_lr=0.25), network()))
    assert {(kind, group["lr"]) for kind, group, _ in kinds} == {("Muon", 0.5), ("AdamW", 0.25)}


def muon_updates(scale: float, adjust_lr: Literal["original", "match-rms-adamw"] = "original") -> dict[str, Tensor]:
    """What one step of Muon takes off each matrix, from gradients whose singular values lie in `scale` * [0.03, 1]."""
    built = network()
    before = {name: weight.detach().clone() for name, weight in built.named_parameters()}
    optimizer = build_optimizer(MuonConfig(lr=1.0, weight_decay=0.0, adjust_lr=adjust_lr), built)
    draw_gradients(built)
    after = dict(built.named_parameters())
    for name in muon_names(optimizer):
        left, _, right = torch.linalg.svd(after[name].grad, full_matrices=False)
        after[name].grad = left * torch.logspace(-1.5, 0, left.shape[1]) @ right * scale
    optimizer.step(1.0)
    return {name: (before[name] - after[name]).detach() for name in muon_names(optimizer)}


def test_muon_updates_are_roughly_orthogonal() -> None:
    for name, update in muon_updates(1.0).items():
        rows, columns = update.shape
        values = torch.linalg.svdvals(update / max(1, rows / columns) ** 0.5)
        assert values.min() > 0.45, name
        assert values.max() < 1.15, name


def test_the_learning_rate_of_muon_is_adjusted_as_asked_for() -> None:
    original, matched = muon_updates(1.0), muon_updates(1.0, "match-rms-adamw")
    for name, update in original.items():
        rows, columns = update.shape
        ratio = 0.2 * max(rows, columns) ** 0.5 / max(1, rows / columns) ** 0.5
        torch.testing.assert_close(matched[name], update * ratio, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("scale", [2.0**-20, 2.0**20])
def test_muon_updates_do_not_depend_on_the_size_of_the_gradient(scale: float) -> None:
    one, other = muon_updates(1.0), muon_updates(scale)
    for name, update in one.items():
        torch.testing.assert_close(other[name], update, rtol=0, atol=2e-2, msg=name)


def test_the_share_scales_every_learning_rate_and_the_first_is_returned() -> None:
    optimizer = build_optimizer(MuonConfig(lr=0.5, adam_lr=0.25), built := network())
    for share in (0.5, 1.0, 0.1):
        draw_gradients(built)
        assert optimizer.step(share) == 0.5 * share
        assert {group["lr"] for _, group, _ in groups(optimizer)} == {0.5 * share, 0.25 * share}


# --- against the formulas of the papers -------------------------------------------------------------------------------

SHARES = (0.5, 1.0, 1.0, 0.25)
"""Of the peak learning rate, step by step."""


def written_out(config: OptimizerConfig) -> tuple[Tensor, Tensor, list[Tensor]]:
    """A vector after four steps as an optimiser takes them, its average where it has one, and the gradients."""
    built = network()
    name = "decoder.final_norm.bias"
    vector = dict(built.named_parameters())[name]
    optimizer, gradients = build_optimizer(config, built), []
    for seed, share in enumerate(SHARES):
        draw_gradients(built, seed)
        assert vector.grad is not None
        gradients.append(vector.grad.double().clone())
        optimizer.step(share)
    return vector.detach().double(), optimizer.averages().get(name, vector).detach().double(), gradients


def test_adam_is_that_of_2017() -> None:
    """Kingma and Ba 2014, algorithm 1."""
    config = AdamConfig(lr=0.01)
    beta1, beta2, eps = 0.9, 0.98, 1e-9
    assert (*config.betas, config.eps) == (beta1, beta2, eps)
    found, _, gradients = written_out(config)
    weight = torch.zeros_like(found)
    m, v = torch.zeros_like(found), torch.zeros_like(found)
    for t, (gradient, share) in enumerate(zip(gradients, SHARES, strict=True), 1):
        m = beta1 * m + (1 - beta1) * gradient
        v = beta2 * v + (1 - beta2) * gradient**2
        weight = weight - config.lr * share * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + eps)
    torch.testing.assert_close(found, weight, rtol=1e-5, atol=1e-7)


def test_adam_decays_nothing() -> None:
    built = network()
    before = {name: weight.detach().clone() for name, weight in built.named_parameters()}
    for weight in built.parameters():
        weight.grad = torch.zeros_like(weight)
    build_optimizer(AdamConfig(lr=0.1), built).step(1.0)
    assert all(torch.equal(weight, before[name]) for name, weight in built.named_parameters())


def test_schedule_free_is_that_of_the_paper() -> None:
    """Defazio et al. 2024, algorithm 1, with the three sequences held apart."""
    config = ScheduleFreeConfig(lr=0.01, betas=(0.9, 0.99))
    found, average, gradients = written_out(config)
    x = z = v = torch.zeros_like(found)
    lr_max = weights = 0.0
    for t, (gradient, share) in enumerate(zip(gradients, SHARES, strict=True), 1):
        lr = config.lr * share
        v = 0.99 * v + 0.01 * gradient**2
        z = z - lr * gradient / ((v / (1 - 0.99**t)).sqrt() + config.eps)
        lr_max = max(lr_max, lr)
        weights += lr_max**2
        c = lr_max**2 / weights
        x = (1 - c) * x + c * z
    torch.testing.assert_close(average, x, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found, 0.1 * z + 0.9 * x, rtol=1e-4, atol=1e-6)


# --- what is remembered -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", KINDS, ids=IDS)
@pytest.mark.parametrize("changes", [*FAMILIES.values(), *(PARTS[part] for part in DIVIDED)], ids=[*FAMILIES, *DIVIDED])
def test_a_restored_optimiser_goes_on_bit_for_bit(config: OptimizerConfig, changes: dict[str, Any]) -> None:
    trained, optimizer = after_steps(config, 3, **changes)
    state = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    fresh = network(**changes)
    fresh.load_state_dict(trained.state_dict())
    restored = build_optimizer(config, fresh)
    restored.load_state(state)
    for seed in (11, 12):
        for one, driver in ((trained, optimizer), (fresh, restored)):
            draw_gradients(one, seed)
            driver.step(0.5)
    other = dict(fresh.named_parameters())
    for name, weight in trained.named_parameters():
        assert torch.equal(weight, other[name]), name
    again = restored.state()
    assert again.keys() == state.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in optimizer.state().items())


def test_a_restored_optimiser_owns_its_state() -> None:
    trained, optimizer = after_steps(AdamWConfig(), 1)
    state = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    restored = build_optimizer(AdamWConfig(), trained)
    kept = {name: tensor.clone() for name, tensor in state.items()}
    restored.load_state(state)
    draw_gradients(trained)
    restored.step(1.0)
    assert all(torch.equal(state[name], kept[name]) for name in state)


@pytest.mark.parametrize("config", KINDS, ids=IDS)
def test_each_part_that_is_missing_is_refused_by_name(config: OptimizerConfig) -> None:
    trained, optimizer = after_steps(config, 1)
    state = optimizer.state()
    assert state.keys() >= {f"optimizer/{name}/exp_avg_sq" for name, p in trained.named_parameters() if p.dim() < 2}
    fresh = build_optimizer(config, network())
    for missing in state:
        _, name, key = missing.split("/")
        rest = {path: tensor for path, tensor in state.items() if path != missing}
        with pytest.raises(DamagedError, match=rf"state of {name} is missing or damaged: {key}"):
            fresh.load_state(rest)


@pytest.mark.parametrize("config", KINDS, ids=IDS)
def test_a_parameter_that_never_had_a_gradient_has_no_state_and_none_is_missed(config: OptimizerConfig) -> None:
    built = network(**PARTS["experts"])
    optimizer = build_optimizer(config, built)
    draw_gradients(built)
    parameters = dict(built.named_parameters())
    idle = ["decoder.final_norm.weight", "decoder.blocks.0.feed_forward.function.experts.up"]
    before = {name: parameters[name].detach().clone() for name in idle}
    for name in idle:
        parameters[name].grad = None
    optimizer.step(1.0)
    assert all(torch.equal(parameters[name], before[name]) for name in idle)
    state = optimizer.state()
    assert "optimizer/decoder.final_norm.weight/exp_avg_sq" not in state
    restored = build_optimizer(config, built)
    restored.load_state(state)
    again = restored.state()
    assert again.keys() == state.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in state.items())


def test_a_part_of_another_shape_is_refused_by_name() -> None:
    _, optimizer = after_steps(AdamWConfig(), 1)
    state = optimizer.state()
    path = "optimizer/decoder.blocks.1.feed_forward.function.up.weight/exp_avg_sq"
    state[path] = state[path][:, :-1]
    with pytest.raises(QkvError, match=r"blocks\.1\.feed_forward\.function\.up\.weight .*: exp_avg_sq"):
        build_optimizer(AdamWConfig(), network()).load_state(state)


@pytest.mark.parametrize(("saved", "built"), [KINDS[:2], KINDS[1::-1]], ids=["adamw to muon", "muon to adamw"])
def test_the_state_of_another_optimiser_is_refused(saved: OptimizerConfig, built: OptimizerConfig) -> None:
    _, optimizer = after_steps(saved, 1)
    with pytest.raises(QkvError, match=r"blocks\.0\.self_attention\.function\.query\.weight is missing"):
        build_optimizer(built, network()).load_state(optimizer.state())


def test_what_is_printed_counts_every_value_once() -> None:
    built = network()
    for config in KINDS:
        lines = build_optimizer(config, built).describe()
        sizes = [int(re.search(r"tensors?, ([\d,]+) values?,", line)[1].replace(",", "")) for line in lines]
        assert sum(sizes) == sum(parameter.numel() for parameter in built.parameters())


def test_one_tensor_is_printed_as_one() -> None:
    built = network()
    for name, parameter in built.named_parameters():
        parameter.requires_grad_(name == "decoder.final_norm.weight")
    (line,) = build_optimizer(AdamWConfig(), built).describe()
    assert line.startswith(f"AdamW: 1 tensor, {built.decoder.final_norm.weight.numel()} values, lr")


def test_what_is_printed_names_the_parameters_of_each_group() -> None:
    muon, matrices, vectors = build_optimizer(MuonConfig(), network()).describe()
    assert muon.endswith("lr 0.02, weight decay 0.1: query, key, value, output, up, down")
    assert matrices.split(": ")[2].split(", ")[0] == "input"
    assert {"norm_in", "norm_in.bias", "query.bias", "final_norm"} <= set(vectors.split(": ")[2].split(", "))
