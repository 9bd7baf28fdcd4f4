"""`qkv generate`."""

from __future__ import annotations

import secrets
import sys
from collections import Counter
from dataclasses import asdict
from typing import Any

import click

from qkv.cli.common import json_option, model_options, print_json, quantize_option, sampling_options
from qkv.config.errors import UsageError


@click.command()
@click.argument("model")
@click.option("--prompt", "prompts", multiple=True, required=True, help="What to continue; - reads stdin. Repeatable.")
@click.option("--max-new-tokens", default=128, show_default=True, help="At most so many; the context may end earlier.")
@sampling_options(temperature=1.0)
@click.option("--frequency-penalty", default=0.0, show_default=True, help="Taken off a logit per generated occurrence.")
@click.option("--presence-penalty", default=0.0, show_default=True, help="Taken off the logit of generated tokens.")
@click.option("--stop", multiple=True, help="A string before which the text ends. Repeatable.")
@click.option("--seed", type=int, help="The same seed gives the same text; default: another one each time.")
@click.option("--num-samples", type=int, help="Several texts; sample i is what seed + i gives.")
@click.option("--beam-size", default=1, show_default=True, help="Above 1: search for the likeliest text, draw nothing.")
@click.option("--length-penalty", type=float, help="Of a search: above 0 favours longer texts (default: 0.6).")
@click.option("--logprobs", default=0, show_default=True, help="With --json: so many alternatives for each token.")
@click.option("--parse-special", is_flag=True, help="Special tokens spelled in the prompt are meant.")
@click.option("--stream", is_flag=True, help="Text as it comes; with --json one object per line.")
@click.option("--no-cache", is_flag=True, help="Read the whole text again for each token: slower, and the same.")
@quantize_option
@model_options
@json_option
def generate(
    model: str,
    prompts: tuple[str, ...],
    num_samples: int | None,
    beam_size: int,
    length_penalty: float | None,
    stream: bool,
    no_cache: bool,
    loading: dict[str, Any],
    quantize: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Continue a text with MODEL (a run, a checkpoint, a published model), or decode from it as a source.

    The text goes to stdout; how long it took, the seed if none was given, and what stands between several texts go to
    stderr. JSON of several prompts is {"results": [...]}, of --num-samples
    {"samples": [...]}.
    """
    if length_penalty is not None and beam_size == 1:
        raise UsageError("--length-penalty ranks the texts of a search", hint="--beam-size 4")
    if stream and beam_size != 1:
        raise UsageError("a search knows its text only at the end", hint="--stream, or --beam-size")
    if stream and (len(prompts) > 1 or num_samples is not None):
        raise UsageError("one text is streamed at a time", hint="one --prompt, and no --num-samples")
    texts = [_stdin() if prompt == "-" else prompt for prompt in prompts]

    from qkv.model import load

    loaded = load(model, quantize=quantize, **loading)
    options["use_cache"] = not no_cache
    drawn = options["seed"] is None
    if drawn:
        options["seed"] = secrets.randbits(32)  # short enough to be typed again
    told = options["seed"] if drawn and options["temperature"] != 0 and beam_size == 1 else None
    if stream:
        _stream(loaded.stream(texts[0], **options), as_json, options, told)
        return
    search: dict[str, Any] = {} if length_penalty is None else {"length_penalty": length_penalty}
    count = 1 if num_samples is None else num_samples
    results: list[Any] = loaded.generate(texts, num_samples=count, beam_size=beam_size, **search, **options)
    # always a list of samples inside
    groups = results if num_samples is not None and num_samples > 1 else [[result] for result in results]
    if as_json:
        rows = [
            [_json(sample, options["seed"] + n if beam_size == 1 else None) for n, sample in enumerate(group)]
            for group in groups
        ]
        objects = [row[0] if num_samples is None else {"samples": row} for row in rows]
        print_json(objects[0] if len(objects) == 1 else {"results": objects})
        return
    samples = [sample for group in groups for sample in group]
    for number, sample in enumerate(samples, 1):
        if number > 1:
            click.echo(f"--- {number} of {len(samples)}", err=True)
        click.echo(sample.text)
    _tell(samples, options["max_new_tokens"], told)


def _stdin() -> str:
    """All of stdin, by the rule for files."""
    from qkv.tokenizer.text import read_stream

    return "".join(read_stream(sys.stdin.buffer, "stdin"))


def _stream(pieces: Any, as_json: bool, options: dict[str, Any], told: int | None) -> None:
    for piece in pieces:
        if as_json:
            print_json({"piece": piece})
        else:
            click.echo(piece, nl=False)
    if as_json:
        print_json(_json(pieces.generation, options["seed"]))
    else:
        click.echo()
        _tell([pieces.generation], options["max_new_tokens"], told)


def _json(generation: Any, seed: int | None) -> dict[str, Any]:
    """The fields of a `Generation` that were asked for, and the seed that gives it again (None: nothing was drawn)."""
    told = asdict(generation) | {"seed": None if seed is None else seed % 2**64}
    return {key: value for key, value in told.items() if value is not None}


def _tell(samples: list[Any], wanted: int, seed: int | None) -> None:
    """One line for all that was generated at once; `seed` if the user does not know it."""
    tokens, seconds = sum(sample.completion_tokens for sample in samples), max(sample.seconds for sample in samples)
    reasons = Counter(_reason(sample, wanted) for sample in samples)
    ends = ", ".join(reason if len(reasons) == 1 else f"{count} {reason}" for reason, count in reasons.items())
    drawn = "" if seed is None else f"; seed {seed}"
    speed = tokens / seconds if tokens else 0.0
    click.echo(f"{tokens} tokens in {seconds:.2f} s, {speed:.1f} per second; finish reason: {ends}{drawn}", err=True)


def _reason(generation: Any, wanted: int) -> str:
    """Why a text ended: not for its own length where the context left room for fewer tokens than were wanted."""
    full = generation.finish_reason == "length" and generation.completion_tokens < wanted
    return "context full" if full else str(generation.finish_reason)
