"""report.md: a run in a page, written from the files the run left, as often as one likes.

What is missing or damaged is named in the page; everything else is told all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from qkv.checkpoint.store import best_of, checkpoints_of
from qkv.config.errors import QkvError
from qkv.config.run import Config
from qkv.evaluate.run_differences import config_differences
from qkv.evaluate.runs import RunRecords, read_run
from qkv.train.run_folder import replace_text

PLOTS = (".png", ".svg")
SHOWN_SKIPS = 20
"""Skipped steps that are told one by one; metrics.jsonl has them all."""


def write_report(run: Path) -> Path:
    """Write `run`/report.md; an older one is replaced, or left as it was where there is an error.

    Raises NotFoundError where `run` is no run, QkvError where the page cannot be written.
    """
    records = read_run(run)
    parts = [_outcome(run, records), *_configuration(records), _model(records), _machine(records)]
    parts += [_validation(records), _skipped(records), _checkpoints(run, records), _samples(run), _plots(run)]
    parts.append(_section("What is missing or damaged", [f"- {problem}" for problem in records.problems]))
    lines = [f"# {run.resolve().name}", "", *(line for part in parts if part for line in [*part, ""])]
    path = run / "report.md"
    replace_text("the report", path, "\n".join(lines))
    return path


def data_line(told: Mapping[str, Any]) -> str:
    """How much there is to learn from, of what a run tells when it begins.

    Documents run into each other, so that only their tokens tell; images and recordings with a label have none.
    """
    line, held = f"{told['train_tokens']:,} training tokens", told["validation_tokens"]
    if told["unit"] != "documents":
        of = "target tokens" if told["unit"] == "pairs" else "tokens"
        tokens = f" of {told['train_tokens']:,} {of}" if told["train_tokens"] else ""
        line, held = f"{told['train_documents']:,} training {told['unit']}{tokens}", told["validation_documents"]
    return f"{line}, {held:,} held out" if held else line


def _section(title: str, lines: Iterable[str]) -> list[str]:
    """A section, or nothing where there is nothing to say."""
    lines = list(lines)
    return [f"## {title}", "", *lines] if lines else []


def _outcome(run: Path, records: RunRecords) -> list[str]:
    summary, metrics, environment = records.summary, records.metrics, records.environment
    planned = "an unknown number of" if summary.steps is None else f"{summary.steps:,}"
    done = summary.steps is not None and summary.step >= summary.steps
    lines = [f"- all of {planned} steps" if done else f"- {summary.step:,} of {planned} steps so far"]
    steps, losses = metrics.series("loss")
    if losses:
        lines.append(f"- training loss {losses[0]:.4f} at step {steps[0]}, {losses[-1]:.4f} at step {steps[-1]}")
    for key in _further_losses(records):
        steps, losses = metrics.series(key)
        figures = f"{losses[0]:.4f} at step {steps[0]}, {losses[-1]:.4f} at step {steps[-1]}"
        lines.append(f"  - {key.replace('_', ' ')}, which training adds to it: {figures}")
    if summary.best_val_loss is not None:
        lines.append(f"- best validation loss {summary.best_val_loss:.4f} at step {summary.best_val_step}")
    (rate_steps, rates), norms = metrics.series("lr"), metrics.series("grad_norm")[1]
    if rates:
        lines.append(f"- learning rate {max(rates):.3g} at most, {rates[-1]:.3g} at step {rate_steps[-1]}")
    if norms:
        lines.append(f"- gradient norm {median(norms):.3g} (median), {max(norms):.3g} at most, before clipping")
    speeds, tokens = metrics.series("tokens_per_second")[1], metrics.series("tokens")[1]
    if speeds:
        lines.append(f"- {median(speeds):,.0f} tokens per second (median of the steps logged)")
    if tokens:
        lines.append(f"- {tokens[-1]:,.0f} tokens in all")
    if environment.get("started_from"):
        lines.append(f"- started from the weights of {environment['started_from']}")
    return [*lines, "", "The losses are nats per target token. `config.yaml` says what was trained and how."]


def _further_losses(records: RunRecords) -> list[str]:
    """The keys of what was added to the loss in training."""
    return [key for key in records.metrics.keys if key.endswith("_loss") and not key.startswith("val_")]


def _configuration(records: RunRecords) -> Iterable[list[str]]:
    """What was changed of the preset that the run's configuration is or extends."""
    preset = records.environment.get("preset")
    if not isinstance(preset, str) or not records.config:
        return
    try:
        standard = Config.load(preset).model_dump(mode="json")
    except QkvError as error:
        yield _section("Configuration", [f"The preset `{preset}` cannot be compared with: {error.what}."])
        return
    found = config_differences(standard, records.config)
    rows = [f"| `{one.key}` | {_code(one.shown(0))} | {_code(one.shown(1))} |" for one in found]
    table = ["| key | preset | run |", "|---|---|---|", *rows]
    lines = [f"From the preset `{preset}`, with these differences:", "", *table]
    yield _section("Configuration", lines if rows else [f"That of the preset `{preset}`."])


