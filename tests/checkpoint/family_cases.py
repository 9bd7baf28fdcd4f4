"""Tiny random models of published architectures, made by transformers, and ours loaded from what it saved.

Every weight is off its default, so that one forgotten, mistaken or misplaced is seen. The promise is 1e-5 of the
largest value.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from nn.parity_weights import randomise
from torch import Tensor, nn
from transformers import PreTrainedModel

import qkv
from qkv import Model

VOCAB = 97
NO_SPECIAL_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
"""So that a text goes on for as long as it is asked to."""


@dataclass(frozen=True)
class Case:
    """A class of transformers and the keys of its configuration; `options` are for the tests of its family."""

    architecture: str
    keys: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Pair:
    """The same weights in transformers and in qkv."""

    case: Case
    theirs: PreTrainedModel
    ours: Model


def make(case: Case) -> PreTrainedModel:
    """A random model, in transformers' plainest way of computing it."""
    kind = getattr(transformers, case.architecture)
    torch.manual_seed(0)
    model = kind(kind.config_class(**case.keys, attn_implementation="eager"))
    if case.options.get("own_head"):  # transformers ties T5's when it is made, but not when it is read
        model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
    randomise(model)
    for name, buffer in model.named_buffers():
        if name.endswith(("final_logits_bias", "e_score_correction_bias")):
            buffer.normal_()
    return model.eval()


def make_pair(case: Case, folder: Path) -> Pair:
    """A model, and what qkv loads of it."""
    theirs = make(case)
    theirs.save_pretrained(folder)
    return Pair(case, theirs, qkv.load(folder, device="cpu"))


def random_ids(rows: int, length: int) -> Tensor:
    """Ids [rows, length], always the same; the lowest, which may mean something, are left out."""
    return torch.randint(5, VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))


def mask_of(lengths: Tensor, longest: int) -> Tensor:
    """Transformers' attention mask [B, longest] of rows padded on the right."""
    return (torch.arange(longest) < lengths[:, None]).long()


def values(theirs: PreTrainedModel, **inputs: Any) -> Tensor:
    """What their model is there for: logits, or a bare model's hidden vectors."""
    with torch.no_grad():
        return theirs(**inputs)[0]


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    """Equal to 1e-5 of the largest value."""
    assert ours.shape == theirs.shape
    difference = (ours - theirs).abs().max().item()
    assert difference <= 1e-5 * theirs.abs().max().item(), f"they differ by {difference:.3g}"


def written(ours: Model, folder: Path) -> PreTrainedModel:
    """What transformers opens of our model written as theirs; no tensor may be missing or left over."""
    ours.save_hf(folder)
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    model, told = getattr(transformers, architecture).from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
    assert qkv.load(folder, device="cpu").network.config == ours.network.config
    return model.eval()
