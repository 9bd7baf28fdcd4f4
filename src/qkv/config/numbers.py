"""Bounded numbers of the configuration: probabilities, widths, lengths."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

Probability = Annotated[float, Field(ge=0.0, lt=1.0)]

# far above any real model: a slip of the keyboard or a hostile file is refused here, not by an allocator
MAX_WIDTH = 2**20
MAX_VOCAB = 2**24
MAX_LENGTH = 2**31
MAX_LAYERS = 4096
Width = Annotated[int, Field(ge=1, le=MAX_WIDTH)]
HiddenWidth = Annotated[int, Field(ge=1, le=4 * MAX_WIDTH)]
Heads = Annotated[int, Field(ge=1, le=2**16)]
VocabSize = Annotated[int, Field(ge=1, le=MAX_VOCAB)]
Length = Annotated[int, Field(ge=1, le=MAX_LENGTH)]
ImageSide = Annotated[int, Field(ge=1, le=2**15)]
Positive = Annotated[float, Field(gt=0)]