def _code(text: str) -> str:
    """A value in a table: a bar would end its cell."""
    return f"`{text}`".replace("|", "\\|")


def _model(records: RunRecords) -> list[str]:
    """Parameters, data and how they were computed with, as the run told when it began."""
    told = records.environment.get("training")
    told = told if isinstance(told, dict) else {}
    lines = []
    if "parameters" in told:
        lines.append(f"- {told['parameters']:,} parameters")
    lines += [f"  - {group}" for group in told.get("optimizer", ())]
    if "unit" in told:
        lines.append(f"- {data_line(told)}")
    if records.data_fingerprint:
        lines.append(f"- fingerprint of the data: `{records.data_fingerprint}`")
    lines += [f"- {line}" for line in told.get("compute", ())]
    return _section("Model and data", lines)


def _machine(records: RunRecords) -> list[str]:
    told = records.environment
    packages = told.get("packages")
    versions = [f"Python {told.get('python')}"]
    if isinstance(packages, dict):
        versions += [f"{name} {found}" for name, found in packages.items() if found]
    lines = []
    if "python" in told:
        lines.append(f"- {', '.join(versions)}; seed {told.get('seed')}")
    if "platform" in told:
        gpus = ", ".join(map(str, told.get("gpus") or ())) or "no GPU"
        threads = f"{told.get('threads')} threads of {told.get('cores')} cores"
        lines.append(f"- {told['platform']}, {told.get('processor')}, {threads}, {gpus}")
    if told.get("commit"):
        lines.append(f"- commit {told['commit']}")
    return _section("Machine", lines)


def _validation(records: RunRecords) -> list[str]:
    metrics = records.metrics
    keys = [key for key in metrics.keys if key.startswith("val_")]
    if "val_loss" not in keys:
        return []
    keys = ["val_loss", *sorted(set(keys) - {"val_loss"})]
    headings = ["validation loss", *(key.removeprefix("val_").replace("_", " ") for key in keys[1:])]
    lines = [f"| {' | '.join(['step', *headings])} |", "|---|" + "---|" * len(keys)]
    series = [dict(zip(*metrics.series(key), strict=True)) for key in keys]
    for step, loss in series[0].items():
        figures = [f"{measure[step]:.4g}" if step in measure else "" for measure in series[1:]]
        lines.append(f"| {' | '.join([str(step), f'{loss:.4f}', *figures])} |")
    return _section("Validation", lines)


def _skipped(records: RunRecords) -> list[str]:
    """Batches that were passed over because their loss or gradient was no number."""
    skips = [record for record in records.metrics.records if "skipped" in record]
    lines = []
    for record in skips[:SHOWN_SKIPS]:
        places = record.get("places")
        where = "; ".join(map(str, places)) if isinstance(places, list) else ""
        lines.append(f"- step {record['step']}: {record.get('non_finite', 'loss')} not finite; {where}".rstrip("; "))
    if len(skips) > SHOWN_SKIPS:
        lines.append(f"- and {len(skips) - SHOWN_SKIPS:,} more in `metrics.jsonl`")
    failure = [f"The run stopped: {records.metrics.failure}.", ""] if records.metrics.failure else []
    return [*failure, *_section("Batches passed over", lines)]


def _checkpoints(run: Path, records: RunRecords) -> list[str]:
    found = checkpoints_of(run)
    lines = []
    for path in found:
        loss = records.states.get(int(path.name.removeprefix("step-")), {}).get("val_loss")
        known = isinstance(loss, int | float)
        lines.append(f"- `{path.name}`" + (f", validation loss {loss:.4f}" if known else ""))
    try:
        lines += [f"- best: `{best_of(found).name}`"] if found else []
    except QkvError:  # a damaged state.json, which is named at the end of the page
        lines.append("- the best is not known")
    return _section("Checkpoints", lines)


def _samples(run: Path) -> list[str]:
    """The last text the model wrote in training."""
    files = sorted(run.glob("samples/*.txt"))
    if not files:
        return []
    try:
        text = files[-1].read_text(encoding="utf-8", errors="replace").rstrip("\n")
    except OSError as error:
        return _section("Samples", [f"`{files[-1].name}` cannot be read: {error.strerror}."])
    earlier = [f"Earlier ones: {', '.join(f'`{path.name}`' for path in files[:-1])}.", ""] if files[1:] else []
    indented = [f"    {line}" for line in text.split("\n")]  # a fence could end within the text
    return _section("Samples", [*earlier, f"`{files[-1].name}`:", "", *indented])


def _plots(run: Path) -> list[str]:
    files = sorted(path.name for path in run.iterdir() if path.suffix.lower() in PLOTS)
    return _section("Plots", [f"![{name}](<{name}>)" for name in files])
