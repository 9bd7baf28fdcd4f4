"""How good a model is, and whether the machine computes it right.

Reading what runs left behind needs no torch; what does is imported on first use. The function `perplexity` is in the
module of that name.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from qkv.evaluate.runs import Metrics, RunSummary, list_runs, read_metrics, summarise_run

if TYPE_CHECKING:
    from qkv.evaluate.corpora import text_corpus, validation_corpus
    from qkv.evaluate.kernels import KernelCheck, check_kernels
    from qkv.evaluate.machine import Machine, describe_machine
    from qkv.evaluate.perplexity import Scores, masked_scores
    from qkv.evaluate.score import Tally, score_batches

_WITH_TORCH = {
    "KernelCheck": "kernels",
    "Machine": "machine",
    "Scores": "perplexity",
    "Tally": "score",
    "check_kernels": "kernels",
    "describe_machine": "machine",
    "masked_scores": "perplexity",
    "score_batches": "score",
    "text_corpus": "corpora",
    "validation_corpus": "corpora",
}

__all__ = [
    "KernelCheck",
    "Machine",
    "Metrics",
    "RunSummary",
    "Scores",
    "Tally",
    "check_kernels",
    "describe_machine",
    "list_runs",
    "masked_scores",
    "read_metrics",
    "score_batches",
    "summarise_run",
    "text_corpus",
    "validation_corpus",
]


def __getattr__(name: str) -> Any:
    if name in _WITH_TORCH:
        return getattr(import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
