"""report.md: a run in a page, written from the files the run left."""

from __future__ import annotations

import json
from pathlib import Path

from qkv.checkpoint.store import best_of, checkpoints_of
from qkv.evaluate.runs import read_metrics


def write_report(run: Path) -> Path:
    """Write `run`/report.md from metrics.jsonl, env.json and the checkpoints; an older one is replaced."""
    metrics = read_metrics(run)
    steps, losses = metrics.series("loss")
    val_steps, val_losses = metrics.series("val_loss")
    speeds = metrics.series("tokens_per_second")[1]
    lines = [f"# {run.resolve().name}", ""]
    if losses:
        lines.append(f"- training loss {losses[0]:.4f} at step {steps[0]}, {losses[-1]:.4f} at step {steps[-1]}")
    if val_losses:
        best = min(range(len(val_losses)), key=val_losses.__getitem__)
        lines.append(f"- best validation loss {val_losses[best]:.4f} at step {val_steps[best]}")
    if speeds:
        lines.append(f"- {sorted(speeds)[len(speeds) // 2]:,.0f} tokens per second (median of the steps logged)")
    checkpoints = checkpoints_of(run)
    if checkpoints:
        names = ", ".join(path.name for path in checkpoints)
        lines.append(f"- checkpoints: {names}; best: {best_of(checkpoints).name}")
    environment = json.loads((run / "env.json").read_text(encoding="utf-8"))
    if environment.get("started_from"):
        lines.append(f"- started from the weights of {environment['started_from']}")
    versions = ", ".join(f"{name} {version}" for name, version in environment["packages"].items() if version)
    lines.append(f"- Python {environment['python']}, {versions}; seed {environment['seed']}")
    lines += ["", "The losses are nats per target token. `config.yaml` says what was trained and how.", ""]
    if val_losses:
        keys = sorted({key for record in metrics.records for key in record if key.startswith("val_")} - {"val_loss"})
        headings = [key.removeprefix("val_").replace("_", " ") for key in keys]
        measures = [dict(zip(*metrics.series(key), strict=True)) for key in keys]
        lines += [f"| {' | '.join(['step', 'validation loss', *headings])} |", "|---|---|" + "---|" * len(keys)]
        for step, loss in zip(val_steps, val_losses, strict=True):
            figures = [f"{measure[step]:.4g}" if step in measure else "" for measure in measures]
            lines.append(f"| {' | '.join([str(step), f'{loss:.4f}', *figures])} |")
        lines.append("")
    path = run / "report.md"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path
