"""Mixtures of experts in published checkpoints, whose matrices are published one by one."""

from __future__ import annotations

from collections.abc import Mapping

from qkv.checkpoint.mapping import Rule, Stacked
from qkv.checkpoint.published import expect
from qkv.config.feed_forward import DenseFeedForwardConfig, MixtureOfExpertsConfig
from qkv.config.model import ModelConfig

MATRICES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
"""What most call an expert's matrices, by our names."""


def experts_of(config: ModelConfig) -> MixtureOfExpertsConfig:
    """The experts of the first layer that has any."""
    kinds = [layer.feed_forward for layer in config.layers]
    mixed = next((kind for kind in kinds if isinstance(kind, MixtureOfExpertsConfig)), kinds[0])
    return expect(mixed, MixtureOfExpertsConfig, "model.feed_forward.kind")


def dense_layers(config: ModelConfig) -> dict[int, DenseFeedForwardConfig]:
    """The feed-forwards of the layers without experts, by the layer's number."""
    kinds = enumerate(layer.feed_forward for layer in config.layers)
    return {number: kind for number, kind in kinds if isinstance(kind, DenseFeedForwardConfig)}


def dense_width(config: ModelConfig) -> int | None:
    """How wide layers without experts are; an expert's width where there is none of them."""
    return next((kind.d_ff for kind in dense_layers(config).values()), experts_of(config).d_ff)


def expert_rules(config: ModelConfig, place: str, names: Mapping[str, str] = MATRICES) -> tuple[Rule, ...]:
    """The names of a mixture in a layer at `place`. `names`: of an expert's matrices, by ours."""
    ours, count = "decoder.blocks.*.feed_forward.function", experts_of(config).num_experts
    return (
        Rule(f"{ours}.router", f"{place}.gate"),
        *(
            Rule(
                f"{ours}.experts.{matrix}", tuple(f"{place}.experts.{e}.{name}.weight" for e in range(count)), Stacked()
            )
            for matrix, name in names.items()
        ),
    )
