"""`qkv show`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qkv.cli.common import allow_option, json_option, print_json, torch_bin_option

if TYPE_CHECKING:
    from qkv.evaluate.kernels import KernelUse


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
    """Diagram, shapes, parameters, FLOPs and memory of CONFIG (a preset, a file, a run folder, or any other model), and
    the kernels that compute its attention.

    Nothing is allocated or trained. A key=value after it overrides a key: model.num_layers=12. Where the data decide a
    size (of the classes, of a vocabulary of words or characters), one is assumed, and said.
    """
    from qkv.checkpoint.load import published_config
    from qkv.config.errors import UsageError
    from qkv.config.run import Config
    from qkv.evaluate.kernels import kernels_used
    from qkv.inspect.diagram import draw
    from qkv.inspect.summary import sized, summarise
    from qkv.nn.device import choose_device
    from qkv.nn.transformer import Transformer
    from qkv.train.optimizer import build_optimizer

    published = published_config(Path(config), torch_bin=torch_bin)
    if published is not None and overrides:
        raise UsageError("a published model cannot be overridden", where=overrides[0], hint="`qkv convert --to qkv`")
    tree = published or Config.load(config, *overrides, allow=allow or None)
    model, assumed = sized(tree)
    network = Transformer(model, device="meta")
    summary = summarise(model, cache_dtype="bf16" if dtype == "auto" else dtype, network=network)
    kernels, in_training = kernels_used(network), kernels_used(network, training=True)
    groups = [] if published else build_optimizer(tree.train.optimizer, network).describe()
    if as_json:
        told = {"kernels": kernels, "kernels_in_training": in_training}
        listed = {name: [asdict(use) for use in uses] for name, uses in told.items()}
        known = {**asdict(summary), "assumed": assumed, **listed, "parameter_groups": groups}
        print_json({**known, "config": tree.model_dump(mode="json")})
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
    if summary.params_training:
        rows.append(("parameters of training", f"{summary.params_training:,} of them"))
        rows.append(("FLOPs per token, training", f"{summary.flops_per_token_train:,}"))
    if summary.kv_cache_bytes_per_token:
        rows.append(
            ("KV cache per token", f"{summary.kv_cache_bytes_per_token:,} bytes in {dtype.replace('auto', 'bf16')}")
        )
    if summary.cross_cache_bytes_per_source_token:
        rows.append(("and per source token", f"{summary.cross_cache_bytes_per_source_token:,} bytes"))
    if kernels:
        rows.append(("attention by", f"{_by(kernels)} on {choose_device()}"))
    if in_training != kernels:
        rows.append(("in training", _by(in_training)))
    rows += [("assumed", f"{key}={size}: the data decide") for key, size in assumed.items()]
    rows += [("trained by", group) for group in groups]
    for name, value in rows:
        click.echo(f"{name:<26}{value}")


def _by(uses: list[KernelUse]) -> str:
    """Which kernels compute attention, each with its share where there are several, and why it is not another."""
    total = sum(use.attentions for use in uses)
    told = []
    for use in uses:
        share = "" if use.attentions == total else f" in {use.attentions} of {total}"
        why = f", for {use.chosen} cannot do {use.lacking}" if use.lacking else ""
        told.append(f"{use.kernel}{share}{why}")
    return "; ".join(told)
