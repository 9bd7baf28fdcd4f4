"""Errors people read: what is wrong, where, and what to try.

Imports nothing, so that the command line can report an error without loading pydantic or torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""All control characters but tab and newline, and those that reorder text."""


class QkvError(Exception):
    """A mistake or a limit that the user can act on; the command line prints it without a traceback.

    `what` says what is wrong, `where` the place (file:line, key, byte offset), `hint` what to try.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(what)
        self.what, self.where, self.hint = what, where, hint

    def __str__(self) -> str:
        place = f"\n  at {self.where}" if self.where else ""
        advice = f"\n  try {self.hint}" if self.hint else ""
        return printable(f"{self.what}{place}{advice}")

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.where, self.hint)


def _rebuild(kind: type[QkvError], what: str, where: str | None, hint: str | None) -> QkvError:
    return kind(what, where=where, hint=hint)


class DamagedError(QkvError):
    """A file that is not what it claims to be."""


class UsageError(QkvError):
    """An argument that cannot be meant: a wrong value, or two that contradict each other."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration that cannot be built."""


class NotFoundError(QkvError):
    """A file, preset, run or model that does not exist."""

    exit_code = 3


class PermissionNeededError(QkvError):
    """Something that needs the user's explicit consent, such as code from a third party."""

    exit_code = 4


class ConflictError(QkvError):
    """What is there already stands in the way, such as a run folder in use."""

    exit_code = 5


def printable(text: str) -> str:
    """`text` with control characters escaped: a name from a stranger's file must not steer the terminal."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def counted(count: int, unit: str) -> str:
    """`1 step`, `1,200 steps`."""
    return f"{count:,} {unit}{'' if count == 1 else 's'}"


def sizes_apart(first: int, second: int) -> tuple[str, str]:
    """Two different numbers of bytes for people, in the largest unit up to MB that shows the difference."""
    for unit, size in (("MB", 10**6), ("kB", 10**3)):
        shown = f"{first / size:,.0f} {unit}", f"{second / size:,.0f} {unit}"
        if shown[0] != shown[1]:
            return shown
    return f"{first:,} bytes", f"{second:,} bytes"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` most likely meant, or None."""
    found = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return found[0] if found else None
