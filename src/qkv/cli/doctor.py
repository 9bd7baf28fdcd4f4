"""`qkv doctor`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from qkv.cli.common import computes, json_option, print_json

if TYPE_CHECKING:
    from qkv.evaluate.kernels import KernelCheck
    from qkv.evaluate.machine import Machine


@click.command()
@json_option
@click.pass_context
@computes
def doctor(context: click.Context, as_json: bool) -> None:
    """What qkv finds on this machine, and whether its attention kernels compute right here.

    Every kernel is compared with a float64 reference: outputs and gradients, for all masks, grouped heads and memory
    layouts; of flex on a CPU, which has no gradients there, outputs alone. Exits with 1 if one is out of tolerance.
    """
    from qkv.evaluate.kernels import check_kernels
    from qkv.evaluate.machine import describe_machine

    machine = describe_machine()
    checks = [check for device in dict.fromkeys(("cpu", machine.device)) for check in check_kernels(device)]
    sound = all(check.ok for check in checks)
    if as_json:
        print_json({**asdict(machine), "kernels": [{**asdict(check), "ok": check.ok} for check in checks], "ok": sound})
    else:
        _show(machine, checks)
        if not sound:
            click.echo("a kernel computes wrong values here: use device cpu, and please report it", err=True)
    context.exit(0 if sound else 1)


def _show(machine: Machine, checks: list[KernelCheck]) -> None:
    memory = _gigabytes(machine.memory_available, machine.memory_total)
    rows = [
        ("versions", ", ".join(f"{name} {found or 'missing'}" for name, found in machine.versions.items())),
        ("platform", machine.platform),
        ("cores, threads", f"{machine.cores} ({machine.cores_why}), {machine.threads}"),
        ("memory", memory),
        ("device", f"{machine.device}: {machine.device_why}"),
        ("precision", f"{machine.dtype} to train in: {machine.dtype_why}"),
        ("C++ compiler", machine.compiler or "none: torch.compile is not available on a CPU"),
    ]
    if machine.device_memory_total is not None:
        rows.insert(5, ("device memory", _gigabytes(machine.device_memory_available, machine.device_memory_total)))
    for name, value in rows:
        click.echo(f"{name:<16}{value}")
    if machine.threads > machine.cores:
        click.echo(f"more threads than cores slow everything down: OMP_NUM_THREADS={machine.cores}", err=True)
    click.echo(f"\n{'kernel':<8}{'device':<8}{'dtype':<8}{'largest error':<16}{'tolerance':<12}{'':<8}where")
    for check in checks:
        error = "not finite" if check.error is None else f"{check.error:.1e}"
        verdict = "ok" if check.ok else "WRONG"
        where = check.case if check.gradients else f"{check.case} (outputs; no gradients here)"
        click.echo(
            f"{check.kernel:<8}{check.device:<8}{check.dtype:<8}{error:<16}{check.tolerance:<12.1e}{verdict:<8}{where}"
        )


def _gigabytes(available: int | None, total: int | None) -> str:
    if total is None:
        return "unknown"
    free = "" if available is None else f"{available / 1e9:.1f} GB free of "
    return f"{free}{total / 1e9:.1f} GB"
