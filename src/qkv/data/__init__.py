"""Files -> documents -> ids -> batches of inputs and labels.

Reading and tokenising never import torch; what needs it is imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from qkv.data.documents import read_documents, read_pieces
from qkv.data.prepare import Corpus, Labelled, Pairs, Prepared, prepare
from qkv.tokenizer.text import normalize

if TYPE_CHECKING:
    from qkv.data.batches import BatchLoader, validation_batches
    from qkv.data.describe import batch_json, describe_batch
    from qkv.data.rows import Batch

_WITH_TORCH = {
    "Batch": "rows",
    "BatchLoader": "batches",
    "batch_json": "describe",
    "describe_batch": "describe",
    "validation_batches": "batches",
}

__all__ = [
    "Batch",
    "BatchLoader",
    "Corpus",
    "Labelled",
    "Pairs",
    "Prepared",
    "batch_json",
    "describe_batch",
    "normalize",
    "prepare",
    "read_documents",
    "read_pieces",
    "validation_batches",
]


def __getattr__(name: str) -> Any:
    if name in _WITH_TORCH:
        return getattr(import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
