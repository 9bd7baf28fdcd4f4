"""`qkv data prepare` and `qkv data show`."""

from __future__ import annotations

from itertools import islice, zip_longest
from typing import TYPE_CHECKING, Any
from unicodedata import east_asian_width

import click

from qkv.cli import LazyGroup
from qkv.cli.common import allow_option, json_option, print_json
from qkv.config.errors import UsageError, printable

if TYPE_CHECKING:
    from torch import Tensor

    from qkv.config.run import Config
    from qkv.data.describe import Row, Slot
    from qkv.data.prepare import Dataset, Prepared
    from qkv.tokenizer.tokenizer import Tokenizer

SUBCOMMANDS = {
    "prepare": ("qkv.cli.data:prepare", "Tokenise the files of a configuration, once, for training."),
    "show": ("qkv.cli.data:show", "What a batch really contains: inputs, labels, documents, padding, masks."),
}
_LABELS_TOLD = 10


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
    tree, tokenizers, prepared = _prepare(config, overrides, allow)
    parts = {"train": prepared.train, "validation": prepared.validation}
    counts = {part: _count(data, prepared) for part, data in parts.items()}
    if as_json:
        print_json(
            {
                **counts,
                "notes": prepared.notes,
                "folders": [str(files.folder) for files in prepared.files],
                "reused": prepared.reused,
                "id_bits": prepared.id_bits,
                "fingerprint": prepared.fingerprint,
                **{name: {"kind": one.kind, "vocab_size": one.vocab_size} for name, one in tokenizers.items()},
            }
        )
        return
    for part, count in counts.items():
        click.echo(f"{part:<18}{_told(count)}")
    for name, one in tokenizers.items():
        bits = f"stored in {prepared.id_bits} bits"
        click.echo(f"{name.replace('_', ' '):<18}{one.kind}, {one.vocab_size:,} ids, {bits}")
    for files in prepared.files:
        click.echo(f"{'as it was' if files.reused else 'made':<18}{files.folder}")
    for note in prepared.notes:
        click.echo(note, err=True)
    if tree.objective.kind in ("causal", "masked") and prepared.train.num_tokens <= tree.model.max_seq_len:
        click.echo(f"too little to train on: a window takes {tree.model.max_seq_len + 1} tokens", err=True)


def _count(data: Dataset | None, prepared: Prepared) -> dict[str, Any]:
    """How much of what there is in one part of the data; None: nothing."""
    import numpy as np

    from qkv.data.prepare import Labelled, Pairs

    data = data or prepared.train.choose(np.zeros(prepared.train.num_documents, np.bool_))
    if isinstance(data, Pairs):
        tokens = {"source_tokens": data.source.num_tokens, "target_tokens": data.target.num_tokens}
        return {data.unit: data.num_documents, **tokens}
    count: dict[str, Any] = {data.unit: data.num_documents, "tokens": data.num_tokens}
    if isinstance(data, Labelled):
        of_class = np.bincount(data.labels_D, minlength=len(prepared.labels)).tolist()
        count["labels"] = dict(zip(prepared.labels, of_class, strict=True))
    return count


def _told(count: dict[str, Any]) -> str:
    labels = count.get("labels", {})
    shown = [f"{number:,} {name.replace('_', ' ')}" for name, number in count.items() if name != "labels"]
    shown += [f"{number:,} of `{printable(label)}`" for label, number in islice(labels.items(), _LABELS_TOLD)]
    more = len(labels) - _LABELS_TOLD
    return ", ".join(shown) + (f" and of {more:,} more labels" if more > 0 else "")


