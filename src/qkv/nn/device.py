"""Where to compute and in which precision, by a stated rule.

auto device: CUDA where there is a GPU, MPS on Apple silicon, else the CPU. auto precision: bfloat16 where the hardware
multiplies it (CUDA from Ampere on; x86 with AVX512-BF16 or AMX), else float32: emulated half precision is 10 to 30
times slower.
"""

from __future__ import annotations

import torch

from qkv.config.errors import UsageError
from qkv.nn.threads import describe_threads, warn_of_threads


def choose_device(name: str = "auto") -> torch.device:
    """The device that `name` ("auto", "cpu", "cuda", "cuda:1", "mps") means. Raises UsageError where there is none.

    On a CPU, more threads than cores are warned of once.
    """
    device = _device(name)
    if device.type == "cpu":
        warn_of_threads()
    return device


def _device(name: str) -> torch.device:
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"`{name}` is not a device", hint="auto, cpu, cuda or mps") from None
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not there.get(device.type, True):
        raise UsageError(f"this machine has no {device.type} device that PyTorch can use", hint="device auto or cpu")
    return device


def describe_device(device: torch.device) -> str:
    """`device cpu, 2 threads (all cores)`."""
    return f"device {device}{f', {describe_threads()}' if device.type == 'cpu' else ''}"


def multiplies_bf16(device: torch.device) -> bool:
    """Whether the hardware multiplies bfloat16 matrices itself."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "cpu":
        capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
        return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "amx_tile"))
    return False


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype that `name` ("auto", "fp32", "bf16") means on `device`."""
    if name == "auto":
        return torch.bfloat16 if multiplies_bf16(device) else torch.float32
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    if name not in dtypes:
        raise UsageError(f"`{name}` is not a precision", hint="auto, fp32 or bf16")
    return dtypes[name]


def choose_weight_dtype(name: str, device: torch.device) -> torch.dtype | None:
    """The dtype to keep a trained model's weights in: None for "stored", as the file has it. "auto" is float32, but
    bfloat16 on a GPU that multiplies it; others as in training."""
    if name == "stored":
        return None
    return torch.float32 if name == "auto" and device.type != "cuda" else choose_dtype(name, device)
