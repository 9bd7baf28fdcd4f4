"""mBART (Liu et al. 2020, arXiv 2001.08210): BART with its norms before the sublayers, and one more after each tower.

A translation starts from the code of its language: the file's, where it was trained for one, or the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qkv.checkpoint.families import Family, bart
from qkv.checkpoint.mapping import Rule
from qkv.checkpoint.published import Published
from qkv.config.model import ModelConfig


def read(published: Published, head: str) -> dict[str, Any]:
    model = bart.read(published, head)
    model["norm"]["placement"] = "pre"
    return model


def rules(config: ModelConfig) -> Sequence[Rule]:
    last = (Rule(f"{side}.final_norm", f"model.{side}.layer_norm") for side in bart.SIDES)
    return (*bart.rules(config, "norm_in"), *last)


FAMILY = Family(
    kind="encoder-decoder",
    model_types=("mbart",),
    architectures={"MBartForConditionalGeneration": "language-model", "MBartModel": "none"},
    prefix="model.",
    read=read,
    write=bart.write,
    rules=rules,
    copies=bart.copies,
)
