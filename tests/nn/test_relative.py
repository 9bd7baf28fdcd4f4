"""T5's relative positions: the buckets of transformers, one table for a stack, right whatever is cached or hidden."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.t5.modeling_t5 import T5Attention

from qkv.config.errors import UsageError
from qkv.config.model import ModelConfig
from qkv.config.positions import RelativeConfig
from qkv.nn import Dims, Transformer, build
from qkv.nn.kernels import KernelName, use_kernel
from qkv.nn.mask import Mask

from .matrix import assert_equal, one_thread  # noqa: F401

V = 23


def network(family: str = "decoder", **changes: Any) -> Transformer:
    tree: dict[str, Any] = {
        "family": family,
        "vocab_size": V,
        "max_seq_len": 64,
        "d_model": 16,
        "num_layers": 2,
        "attention": {"num_heads": 4, "scale": 1.0},
        "position": {"kind": "relative", "num_buckets": 8, "max_distance": 12},
        "init": {"kind": "normal", "std": 0.3},
    }
    generator = torch.Generator().manual_seed(0)
    return Transformer(ModelConfig.model_validate(tree | changes), generator=generator).eval()


def ids_of(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, V, (rows, length), generator=torch.Generator().manual_seed(seed))


def relative(causal: bool, num_buckets: int = 32, max_distance: int = 128, heads: int = 3) -> Any:
    config = RelativeConfig(num_buckets=num_buckets, max_distance=max_distance)
    position = build(config, Dims(8, num_heads=heads, causal=causal))
    with torch.no_grad():
        position.table.weight.normal_(generator=torch.Generator().manual_seed(0))
    return position


@pytest.mark.parametrize("causal", [True, False], ids=["decoder", "encoder"])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 12), (64, 300)])
def test_buckets_are_those_of_transformers(causal: bool, num_buckets: int, max_distance: int) -> None:
    distances = torch.arange(-700, 700)
    expected = T5Attention._relative_position_bucket(distances, not causal, num_buckets, max_distance)
    assert torch.equal(relative(causal, num_buckets, max_distance).bucket(distances), expected)


@pytest.mark.parametrize(
    ("causal", "distance", "bucket"),
    [
        (False, 0, 0),
        (False, 1, 17),
        (False, -1, 1),
        (False, 128, 31),
        (False, 9000, 31),
        (True, 0, 0),
        (True, -15, 15),
        (True, -16, 16),
        (True, -128, 31),
        (True, 5, 0),
    ],
)
def test_a_bucket_is_where_the_paper_has_it(causal: bool, distance: int, bucket: int) -> None:
    assert relative(causal).bucket(torch.tensor(distance)) == bucket


@pytest.mark.parametrize("causal", [True, False], ids=["decoder", "encoder"])
def test_the_bias_is_the_table_by_bucket_and_depends_on_the_distance_only(causal: bool) -> None:
    position = relative(causal)
    bias = position.phases(torch.arange(40)[None], torch.float32).bias
    mask = Mask.square(None, 40, torch.device("cpu"))
    values_HTS = bias.tensor(mask)[0]
    assert values_HTS.shape == (3, 40, 40)
    assert torch.equal(values_HTS[2, 30, 4], position.table.weight[position.bucket(torch.tensor(-26)), 2])
    assert torch.equal(values_HTS[:, 1:, 1:], values_HTS[:, :-1, :-1])
    assert torch.equal(bias.tile(mask, slice(3, 9), slice(7, 30))[0], values_HTS[:, 3:9, 7:30])
    assert torch.equal(bias.head(1).tensor(mask)[0], values_HTS[1:2])


def test_the_bias_of_a_token_behind_a_cache_is_the_last_row_of_the_whole() -> None:
    bias = relative(True).phases(torch.arange(1)[None], torch.float32).bias
    whole = bias.tensor(Mask.square(None, 20, torch.device("cpu")))
    last = bias.tensor(Mask(None, torch.tensor([19]), 20, aligned=True))
    assert torch.equal(last, whole[:, :, 19:])
    uneven = bias.tensor(Mask(None, torch.tensor([[19], [4]]), 20, aligned=False))
    assert torch.equal(uneven[:, :, 0], whole[0][:, [19, 4]].transpose(0, 1))


def test_a_stack_has_one_table_for_all_layers_and_none_for_its_source() -> None:
    net = network("encoder-decoder", num_layers=3)
    tables = [name for name, parameter in net.named_parameters() if tuple(parameter.shape) == (8, 4)]
    assert tables == ["encoder.positions.0.table.weight", "decoder.positions.0.table.weight"]
    ids, source = ids_of(2, 9), ids_of(2, 7, seed=1)
    received: list[Any] = []
    for block in net.decoder.blocks:
        for kind in ("self", "cross"):
            block.attention(kind).kernel.register_forward_pre_hook(lambda _, args: received.append(args[4].bias))
    net(ids, source=source)
    assert received[1::2] == [None] * 3
    assert len({id(bias) for bias in received[::2]}) == 1


def test_layers_may_do_without() -> None:
    net = network(num_layers=3, layers=[{}, {"position": {"kind": "none"}}])
    assert [type(position).__name__ for position in net.decoder.positions] == ["Relative", "NoPosition"]
    assert net.decoder.position_of_layer == [0, 1, 0]


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("capacity", [None, 40])
def test_cached_in_chunks_equals_the_full_forward(window: int | None, capacity: int | None) -> None:
    net = network(attention={"num_heads": 4, "num_kv_heads": 2, "window": window}).requires_grad_(False)
    ids = ids_of(2, 30)
    cache = net.new_cache(2, capacity)
    logits = torch.cat([net(ids[:, a:b], cache=cache) for a, b in ((0, 7), (7, 8), (8, 27), (27, 30))], 1)
    assert_equal(logits, net(ids))


@pytest.mark.parametrize("kernel", ["math", "sdpa", "tiled"])
def test_every_kernel_gives_the_table_its_gradient(kernel: KernelName) -> None:
    nets = [network().double() for _ in range(2)]
    use_kernel(nets[0], "math")
    use_kernel(nets[1], kernel)
    for net in nets:
        net(ids_of(2, 9), labels=ids_of(2, 9, seed=1)).loss_sum.backward()
    expected, actual = (net.decoder.positions[0].table.weight.grad for net in nets)
    torch.testing.assert_close(actual, expected)
    used = nets[0].decoder.positions[0].bucket(-torch.arange(9)).unique()
    assert torch.equal(expected.abs().sum(1).nonzero().flatten(), used)


@pytest.mark.parametrize("family", ["decoder", "encoder"])
def test_given_positions_are_refused_for_they_would_change_nothing(family: str) -> None:
    with pytest.raises(UsageError, match="positions"):
        network(family)(ids_of(2, 9), positions=torch.arange(9)[None])
