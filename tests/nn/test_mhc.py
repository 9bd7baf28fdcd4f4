"""Manifold-constrained hyper-connections: the published equations, and what they promise."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from qkv.checkpoint.store import load_checkpoint, save_checkpoint
from qkv.config.model import ModelConfig
from qkv.config.residuals import MhcConfig
from qkv.config.run import Config
from qkv.config.training import AdamWConfig
from qkv.nn import Dims, Transformer
from qkv.nn.block import BlockInputs, Sublayer
from qkv.nn.mask import Causal
from qkv.nn.mhc import Mhc, Mixing, sinkhorn
from qkv.train.optimizer import build_optimizer

from .matrix import assert_equal, one_thread  # noqa: F401

V = 23
FAMILIES = pytest.mark.parametrize("family", ["decoder", "encoder", "encoder-decoder"])


def network(
    family: str = "decoder", seed: int = 0, residual: dict[str, Any] | None = None, **changes: Any
) -> Transformer:
    tree: dict[str, Any] = {
        "family": family,
        "vocab_size": V,
        "max_seq_len": 32,
        "d_model": 16,
        "num_layers": 2,
        "attention": {"num_heads": 4},
        "init": {"kind": "normal", "std": 0.3},
        "residual": {"kind": "mhc"} | (residual or {}),
    }
    return Transformer(ModelConfig.model_validate(tree | changes), generator=torch.Generator().manual_seed(seed)).eval()


def plain(family: str = "decoder", **changes: Any) -> Transformer:
    return network(family, residual={"kind": "plain"}, **changes)


def inputs_of(family: str, length: int = 7, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = {"ids": torch.randint(0, V, (2, length), generator=generator)}
    if family == "encoder-decoder":
        inputs["source"] = torch.randint(0, V, (2, length + 2), generator=generator)
    return inputs


def redraw(module: nn.Module, std: float = 0.5, seed: int = 1) -> None:
    """Random numbers in what belongs to the streams, so that streams and H_res differ."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for part in module.modules():
            for name in getattr(part, "float32", ()):
                getattr(part, name).normal_(0.0, std, generator=generator)


def mixing_of(streams: int = 4, d_model: int = 8, **changes: Any) -> Mixing:
    mixing = Mixing(MhcConfig(streams=streams, **changes), Dims(d_model))
    redraw(mixing)
    return mixing


