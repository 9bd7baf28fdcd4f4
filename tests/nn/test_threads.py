"""The number of threads on a CPU, by the rule."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from qkv.nn import threads
from qkv.nn.device import choose_device, choose_weight_dtype, describe_device
from qkv.nn.threads import Cores, describe_threads, keep_to_cores, usable_cores

V1 = {"proc/self/cgroup": "4:memory:/docker/ab\n2:cpu,cpuacct:/docker/ab\n0::/\n"}
V2 = {"proc/self/cgroup": "0::/pods/one/main\n"}


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nobody has chosen a number, and afterwards there are as many threads as before."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    threads.warn_of_threads.cache_clear()
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


def machine(root: Path, files: dict[str, str], monkeypatch: pytest.MonkeyPatch, cores: int, bound: int) -> Cores:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(bound)), raising=False)
    return usable_cores(root)


@pytest.mark.parametrize(
    ("files", "cores", "why"),
    [
        ({}, 8, "all cores"),
        ({"sys/fs/cgroup/cpu.max": "200000 100000\n"}, 8, "all cores"),  # nothing says which group is ours
        ({**V2, "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2, "the container's limit"),
        ({**V2, "sys/fs/cgroup/pods/one/main/cpu.max": "350000 100000"}, 3, "the container's limit"),
        ({**V2, "sys/fs/cgroup/pods/cpu.max": "150000 50000"}, 3, "the container's limit"),
        ({**V2, "sys/fs/cgroup/pods/cpu.max": "50000 100000"}, 1, "the container's limit"),
        ({**V2, "sys/fs/cgroup/pods/one/main/cpu.max": "max 100000"}, 8, "all cores"),
        ({**V2, "sys/fs/cgroup/pods/one/main/cpu.max": "9900000 100000"}, 8, "all cores"),
        ({**V2, "sys/fs/cgroup/cpu.max": "rubbish"}, 8, "all cores"),
        ({"proc/self/cgroup": "rubbish\n"}, 8, "all cores"),
    ],
)
def test_cgroup_2_limits_the_cores(tmp_path, monkeypatch, files, cores, why) -> None:
    assert machine(tmp_path, files, monkeypatch, 8, 8) == Cores(cores, why)


@pytest.mark.parametrize("folder", ["cpu,cpuacct", "cpu", "cpu/docker/ab", "cpu,cpuacct/docker"])
@pytest.mark.parametrize(("quota", "cores"), [("250000", 2), ("-1", 8)])
def test_cgroup_1_limits_the_cores(tmp_path, monkeypatch, folder, quota, cores) -> None:
    group = f"sys/fs/cgroup/{folder}"
    files = {**V1, f"{group}/cpu.cfs_quota_us": quota + "\n", f"{group}/cpu.cfs_period_us": "100000\n"}
    assert machine(tmp_path, files, monkeypatch, 8, 8).count == cores


def test_the_smallest_limit_counts(tmp_path, monkeypatch) -> None:
    assert machine(tmp_path, V2, monkeypatch, 8, 3) == Cores(3, "the cores it is bound to")
    files = {**V2, "sys/fs/cgroup/cpu.max": "500000 100000"}
    assert machine(tmp_path, files, monkeypatch, 8, 3) == Cores(3, "the cores it is bound to")
    assert machine(tmp_path, files, monkeypatch, 8, 6) == Cores(5, "the container's limit")


def test_threads_are_lowered_to_the_cores_and_never_raised(monkeypatch) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: Cores(2, "the container's limit"))
    torch.set_num_threads(3)
    keep_to_cores()
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    keep_to_cores()
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_a_variable_stands(monkeypatch, name) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: Cores(1, "all cores"))
    monkeypatch.setenv(name, "2")
    torch.set_num_threads(2)
    keep_to_cores()
    assert (torch.get_num_threads(), describe_threads()) == (2, f"2 threads ({name})")


@pytest.mark.parametrize(
    ("count", "cores", "words"),
    [
        (1, Cores(1, "all cores"), "1 thread (all cores)"),
        (2, Cores(2, "the container's limit"), "2 threads (the container's limit)"),
        (2, Cores(4, "all cores"), "2 threads (of 4 cores: all cores)"),
        (2, Cores(1, "the container's limit"), "2 threads (more than 1 core: the container's limit)"),
    ],
)
def test_the_number_is_told_with_what_it_follows(monkeypatch, count, cores, words) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: cores)
    torch.set_num_threads(count)
    assert describe_threads() == words
    assert describe_device(torch.device("cpu")) == f"device cpu, {words}"
    assert describe_device(torch.device("meta")) == "device meta"


def test_a_program_keeps_its_threads_and_is_warned_once(monkeypatch, caplog) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: Cores(1, "the container's limit"))
    torch.set_num_threads(2)
    with caplog.at_level(logging.WARNING, "qkv"):
        choose_device("cpu")
        choose_device("cpu")
    (record,) = caplog.records
    assert "2 threads are more than the cores of this process (1: the container's limit)" in record.getMessage()
    assert "torch.set_num_threads(1)" in record.getMessage()
    assert torch.get_num_threads() == 2


def test_weights_are_float32_on_a_cpu_unless_asked_otherwise() -> None:
    cpu = torch.device("cpu")
    assert choose_weight_dtype("auto", cpu) == torch.float32
    assert choose_weight_dtype("bf16", cpu) == torch.bfloat16
    assert choose_weight_dtype("stored", cpu) is None
