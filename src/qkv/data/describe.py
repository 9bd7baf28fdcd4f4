"""What a batch really contains, for people (`qkv data show`) and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qkv.data.rows import Batch
from qkv.nn import IGNORE

if TYPE_CHECKING:
    from qkv.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class Slot:
    """One slot of a row. `label` is None where nothing is predicted, `document` and `position` are None in padding.

    `sees` is the first and the last slot of the row that this one may attend to, None in padding.
    """

    slot: int
    token: str
    token_id: int
    label: str | None
    label_id: int
    document: int | None
    position: int | None
    sees: tuple[int, int] | None


@dataclass(frozen=True)
class Row:
    """The slots of a row (none of an image or recording), those of its source (none where there is none, or where it is
    an image or recording), and of what has a label its class."""

    slots: list[Slot]
    source: list[Slot]
    label: str | None


def batch_json(batch: Batch) -> dict[str, Any]:
    """Nested lists: `inputs`, `labels`, `documents`, `positions` [B, T], `lengths` [B], and where there is a source
    `source` [B, S], `source_lengths` [B]. The labels of texts are the numbers of their classes [B].

    Where the model has a prefix, `prefix_lengths` [B]. What a batch leaves to the model's defaults is written out: one
    document per row, positions from 0, full rows. Where images or log-mel features stand in the place of ids, there is
    their shape instead: `inputs_shape`, `source_shape`.
    """
    if batch.inputs.is_floating_point():
        return {"inputs_shape": list(batch.inputs.shape), "labels": batch.labels.tolist()}
    rows, width = batch.inputs.shape
    written = {
        "inputs": batch.inputs.tolist(),
        "labels": batch.labels.tolist(),
        "documents": [[0] * width] * rows if batch.documents is None else batch.documents.tolist(),
        "positions": [list(range(width))] * rows if batch.positions is None else batch.positions.tolist(),
        "lengths": [width] * rows if batch.lengths is None else batch.lengths.tolist(),
    }
    if batch.source is not None and batch.source.is_floating_point():
        written["source_shape"] = list(batch.source.shape)
    elif batch.source is not None:
        lengths = batch.source_lengths
        written["source"] = batch.source.tolist()
        written["source_lengths"] = [batch.source.shape[1]] * rows if lengths is None else lengths.tolist()
    if batch.prefix_lengths is not None:
        written["prefix_lengths"] = batch.prefix_lengths.tolist()
    return written


def describe_batch(
    batch: Batch,
    tokenizer: Tokenizer | None,
    *,
    looks_ahead: bool,
    source_tokenizer: Tokenizer | None = None,
    labels: Sequence[str] = (),
) -> list[Row]:
    """The rows of a batch; a slot attends to those after it where the model `looks_ahead`, as encoders do.

    tokenizer: None where there are no texts. source_tokenizer: of the sources, where they have one of their own.
    labels: the names of the classes.
    """
    table = []
    written = batch_json(batch)
    if tokenizer is None:
        return [Row([], [], labels[told]) for told in written["labels"]]
    for number, inputs in enumerate(written["inputs"]):
        told = written["labels"][number]
        of_slots = told if isinstance(told, list) else [IGNORE] * len(inputs)
        documents, positions = written["documents"][number], written["positions"][number]
        length = written["lengths"][number]
        prefix = written["prefix_lengths"][number] if "prefix_lengths" in written else 0
        slots = _slots(inputs, of_slots, documents, positions, length, tokenizer, looks_ahead, prefix)
        source: list[Slot] = []
        if "source" in written:
            ids = written["source"][number]
            nothing, whole = [IGNORE] * len(ids), [0] * len(ids)
            length = written["source_lengths"][number]
            source = _slots(ids, nothing, whole, range(len(ids)), length, source_tokenizer or tokenizer, True)
        table.append(Row(slots, source, None if isinstance(told, list) else labels[told]))
    return table


def _slots(
    inputs: Sequence[int],
    labels: Sequence[int],
    documents: Sequence[int],
    positions: Sequence[int],
    length: int,
    tokenizer: Tokenizer,
    looks_ahead: bool,
    prefix: int = 0,
) -> list[Slot]:
    last_of = {number: slot for slot, number in enumerate(documents[:length])}
    row = []
    for slot, (token_id, label_id, number) in enumerate(zip(inputs, labels, documents, strict=True)):
        real = slot < length
        row.append(
            Slot(
                slot=slot,
                token=spelling(token_id, tokenizer),
                token_id=token_id,
                label=None if label_id == IGNORE else spelling(label_id, tokenizer),
                label_id=label_id,
                document=number if real else None,
                position=positions[slot] if real else None,
                sees=(slot - positions[slot], last_of[number] if looks_ahead else max(slot, prefix - 1))
                if real
                else None,
            )
        )
    return row


def spelling(token_id: int, tokenizer: Tokenizer) -> str:
    """The text of one token; bytes that are no whole character show as `\\x..`."""
    if token_id in tokenizer.special_ids:
        return tokenizer.id_to_token(token_id)
    return tokenizer.token_bytes(token_id).decode(errors="backslashreplace")
