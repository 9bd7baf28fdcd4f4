"""`qkv transcribe`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qkv.cli.common import json_lines_option, model_options, print_json

if TYPE_CHECKING:
    from torch import Tensor

    from qkv.model import Model


@click.command()
@click.argument("model")
@click.argument("audio", nargs=-1, required=True, metavar="AUDIO...", type=click.Path(path_type=Path))
@click.option("--language", help="What is spoken, such as en or zh (default: the likeliest).")
@click.option("--task", type=click.Choice(["transcribe", "translate"]), default="transcribe", show_default=True)
@click.option("--beam-size", default=1, show_default=True, help="Texts in progress at a time; 1: greedy.")
@click.option("--batch-size", default=1, show_default=True, help="Windows at once.")
@click.option("--max-new-tokens", type=int, help="At most so many per window (default: half the decoder's context).")
@model_options
@json_lines_option
def transcribe(model: str, audio: tuple[Path, ...], loading: dict[str, Any], as_json: bool, **options: Any) -> None:
    """Write down what is said in AUDIO, a WAV file, with MODEL, a speech model such as Whisper.

    Each window (of at most 30 s in Whisper) gives a line as soon as it is done; of several files each gives a line, in
    order. Windows follow each other without overlap, cut where it is quiet. --language and --task are for models that
    know several; translate is into English.
    """
    from qkv.cli.lines import one_line
    from qkv.data.audio import read_audio
    from qkv.model import load
    from qkv.tokenizer.text import existing_file

    for file in audio[1:]:  # a name that is misspelt is found before the first hour of speech
        existing_file(file)
    first = read_audio(audio[0])
    loaded = load(model, **loading)
    for number, file in enumerate(audio):
        wave = read_audio(file) if number else first
        if as_json:
            print_json({"audio": str(file), **asdict(loaded.transcribe(wave, **options))})
            continue
        windows = _windows(loaded, wave, file if len(audio) > 1 else None, options)
        if len(audio) == 1:
            for text in windows:
                click.echo(text.strip())
        else:
            click.echo(one_line("".join(windows).strip()))


def _windows(model: Model, wave: Tensor, file: Path | None, options: dict[str, Any]) -> Iterator[str]:
    """The text of each window; how far it came is told on stderr, with the file's name where there are several."""
    from qkv.data.audio import SAMPLE_RATE

    name = f"{file}: " if file else ""
    cut = 0
    for segment in model.transcribe_stream(wave, **options):
        yield segment.text
        cut += segment.finish_reason == "length"
        click.echo(f"{name}{segment.end:.1f} of {len(wave) / SAMPLE_RATE:.1f} s", err=True)
    if cut:
        click.echo(f"{name}windows whose text was cut off at --max-new-tokens: {cut:,}", err=True)
