"""`qkv data prepare` and `qkv data show`."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unicodedata import east_asian_width

import click

from qkv.cli import LazyGroup
from qkv.cli.common import allow_option, json_option, print_json
from qkv.config.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from qkv.config.run import Config
    from qkv.data.describe import Slot
    from qkv.data.prepare import Dataset, Prepared
    from qkv.tokenizer.tokenizer import Tokenizer

SUBCOMMANDS = {
    "prepare": ("qkv.cli.data:prepare", "Tokenise the files of a configuration, once, for training."),
    "show": ("qkv.cli.data:show", "What a batch really contains: inputs, labels, documents, padding, masks."),
}


@click.group(cls=LazyGroup, table=SUBCOMMANDS)
def data() -> None:
    """Turn text files into batches, and look at them."""


@click.command()
@click.argument("config")
@click.argument("overrides", nargs=-1, metavar="[key=value]...")
@allow_option
@json_option
def prepare(config: str, overrides: tuple[str, ...], allow: tuple[str, ...], as_json: bool) -> None:
    """Tokenise the files of CONFIG into the cache ($QKV_CACHE), where training finds them.

    What is there already, made from the same files by the same tokenizer, is used again.
    """
    tree, tokenizer, prepared = _prepare(config, overrides, allow)
    sides = {"train": prepared.train, "validation": prepared.validation}
    counts = {side: _count(corpus) for side, corpus in sides.items()}
    if as_json:
        print_json(
            {
                **counts,
                "folders": [str(files.folder) for files in prepared.files],
                "reused": prepared.reused,
                "id_bits": prepared.id_bits,
                "fingerprint": prepared.fingerprint,
                "tokenizer": {"kind": tokenizer.kind, "vocab_size": tokenizer.vocab_size},
            }
        )
        return
    for side, count in counts.items():
        click.echo(f"{side:<12}{count['documents']:,} documents, {count['tokens']:,} tokens")
    click.echo(f"{'tokenizer':<12}{tokenizer.kind}, {tokenizer.vocab_size:,} ids, stored in {prepared.id_bits} bits")
    for files in prepared.files:
        click.echo(f"{'as it was' if files.reused else 'made':<12}{files.folder}")
    if prepared.train.num_tokens <= tree.model.max_seq_len:
        click.echo(f"too little to train on: a window takes {tree.model.max_seq_len + 1} tokens", err=True)


def _count(corpus: Dataset | None) -> dict[str, int]:
    if corpus is None:
        return {"documents": 0, "tokens": 0}
    return {"documents": corpus.num_documents, "tokens": corpus.num_tokens}


def _prepare(config: str, overrides: tuple[str, ...], allow: tuple[str, ...]) -> tuple[Config, Tokenizer, Prepared]:
    from qkv.config.paths import cache_folder
    from qkv.config.run import Config
    from qkv.data.prepare import prepare as tokenise
    from qkv.data.tokenizers import tokenizer_for

    tree = Config.load(config, *overrides, allow=allow or None)
    tokenizer = tokenizer_for(tree, cache_folder())
    return tree, tokenizer, tokenise(tree, tokenizer, cache_folder() / "data")


@click.command()
@click.argument("config")
@click.argument("overrides", nargs=-1, metavar="[key=value]...")
@click.option("--rows", type=int, default=1, show_default=True, help="Rows of the batch to draw; --json gives all.")
@click.option("--validation", is_flag=True, help="The first validation batch instead of the first of training.")
@allow_option
@json_option
def show(
    config: str, overrides: tuple[str, ...], rows: int, validation: bool, allow: tuple[str, ...], as_json: bool
) -> None:
    """The first batch of CONFIG: each slot's token, label, document and position, and the slots it may attend to."""
    if rows < 1:
        raise UsageError(f"--rows must be at least 1, got {rows}")
    from qkv.data.batches import BatchLoader, validation_batches
    from qkv.data.describe import batch_json, describe_batch

    tree, tokenizer, prepared = _prepare(config, overrides, allow)
    objective, train, length = tree.objective, tree.train, tree.model.max_seq_len
    if objective is None:
        raise ConfigError(f"there is no objective yet for a model of family {tree.model.family}")
    if not validation:
        loader = BatchLoader(
            prepared.train,
            objective,
            tokenizer,
            max_seq_len=length,
            batch_tokens=train.batch_tokens,
            micro_batch_tokens=train.micro_batch_tokens,
            seed=train.seed,
        )
        batch = next(loader)[0]
    elif prepared.validation is None:
        raise UsageError("the configuration holds nothing out", where="data.validation", hint="data.validation=0.02")
    else:
        size = train.micro_batch_tokens or train.batch_tokens
        batch = next(
            validation_batches(prepared.validation, objective, tokenizer, max_seq_len=length, batch_tokens=size)
        )
    if as_json:
        print_json(batch_json(batch))
        return
    count, width = batch.inputs.shape
    click.echo(f"{count} rows of {width} slots, {batch.target_count:,} targets, {objective.kind}", err=True)
    for number, row in enumerate(describe_batch(batch, tokenizer, objective)[:rows]):
        click.echo(f"row {number}")
        _draw(row)


def _draw(row: list[Slot]) -> None:
    click.echo(f"{'slot':>5}  {'id':>6} {'token':<16}{'label':>6} {'':<16}{'document':>8}{'position':>9}  sees")
    for slot in row:
        label = f"{'-':>6} {'':<16}" if slot.label is None else f"{slot.label_id:>6} {_quoted(slot.label)}"
        place = f"{'padding':>17}" if slot.document is None else f"{slot.document:>8}{slot.position:>9}"
        sees = "nothing" if slot.sees is None else f"{slot.sees[0]} to {slot.sees[1]}"
        click.echo(f"{slot.slot:>5}  {slot.token_id:>6} {_quoted(slot.token)}{label}{place}  {sees}")


def _quoted(text: str, columns: int = 16) -> str:
    """On one line, spaces visible, cut and filled to so many columns; Chinese characters take two."""
    shown, used = "", 0
    for character in repr(text):
        width = 2 if east_asian_width(character) in "WF" else 1
        if used + width > columns - 3:
            shown, used = f"{shown}..", used + 2
            break
        shown, used = shown + character, used + width
    return shown + " " * (columns - used)
