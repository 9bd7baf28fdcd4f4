"""Batches of what a network reads: ids, features or images.

Shapes: B inputs of a batch, S tokens or frames, W width of features, C channels, H and W height and width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from qkv.data.rows import cut
from qkv.generate.decode import pad
from qkv.generate.media import stacked

Input = Sequence[int] | Tensor
"""Ids, or a float tensor: features [S, W], or an image [C, H, W]."""


def padded(batch: Sequence[Any], like: Tensor) -> tuple[Tensor, Tensor | None]:
    """Inputs of one kind as one tensor, ids [B, S], features [B, S, W] or images [B, C, H, W], and the length of each
    [B] (None: all whole), on the device of `like`, and with its precision."""
    return stacked(batch, like) if _is_features(batch[0]) else pad(batch, like.device)


def batches(
    inputs: Sequence[Input], like: Tensor, batch_size: int, *, longest: int, end_id: int | None
) -> Iterator[tuple[list[int], Tensor, Tensor | None]]:
    """All inputs, those of like length together: their numbers, and what `padded` makes of them.

    Of more than `longest` ids the rest is left out, and they still end with `end_id`.
    """
    rows = [one if _is_features(one) else cut(one, longest, end_id) for one in inputs]
    order = sorted(range(len(rows)), key=lambda number: len(rows[number]))
    for first in range(0, len(order), batch_size):
        numbers = order[first : first + batch_size]
        yield numbers, *padded([rows[number] for number in numbers], like)


def _is_features(one: Input) -> bool:
    return isinstance(one, Tensor) and one.is_floating_point()
