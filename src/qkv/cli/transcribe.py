"""`qkv transcribe`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from qkv.cli.common import json_option, model_options, print_json


@click.command()
@click.argument("model")
@click.argument("audio", type=click.Path(path_type=Path))
@click.option("--language", help="What is spoken, such as en or zh (default: the likeliest).")
@click.option("--task", type=click.Choice(["transcribe", "translate"]), default="transcribe", show_default=True)
@click.option("--beam-size", default=1, show_default=True, help="Texts in progress at a time; 1: greedy.")
@click.option("--batch-size", default=1, show_default=True, help="Windows at once.")
@click.option("--max-new-tokens", type=int, help="At most so many per window (default: half the decoder's context).")
@model_options
@json_option
def transcribe(model: str, audio: Path, loading: dict[str, Any], as_json: bool, **options: Any) -> None:
    """Write down what is said in AUDIO, a WAV file, with MODEL, a speech model such as Whisper.

    Each window (of at most 30 s in Whisper) gives a line as soon as it is done. Windows follow each other without
    overlap, cut where it is quiet. --language and --task are for models that know several; translate is into English.
    """
    from qkv.data.audio import SAMPLE_RATE, read_audio
    from qkv.model import load

    wave = read_audio(audio)
    loaded = load(model, **loading)
    if as_json:
        print_json(asdict(loaded.transcribe(wave, **options)))
        return
    cut = 0
    for segment in loaded.transcribe_stream(wave, **options):
        click.echo(segment.text.strip())
        cut += segment.finish_reason == "length"
        click.echo(f"{segment.end:.1f} of {len(wave) / SAMPLE_RATE:.1f} s", err=True)
    if cut:
        click.echo(f"windows whose text was cut off at --max-new-tokens: {cut:,}", err=True)
