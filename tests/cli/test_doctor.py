"""`qkv doctor`."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from qkv.cli import main
from qkv.evaluate import describe_machine
from qkv.evaluate.kernels import KernelCheck
from qkv.nn.kernels import KERNELS


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def checks(error: float | None) -> list[KernelCheck]:
    return [
        KernelCheck("math", "cpu", "fp32", 1e-7, 1e-5, "causal, contiguous"),
        KernelCheck("sdpa", "cpu", "fp32", error, 1e-5, "window, permuted"),
        KernelCheck("flex", "cpu", "fp32", 1e-7, 1e-5, "causal, permuted", gradients=False),
    ]


def test_a_sound_machine_exits_with_zero(capsys, monkeypatch) -> None:
    monkeypatch.delitem(KERNELS, "flex")  # each of its calls takes half a second on a CPU
    code, out, err = run(capsys, "doctor", "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert found["ok"] is True
    assert {"math", "tiled", "sdpa"} == {row["kernel"] for row in found["kernels"]}
    assert {"fp32", "bf16"} == {row["dtype"] for row in found["kernels"]}
    assert all(0 < row["error"] <= row["tolerance"] for row in found["kernels"])
    assert found["versions"]["torch"].startswith("2.")
    assert found["threads"] == torch.get_num_threads()
    assert found["dtype"] in ("fp32", "bf16")


@pytest.mark.parametrize("error", [0.5, None])
def test_a_kernel_out_of_tolerance_exits_with_one_and_is_named(capsys, monkeypatch, error) -> None:
    import qkv.evaluate.kernels

    monkeypatch.setattr(qkv.evaluate.kernels, "check_kernels", lambda device: checks(error))
    code, out, err = run(capsys, "doctor")
    assert code == 1
    (wrong,) = [line for line in out.splitlines() if "WRONG" in line]
    assert "sdpa" in wrong
    assert "window, permuted" in wrong
    assert "wrong values" in err
    code, out, _ = run(capsys, "doctor", "--json")
    assert (code, json.loads(out)["ok"]) == (1, False)


def test_people_are_told_the_rules_and_the_compiler(capsys, monkeypatch) -> None:
    import qkv.evaluate.kernels

    monkeypatch.setattr(qkv.evaluate.kernels, "check_kernels", lambda device: checks(1e-6))
    out = run(capsys, "doctor")[1]
    assert "causal, permuted (outputs; no gradients here)" in out
    for name in ("versions", "threads", "memory", "device", "precision", "bfloat16", "C++ compiler", "tolerance"):
        assert name in out


def test_the_compiler_is_the_one_named_or_the_first_found(monkeypatch) -> None:
    monkeypatch.setenv("CXX", "my++")
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}" if name in ("my++", "clang++") else None)
    assert describe_machine().compiler == "/bin/my++"
    monkeypatch.delenv("CXX")
    assert describe_machine().compiler == "/bin/clang++"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert describe_machine().compiler is None
