"""Hyper-Connections: their equations, what others compute, how their networks start and what they learn."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hyper_connections import HyperConnections as Oracle
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from qkv.config.model import ModelConfig
from qkv.config.residuals import HyperConnectionsConfig
from qkv.config.training import AdamWConfig, MuonConfig
from qkv.nn import Dims, HyperConnections, Site, Transformer
from qkv.nn.block import BlockInputs
from qkv.nn.mask import Causal
from qkv.train.optimizer import build_optimizer

from .matrix import assert_equal, one_thread  # noqa: F401

V = 23
SIZES = pytest.mark.parametrize(("streams", "fractions"), [(1, 1), (4, 1), (3, 1), (1, 4), (2, 2)])
DYNAMIC = pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])


def network(residual: dict[str, Any] | None = None, family: str = "decoder", **changes: Any) -> Transformer:
    tree: dict[str, Any] = {
        "family": family,
        "vocab_size": V,
        "max_seq_len": 32,
        "d_model": 16,
        "num_layers": 2,
        "attention": {"num_heads": 4, "num_kv_heads": 2},
        "norm": {"kind": "rmsnorm", "eps": 1e-12},
        "init": {"kind": "normal", "std": 0.3},
        "residual": {"kind": "hyper-connections"} | (residual or {}),
    }
    config = ModelConfig.model_validate(tree | changes)
    return Transformer(config, generator=torch.Generator().manual_seed(0)).eval()


def randomise(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" in name or "site" in name or isinstance(module, Site):
                parameter.add_(torch.randn(parameter.shape, generator=generator) / 3)


def inputs_of(family: str = "decoder", length: int = 6) -> dict[str, Tensor]:
    ids = torch.randint(0, V, (2, length), generator=torch.Generator().manual_seed(2))
    return {"ids": ids} | ({"source": ids.flip(1)} if family == "encoder-decoder" else {})


def site_of(streams: int, fractions: int, dynamic: bool, width: int = 8) -> tuple[Site, Tensor, Tensor]:
    """A site of random weights, a state and a sublayer's output."""
    config = HyperConnectionsConfig(streams=streams, fractions=fractions, dynamic=dynamic)
    site = HyperConnections(config, Dims(width)).new_site(2, 1).double()
    randomise(site)
    generator = torch.Generator().manual_seed(3)
    state = torch.randn(2, 3, streams * fractions, width // fractions, generator=generator, dtype=torch.float64)
    return site, state, torch.randn(2, 3, width, generator=generator, dtype=torch.float64)


# --- equations and oracle ---------------------------------------------------------------------------------------------


@SIZES
@DYNAMIC
@torch.no_grad()
def test_a_site_computes_the_equations(streams: int, fractions: int, dynamic: bool) -> None:
    site, state, y = site_of(streams, fractions, dynamic)
    weights = site.read.weights
    x, context = site.read(state)
    new = site.write(state, y, context)
    for token in [(b, t) for b in range(2) for t in range(3)]:
        parts = state[token]
        rows = []
        for i, part in enumerate(parts):
            alpha, beta = weights.alpha[i], weights.beta[i]
            if dynamic:
                moves = torch.tanh(weights.weight @ weights.norm(part))
                alpha, beta = alpha + weights.scale[0] * moves[:-1], beta + weights.scale[1] * moves[-1]
            rows.append((alpha[:fractions], alpha[fractions:], beta))
        read = [sum(row[0][f] * part for row, part in zip(rows, parts, strict=True)) for f in range(fractions)]
        torch.testing.assert_close(x[token], torch.cat(read))
        for j in range(len(parts)):
            mixed = sum(row[1][j] * part for row, part in zip(rows, parts, strict=True))
            output = y[token].chunk(fractions)[j % fractions]
            torch.testing.assert_close(new[token][j], mixed + rows[j][2] * output)


def oracle_of(site: Site, streams: int, fractions: int, width: int) -> Oracle:
    """The package's module with the weights of a dynamic site. Of fractions, it numbers parts fraction by fraction and
    keeps, for each, what is read next to what becomes of the streams."""
    weights = site.read.weights
    oracle = Oracle(streams, dim=width, layer_index=0, num_fracs=fractions).double()
    oracle.norm = copy.deepcopy(weights.norm)  # the paper's; its own is another
    columns = [[f, *(fractions + s * fractions + f for s in range(streams))] for f in range(fractions)]
    order = torch.tensor(columns).flatten()
    with torch.no_grad():
        rows = weights.alpha.view(streams, fractions, -1).transpose(0, 1).flatten(0, 1)
        oracle.static_alpha.copy_(rows[:, order])
        oracle.dynamic_alpha_fn.copy_(weights.weight[:-1].T[:, order])
        oracle.dynamic_alpha_scale.copy_(weights.scale[0])
        if fractions == 1:
            oracle.static_beta.copy_(weights.beta)
            oracle.dynamic_beta_fn.copy_(weights.weight[-1])
            oracle.dynamic_beta_scale.copy_(weights.scale[1])
    return oracle


@SIZES
@torch.no_grad()
def test_reading_and_mixing_are_those_of_the_package_hyper_connections(streams: int, fractions: int) -> None:
    site, state, _ = site_of(streams, fractions, dynamic=True)
    oracle = oracle_of(site, streams, fractions, width=8)
    by_stream = state.unflatten(2, (streams, fractions)).flatten(3)
    read, mixed, _ = oracle.width_connection(by_stream.permute(0, 2, 1, 3).flatten(0, 1))
    x, context = site.read(state)
    torch.testing.assert_close(x, read)
    mixed = mixed.view(2, streams, 3, fractions, -1).transpose(1, 2).flatten(2, 3)
    torch.testing.assert_close(site.write(state, torch.zeros_like(x), context), mixed)


@pytest.mark.parametrize("streams", [1, 3, 4])
@torch.no_grad()
def test_a_sublayer_is_that_of_the_package_hyper_connections(streams: int) -> None:
    # of fractions it writes every one of the output to every one of the state, which the paper does not
    site, state, _ = site_of(streams, 1, dynamic=True)
    oracle = oracle_of(site, streams, 1, width=8)
    oracle.branch = torch.sin
    expected = oracle(state.transpose(1, 2).flatten(0, 1)).view(2, streams, 3, -1).transpose(1, 2)
    x, context = site.read(state)
    torch.testing.assert_close(site.write(state, torch.sin(x), context), expected)


# --- how networks start -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["decoder", "encoder", "encoder-decoder"])
@pytest.mark.parametrize(("streams", "fractions"), [(1, 1), (2, 1), (4, 1), (8, 1), (1, 4), (2, 2)])
@DYNAMIC
@torch.no_grad()
def test_a_network_starts_as_the_pre_norm_network_of_its_seed(
    streams: int, fractions: int, dynamic: bool, family: str
) -> None:
    net = network({"streams": streams, "fractions": fractions, "dynamic": dynamic}, family).double()
    plain = network({"kind": "plain"}, family).double()
    inputs = inputs_of(family)
    torch.testing.assert_close(net(**inputs), plain(**inputs), rtol=0, atol=1e-9)


@pytest.mark.parametrize("changes", [{"parallel": "one-norm"}, {"share_layers": True}])
@torch.no_grad()
def test_so_does_one_of_parallel_or_shared_layers(changes: dict[str, Any]) -> None:
    net, plain = network(**changes).double(), network({"kind": "plain"}, **changes).double()
    torch.testing.assert_close(net(**inputs_of()), plain(**inputs_of()), rtol=0, atol=1e-9)


def test_sites_read_the_streams_in_turn() -> None:
    net = network({"streams": 3}, "encoder-decoder")
    assert net.decoder is not None
    sites = [part.site for block in net.decoder.blocks for part in block.children()]
    assert [site.read.weights.alpha[:, 0].argmax().item() for site in sites] == [0, 1, 2, 0, 1, 2]


@torch.no_grad()
def test_a_hook_reads_the_weights_of_each_site_by_name() -> None:
    net, seen = network({"streams": 3}), {}
    for name, module in net.named_modules():
        if name.endswith("site.read.weights"):
            module.register_forward_hook(lambda _module, _inputs, output, name=name: seen.update({name: output}))
    net(**inputs_of())
    connections = seen["decoder.blocks.1.feed_forward.site.read.weights"]
    assert len(seen) == 4
    assert torch.equal(connections.read_BTNm[1, 2, :, 0], torch.tensor([1.0, 0.0, 0.0]))
    assert torch.equal(connections.keep_BTNN[1, 2], torch.eye(3))
    assert torch.equal(connections.write_BTN[1, 2], torch.ones(3))


# --- what they learn --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
@pytest.mark.parametrize("residual", [{}, {"dynamic": False}, {"streams": 2, "fractions": 2}])
def test_gradients_reach_every_parameter(residual: dict[str, Any], family: str) -> None:
    net = network(residual, family)
    randomise(net)
    inputs = inputs_of(family)
    net(**inputs, labels=inputs["ids"]).loss_sum.backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name


@DYNAMIC
def test_streams_separate_within_a_hundred_steps(dynamic: bool) -> None:
    net = network({"dynamic": dynamic}, init={"kind": "normal"})
    states: list[Tensor] = []
    net.decoder.blocks[-1].register_forward_hook(lambda _module, _inputs, state: states.append(state.detach()))
    optimizer, inputs = torch.optim.AdamW(net.parameters(), lr=3e-3), inputs_of()
    for _ in range(100):
        net(**inputs, labels=inputs["ids"].roll(1, 1)).loss_sum.backward()
        optimizer.step()
        optimizer.zero_grad()
    spread = [(state.std(2).norm() / state.mean(2).norm()).item() for state in (states[0], states[-1])]
    assert spread[0] < 1e-6
    assert spread[1] > 0.01


@pytest.mark.parametrize("config", [AdamWConfig(weight_decay=0.1), MuonConfig(weight_decay=0.1)])
def test_weight_decay_acts_on_the_dynamic_weights_only(config: AdamWConfig | MuonConfig) -> None:
    net = network()
    adam = build_optimizer(config, net).optimizers[-1]
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    decayed: dict[str, set[bool]] = {}
    for group in adam.param_groups:
        for parameter in group["params"]:
            if ".site." in names[id(parameter)]:
                part = names[id(parameter)].partition("weights.")[2]
                decayed.setdefault(part, set()).add(group["weight_decay"] > 0)
    still = {name: {False} for name in ("alpha", "beta", "scale", "norm.weight", "norm.bias")}
    assert decayed == {"weight": {True}} | still


# --- cache, checkpointing, compiling, precision -----------------------------------------------------------------------


@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
@torch.no_grad()
def test_any_split_with_a_cache_gives_the_logits_of_the_whole(family: str) -> None:
    net = network({"streams": 2, "fractions": 2}, family)
    randomise(net)
    inputs = inputs_of(family)
    ids, cache = inputs["ids"], net.new_cache(2)
    first = {key: value if key == "source" else value[:, :3] for key, value in inputs.items()}
    pieces = [net(**first, cache=cache), net(ids[:, 3:4], cache=cache), net(ids[:, 4:], cache=cache)]
    assert_equal(torch.cat(pieces, 1), net(**inputs))


def test_a_block_may_be_computed_again_in_the_backward_pass() -> None:
    net = network()
    randomise(net)
    block, state = net.decoder.blocks[0], torch.randn(2, 5, 4, 16, generator=torch.Generator().manual_seed(4))
    gradients = []
    for again in (False, True):
        inputs = BlockInputs(mask=Causal())
        out = checkpoint(block, state, inputs, use_reentrant=False) if again else block(state, inputs)
        gradients.append(torch.autograd.grad(out.square().sum(), list(block.parameters())))
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.fixture
def forgotten_afterwards() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("forgotten_afterwards")
@torch.no_grad()
def test_all_blocks_are_one_graph() -> None:
    net = network(num_layers=4)
    randomise(net)
    expected = net(**inputs_of())
    counter = CompileCounterWithBackend("eager")
    for block in net.decoder.blocks:
        block.compile(backend=counter, fullgraph=True)
    assert_equal(net(**inputs_of()), expected)
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("embedding", "dtype"), [({}, torch.float32), ({"width": 8}, torch.bfloat16)], ids=["table", "factorised"]
)
@DYNAMIC
@torch.no_grad()
def test_the_streams_keep_the_precision_of_the_embedding_where_matrices_are_multiplied_in_bfloat16(
    embedding: dict[str, Any], dtype: torch.dtype, dynamic: bool
) -> None:
    net, dtypes = network({"streams": 2, "fractions": 2, "dynamic": dynamic}, embedding=embedding), []
    for block in net.decoder.blocks:
        block.register_forward_hook(lambda _module, _inputs, state: dtypes.append(state.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = net(**inputs_of())
    assert dtypes == [dtype] * 2
    assert (logits - net(**inputs_of())).abs().max() < 0.05 * logits.abs().max()


@torch.no_grad()
def test_a_network_may_be_bfloat16_throughout() -> None:
    net = network()
    logits = net(**inputs_of())
    assert (net.bfloat16()(**inputs_of()) - logits).abs().max() < 0.1 * logits.abs().max()
