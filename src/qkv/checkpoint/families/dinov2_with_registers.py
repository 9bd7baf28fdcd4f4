"""DINOv2 with registers (Darcet et al. 2023, arXiv 2309.16588). Theirs have no positions; ours have, and read zeros."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from qkv.checkpoint.families import dinov2
from qkv.checkpoint.mapping import Rule, Tensors
from qkv.checkpoint.published import Published, expect
from qkv.config.model import ModelConfig
from qkv.config.parts import PatchInputConfig


def read(published: Published, head: str) -> dict[str, Any]:
    model = dinov2.read(published, head)
    return {**model, "input": {**model["input"], "num_registers": published.whole("num_register_tokens", 4)}}


def write(config: ModelConfig) -> dict[str, Any]:
    images = expect(config.input, PatchInputConfig, "model.input.kind")
    return {**dinov2.write(config), "num_register_tokens": images.num_registers}


@dataclass(frozen=True)
class Registers:
    """`count` registers and all positions, published as what the registers are with theirs, the other positions, and
    the vector of masked patches, which only their training uses."""

    count: int

    def load(self, theirs: Tensors) -> Tensors:
        registers_1RM, positions_1TM, _ = theirs
        first_1M, patches_NM = positions_1TM[0, :1], positions_1TM[0, 1:]
        return registers_1RM[0], torch.cat((first_1M, torch.zeros_like(registers_1RM[0]), patches_NM))

    def save(self, ours: Tensors) -> Tensors:
        registers_RM, positions_TM = ours
        first_1M, own_RM, patches_NM = torch.split(positions_TM, [1, self.count, len(positions_TM) - 1 - self.count])
        return (registers_RM + own_RM)[None], torch.cat((first_1M, patches_NM))[None], torch.zeros_like(first_1M)


def rules(config: ModelConfig) -> Sequence[Rule]:
    images = expect(config.input, PatchInputConfig, "model.input.kind")
    registers = Rule(
        ("encoder_embedding.input.registers", "encoder_embedding.position.weight"),
        ("embeddings.register_tokens", "embeddings.position_embeddings", "embeddings.mask_token"),
        Registers(images.num_registers),
    )
    return (registers, *dinov2.encoder(config))


FAMILY = replace(
    dinov2.FAMILY,
    model_types=("dinov2_with_registers",),
    architectures={"Dinov2WithRegistersModel": "none"},
    read=read,
    write=write,
    rules=rules,
    ignored=(),
)
