"""`qkv completion`."""

from __future__ import annotations

import click

from qkv.cli.common import json_option, print_json

HOW = {
    "bash": 'eval "$(qkv completion bash)" in ~/.bashrc',
    "zsh": 'eval "$(qkv completion zsh)" in ~/.zshrc',
    "fish": "qkv completion fish > ~/.config/fish/completions/qkv.fish",
}


@click.command()
@click.argument("shell", type=click.Choice(list(HOW)))
@json_option
@click.pass_context
def completion(context: click.Context, shell: str, as_json: bool) -> None:
    """Print the script that completes qkv's commands and options in SHELL.

    \b
    bash  eval "$(qkv completion bash)" in ~/.bashrc
    zsh   eval "$(qkv completion zsh)" in ~/.zshrc
    fish  qkv completion fish > ~/.config/fish/completions/qkv.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None  # click brings all three
    script = kind(context.find_root().command, {}, "qkv", "_QKV_COMPLETE").source()
    if as_json:
        print_json({"shell": shell, "script": script})
    else:
        click.echo(script)
