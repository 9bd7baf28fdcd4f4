"""`qkv convert`."""

from __future__ import annotations

from pathlib import Path

import click

from qkv.cli.common import allow_option, json_option, print_json, torch_bin_option


@click.command()
@click.argument("model")
@click.option("--to", "form", type=click.Choice(["hf", "qkv"]), required=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The folder to write.")
@click.option(
    "--dtype",
    type=click.Choice(["stored", "fp32", "bf16"]),
    default="stored",
    show_default=True,
    help="Of the weights.",
)
@torch_bin_option
@allow_option
@json_option
def convert(
    model: str, form: str, output: Path, dtype: str, torch_bin: bool, allow: tuple[str, ...], as_json: bool
) -> None:
    """Write MODEL (a run or checkpoint folder, a Hugging Face folder, a GGUF file, ...) in another format.

    \b
    hf    a folder that `transformers` reads, for a model whose configuration is that of a published architecture;
          any other is refused, with the first key that differs
    qkv   a checkpoint folder, for any model

    The folder appears whole or not at all.
    """
    from qkv.model import load

    loaded = load(model, device="cpu", dtype=dtype, allow=allow, torch_bin=torch_bin)
    if form == "hf":
        loaded.save_hf(output)
    else:
        loaded.save(output)
    if as_json:
        print_json({"output": str(output), "format": form})
    else:
        click.echo(f"written: {output}", err=True)
