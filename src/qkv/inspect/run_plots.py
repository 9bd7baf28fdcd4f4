"""Plots of what runs measured while they trained: losses, learning rates, gradient norms, speeds.

Runs whose configurations are the same but for `train.seed` are seeds of one: they are drawn as their mean, in a band
from the lowest to the highest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from qkv.config.errors import QkvError, UsageError
from qkv.config.load import read_tree
from qkv.evaluate.runs import Metrics, config_hash, read_metrics
from qkv.inspect.plots import COLORS, drawable, label_log_axis, new_axes, round_ticks, style, write_footer

_BAND = 0.18
_VALIDATION: dict[str, Any] = {"linewidth": 1.8, "marker": "o", "markersize": 4}
_MOST_HASHES = 8


@dataclass(frozen=True)
class Curve:
    """A metric that can be drawn: its key in metrics.jsonl, what it is called, and its axis."""

    key: str
    title: str
    axis: str


CURVES = {
    "loss": Curve("loss", "Loss", "loss (nats per token)"),
    "lr": Curve("lr", "Learning rate", "learning rate"),
    "grad-norm": Curve("grad_norm", "Gradient norm", "gradient norm, before clipping"),
    "speed": Curve("tokens_per_second", "Speed", "tokens per second"),
}
"""Kind of plot -> what it shows."""


@dataclass(frozen=True)
class _Group:
    """The seeds of one configuration, or a single run."""

    first: str
    config: Any
    seeds: list[Any] = field(default_factory=list)
    members: list[Metrics] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The first run's name, and how many seeds it stands for."""
        return self.first if len(self.members) == 1 else f"{self.first} ({len(self.members)} seeds)"

    def series(self, key: str) -> tuple[list[int], np.ndarray[Any, Any]]:
        """The steps that every member has a value for, and the values, [runs, steps]."""
        found = [dict(zip(*member.series(key), strict=True)) for member in self.members]
        steps = sorted(set.intersection(*(set(series) for series in found)))
        return steps, np.array([[series[step] for step in steps] for series in found])


def plot_runs(
    runs: Sequence[Path], kind: str = "loss", axes: Axes | None = None, *, log_x: bool = False, log_y: bool = False
) -> Axes:
    """A metric of run folders over steps, one colour per run or group of seeds; kind: a key of CURVES.

    The loss is drawn thin in training and marked on what was held out. Raises UsageError for no run and an unknown
    kind, NotFoundError for a folder without metrics, QkvError for one without this metric.
    """
    if not runs:
        raise UsageError("which run? a run folder such as runs/latest", hint="`qkv runs` for the list")
    if kind not in CURVES:
        raise UsageError(f"runs have no plot `{kind}`", hint=", ".join(CURVES))
    curve = CURVES[kind]
    groups = _groups(runs, curve)
    with style():
        axes = new_axes(axes, 7.5, 4.6)
        handles: list[Any] = []
        for index, group in enumerate(groups):
            color = COLORS[index % len(COLORS)]
            _draw(axes, group, curve.key, color, {"linewidth": 1, "alpha": 0.6} if kind == "loss" else {})
            if kind == "loss":
                _draw(axes, group, "val_loss", color, _VALIDATION)
            if len(groups) > 1:
                handles.append(Line2D([], [], color=color, linewidth=3, label=group.name))
        handles = [*_kinds_of_line(groups, kind), *handles]
        axes.set_xlabel("step")
        axes.set_ylabel(curve.axis)
        axes.set_title(curve.title if len(groups) > 1 else f"{curve.title} of {groups[0].name}")
        if log_y:
            axes.set_yscale("log")
            label_log_axis(axes.yaxis)
        if log_x:
            axes.set_xscale("log")
            label_log_axis(axes.xaxis)
        else:
            axes.xaxis.set_major_locator(round_ticks())
        axes.grid(axis="y", color="0.9")
        axes.set_axisbelow(True)
        if handles:
            axes.legend(handles=handles, fontsize=9)
        hashes = [config_hash(run) or "unknown" for run in runs]
        write_footer(axes, f"config {', '.join(hashes[:_MOST_HASHES])}{' ...' if len(hashes) > _MOST_HASHES else ''}")
    return axes


def _draw(axes: Axes, group: _Group, key: str, color: str, style: dict[str, Any]) -> None:
    steps, values = group.series(key)
    if not steps:
        return
    axes.plot(steps, values.mean(axis=0), color=color, **style)
    if len(values) > 1:
        axes.fill_between(steps, values.min(axis=0), values.max(axis=0), color=color, alpha=_BAND, linewidth=0)


def _kinds_of_line(groups: list[_Group], kind: str) -> list[Any]:
    """What the legend says of the lines, whatever their colour."""
    handles: list[Any] = []
    if kind == "loss":
        handles.append(Line2D([], [], color="0.4", linewidth=1, alpha=0.6, label="training"))
        if any(group.series("val_loss")[0] for group in groups):
            handles.append(Line2D([], [], color="0.4", label="validation", **_VALIDATION))
    if any(len(group.members) > 1 for group in groups):
        label = "line: mean of the seeds; band: lowest to highest"
        handles.append(Patch(color="0.4", alpha=_BAND, linewidth=0, label=label))
    return handles


def _groups(runs: Sequence[Path], curve: Curve) -> list[_Group]:
    """The runs in their order, seeds of one configuration at the place of the first."""
    groups: list[_Group] = []
    for run in runs:
        metrics = read_metrics(run)
        if not metrics.series(curve.key)[0]:
            raise QkvError(f"the run has no {curve.title.lower()} yet", where=str(run / "metrics.jsonl"))
        config, seed = _config_and_seed(run)
        alike = (group for group in groups if group.config == config and seed not in group.seeds)
        group = next(alike, None) if seed is not None else None
        if group is None:
            group = _Group(drawable(run.resolve().name), config)  # of runs/latest, the name of the run it points at
            groups.append(group)
        group.seeds.append(seed)
        group.members.append(metrics)
    return groups


def _config_and_seed(run: Path) -> tuple[Any, Any]:
    """The configuration without its seed, and the seed; None where it says none."""
    try:
        tree = read_tree(run / "config.yaml").data
    except QkvError:  # a curve needs no configuration
        return None, None
    train = tree.get("train")
    if not isinstance(train, dict) or "seed" not in train:
        return tree, None
    return {**tree, "train": {key: value for key, value in train.items() if key != "seed"}}, train["seed"]
