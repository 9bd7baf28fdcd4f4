"""`qkv presets` and `qkv new`."""

from __future__ import annotations

from pathlib import Path

import click

from qkv.cli.common import json_option, print_json
from qkv.config.errors import ConflictError, NotFoundError, QkvError


@click.command()
@json_option
def presets(as_json: bool) -> None:
    """List the presets: names that `qkv show`, `qkv new` and `extends:` accept."""
    from qkv.config.load import preset_names, preset_summary

    rows = [{"name": name, "summary": preset_summary(name)} for name in preset_names()]
    if as_json:
        print_json({"presets": rows})
        return
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        click.echo(f"{row['name']:<{width}}  {row['summary']}")


@click.command()
@click.argument("preset")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Where to write (default: PRESET.yaml).")
@json_option
def new(preset: str, output: Path | None, as_json: bool) -> None:
    """Write PRESET as a configuration file to edit; an existing file is never overwritten."""
    from qkv.config.load import preset_text

    text = preset_text(preset)
    output = output or Path(f"{preset}.yaml")
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConflictError("the file exists already", where=str(output), hint="another name with -o") from None
    except OSError as error:
        kind = NotFoundError if isinstance(error, FileNotFoundError) else QkvError
        raise kind(f"cannot write the file: {error.strerror}", where=str(output), hint="another name with -o") from None
    if as_json:
        print_json({"path": str(output)})
    else:
        click.echo(f"wrote {output}\nlook at it: qkv show {output}", err=True)
