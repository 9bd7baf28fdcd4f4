"""Which weights are updated how, and what the optimisers remember."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from qkv.config.errors import QkvError
from qkv.config.model import ModelConfig
from qkv.config.run import AdamWConfig, MuonConfig, OptimizerConfig
from qkv.nn.transformer import Transformer
from qkv.train.optimizer import Optimizer, build_optimizer

KINDS: list[OptimizerConfig] = [AdamWConfig(), MuonConfig()]
IDS = ["adamw", "muon"]


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


@pytest.mark.parametrize("config", KINDS, ids=IDS)
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


def test_muon_and_adamw_have_learning_rates_of_their_own() -> None:
    kinds = groups(build_optimizer(MuonConfig(lr=0.5, adam_lr=0.25), network()))
    assert {(kind, group["lr"]) for kind, group, _ in kinds} == {("Muon", 0.5), ("AdamW", 0.25)}


def muon_updates(scale: float) -> dict[str, Tensor]:
    """What one step of Muon takes off each matrix, from gradients whose singular values lie in `scale` * [0.03, 1]."""
    built = network()
    before = {name: weight.detach().clone() for name, weight in built.named_parameters()}
    optimizer = build_optimizer(MuonConfig(lr=1.0, weight_decay=0.0), built)
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
        assert values.max() < 1.2, name


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


@pytest.mark.parametrize("config", KINDS, ids=IDS)
@pytest.mark.parametrize("changes", FAMILIES.values(), ids=FAMILIES.keys())
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
    assert state.keys() >= {f"optimizer/{name}/exp_avg" for name, p in trained.named_parameters() if p.dim() < 2}
    for missing in state:
        _, name, key = missing.split("/")
        rest = {path: tensor for path, tensor in state.items() if path != missing}
        with pytest.raises(QkvError, match=rf"state of {name} is missing or damaged: {key}"):
            build_optimizer(config, network()).load_state(rest)


def test_a_part_of_another_shape_is_refused_by_name() -> None:
    _, optimizer = after_steps(AdamWConfig(), 1)
    state = optimizer.state()
    path = "optimizer/decoder.blocks.1.feed_forward.function.up.weight/exp_avg_sq"
    state[path] = state[path][:, :-1]
    with pytest.raises(QkvError, match=r"blocks\.1\.feed_forward\.function\.up\.weight .*: exp_avg_sq"):
        build_optimizer(AdamWConfig(), network()).load_state(state)


@pytest.mark.parametrize(("saved", "built"), [KINDS, KINDS[::-1]], ids=["adamw to muon", "muon to adamw"])
def test_the_state_of_another_optimiser_is_refused(saved: OptimizerConfig, built: OptimizerConfig) -> None:
    _, optimizer = after_steps(saved, 1)
    with pytest.raises(QkvError, match=r"blocks\.0\.self_attention\.function\.query\.weight is missing"):
        build_optimizer(built, network()).load_state(optimizer.state())


def test_what_is_printed_counts_every_value_once() -> None:
    built = network()
    for config in KINDS:
        lines = build_optimizer(config, built).describe()
        sizes = [int(line.split(" tensors, ")[1].split(" values")[0].replace(",", "")) for line in lines]
        assert sum(sizes) == sum(parameter.numel() for parameter in built.parameters())
