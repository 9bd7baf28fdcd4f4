"""Every family compiles, in few graphs whatever its depth, and a compiled network gives what the eager one gives."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from qkv.config.model import ModelConfig
from qkv.nn import IGNORE, Cache, Transformer, use_kernel

from .matrix import assert_equal, one_thread  # noqa: F401

V = 23
FAMILIES = pytest.mark.parametrize("family", ["decoder", "encoder", "encoder-decoder"])


@pytest.fixture(autouse=True)
def _forgotten_afterwards() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def network(family: str, num_layers: int = 2, **changes: Any) -> Transformer:
    """Layers that differ in their window, and in having a position or none."""
    kinds: list[dict[str, Any]] = [{"attention": {"window": 2 + layer}} for layer in range(num_layers)]
    kinds[-1]["position"] = {"kind": "none"}
    tree: dict[str, Any] = {
        "family": family,
        "vocab_size": V,
        "max_seq_len": 64,
        "d_model": 16,
        "num_layers": num_layers,
        "attention": {"num_heads": 4, "num_kv_heads": 2},
        "layers": kinds,
        "init": {"kind": "normal", "std": 0.3},
    }
    generator = torch.Generator().manual_seed(0)
    return Transformer(ModelConfig.model_validate(tree | changes), generator=generator).eval()


def ids_of(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, V, (rows, length), generator=torch.Generator().manual_seed(seed))


def inputs_of(family: str, length: int, seed: int = 0) -> dict[str, Tensor]:
    inputs = {"ids": ids_of(2, length, seed)}
    return inputs | ({"source": ids_of(2, length + 2, seed + 1)} if family == "encoder-decoder" else {})


def compiled(
    net: Transformer, *, backend: str = "aot_eager", whole: bool = True
) -> tuple[Any, CompileCounterWithBackend]:
    """The network compiled (as one graph, where `whole`), and the counter of its compilations."""
    counter = CompileCounterWithBackend(backend)
    return torch.compile(net, backend=counter, fullgraph=whole, dynamic=None), counter


# --- how often --------------------------------------------------------------------------------------------------------


@FAMILIES
@pytest.mark.parametrize("num_layers", [2, 6])
def test_one_shape_is_one_graph_whatever_the_depth(family: str, num_layers: int) -> None:
    net = network(family, num_layers)
    fast, counter = compiled(net, backend="aot_eager" if num_layers == 2 else "eager")  # both count the same graphs
    for seed in range(3):
        inputs = inputs_of(family, 7, seed)
        assert_equal(fast(**inputs), net(**inputs))
    assert counter.frame_count == 1


@FAMILIES
@pytest.mark.parametrize("training", [False, True], ids=["logits", "loss-of-padded"])
def test_five_lengths_are_two_compilations(family: str, training: bool) -> None:
    net = network(family, num_layers=1)
    fast, counter = compiled(net)
    for length in (7, 9, 5, 12, 20):
        inputs = inputs_of(family, length)
        if training:
            inputs |= {"lengths": torch.tensor([length - 2, length]), "labels": ids_of(2, length, seed=5)}
            assert_equal(fast(**inputs).loss_sum, net(**inputs).loss_sum)
        else:
            assert_equal(fast(**inputs), net(**inputs))
    assert counter.frame_count <= 2


@FAMILIES
def test_padding_and_packing_are_one_graph_each(family: str) -> None:
    net = network(family, num_layers=1)
    fast, counter = compiled(net)
    for lengths in ([3, 7], [7, 1]):
        hidden = {"lengths": torch.tensor(lengths)}
        real = torch.arange(7) < hidden["lengths"][:, None]
        if family == "encoder-decoder":
            hidden["source_lengths"] = torch.tensor(lengths) + 2
        inputs = inputs_of(family, 7)
        assert_equal(fast(**inputs, **hidden)[real], net(**inputs, **hidden)[real])
    for cut in (2, 5):
        packed = {"documents": (torch.arange(7) >= cut).long().expand(2, -1)}
        if family == "encoder-decoder":
            packed["source_documents"] = (torch.arange(9) >= cut).long().expand(2, -1)
        inputs = inputs_of(family, 7)
        assert_equal(fast(**inputs, **packed), net(**inputs, **packed))
    assert counter.frame_count == 2


# --- decoding ---------------------------------------------------------------------------------------------------------


def continued(net: Any, cache: Cache, inputs: dict[str, Tensor], steps: int) -> Tensor:
    """The logits of a prompt and of single tokens after it."""
    logits = [net(**inputs, cache=cache)]
    logits += [net(ids_of(2, 1, seed), cache=cache) for seed in range(steps)]
    return torch.cat(logits, 1)


@pytest.mark.parametrize(("family", "most"), [("decoder", 4), ("encoder-decoder", 5)])
def test_compiled_decoding_has_few_graphs_and_forgets_the_request_before(family: str, most: int) -> None:
    net = network(family, num_layers=1)
    fast, counter = compiled(net)
    used, counts = net.new_cache(2, 40), []
    for request, (length, cache) in enumerate([(6, used), (9, net.new_cache(2, 40)), (4, used), (5, used)]):
        cache.reset()
        inputs = inputs_of(family, length, seed=request)
        expected = continued(net, net.new_cache(2, 40), inputs, steps=8)
        assert_equal(continued(fast, cache, inputs, steps=8), expected)
        counts.append(counter.frame_count)
    # a prompt, prompts of any length, and prompts into memory that is there already; a single token, and a single token
    # after a source of any length
    assert counts[2] <= most
    assert counts[3] == counts[2]


def test_compiled_decoding_of_unequal_prompts_equals_eager() -> None:
    net = network("decoder", num_layers=1)
    fast, counter = compiled(net, whole=False)  # the prompt's lengths are looked at, which ends a graph
    seen = []
    for run in (fast, net):
        cache = net.new_cache(2, 20)
        prompt = run(ids_of(2, 6), lengths=torch.tensor([2, 6]), cache=cache)
        steps = [run(ids_of(2, 1, seed), cache=cache) for seed in range(4)]
        seen.append(
            torch.cat([prompt[1:], *(step[1:] for step in steps), prompt[:1, :2], *(step[:1] for step in steps)], 1)
        )
        assert cache.lengths_B.tolist() == [6, 10]
    assert_equal(*seen)
    assert counter.frame_count <= 5  # of the prompt: the embedding, what stands before the break and behind it


# --- training, other kernels, real code -------------------------------------------------------------------------------

PARTS: dict[str, dict[str, Any]] = {
    "relative": {"position": {"kind": "relative"}},
    "alibi": {"position": {"kind": "alibi"}},
    "cosine": {"attention": {"num_heads": 4, "score": "cosine"}},
    "additive": {"attention": {"num_heads": 4, "score": "additive"}},
    "longrope": {
        "position": {
            "kind": "rope",
            "scaling": {
                "kind": "longrope",
                "short_factor": [1.0, 2.0],
                "long_factor": [2.0, 3.0],
                "original_max_seq_len": 5,
            },
        }
    },
    "parallel": {"parallel": "two-norms"},
    "shared": {"share_layers": True},
    "softcap": {"attention": {"num_heads": 4, "softcap": 2.0}},
    "sinks": {"attention": {"num_heads": 4, "sinks": True}},
    "gate": {"attention": {"num_heads": 4, "gate": "per-head"}},
    "differential": {"attention": {"kind": "differential", "num_heads": 4}},
}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_any_kind_is_in_one_graph_forward_and_backward(part: str) -> None:
    net = network("decoder", layers=[{}], **PARTS[part])
    twin = copy.deepcopy(net)
    fast, counter = compiled(twin)
    inputs, labels = inputs_of("decoder", 7), ids_of(2, 7, seed=5)
    with torch.enable_grad():
        for run in (net, fast):
            run(**inputs, labels=labels).loss_sum.backward()
    assert counter.frame_count == 1
    for (name, parameter), other in zip(net.named_parameters(), twin.parameters(), strict=True):
        assert parameter.grad is not None, name
        torch.testing.assert_close(other.grad, parameter.grad, rtol=1e-4, atol=1e-5)


def test_compiled_decoding_with_relative_positions_equals_eager() -> None:
    net = network("decoder", layers=[{}], position={"kind": "relative"})
    fast, counter = compiled(net)
    inputs = inputs_of("decoder", 6)
    expected = continued(net, net.new_cache(2, 40), inputs, steps=8)
    assert_equal(continued(fast, net.new_cache(2, 40), inputs, steps=8), expected)
    assert counter.frame_count <= 2


@FAMILIES
def test_a_compiled_step_has_the_gradients_of_the_eager_one(family: str) -> None:
    net = network(family, num_layers=1, tie_embeddings="head")
    twin = copy.deepcopy(net)
    fast, counter = compiled(twin)
    inputs, labels = inputs_of(family, 7), ids_of(2, 7, seed=5)
    labels[0, :3] = IGNORE
    with torch.enable_grad():
        for run in (net, fast):
            run(**inputs, labels=labels).loss_sum.backward()
    assert counter.frame_count == 1
    for (name, parameter), other in zip(net.named_parameters(), twin.parameters(), strict=True):
        assert parameter.grad is not None, name
        torch.testing.assert_close(other.grad, parameter.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernel", ["math", "tiled", "flex"])
def test_a_compiled_network_may_use_any_kernel(kernel: Any) -> None:
    net = network("decoder", num_layers=1)
    use_kernel(net, kernel)
    apart = kernel in ("tiled", "flex")  # loops over tiles are not compiled, and flex compiles itself
    fast, counter = compiled(net, whole=not apart)
    inputs = inputs_of("decoder", 7)
    assert_equal(fast(**inputs), net(**inputs))
    assert counter.frame_count == 1 or apart


@pytest.mark.slow  # the first one compiles PyTorch's headers
@FAMILIES
def test_generated_code_gives_what_eager_gives(family: str) -> None:
    net = network(family, num_layers=1)
    fast, counter = compiled(net, backend="inductor")
    inputs = inputs_of(family, 7)
    assert_equal(fast(**inputs), net(**inputs))
    assert counter.frame_count == 1
