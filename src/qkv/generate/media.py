"""Images and sound, as files or arrays, to what a model's encoder reads.

Shapes: N samples, C channels, H and W height and width, F frames, S mels.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from qkv.config.data import AudioDataConfig, ImagesDataConfig
from qkv.config.errors import UsageError
from qkv.config.parts import PatchInputConfig
from qkv.config.run import Config
from qkv.config.stack import StackConfig
from qkv.data.media import medium_of

_DATA = {"images": ImagesDataConfig, "log-mel features": AudioDataConfig}
"""What tells how files become what an encoder reads."""


def is_one_file(given: Any, stack: StackConfig) -> bool:
    """Whether this is one image or recording, a file or its features, not a list of them."""
    if isinstance(given, Tensor):
        return given.dim() != len(stack.input.axes)
    return not isinstance(given, list | tuple)


def features_of(given: Sequence[Any] | Tensor, stack: StackConfig, config: Config) -> list[Tensor]:
    """Each of `given`, a file or a float tensor that is features already, as the stack reads it: [C, H, W] or [F, S].

    Files are read as `config.data` says, or as that kind of data does by default. Raises UsageError for what is neither
    or has another shape, and what reading files raises.
    """
    kind = _DATA[stack.input.reads]
    medium = medium_of(config.data if isinstance(config.data, kind) else kind(), stack)
    axes = stack.input.axes[1:]
    found = []
    for number, one in enumerate(given):
        if isinstance(one, str | os.PathLike):
            values, vectors = medium.read(os.fspath(one))
            if vectors > stack.max_seq_len:
                raise UsageError(
                    f"the recording becomes {vectors} vectors, which do not fit the model's context of "
                    f"{stack.max_seq_len}",
                    where=os.fspath(one),
                )
            found.append(medium.finished(values))
            continue
        fits = isinstance(one, Tensor) and one.is_floating_point() and one.dim() == len(axes)
        if not fits or any(isinstance(size, int) and size != got for size, got in zip(axes, one.shape, strict=True)):
            what = f"{one.dtype} {list(one.shape)}" if isinstance(one, Tensor) else type(one).__name__
            wanted = "an image" if isinstance(stack.input, PatchInputConfig) else "a recording"
            shape = ", ".join(map(str, axes))
            raise UsageError(f"{wanted} is a file or a float tensor [{shape}], not {what}", where=f"number {number}")
        found.append(one)
    return found


def stacked(features: Sequence[Tensor], like: Tensor) -> tuple[Tensor, Tensor | None]:
    """Images as [B, C, H, W], or other features as [B, F, S] with the length of each [B] (None: all whole), with the
    device and precision of `like`."""
    if features[0].dim() == 3:
        return torch.stack(list(features)).to(like.device, like.dtype), None
    lengths_B = torch.tensor([len(one) for one in features], device=like.device)
    return pad_sequence(list(features), batch_first=True).to(like.device, like.dtype), lengths_B
