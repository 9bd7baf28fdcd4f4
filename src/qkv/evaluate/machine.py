"""What qkv finds on this machine, and what it decides from that."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from qkv.nn.device import choose_device, choose_dtype, multiplies_bf16
from qkv.nn.threads import usable_cores

PACKAGES = ("qkv", "torch", "numpy", "tokenizers", "safetensors", "pydantic", "matplotlib")


@dataclass(frozen=True)
class Machine:
    """`device` and `dtype` are what `auto` means for training here, each with the reason. cores: those that this
    process may use, and what limits it to them. compiler: the C++ one that `torch.compile` would use, None without one.
    Memory in bytes, None where the system does not say; a container's limit counts."""

    versions: dict[str, str | None]
    platform: str
    cores: int
    cores_why: str
    threads: int
    device: str
    device_why: str
    dtype: str
    dtype_why: str
    compiler: str | None
    memory_total: int | None
    memory_available: int | None
    device_memory_total: int | None
    device_memory_available: int | None


def describe_machine() -> Machine:
    """Look around."""
    device, cores = choose_device(), usable_cores()
    total, available = _memory()
    device_total = device_available = None
    name = ""
    if device.type == "cuda":
        device_available, device_total = torch.cuda.mem_get_info(device)
        name = f" ({torch.cuda.get_device_name(device)})"
    multiplies = multiplies_bf16(device)
    return Machine(
        versions={"python": platform.python_version(), **{package: _version(package) for package in PACKAGES}},
        platform=platform.platform(),
        cores=cores.count,
        cores_why=cores.why,
        threads=torch.get_num_threads(),
        device=str(device),
        device_why=_device_why(device) + name,
        dtype="bf16" if choose_dtype("auto", device) == torch.bfloat16 else "fp32",
        dtype_why="the hardware multiplies bfloat16" if multiplies else "the hardware would only emulate bfloat16",
        compiler=compiler(),
        memory_total=total,
        memory_available=available,
        device_memory_total=device_total,
        device_memory_available=device_available,
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _device_why(device: torch.device) -> str:
    reasons = {"cuda": "a GPU that PyTorch can use", "mps": "Apple silicon"}
    return reasons.get(device.type, "no GPU that PyTorch can use")


def compiler() -> str | None:
    """The path of the C++ compiler: $CXX, or the first usual name found."""
    for name in (os.environ.get("CXX"), "g++", "c++", "clang++", "cl"):
        if name and (path := shutil.which(name)):
            return path
    return None


def _memory() -> tuple[int | None, int | None]:
    """Main memory that there is, and that is free, in bytes."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows
        return None, None
    available = None
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit = next(iter(_lines(Path("/sys/fs/cgroup/memory.max"))), "max").strip()
    if limit.isdigit() and int(limit) < total:
        total = int(limit)
        used = next(iter(_lines(Path("/sys/fs/cgroup/memory.current"))), "").strip()
        if used.isdigit() and available is not None:
            available = min(available, max(total - int(used), 0))
    return total, available


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
