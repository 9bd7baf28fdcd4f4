"""`qkv show`."""

from __future__ import annotations

from dataclasses import asdict

import click

from qkv.cli.common import allow_option, json_option, print_json


@click.command()
@click.argument("config")
@click.argument("overrides", nargs=-1, metavar="[key=value]...")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "fp32", "bf16"]),
    default="auto",
    help="What keys and values are cached in (auto: bf16).",
)
@allow_option
@json_option
def show(config: str, overrides: tuple[str, ...], dtype: str, allow: tuple[str, ...], as_json: bool) -> None:
    """Diagram, shapes, parameters, FLOPs and memory of CONFIG (a preset, a file or a run folder).

    Nothing is allocated or trained. A key=value after it overrides a key: model.num_layers=12
    """
    from qkv.config.run import Config
    from qkv.inspect.diagram import draw
    from qkv.inspect.summary import summarise
    from qkv.nn.transformer import Transformer

    tree = Config.load(config, *overrides, allow=allow or None)
    model = tree.model.with_vocab_size(tree.tokenizer.vocab_size) if tree.tokenizer.vocab_size else tree.model
    network = Transformer(model, device="meta")
    summary = summarise(model, cache_dtype="bf16" if dtype == "auto" else dtype, network=network)
    if as_json:
        print_json({**asdict(summary), "config": tree.model_dump(mode="json")})
        return
    click.echo(draw(model, network))
    click.echo("")
    rows = [
        ("family", summary.family),
        ("parameters", f"{summary.params:,}"),
        ("of these embeddings", f"{summary.params_embedding:,}"),
        ("active per token", f"{summary.params_active:,}"),
        ("context", " and ".join(f"{stack.max_seq_len:,} {name} tokens" for name, stack in model.stacks.items())),
        ("FLOPs per token, forward", f"{summary.flops_per_token_forward:,} with the whole context to attend to"),
        ("weights, gradients, Adam", f"{summary.train_state_bytes / 1e6:,.1f} MB in float32, activations not counted"),
    ]
    if summary.kv_cache_bytes_per_token:
        rows.append(
            ("KV cache per token", f"{summary.kv_cache_bytes_per_token:,} bytes in {dtype.replace('auto', 'bf16')}")
        )
    if summary.cross_cache_bytes_per_source_token:
        rows.append(("and per source token", f"{summary.cross_cache_bytes_per_source_token:,} bytes"))
    for name, value in rows:
        click.echo(f"{name:<26}{value}")
