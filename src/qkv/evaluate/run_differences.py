"""How two runs differ: what was configured, where they ran, what they read, and what came of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkv.evaluate.runs import Metrics, RunRecords, read_run

ABSENT: Any = object()
"""The value of a key that is not there; null is a value."""

_STACKS = ("encoder", "decoder")
_OF_THE_RUN = ("data_fingerprint", "training", "preset", "started_from", "seed")
"""What env.json says of the run rather than of the machine."""
_PlainKey = tuple[str | int, ...]


@dataclass(frozen=True)
class Difference:
    """A key whose value is not the same on both sides, or that one side lacks (ABSENT)."""

    key: str
    first: Any
    second: Any

    def shown(self, side: int) -> str:
        """The value of the first (0) or second (1) side as people read it."""
        value = (self.first, self.second)[side]
        return "(none)" if value is ABSENT else json.dumps(value, ensure_ascii=False)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: a side that lacks the key is left out."""
        sides = {"first": self.first, "second": self.second}
        return {"key": self.key, **{side: value for side, value in sides.items() if value is not ABSENT}}


@dataclass(frozen=True)
class RunDifferences:
    """Two runs side by side. `config`, `environment`: None where one side cannot be read. `data_fingerprints`: None for
    a run that does not say its own. `metrics`: key -> (step, value of the first, value of the second) of the steps that
    both logged; empty where they have none in common. `problems` names missing and damaged files."""

    first: RunRecords
    second: RunRecords
    config: list[Difference] | None
    environment: list[Difference] | None
    data_fingerprints: tuple[str | None, str | None]
    metrics: dict[str, list[tuple[int, float, float]]]
    problems: list[str]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        found = {"config": self.config, "environment": self.environment}
        return {
            "runs": [self.first.summary.path, self.second.summary.path],
            **{name: None if one is None else [key.as_dict() for key in one] for name, one in found.items()},
            "data_fingerprints": list(self.data_fingerprints),
            "metrics": {
                key: [{"step": step, "first": first, "second": second} for step, first, second in rows]
                for key, rows in self.metrics.items()
            },
            "problems": self.problems,
        }


def diff_runs(first: Path, second: Path) -> RunDifferences:
    """Compare two run folders. Raises NotFoundError where one is none; what is damaged in them is named."""
    runs = read_run(first), read_run(second)
    machines = [{key: value for key, value in run.environment.items() if key not in _OF_THE_RUN} for run in runs]
    return RunDifferences(
        first=runs[0],
        second=runs[1],
        config=config_differences(runs[0].config, runs[1].config) if all(run.config for run in runs) else None,
        environment=_tree_differences(*machines) if all(run.environment for run in runs) else None,
        data_fingerprints=(runs[0].data_fingerprint, runs[1].data_fingerprint),
        metrics=_common_metrics(runs[0].metrics, runs[1].metrics),
        problems=[f"{run.summary.path}: {problem}" for run in runs for problem in run.problems],
    )


def config_differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Difference]:
    """How two resolved configurations differ, key by key.

    A difference in a shared key, which every stack and layer repeats, is told once; one that all layers have under the
    key `layers.*`. Layers that only one side has are not told: `num_layers` differs. Of another list's item that only
    one side has, nulls are not told.
    """
    differing = _differing(first, second)
    items = _items(first) ^ _items(second)
    differing = {key: values for key, values in differing.items() if not _says_nothing(key, values, items)}
    groups: dict[_PlainKey, dict[_PlainKey, tuple[Any, Any]]] = {}
    for key, values in differing.items():
        if not any(differing.get(shared) == values for shared in _shared(key)):
            groups.setdefault(_in_any_layer(key), {})[key] = values
    found = []
    for pattern, members in groups.items():
        if "*" in pattern:
            layers = pattern[: pattern.index("*")]
            count = min(len(_at(side, layers)) for side in (first, second))
            members = {key: values for key, values in members.items() if int(key[len(layers)]) < count}
            found_in = list(members.values())
            if found_in and found_in == [found_in[0]] * count:
                members = {pattern: found_in[0]}
        found += [Difference(_spelled(key), *values) for key, values in members.items()]
    return found


def _tree_differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Difference]:
    return [Difference(_spelled(key), *values) for key, values in _differing(first, second).items()]


def _in_any_layer(key: _PlainKey) -> _PlainKey:
    """The key with `*` for the number of the layer, if it is one of a layer."""
    return tuple("*" if n and key[n - 1] == "layers" and isinstance(name, int) else name for n, name in enumerate(key))


def _shared(key: _PlainKey) -> Iterator[_PlainKey]:
    """The shared keys that a stack's or a layer's key repeats."""
    if key[0] != "model" or len(key) == 1:
        return
    stack, inner = (key[1:2], key[2:]) if key[1] in _STACKS else ((), key[1:])
    if stack:
        yield ("model", *inner)
    if inner[:1] == ("layers",):
        yield ("model", *stack, *inner[2:])
        yield ("model", *inner[2:])
        if inner[2:3] == ("cross_attention",):  # where nothing is said of it, it is like self-attention
            yield ("model", "attention", *inner[3:])


def _differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[_PlainKey, tuple[Any, Any]]:
    """The leaves that are not equal, those of the first side first."""
    sides = dict(_leaves(first)), dict(_leaves(second))
    pairs = {key: (sides[0].get(key, ABSENT), sides[1].get(key, ABSENT)) for key in {**sides[0], **sides[1]}}
    return {key: (one, other) for key, (one, other) in pairs.items() if one is ABSENT or one != other}


def _says_nothing(key: _PlainKey, values: tuple[Any, Any], items: set[_PlainKey]) -> bool:
    """Whether it is a null of an item that only one side has (`items`), or the empty list of the side without any."""
    told = [value for value in values if value is not ABSENT]
    if told == [None]:
        return any(key[:length] in items for length in range(1, len(key)))
    return told == [[]] and (*key, 0) in items


def _items(side: Mapping[str, Any]) -> set[_PlainKey]:
    """The places of all items of lists that hold mappings."""
    return {key[: n + 1] for key, _ in _leaves(side) for n, name in enumerate(key) if isinstance(name, int)}


def _leaves(tree: Any, key: _PlainKey = ()) -> Iterator[tuple[_PlainKey, Any]]:
    """Every value that holds no other mapping, with its place."""
    if isinstance(tree, Mapping) and tree:
        for name, value in tree.items():
            yield from _leaves(value, (*key, name))
    elif isinstance(tree, list) and any(isinstance(item, Mapping) for item in tree):
        for number, value in enumerate(tree):
            yield from _leaves(value, (*key, number))
    else:
        yield key, tree


def _common_metrics(first: Metrics, second: Metrics) -> dict[str, list[tuple[int, float, float]]]:
    found = {}
    for key in dict.fromkeys([*first.keys, *second.keys]):
        values, others = (dict(zip(*metrics.series(key), strict=True)) for metrics in (first, second))
        found[key] = [(step, value, others[step]) for step, value in values.items() if step in others]
    return found


def _at(tree: Any, key: _PlainKey) -> Any:
    """What stands at `key`; nothing where one side has no such place."""
    for name in key:
        tree = tree.get(name, []) if isinstance(tree, Mapping) else []
    return tree


def _spelled(key: _PlainKey) -> str:
    return ".".join(map(str, key))