def normal(*shape: int, seed: int = 0, std: float = 1.0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * std


# --- the equations ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_site_is_what_the_equations_say_token_by_token() -> None:
    n, width = 3, 8
    site = Mhc(MhcConfig(streams=n, iterations=5), Dims(width)).new_site(0, 0).double()
    redraw(site)
    state, y = normal(2, 3, n, width), normal(2, 3, width, seed=1)
    x, context = site.read(state)
    written = site.write(state, y, context)
    mixing = site.read.mixing
    for row in range(2):
        for token in range(3):
            streams = state[row, token]
            flat = streams.reshape(-1)
            seen = mixing.phi @ (flat / (flat.square().mean() + 1e-20).sqrt())
            pre = torch.sigmoid(mixing.scale[0] * seen[:n] + mixing.bias[:n])
            post = 2 * torch.sigmoid(mixing.scale[1] * seen[n : 2 * n] + mixing.bias[n : 2 * n])
            matrix = (mixing.scale[2] * seen[2 * n :] + mixing.bias[2 * n :]).reshape(n, n).exp()
            for _ in range(5):
                matrix = matrix / matrix.sum(0, keepdim=True)
                matrix = matrix / matrix.sum(1, keepdim=True)
            torch.testing.assert_close(x[row, token], pre @ streams)
            expected = matrix @ streams + torch.outer(post, y[row, token])
            torch.testing.assert_close(written[row, token], expected)


@torch.no_grad()
@pytest.mark.parametrize("streams", [3, 4])
def test_a_site_equals_the_one_of_transformers(streams: int) -> None:
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    names = {"hc_mult": streams, "hc_sinkhorn_iters": 20, "hc_eps": 1e-12, "hidden_size": 8, "rms_norm_eps": 1e-20}
    oracle = modeling.DeepseekV4HyperConnection(SimpleNamespace(**names))
    site = Mhc(MhcConfig(streams=streams), Dims(8)).new_site(0, 0)
    redraw(site)
    mixing = site.read.mixing
    order = torch.arange(streams**2).view(streams, streams).t().flatten() + 2 * streams  # its comb is H_res transposed
    order = torch.cat([torch.arange(2 * streams), order])
    oracle.fn.copy_(mixing.phi[order])
    oracle.base.copy_(mixing.bias[order])
    oracle.scale.copy_(mixing.scale)
    state, y = normal(2, 5, streams, 8).float(), normal(2, 5, 8, seed=1).float()
    post, comb, collapsed = oracle(state)
    x, context = site.read(state)
    torch.testing.assert_close(x, collapsed)
    expected = post.unsqueeze(-1) * y.unsqueeze(-2) + comb.transpose(-1, -2) @ state
    torch.testing.assert_close(site.write(state, y, context), expected)
    assert (context[1] - context[1].mT).abs().max() > 0.1  # a transposed matrix would show


@torch.no_grad()
def test_a_learned_exit_equals_the_head_of_transformers() -> None:
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    oracle = modeling.DeepseekV4HyperHead(SimpleNamespace(hc_mult=4, hc_eps=1e-6, hidden_size=8, rms_norm_eps=1e-20))
    stream = Mhc(MhcConfig(exit="learned"), Dims(8))
    redraw(stream)
    oracle.hc_fn.copy_(stream.exit_weights.phi)
    oracle.hc_base.copy_(stream.exit_weights.bias)
    oracle.hc_scale.copy_(stream.exit_weights.scale)
    state = normal(2, 5, 4, 8).float()
    torch.testing.assert_close(stream.exit(state), oracle(state))


@torch.no_grad()
@pytest.mark.parametrize("exit_kind", ["mean", "sum"])
def test_a_network_runs_every_sublayer_through_its_site(exit_kind: str) -> None:
    net = network(residual={"exit": exit_kind}, position={"kind": "none"})
    redraw(net)
    x = normal(2, 5, 16).float()
    state = x.unsqueeze(2).expand(-1, -1, 4, -1)
    for sublayer in [module for module in net.decoder.modules() if isinstance(module, Sublayer)]:
        pre, post, res = sublayer.site.read.mixing(state)
        y = sublayer.call(torch.einsum("btn,btnm->btm", pre, state), BlockInputs(mask=Causal()))
        state = torch.einsum("btij,btjm->btim", res, state) + torch.einsum("btn,btm->btnm", post, y)
    expected = state.mean(2) if exit_kind == "mean" else state.sum(2)
    assert_equal(net.decoder(x), net.decoder.final_norm(expected))


def test_gradients_of_a_site_are_those_of_finite_differences() -> None:
    site = Mhc(MhcConfig(streams=2, iterations=3), Dims(3)).new_site(0, 0).double()
    redraw(site)
    state, y = normal(1, 2, 2, 3).requires_grad_(), normal(1, 2, 3, seed=1).requires_grad_()

    def through(state: Tensor, y: Tensor, *_: Tensor) -> Tensor:
        x, context = site.read(state)
        return site.write(state, y * x, context)

    assert torch.autograd.gradcheck(through, (state, y, *site.parameters()))


# --- the doubly stochastic matrix -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("std", "most"), [(0.1, 1e-12), (1.0, 5e-3), (3.0, 0.15)])
def test_rows_sum_to_1_and_columns_nearly_the_better_the_smaller_the_logits(std: float, most: float) -> None:
    matrix = sinkhorn(normal(1, 2000, 4, 4, std=std), 20)
    torch.testing.assert_close(matrix.sum(3), torch.ones_like(matrix.sum(3)), rtol=0, atol=1e-12)
    assert (matrix >= 0).all()
    assert float((matrix.sum(2) - 1).abs().max()) < most
    assert float(torch.linalg.matrix_norm(matrix, 2).max()) < 1 + most


def test_more_iterations_bring_the_columns_nearer() -> None:
    logits = normal(1, 500, 4, 4, std=2.0)
    errors = [float((sinkhorn(logits, steps).sum(2) - 1).abs().mean()) for steps in (1, 2, 5, 20, 100)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0] / 100


def test_logits_of_any_size_give_numbers() -> None:
    logits = normal(1, 100, 4, 4, std=1000.0).float().requires_grad_()
    matrix = sinkhorn(logits, 20)
    matrix.square().sum().backward()
    torch.testing.assert_close(matrix.sum(3), torch.ones(1, 100, 4))
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_a_product_of_sixty_matrices_stays_bounded() -> None:
    product = torch.eye(4, dtype=torch.float64)
    for matrix in sinkhorn(normal(1, 60, 4, 4, std=3.0), 20)[0]:
        product = matrix @ product
    assert float(product.sum(1).max()) < 1.01
    assert float(torch.linalg.matrix_norm(product, 2)) < 1.2


# --- at the start -----------------------------------------------------------------------------------------------------


@FAMILIES
@pytest.mark.parametrize(("streams", "exit_kind"), [(1, "mean"), (2, "sum"), (4, "mean"), (4, "learned")])
@torch.no_grad()
def test_without_what_tokens_say_it_is_the_plain_network(family: str, streams: int, exit_kind: str) -> None:
    norm = {"kind": "rmsnorm", "eps": 1e-12 if exit_kind != "mean" else 1e-6}  # a scale meets the norm at the exit only
    net = network(family, residual={"streams": streams, "start": 0.0, "exit": exit_kind}, norm=norm).double()
    expected = plain(family, norm=norm).double()
    assert_equal(net(**inputs_of(family)), expected(**inputs_of(family)), 1e-10 if exit_kind != "mean" else 1e-12)


@torch.no_grad()
def test_shared_parameters_draw_what_they_draw_in_a_plain_network() -> None:
    ours = dict(network().named_parameters())
    for name, parameter in plain().named_parameters():
        assert torch.equal(ours[name], parameter), name


def spreads(std: float) -> list[float]:
    """How much streams differ, as a share of their size, over 100 steps of learning to repeat the last token; with
    the largest gradient of the biases of H_res in the last step."""
    net = network(residual={"std": std}).train()
    states: list[Tensor] = []
    site = net.decoder.blocks[-1].feed_forward.site
    site.read.register_forward_pre_hook(lambda module, args: states.append(args[0].detach()))
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        ids = torch.randint(0, V, (8, 16), generator=generator)
        optimizer.zero_grad()
        net(ids, labels=ids.roll(1, 1)).loss.backward()
        optimizer.step()
    gradients = [part.bias.grad[8:].abs().max() for part in net.modules() if isinstance(part, Mixing)]
    return [float(state.std(2).norm() / state.norm()) for state in states] + [float(max(gradients))]


def test_streams_separate_and_the_matrix_learns() -> None:
    *spread, gradient = spreads(std=0.02)
    assert spread[-1] > 10 * spread[0] > 0
    assert gradient > 1e-7


def test_without_a_drawn_phi_streams_stay_equal_and_the_matrix_never_learns() -> None:
    *spread, gradient = spreads(std=0.0)
    assert max(spread) == 0
    assert gradient < 1e-9


@FAMILIES
def test_gradients_reach_every_parameter(family: str) -> None:
    net = network(family, residual={"exit": "learned"})
    redraw(net)
    net(**inputs_of(family), labels=inputs_of(family, seed=5)["ids"]).loss.backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


# --- with the rest ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_hooks_read_the_matrices_by_name() -> None:
    net, seen = network(), {}
    redraw(net)
    for name, module in net.named_modules():
        if name.endswith("site.read.mixing"):
            module.register_forward_hook(lambda module, args, out, name=name: seen.update({name: out}))
    net(**inputs_of("decoder"))
    assert list(seen) == [
        f"decoder.blocks.{layer}.{sublayer}.site.read.mixing"
        for layer in range(2)
        for sublayer in ("self_attention", "feed_forward")
    ]
    for pre_BTN, post_BTN, res_BTNN in seen.values():
        assert pre_BTN.shape == post_BTN.shape == (2, 7, 4)
        assert res_BTNN.shape == (2, 7, 4, 4)


@torch.no_grad()
@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
def test_chunks_with_a_cache_are_one_pass(family: str) -> None:
    net, inputs = network(family), inputs_of(family)
    redraw(net)
    whole, cache = net(**inputs), net.new_cache(2)
    first = net(**inputs | {"ids": inputs["ids"][:, :3]}, cache=cache)
    steps = [net(inputs["ids"][:, t : t + 1], cache=cache) for t in range(3, 7)]
    assert_equal(torch.cat([first, *steps], 1), whole)


@torch.no_grad()
def test_a_parallel_block_is_one_site() -> None:
    net = network(parallel="one-norm")
    assert sum(isinstance(part, Mixing) for part in net.modules()) == 2
    assert net(**inputs_of("decoder")).isfinite().all()


def test_a_checkpointed_block_has_the_same_gradients() -> None:
    net = network()
    redraw(net)
    block, state = net.decoder.blocks[0], normal(2, 5, 4, 16).float()
    gradients = []
    for run in (block, lambda x: checkpoint(block, x, use_reentrant=False)):
        net.zero_grad()
        run(state).square().sum().backward()
        gradients.append([parameter.grad for parameter in block.parameters()])
    for ours, expected in zip(*gradients, strict=True):
        assert torch.equal(ours, expected)


@FAMILIES
def test_a_compiled_step_is_one_graph_with_the_gradients_of_the_eager_one(family: str) -> None:
    net = network(family, num_layers=1, residual={"iterations": 2})
    redraw(net)
    twin = copy.deepcopy(net)
    torch._dynamo.reset()
    fast = torch.compile(twin, backend="aot_eager", fullgraph=True)
    inputs, labels = inputs_of(family), inputs_of(family, seed=5)["ids"]
    for run in (net, fast):
        run(**inputs, labels=labels).loss_sum.backward()
    for (name, parameter), other in zip(net.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(other.grad, parameter.grad, rtol=1e-4, atol=1e-5, msg=name)
    torch._dynamo.reset()


# --- precision --------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_network_in_half_precision_keeps_what_computes_the_matrices_in_float32(dtype: torch.dtype) -> None:
    net = network(residual={"exit": "learned"})
    redraw(net)
    before = {name: parameter.clone() for name, parameter in net.named_parameters()}
    net.to(dtype)
    for name, parameter in net.named_parameters():
        kept = name.rpartition(".")[2] in ("phi", "scale") or "mixing" in name or "exit_weights" in name
        assert parameter.dtype == (torch.float32 if kept else dtype), name
        assert not kept or torch.equal(parameter, before[name])
    assert net(**inputs_of("decoder")).dtype == dtype
    assert {parameter.dtype for parameter in net.double().parameters()} == {torch.float64}


@torch.no_grad()
def test_autocast_leaves_the_matrices_and_the_state_in_float32() -> None:
    net = network()
    redraw(net)
    site, state = net.decoder.blocks[0].feed_forward.site, normal(2, 5, 4, 16).float()
    with torch.autocast("cpu", torch.bfloat16):
        x, context = site.read(state)
        written = site.write(state, x.bfloat16(), context)
    expected_x, expected_context = site.read(state)
    assert torch.equal(x, expected_x)
    assert torch.equal(context[1], expected_context[1])
    assert torch.equal(written, site.write(state, x.bfloat16().float(), context))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_what_computes_the_matrices_is_loaded_in_float32_at_least(dtype: torch.dtype, tmp_path: Path) -> None:
    net = network(residual={"exit": "learned"})
    redraw(net)
    save_checkpoint(tmp_path / "model", net, Config(model=net.config))
    loaded = load_checkpoint(tmp_path / "model", dtype=dtype).network
    for part in loaded.modules():
        for name in getattr(part, "float32", ()):
            assert getattr(part, name).dtype == torch.promote_types(dtype, torch.float32)
    assert loaded.decoder.blocks[0].feed_forward.function.up.weight.dtype == dtype
    mixing, expected = (each.decoder.blocks[0].self_attention.site.read.mixing for each in (loaded, net))
    assert torch.equal(mixing.phi.float(), expected.phi)


def test_biases_and_factors_do_not_decay() -> None:
    net = network()
    optimizer = build_optimizer(AdamWConfig(), net)
    decayed = {
        id(p) for group in optimizer.optimizers[0].param_groups if group["weight_decay"] for p in group["params"]
    }
    for part in net.modules():
        if isinstance(part, Mixing):
            assert id(part.phi) in decayed
            assert id(part.bias) not in decayed
            assert id(part.scale) not in decayed
