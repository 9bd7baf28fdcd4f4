"""A published config.json, read with care: it may be hostile, and what it asks for may not be supported."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, TypeVar, get_args

from qkv.config.base import Part
from qkv.config.errors import QkvError

Value = TypeVar("Value")
PartKind = TypeVar("PartKind", bound=Part)

_ABSENT: Any = object()
_LARGEST = 2**63 - 1


class Published:
    """The keys of a config.json. `where` names the file in errors; `tensors` are the names published with it.

    The readers give the default where a key is absent or null, and a QkvError that names the key where the value is of
    another kind, or the key is needed and absent.
    """

    def __init__(self, keys: Mapping[str, Any], where: str, tensors: Collection[str] = ()) -> None:
        self.keys = keys
        self.where = where
        self.tensors = tensors

    def __contains__(self, key: str) -> bool:
        return self.keys.get(key) is not None

    def holds(self, tensor: str) -> bool:
        """Whether a tensor of this name, or of this name after a prefix, is published too."""
        return any(f".{name}".endswith(f".{tensor}") for name in self.tensors)

    def with_defaults(self, defaults: Mapping[str, Any]) -> Published:
        """The same with values for absent keys; what is null stays null."""
        return Published({**defaults, **self.keys}, self.where, self.tensors)

    def whole(self, key: str, default: Any = _ABSENT, *, least: int = -_LARGEST, most: int = _LARGEST) -> Any:
        """A whole number, from `least` to `most`."""
        value = self._typed(key, default, int, "a whole number")
        if value is not None and not least <= value <= most:
            raise QkvError(f"`{key}` should be from {least} to {most}, not {value!s:.80}", where=self.where)
        return value

    def number(self, key: str, default: Any = _ABSENT) -> Any:
        """A finite number, as a float."""
        value = self._typed(key, default, (int, float), "a number")
        if value is None:
            return None
        try:
            finite = math.isfinite(value)
        except OverflowError:  # a whole number beyond what a float holds
            finite = False
        if not finite:
            raise QkvError(f"`{key}` should be a finite number", where=self.where)
        return float(value)

    def flag(self, key: str, default: Any = _ABSENT) -> Any:
        """True or false."""
        return self._typed(key, default, bool, "true or false")

    def text(self, key: str, default: Any = _ABSENT) -> Any:
        """A string."""
        return self._typed(key, default, str, "a string")

    def section(self, key: str) -> Published:
        """A mapping within, empty where it is absent."""
        return Published(self._typed(key, {}, dict, "an object"), f"{self.where}, {key}")

    def list(self, key: str, default: Any = _ABSENT) -> Any:
        """A list."""
        return self._typed(key, default, list, "a list")

    def choice(self, key: str, known: Mapping[str, Value], default: str) -> Value:
        """What of ours a published name means. Raises QkvError, naming the known ones, for others."""
        value = self.text(key, default)
        if value not in known:
            raise self.unsupported(key, value, f"supported: {', '.join(known)}")
        return known[value]

    def only(self, key: str, supported: Any) -> None:
        """Refuse every value but this one, and absence."""
        if key in self and self.keys[key] != supported:
            raise self.unsupported(key, self.keys[key], f"only {key}={supported} is supported")

    def unsupported(self, key: str, value: Any, hint: str) -> QkvError:
        """The error for a value that is meant but not supported."""
        return QkvError(f"`{key}: {value!s:.80}` is not supported", where=self.where, hint=hint)

    def _typed(self, key: str, default: Any, kind: type | tuple[type, ...], wanted: str) -> Any:
        value = self.keys.get(key)
        if value is None:
            if default is _ABSENT:
                raise QkvError(f"`{key}` is missing", where=self.where)
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise QkvError(f"`{key}` should be {wanted}, not {value!r:.80}", where=self.where)
        return value


def expect(part: Part, kind: type[PartKind], key: str) -> PartKind:
    """`part`, which a family can write if it is of this class. Raises QkvError naming the key otherwise."""
    if not isinstance(part, kind):
        kinds = " or ".join(get_args(kind.model_fields["kind"].annotation))
        raise QkvError(f"`{key}: {part.kind}` has no equivalent in this architecture", hint=f"{key}={kinds}")
    return part


def called(known: Mapping[str, Value], ours: Value) -> str:
    """The published name of what is ours, the inverse of `Published.choice`: the first that means it. Where there is
    none it is the first of all, and reading back tells the difference."""
    return next((theirs for theirs, meaning in known.items() if meaning == ours), next(iter(known)))
