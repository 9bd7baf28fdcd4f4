"""Linear layers that read the same vectors, as one product.

Shapes: [..., M] what is read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def side_by_side(x: Tensor, *layers: nn.Module) -> Sequence[Tensor]:
    """What each of the layers makes of x, [..., M] -> [..., width] each.

    One product of large matrices is faster than several of small ones. Under autocast it costs nothing to put the
    weights side by side, as they are copied to another precision anyway; else, and with layers that are no plain
    nn.Linear, each computes by itself.
    """
    plain = [layer for layer in layers if type(layer) is nn.Linear]
    weights: list[Tensor] = [layer.weight for layer in plain]
    biases: list[Tensor] = [layer.bias for layer in plain if layer.bias is not None]
    autocast = x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)
    if not autocast or len(plain) < len(layers) or 0 < len(biases) < len(layers):
        return [layer(x) for layer in layers]
    joined = F.linear(x, torch.cat(weights), torch.cat(biases) if biases else None)
    return torch.split(joined, [layer.out_features for layer in plain], dim=-1)