def _prepare(
    config: str, overrides: tuple[str, ...], allow: tuple[str, ...]
) -> tuple[Config, dict[str, Tokenizer], Prepared]:
    """The configuration, its `tokenizer` where there are texts and, where sources have their own, `source_tokenizer`,
    and the data."""
    from qkv.config.paths import cache_folder
    from qkv.config.run import Config
    from qkv.data.prepare import prepare as tokenise
    from qkv.data.tokenizers import tokenizers_for

    tree = Config.load(config, *overrides, allow=allow or None)
    tokenizer, source_tokenizer = tokenizers_for(tree, cache_folder())
    prepared = tokenise(tree, tokenizer, cache_folder() / "data", source_tokenizer=source_tokenizer)
    named = {"tokenizer": tokenizer, "source_tokenizer": source_tokenizer}
    return tree, {name: found for name, found in named.items() if found is not None}, prepared


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
    """The first batch of CONFIG: each slot's token, label, document and position, and the slots it may attend to.

    Of a pair the source beside the target, of a text with a label its class.
    """
    if rows < 1:
        raise UsageError(f"--rows must be at least 1, got {rows}")
    from qkv.data.batches import BatchLoader, validation_batches
    from qkv.data.describe import batch_json, describe_batch

    tree, tokenizers, prepared = _prepare(config, overrides, allow)
    tokenizer, train, length = tokenizers.get("tokenizer"), tree.train, tree.model.context
    if not validation:
        loader = BatchLoader(
            prepared.train,
            tree.objective,
            tokenizer,
            max_seq_len=length,
            batch_tokens=train.batch_tokens,
            micro_batch_tokens=train.micro_batch_tokens,
            ramp=train.ramp,
            seed=train.seed,
        )
        batch = next(loader)[0]
    elif prepared.validation is None:
        raise UsageError("the configuration holds nothing out", where="data.validation", hint="data.validation=0.02")
    else:
        size = train.micro_batch_tokens or train.batch_tokens
        batch = next(
            validation_batches(prepared.validation, tree.objective, tokenizer, max_seq_len=length, batch_tokens=size)
        )
    if as_json:
        print_json(batch_json(batch))
        return
    count, width = batch.inputs.shape[:2]
    slots = _shape(batch.inputs) if batch.inputs.is_floating_point() else f"{width} slots"
    if batch.source is not None:
        read = _shape(batch.source) if batch.source.is_floating_point() else f"{batch.source.shape[1]} source"
        slots = f"{read} and {width} target slots"
    click.echo(f"{count} rows of {slots}, {batch.target_count:,} targets, {tree.objective.kind}", err=True)
    table = describe_batch(
        batch,
        tokenizer,
        looks_ahead=tree.model.family == "encoder",
        source_tokenizer=tokenizers.get("source_tokenizer"),
        labels=prepared.labels,
    )
    for number, row in enumerate(table[:rows]):
        click.echo(f"row {number}" if row.label is None else f"row {number}, label {_quoted(row.label).rstrip()}")
        if row.slots:
            _draw_pair(row) if row.source else _draw(row)


def _shape(features: Tensor) -> str:
    """The size of each, in place of slots."""
    return " x ".join(map(str, features.shape[1:]))


def _draw(row: Row) -> None:
    click.echo(f"{'slot':>5}  {'id':>6} {'token':<16}{'label':>6} {'':<16}{'document':>8}{'position':>9}  sees")
    for slot in row.slots:
        label = f"{'-':>6} {'':<16}" if slot.label is None else f"{slot.label_id:>6} {_quoted(slot.label)}"
        place = f"{'padding':>17}" if slot.document is None else f"{slot.document:>8}{slot.position:>9}"
        sees = "nothing" if slot.sees is None else f"{slot.sees[0]} to {slot.sees[1]}"
        click.echo(f"{slot.slot:>5}  {slot.token_id:>6} {_quoted(slot.token)}{label}{place}  {sees}")


def _draw_pair(row: Row) -> None:
    click.echo(f"{'slot':>5}  {'id':>6} {'source':<16}{'id':>6} {'target':<16}{'label':>6}")
    for number, (source, target) in enumerate(zip_longest(row.source, row.slots)):
        label = "" if target is None else f"{'-':>6}"
        if target is not None and target.label is not None:
            label = f"{target.label_id:>6} {_quoted(target.label)}"
        click.echo(f"{number:>5}  {_cell(source)}{_cell(target)}{label}".rstrip())


def _cell(slot: Slot | None) -> str:
    """The id and the token of a slot; None is beyond the end of the batch."""
    if slot is None:
        return " " * 23
    return f"{slot.token_id:>6} {'padding':<16}" if slot.sees is None else f"{slot.token_id:>6} {_quoted(slot.token)}"


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
