"""Linear layers side by side."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from qkv.nn.linear import side_by_side

WIDTHS = (6, 2, 4)


def layers(*biases: bool) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(8, width, bias=bias) for width, bias in zip(WIDTHS, biases, strict=True)]


@pytest.mark.parametrize("biases", [(False,) * 3, (True,) * 3, (True, False, True)], ids=["none", "all", "some"])
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
def test_layers_side_by_side_give_what_each_gives(biases: tuple[bool, ...], autocast: bool) -> None:
    together, apart = layers(*biases), layers(*biases)
    x = torch.randn(3, 5, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        found, expected = side_by_side(x, *together), [layer(x) for layer in apart]
    for outputs in (found, expected):
        sum(output.float().square().sum() for output in outputs).backward()
    for output, other in zip(found, expected, strict=True):
        assert output.dtype == other.dtype
        torch.testing.assert_close(output, other)
    for layer, other in zip(together, apart, strict=True):
        for parameter, twin in zip(layer.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, twin.grad, rtol=0.02, atol=0.02)


def test_under_autocast_they_are_one_product() -> None:
    x, calls = torch.randn(2, 8), 0

    class Counter(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            nonlocal calls
            calls += function is nn.functional.linear
            return function(*args, **(kwargs or {}))

    with Counter(), torch.autocast("cpu", dtype=torch.bfloat16):
        side_by_side(x, *layers(False, False, False))
    assert calls == 1


def test_a_layer_of_another_kind_computes_by_itself() -> None:
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    plain, doubled = nn.Linear(8, 4, bias=False), Doubled(8, 4, bias=False)
    x = torch.randn(2, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(side_by_side(x, plain, doubled)[1], doubled(x))
