"""The shared keys of a model spelled out: complete stacks, and one complete mapping for each of their layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import PydanticCustomError

from qkv.config.base import contradiction
from qkv.config.block import BLOCK_KEYS, BlockConfig
from qkv.config.merge import merge
from qkv.config.numbers import MAX_LAYERS
from qkv.config.parts import PatchInputConfig
from qkv.config.stack import StackConfig

_OF_ONE_SIDE = ("input", "num_queries")
"""Keys of a stack that an encoder-decoder's sides do not share."""


def spelled_out(model: Mapping[str, Any]) -> dict[str, Any]:
    """A model's keys with those of its stacks complete; what is complete already stays as it is.

    Raises PydanticCustomError for entries of `layers` that are none, and for sides of what has but one stack.
    """
    tree = dict(model)
    family = tree.get("family", "decoder")
    if family == "encoder-decoder":
        shared = {key: tree[key] for key in StackConfig.model_fields if key in tree and key not in _OF_ONE_SIDE}
        for side in ("encoder", "decoder"):
            own = tree.get(side)
            if isinstance(own, StackConfig):
                continue
            stack = merge(shared, own or {})
            if side == "encoder":
                stack.pop("cross_attention", None)
                stack.pop("cross_gate", None)
                if _reads_images(stack) and "max_seq_len" not in (own or {}):
                    stack.pop("max_seq_len", None)  # an image says itself how many vectors it becomes
            tree[side] = _with_layers(stack, attends_source=side == "decoder")
        tree.pop("layers", None)
        return tree
    for side in ("encoder", "decoder"):
        if tree.get(side) is not None:
            raise contradiction(
                "family", side, f"a model of family {family} is one stack", "its keys directly under `model`"
            )
    return _with_layers(tree, attends_source=False)


def _reads_images(stack: Mapping[str, Any]) -> bool:
    given = stack.get("input")
    return isinstance(given, PatchInputConfig) or (isinstance(given, Mapping) and given.get("kind") == "patches")


def _with_layers(stack: Mapping[str, Any], *, attends_source: bool) -> dict[str, Any]:
    """One complete mapping per layer: the shared keys, overridden by the pattern, tiled and cut to num_layers."""
    stack = dict(stack)
    count = stack.get("num_layers", StackConfig.model_fields["num_layers"].default)
    if not isinstance(count, int) or not 1 <= count <= MAX_LAYERS:
        return stack  # the field's own validation has the better message
    shared = {key: stack[key] for key in BLOCK_KEYS if key in stack}
    pattern: list[Any] = []
    entries: list[Any] = list(stack.get("layers") or [{}])
    for entry in entries:
        if isinstance(entry, BlockConfig):
            says = "cross_attention" in entry.model_fields_set
            pattern.append(_with_cross_attention(dict(entry)) if attends_source and not says else entry)
            continue
        if not isinstance(entry, Mapping):
            raise PydanticCustomError(
                "layers", "an entry of `layers` is a mapping, got {entry}", {"entry": repr(entry)}
            )
        own = dict(entry)
        repeat = own.pop("repeat", 1)
        if not isinstance(repeat, int) or isinstance(repeat, bool) or repeat < 1:
            raise PydanticCustomError(
                "repeat", "`layers[].repeat` is a whole number from 1, got {repeat}", {"repeat": repr(repeat)}
            )
        layer = merge(shared, own)
        if attends_source and own.get("cross_attention", {}) is not None:
            layer = _with_cross_attention(layer)
        pattern.extend([layer] * min(repeat, count))
    stack["layers"] = [pattern[index % len(pattern)] for index in range(count)]
    return stack


def _with_cross_attention(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Cross-attention is shaped like the layer's self-attention unless it says otherwise, and never has a window, nor a
    value residual."""
    attention = dict(layer.get("attention") or {})
    if attention.get("window") is not None:
        attention["window"] = None
    if "value_residual" in attention:
        attention["value_residual"] = "none"
    return {**layer, "cross_attention": merge(attention, dict(layer.get("cross_attention") or {}))}
