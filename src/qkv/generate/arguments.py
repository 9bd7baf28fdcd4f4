"""Arguments of generation that cannot be meant are refused here by name, before the model runs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

from qkv.config.errors import UsageError, nearest

_ELSEWHERE = {
    "beam_size": ("a beam search knows its text only at the end, so there is nothing to stream", "generate"),
    "num_beams": ("there is no option 'num_beams'", "beam_size"),
    "num_samples": ("one text is streamed at a time, so there is no num_samples", "generate, or one stream per seed"),
}
"""Options that are meant, but not here."""


def check_count(name: str, value: Any, least: int = 0) -> int:
    """`value`, a whole number from `least`; True is none."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise UsageError(f"{name} is a whole number from {least}, not {value!r}")
    return int(value)


def check_number(name: str, value: Any, allowed: str) -> float:
    """`value` as a float, infinite where none can hold it; `allowed` is what the error says of the range."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise UsageError(f"{name} is {allowed}, not {value!r}")
    try:
        return float(value)
    except OverflowError:
        return -math.inf if value < 0 else math.inf


def check_flag(name: str, value: Any) -> None:
    """Raises UsageError unless `value` is True or False: a text such as "no" would count as true."""
    if not isinstance(value, bool):
        raise UsageError(f"{name} is True or False, not {value!r}")


def check_names(given: Iterable[str], known: Iterable[str]) -> None:
    """Raises UsageError for an option that there is not, with the nearest one that there is."""
    names = list(known)
    for name in given:
        if name in names:
            continue
        what, hint = _ELSEWHERE.get(name, (f"there is no option {name!r}", nearest(name, names) or ", ".join(names)))
        raise UsageError(what, where=f"option {name}", hint=hint)
