"""Rotary positions in a config.json: `rope_parameters`, or `rope_theta` and `rope_scaling` as before transformers 5.

A scaling's `original_max_position_embeddings` is our `original_max_seq_len`. Beside a linear or dynamic one,
`max_position_embeddings` stays what it was before, and the context is `factor` times as long; beside the others it is
the whole context, though files with YaRN may leave it as it was too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qkv.checkpoint.published import Published, expect
from qkv.config.positions import DynamicScalingConfig, LinearScalingConfig, PositionConfig, RopeConfig

ORIGINAL = "original_max_position_embeddings"


def read_rope(published: Published, theta: float = 10000.0, *, partial: bool = False) -> dict[str, Any]:
    """The keys `position` and `max_seq_len`. theta: the architecture's default; partial: whether it can leave channels
    of a head unturned."""
    section = "rope_scaling" if "rope_scaling" in published else "rope_parameters"
    above = {key: published.keys[key] for key in ("rope_theta", "partial_rotary_factor") if key in published}
    parameters = published.section(section).with_defaults({"rope_theta": theta, **above})
    if any(isinstance(value, Mapping) for value in parameters.keys.values()):
        raise published.unsupported(section, "one per layer type", "one for all layers")
    if not partial:
        parameters.only("partial_rotary_factor", 1.0)
    position = read_parameters(parameters, published)
    length: int = published.whole("max_position_embeddings")
    match position["scaling"]:
        case {"kind": "linear" | "dynamic", "factor": factor}:
            length = _scaled(length, factor)
        case {"kind": "yarn", "factor": factor, "original_max_seq_len": original}:
            length = max(length, _scaled(original, factor))
    return {"position": position, "max_seq_len": length}


def _scaled(length: int, factor: float) -> int:
    """So many times the length; at most one that the configuration refuses, for a factor may be absurd."""
    return round(max(-1.0, min(length * factor, 2.0**63)))


def read_parameters(parameters: Published, published: Published) -> dict[str, Any]:
    """The section `position` from one set of rope parameters in a config.json."""
    return {
        "kind": "rope",
        "theta": parameters.number("rope_theta"),
        "fraction": parameters.number("partial_rotary_factor", 1.0),
        "scaling": _read_scaling(parameters, published),
    }


def _read_scaling(parameters: Published, published: Published) -> dict[str, Any] | None:
    kind = parameters.text("rope_type", parameters.text("type", "default"))
    length = published.whole("max_position_embeddings", least=1)
    original = published.whole(ORIGINAL, parameters.whole(ORIGINAL, length), least=1)
    match kind:
        case "default":
            return None
        case "linear":
            return {"kind": kind, "factor": parameters.number("factor")}
        case "dynamic":
            return {"kind": kind, "factor": parameters.number("factor"), "original_max_seq_len": length}
        case "yarn":
            return {
                "kind": kind,
                "factor": parameters.number("factor", length / original),
                "original_max_seq_len": original,
                "beta_fast": parameters.number("beta_fast", 32.0),
                "beta_slow": parameters.number("beta_slow", 1.0),
                "attention_factor": parameters.number("attention_factor", None),
                "mscale": parameters.number("mscale", None),
                "mscale_all_dim": parameters.number("mscale_all_dim", None),
                "truncate": parameters.flag("truncate", True),
            }
        case "longrope":
            return {
                "kind": kind,
                "short_factor": parameters.list("short_factor"),
                "long_factor": parameters.list("long_factor"),
                "original_max_seq_len": original,
                "attention_factor": parameters.number("attention_factor", None),
                "factor": parameters.number("factor", None),
            }
        case "llama3":
            return {
                "kind": kind,
                "factor": parameters.number("factor"),
                "low_freq_factor": parameters.number("low_freq_factor"),
                "high_freq_factor": parameters.number("high_freq_factor"),
                "original_max_seq_len": original,
            }
    raise parameters.unsupported("rope_type", kind, "supported: default, linear, dynamic, yarn, longrope, llama3")


def write_rope(position: PositionConfig, max_seq_len: int) -> dict[str, Any]:
    """The keys for the positions and the context, as transformers 5 reads them and as versions before it do."""
    rope = expect(position, RopeConfig, "model.position.kind")
    length = max_seq_len
    if isinstance(rope.scaling, LinearScalingConfig):
        length = round(max_seq_len / rope.scaling.factor)
    elif isinstance(rope.scaling, DynamicScalingConfig):
        length = rope.scaling.original_max_seq_len
    parameters = write_parameters(rope)
    return {
        "max_position_embeddings": length,
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.scaling is None else parameters,
        "rope_parameters": parameters,
    }


def write_parameters(rope: RopeConfig) -> dict[str, Any]:
    """One set of rope parameters."""
    scaling = {} if rope.scaling is None else rope.scaling.model_dump(mode="json", exclude_none=True)
    kind = scaling.pop("kind", "default")
    original = scaling.pop("original_max_seq_len", None)
    if original is not None and kind != "dynamic":  # there it is max_position_embeddings
        scaling[ORIGINAL] = original
    return {"rope_type": kind, "rope_theta": rope.theta, **scaling}
