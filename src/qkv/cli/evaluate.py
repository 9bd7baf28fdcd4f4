"""`qkv eval`."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path

import click

from qkv.cli.common import json_option, print_json
from qkv.config.errors import QkvError, UsageError

TASKS = ("auto", "language-model")


@click.command(name="eval")
@click.argument("model")
@click.option("--data", type=click.Path(path_type=Path), help="Text to score (default: what the run held out).")
@click.option("--task", default="auto", show_default=True, help="auto or language-model.")
@click.option("--window", type=int, help="Tokens the model reads at once (default: its whole context).")
@click.option("--stride", type=int, help="Tokens between the beginnings of windows (default: the window).")
@click.option("--max-windows", type=int, help="Score only so many windows, from the front.")
@click.option("--batch-size", type=int, help="Windows computed at once; has no effect on the figures.")
@click.option(
    "--bad-bytes", type=click.Choice(["error", "replace", "drop"]), help="For bytes of FILE that are not UTF-8."
)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or mps.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "fp32", "bf16"]),
    default="auto",
    show_default=True,
    help="auto is fp32, so that figures compare.",
)
@click.option("--allow-package", multiple=True, metavar="NAME", help="A package whose parts the model may import.")
@json_option
def evaluate(
    model: str,
    data: Path | None,
    task: str,
    window: int | None,
    stride: int | None,
    max_windows: int | None,
    batch_size: int | None,
    bad_bytes: str | None,
    device: str,
    dtype: str,
    allow_package: tuple[str, ...],
    as_json: bool,
) -> None:
    """Loss, perplexity and bits per byte of MODEL (a run or model folder) on a text.

    Every token is scored once, given at most a window of tokens before it; a beginning-of-text token is context only. A
    stride below the window gives tokens more context and takes longer. Encoders are scored on masked tokens.
    """
    if task not in TASKS:
        raise UsageError(f"the task `{task}` cannot be evaluated", hint=" or ".join(TASKS))
    from qkv.config.paths import cache_folder
    from qkv.evaluate.corpora import text_corpus, validation_corpus
    from qkv.evaluate.perplexity import masked_scores, perplexity
    from qkv.evaluate.score import check_predicts_tokens
    from qkv.model import load

    loaded = load(model, device=device, dtype="fp32" if dtype == "auto" else dtype, allow=allow_package)
    network, tokenizer, config = loaded.network, loaded.tokenizer, loaded.config
    check_predicts_tokens(network)
    if tokenizer is None:
        raise UsageError("the model has no tokenizer, and without one no text can be scored", where=model)
    masked = config.model.family == "encoder"
    if data is None:
        corpus = validation_corpus(config, tokenizer, cache_folder() / "data")
    else:
        wanted = config.data.model_copy(update={"bad_bytes": bad_bytes}) if bad_bytes else config.data
        try:
            corpus = text_corpus(data, tokenizer, wanted, ends=masked)
        except QkvError as error:
            error.hint = error.hint and error.hint.replace("data.bad_bytes=", "--bad-bytes ")
            raise
    if masked:
        if stride is not None or max_windows is not None:
            raise UsageError("masked tokens see both sides: --stride and --max-windows are for decoders")
        rate = getattr(config.objective, "rate", 0.15)
        scores = masked_scores(network, corpus, tokenizer, rate=rate, window=window, batch_size=batch_size)
    else:
        scores = perplexity(
            network,
            corpus,
            window=window,
            stride=stride,
            max_windows=max_windows,
            batch_size=batch_size,
            tokenizer=tokenizer,
        )
    if as_json:
        figures = asdict(scores)
        print_json({name: None if value == math.inf else value for name, value in figures.items()})
        return
    what = "masked token" if masked else "token"
    click.echo(f"{'loss':<16}{scores.loss:.4f} nats per {what}")
    click.echo(f"{'perplexity':<16}{scores.perplexity:.4f}")
    if scores.bits_per_byte is not None:
        click.echo(f"{'bits per byte':<16}{scores.bits_per_byte:.4f}")
    click.echo(f"{'accuracy':<16}{scores.accuracy:.2%} of tokens guessed right")
    click.echo(f"{'tokens':<16}{scores.tokens:,}" + (f", {scores.bytes:,} bytes" if scores.bytes else ""))
    if scores.bits_per_byte is None and not masked:
        click.echo("no bits per byte: unknown tokens stand for text that is lost", err=True)
