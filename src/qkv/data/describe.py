"""What a batch really contains, for people (`qkv data show`) and for programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qkv.config.run import MaskedObjectiveConfig, ObjectiveConfig
from qkv.data.rows import Batch
from qkv.nn import IGNORE

if TYPE_CHECKING:
    from qkv.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class Slot:
    """One slot of a row. `label` is None where nothing is predicted, `document` and `position` are None in padding.

    `sees` is the first and the last slot that this one may attend to, None in padding.
    """

    slot: int
    token: str
    token_id: int
    label: str | None
    label_id: int
    document: int | None
    position: int | None
    sees: tuple[int, int] | None


def batch_json(batch: Batch) -> dict[str, Any]:
    """Nested lists: `inputs`, `labels`, `documents`, `positions` [B, T], `lengths` [B].

    What a batch leaves to the model's defaults is written out: one document per row, positions from 0, full rows.
    """
    rows, width = batch.inputs.shape
    return {
        "inputs": batch.inputs.tolist(),
        "labels": batch.labels.tolist(),
        "documents": [[0] * width] * rows if batch.documents is None else batch.documents.tolist(),
        "positions": [list(range(width))] * rows if batch.positions is None else batch.positions.tolist(),
        "lengths": [width] * rows if batch.lengths is None else batch.lengths.tolist(),
    }


def describe_batch(batch: Batch, tokenizer: Tokenizer, objective: ObjectiveConfig) -> list[list[Slot]]:
    """The slots of each row; `objective` says whether attention looks ahead."""
    both_ways = isinstance(objective, MaskedObjectiveConfig)
    table = []
    for inputs, labels, documents, positions, length in zip(*batch_json(batch).values(), strict=True):
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
                    sees=(slot - positions[slot], last_of[number] if both_ways else slot) if real else None,
                )
            )
        table.append(row)
    return table


def spelling(token_id: int, tokenizer: Tokenizer) -> str:
    """The text of one token; bytes that are no whole character show as `\\x..`."""
    if token_id in tokenizer.special_ids:
        return tokenizer.id_to_token(token_id)
    return tokenizer.token_bytes(token_id).decode(errors="backslashreplace")
