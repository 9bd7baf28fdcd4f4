"""A network for images of another size."""

from __future__ import annotations

import torch
from pydantic import ValidationError

from qkv.config.errors import UsageError
from qkv.config.parts import PatchInputConfig
from qkv.config.positions import LearnedConfig
from qkv.nn.stem import resize_positions
from qkv.nn.transformer import Transformer

_POSITIONS = "encoder_embedding.position.weight"


def for_image_size(network: Transformer, image_size: int | tuple[int, int]) -> Transformer:
    """The same network for images of this height and width (one number: both), learned positions being interpolated.

    Raises UsageError for a network that reads no images, and a size that does not divide into its patches.
    """
    stack = network.config.stacks.get("encoder")
    if stack is None or not isinstance(stack.input, PatchInputConfig):
        raise UsageError("`image_size` is for models that read images")
    images = stack.input
    try:
        wanted = PatchInputConfig.model_validate({**images.model_dump(), "image_size": image_size})
    except ValidationError:
        raise UsageError(
            f"`image_size` is one number, or a height and a width, that divide into patches of {images.patch_size}, "
            f"not {image_size!r}"
        ) from None
    changed = {"input": wanted, "max_seq_len": wanted.fixed_length}
    config = network.config.model_copy(
        update=changed if network.config.encoder is None else {"encoder": stack.model_copy(update=changed)}
    )
    weights = network.state_dict()
    if isinstance(stack.position, LearnedConfig):
        weights[_POSITIONS] = resize_positions(weights[_POSITIONS], images.grid, wanted.grid)
    parameter = next(network.parameters())
    generator = torch.Generator(parameter.device)  # what it draws is replaced
    resized = Transformer(config, device=parameter.device, generator=generator).to(parameter.dtype)
    resized.load_state_dict(weights)
    return resized.train(network.training)
