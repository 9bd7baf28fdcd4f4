"""`qkv show`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from qkv.cli.common import allow_option, json_option, print_json, torch_bin_option


@click.command()
@click.argument("config")
@click.argument("overrides", nargs=-1, metavar="[key=value]...")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "fp32", "bf16"]),
    default="auto",
    help="What keys and values are cached in (auto: bf16).",
)
@torch_bin_option
@allow_option
@json_option
def show(
    config: str, overrides: tuple[str, ...], dtype: str, torch_bin: bool, allow: tuple[str, ...], as_json: bool
) -> None:
    """Diagram, shapes, parameters, FLOPs and memory of CONFIG (a preset, a file, a run folder, or any other model).

    Nothing is allocated or trained. A key=value after it overrides a key: model.num_layers=12
    """
    from qkv.checkpoint.load import published_config
    from qkv.config.errors import UsageError
    from qkv.config.run import Config
    from qkv.inspect.diagram import draw
    from qkv.inspect.summary import summarise
    from qkv.nn.transformer import Transformer
    from qkv.train.optimizer import build_optimizer

    published = published_config(Path(config), torch_bin=torch_bin)
    if published is not None and overrides:
        raise UsageError("a published model cannot be overridden", where=overrides[0], hint="`qkv convert --to qkv`")
    tree = published or Config.load(config, *overrides, allow=allow or None)
    model = tree.model.with_vocab_size(tree.tokenizer.vocab_size) if tree.tokenizer.vocab_size else tree.model
    network = Transformer(model, device="meta")
    summary = summarise(model, cache_dtype="bf16" if dtype == "auto" else dtype, network=network)
    groups = [] if published else build_optimizer(tree.train.optimizer, network).describe()
    if as_json:
        print_json({**asdict(summary), "parameter_groups": groups, "config": tree.model_dump(mode="json")})
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
    rows += [("trained by", group) for group in groups]
    for name, value in rows:
        click.echo(f"{name:<26}{value}")
