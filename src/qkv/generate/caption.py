"""Images to text: what an encoder-decoder that reads patches writes of each."""

from __future__ import annotations

from dataclasses import dataclass

from qkv.config.errors import UsageError
from qkv.config.parts import PatchInputConfig
from qkv.generate.translate import Alternative, check_translates
from qkv.nn.transformer import Transformer


@dataclass(frozen=True)
class Caption(Alternative):
    """What is written of an image."""


def check_captions(network: Transformer) -> None:
    """Raise UsageError for what writes nothing of images."""
    reads = None if network.encoder is None else network.encoder.config.input
    if network.decoder is None or not isinstance(reads, PatchInputConfig):
        what = f", and reads {reads.kind}" if reads else ""
        raise UsageError(
            f"a model of family {network.config.family} does not caption images{what}",
            hint="an encoder-decoder whose encoder reads patches",
        )
    check_translates(network)
