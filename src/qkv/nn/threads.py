"""How many threads a CPU computes with, by a stated rule.

OMP_NUM_THREADS (or MKL_NUM_THREADS) stands. Otherwise a command computes with no more threads than there are cores for
this process: torch sees the machine's, but neither those that the process is bound to, in every build, nor a
container's limit; threads beyond them wait for each other, and everything gets many times slower. The number is only
ever lowered, and only by the command line: in a program of its own, `torch.set_num_threads` is the program's to call.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from qkv.config.errors import counted

log = logging.getLogger("qkv")

_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Cores:
    """How many cores this process may use, and what limits it to them."""

    count: int
    why: str


def usable_cores(root: Path = Path("/")) -> Cores:
    """The smallest of all cores, those that the process is bound to, and its container's limit, whose part of a core is
    left unused (but for a limit below one). root: where /proc and /sys are."""
    limits = [Cores(os.cpu_count() or 1, "all cores")]
    if hasattr(os, "sched_getaffinity"):
        limits.append(Cores(len(os.sched_getaffinity(0)), "the cores it is bound to"))
    limits += [Cores(max(1, int(quota)), "the container's limit") for quota in _quotas(root)]
    return min(limits, key=lambda cores: cores.count)


def _quotas(root: Path) -> Iterator[float]:
    """The limits of the process's control groups and of those around them, in cores (cgroups 1 and 2)."""
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        mount = root / "sys/fs/cgroup"
        if "cpu" in controllers.split(","):
            mount /= controllers if (mount / controllers).is_dir() else "cpu"
        elif number != "0":
            continue
        # inside a container the path may be the one outside it, and the limit stands where the files begin
        group = mount / path.strip("/")
        for folder in (group, *(parent for parent in group.parents if parent.is_relative_to(mount))):
            yield from _quota(folder)


def _quota(group: Path) -> Iterator[float]:
    """The limit of one control group, where it has one: microseconds of computing in each period."""
    told = _lines(group / "cpu.max") or [
        " ".join([*_lines(group / "cpu.cfs_quota_us"), *_lines(group / "cpu.cfs_period_us")])
    ]
    for quota, period in (words for line in told if len(words := line.split()) == 2):
        if quota.isdecimal() and period.isdecimal() and int(period):  # otherwise "max", or -1
            yield int(quota) / int(period)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError):
        return []


def keep_to_cores() -> None:
    """Compute with no more threads than there are cores for this process, unless a variable says how many."""
    cores = usable_cores()
    if _asked() is None and torch.get_num_threads() > cores.count:
        torch.set_num_threads(cores.count)


def _asked() -> str | None:
    """The variable by which somebody has chosen the number of threads."""
    return next((name for name in _VARIABLES if os.environ.get(name)), None)


def describe_threads() -> str:
    """The number of threads, and what it follows: `2 threads (all cores)`."""
    count, cores, asked = torch.get_num_threads(), usable_cores(), _asked()
    threads = counted(count, "thread")
    if asked is not None and os.environ[asked].split(",")[0].strip() == str(count):
        return f"{threads} ({asked})"
    if count == cores.count:
        return f"{threads} ({cores.why})"
    relation = "of" if count < cores.count else "more than"
    return f"{threads} ({relation} {counted(cores.count, 'core')}: {cores.why})"


@functools.cache
def warn_of_threads() -> None:
    """Say once if there are more threads than cores for this process."""
    count, cores = torch.get_num_threads(), usable_cores()
    if count > cores.count:
        log.warning(
            "%d threads are more than the cores of this process (%d: %s), which is slow: torch.set_num_threads(%d)",
            *(count, cores.count, cores.why, cores.count),
        )
