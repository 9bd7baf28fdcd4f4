"""The diagram names what every residual kind, score and position does, and counts every parameter once."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from qkv.config.model import ModelConfig
from qkv.inspect.diagram import WIDTH, draw
from qkv.inspect.summary import summarise

KINDS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "plain": ({"residual": {"kind": "plain"}}, ("add",)),
    "none": ({"residual": {"kind": "none"}}, ("replace the stream",)),
    "rezero": ({"residual": {"kind": "rezero"}}, ("times a learned number, add", "the residual's own 1 ")),
    "layerscale": ({"residual": {"kind": "layerscale"}}, ("times a learned number per channel, add", "own 16 ")),
    "deepnorm": (
        {"residual": {"kind": "deepnorm"}, "norm": {"kind": "layernorm", "placement": "post"}},
        ("x the stream, LayerNorm",),
    ),
    "hyper-connections": (
        {"residual": {"kind": "hyper-connections", "streams": 2, "dynamic": False}},
        ("as 2 streams", "reads a mixture of 2 streams, static", "add to each of them, mixed", "sum of the streams"),
    ),
    "fractions": ({"residual": {"kind": "hyper-connections", "streams": 1, "fractions": 4}}, ("1 stream in 4 parts",)),
    "mhc": (
        {"residual": {"kind": "mhc", "streams": 3, "exit": "learned"}},
        (
            "as 3 streams",
            "mixture of 3 streams, by sigmoids",
            "doubly stochastic",
            "learned weighted sum of the streams",
        ),
    ),
    "one-stream": (
        {"residual": {"kind": "mhc", "streams": 1, "iterations": 1}},
        ("as 1 stream", "mixture of 1 stream, by sigmoids", "stochastic (1 step)"),
    ),
    "attention-residuals": (
        {"residual": {"kind": "attention-residuals"}},
        ("reads a mixture of embedding and all results", "one more to mix"),
    ),
    "block": (
        {"residual": {"kind": "attention-residuals", "block_size": 1}},
        ("embedding and the sum of each layer, by softmax", "add to the sum of its layer"),
    ),
    "sublayer-block": (
        {"residual": {"kind": "attention-residuals", "block_size": 3, "unit": "sublayer"}},
        ("embedding and the sum of each 3 sublayers", "add to the sum of its 3 sublayers"),
    ),
    "dot": ({"attention": {"num_heads": 2, "score": "dot"}}, ("dot scores",)),
    "cosine": ({"attention": {"num_heads": 2, "score": "cosine"}}, ("cosine scores",)),
    "additive": ({"attention": {"num_heads": 2, "score": "additive"}}, ("additive scores",)),
    "sinks": ({"attention": {"num_heads": 2, "sinks": True}}, ("sinks",)),
    "gate": ({"attention": {"num_heads": 2, "gate": "per-head"}}, ("gate per-head",)),
    "differential": ({"attention": {"kind": "differential", "num_heads": 2}}, ("differential",)),
    "alibi": ({"position": {"kind": "alibi"}}, ("alibi positions, in the scores",)),
    "relative": ({"position": {"kind": "relative"}}, ("relative positions, in the scores",)),
    "sinusoidal": ({"position": {"kind": "sinusoidal"}}, ("+ sinusoidal positions",)),
}


@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
@pytest.mark.parametrize(("changes", "lines"), KINDS.values(), ids=KINDS)
def test_a_kind_is_named_and_every_parameter_is_in_a_box(
    changes: dict[str, Any], lines: tuple[str, ...], family: str
) -> None:
    tree = {"family": family, "vocab_size": 40, "d_model": 16, "num_layers": 2, "attention": {"num_heads": 2}}
    config = ModelConfig.model_validate(tree | changes)
    drawn = draw(config)
    words = [word for word in drawn.split() if word not in ("│", "├─")]
    for line in lines:
        assert line in " ".join(words), drawn
    boxes = [int(before.replace(",", "")) for before, word in itertools.pairwise(words) if word.startswith("parameter")]
    assert sum(boxes) == summarise(config).params
    assert max(len(row) for row in drawn.split("\n")) <= 2 * WIDTH + 8


PARTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "prefix": ({"prefix": True}, ("its prefix in both directions",)),
    "experts": (
        {"feed_forward": {"kind": "moe", "num_experts": 4, "top_k": 2, "d_ff": 8, "shared": {"d_ff": 8}}},
        ("2 of 4 experts by softmax and a shared one",),
    ),
    "groups": (
        {
            "feed_forward": {
                "kind": "moe",
                "num_experts": 8,
                "top_k": 2,
                "d_ff": 8,
                "router": {"score": "sigmoid", "num_groups": 4, "top_groups": 2},
            }
        },
        ("2 of 8 experts in 2 of 4 groups by sigmoid",),
    ),
    "cross-gate": ({"family": "encoder-decoder", "cross_gate": True}, ("times tanh of a learned number",)),
    "queries": (
        {"family": "encoder-decoder", "encoder": {"num_queries": 3, "position": {"kind": "learned"}}},
        ("3 learned queries in its place", "attention to the input", "memory [B, 3, 16]"),
    ),
    "registers": (
        {
            "family": "encoder",
            "input": {"kind": "patches", "image_size": 8, "patch_size": 4, "num_registers": 2},
            "position": {"kind": "learned"},
            "head": {"kind": "none"},
        },
        ("class token, 2 registers, patches of 4 x 4",),
    ),
}


@pytest.mark.parametrize(("changes", "lines"), PARTS.values(), ids=PARTS)
def test_a_part_is_named_and_counted(changes: dict[str, Any], lines: tuple[str, ...]) -> None:
    tree = {"vocab_size": 40, "d_model": 16, "num_layers": 2, "attention": {"num_heads": 2}}
    config = ModelConfig.model_validate(tree | changes)
    words = [word for word in draw(config).split() if word not in ("│", "├─")]
    for line in lines:
        assert line in " ".join(words)
    boxes = [int(before.replace(",", "")) for before, word in itertools.pairwise(words) if word.startswith("parameter")]
    assert sum(boxes) == summarise(config).params


def test_layers_that_take_turns_are_drawn_once_each() -> None:
    local = [{"attention": {"window": 4}, "repeat": 5}, {}]
    tree = {"vocab_size": 40, "d_model": 16, "num_layers": 26, "attention": {"num_heads": 2}, "layers": local}
    drawn = draw(ModelConfig.model_validate(tree))
    titles = [line.strip("│ ") for line in drawn.splitlines() if " x block" in line]
    assert titles == ["22 x block in layers 0-4, 6-10, ..., 24-25", "4 x block in layers 5, 11, 17, 23"]
    assert drawn.count("window 4") == 1


def test_layers_are_drawn_as_one_that_has_something_to_mix() -> None:
    tree = {"vocab_size": 40, "d_model": 16, "num_layers": 2, "attention": {"num_heads": 2}}
    drawn = draw(ModelConfig.model_validate(tree | {"residual": {"kind": "attention-residuals"}}))
    assert drawn.count("the residual's own") == 2, drawn
