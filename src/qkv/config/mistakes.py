"""What pydantic finds wrong with a configuration, as one error that people can read."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from qkv.config.errors import ConfigError, PermissionNeededError, QkvError
from qkv.config.yaml_tree import Path_, Tree

MAX_SHOWN = 200
"""How much of a wrong value an error shows."""


def explained(error: ValidationError, tree: Tree) -> QkvError:
    """One readable error of what pydantic found; a mistake in a shared key is told once, not once per layer."""
    seen: set[str] = set()
    lines: list[tuple[str, str, str | None]] = []
    meant = ""  # what the hint of the first mistake says already
    for detail in error.errors(include_url=False):
        context = detail.get("ctx") or {}
        path: Path_ = tuple(detail["loc"])
        if detail["type"] == "unknown_key":
            path = (*path, context["key"])
        path = _written(path, tree)
        message = _message(detail)
        if message in seen:  # a mistake in a key that all layers share
            continue
        if not seen:
            meant = context.get("meant", "")
        seen.add(message)
        place = ".".join(map(str, path))
        origin = tree.origin(path)
        lines.append(
            (message, f"{origin}, key `{place}`" if origin and place else origin or f"`{place}`", context.get("hint"))
        )
    what, where, hint = lines[0]
    what = what.removesuffix(meant)
    for message, place, _ in lines[1:]:
        what += f"\n  also: {message} ({place})"
    asks = any(detail["type"] == "package_not_allowed" for detail in error.errors(include_url=False))
    return (PermissionNeededError if asks else ConfigError)(what, where=where, hint=hint)


def _written(path: Path_, tree: Tree) -> Path_:
    """Where the user wrote what stands at `path` of the spelled-out tree: a layer's key may be a shared key."""
    if path[:1] != ("model",) or path in tree.origins:
        return path
    candidates = [path]
    inner = path[1:]
    if inner[:1] in (("encoder",), ("decoder",)):
        side, inner = inner[:1], inner[1:]
        if inner[:1] == ("layers",):
            candidates.append(("model", *side, *inner[2:]))
        candidates.append(("model", *inner))
    if inner[:1] == ("layers",):
        # layer 7 may be the second entry of a pattern of three
        place = path[: len(path) - len(inner) + 1]
        entries = {p[len(place)] for p in tree.origins if p[: len(place)] == place and len(p) > len(place)}
        candidates += [(*place, entry, *inner[2:]) for entry in sorted(entries, key=str)]
        candidates.append(("model", *inner[2:]))
    if candidates[-1][1:2] == ("cross_attention",):
        candidates.append(("model", "attention", *candidates[-1][2:]))
    for candidate in candidates:
        if candidate in tree.origins:
            return candidate
    return candidates[-1] if len(candidates) > 1 else path


def _message(detail: Any) -> str:
    kind, value = detail["type"], detail.get("input")
    if kind == "missing":
        return f"there is no `{detail['loc'][-1]}`"
    custom = (
        "unknown_key",
        "unknown_kind",
        "contradiction",
        "not_a_mapping",
        "layers",
        "repeat",
        "sides",
        "package_not_allowed",
        "import_failed",
        "wrong_part",
        "no_module",
    )
    message = str(detail["msg"])
    if kind in custom:
        return message
    message = "expected a list" if kind == "tuple_type" else message[0].lower() + message[1:]
    shown = "true" if value is True else "false" if value is False else repr(value)  # as YAML spells them
    return f"{message}, got {shortened(shown)}"


def shortened(text: str) -> str:
    """As much of a wrong value as an error shows."""
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."
