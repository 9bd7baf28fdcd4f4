"""How one mapping overrides another: mappings merge deeply, a changed `kind` replaces the object, lists replace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel


def merge(base: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `override` on top; neither is changed."""
    merged = dict(base)
    for key, value in override.items():
        below = merged.get(key)
        if isinstance(below, BaseModel) and isinstance(value, Mapping):
            below = dict(below)
        if isinstance(below, Mapping) and isinstance(value, Mapping) and not replaces(below, value):
            merged[key] = merge(below, value)
        else:
            merged[key] = value
    return merged


def difference(value: Mapping[str, Any], below: Mapping[str, Any]) -> dict[str, Any]:
    """The least that makes `value` of `below`: `merge(below, difference(value, below))` is `value`, where it has all
    keys of `below`."""
    least: dict[str, Any] = {}
    for key, own in value.items():
        other = below.get(key)
        if isinstance(own, Mapping) and isinstance(other, Mapping) and not replaces(other, own):
            if inner := difference(own, other):
                least[key] = inner
        elif key not in below or own != other:
            least[key] = own
    return least


def replaces(below: Mapping[str, Any], above: Mapping[str, Any]) -> bool:
    """Whether `above` names another kind than `below`, so that keys of the old kind must not survive."""
    return "kind" in above and "kind" in below and above["kind"] != below["kind"]
