"""How good a model is, and whether the machine computes it right.

Reading what runs left behind and comparing answers with references need no torch. Everything but the former is imported
on first use. The function `perplexity` is in the module of that name.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from qkv.evaluate.runs import Metrics, RunSummary, list_runs, read_metrics, summarise_run

if TYPE_CHECKING:
    from qkv.evaluate.classification import ClassificationScores, ClassScores, classification_scores, confusion_table
    from qkv.evaluate.corpora import text_corpus, validation_corpus
    from qkv.evaluate.error_rates import (
        PronunciationScores,
        edit_distance,
        error_rate,
        exact_match,
        pronunciation_scores,
    )
    from qkv.evaluate.examples import Examples, PairScores, held_out_examples, pair_scores, read_examples
    from qkv.evaluate.kernels import KernelCheck, KernelUse, check_kernels, kernels_used
    from qkv.evaluate.machine import Machine, describe_machine
    from qkv.evaluate.perplexity import Scores, masked_scores, prefix_scores
    from qkv.evaluate.score import Tally, score_batches
    from qkv.evaluate.speed import DecodeSpeed, PrefillSpeed, measure_decode, measure_prefill
    from qkv.evaluate.translation import TranslationScores, translation_scores

_ON_FIRST_USE = {
    "ClassScores": "classification",
    "ClassificationScores": "classification",
    "DecodeSpeed": "speed",
    "Examples": "examples",
    "KernelCheck": "kernels",
    "KernelUse": "kernels",
    "Machine": "machine",
    "PairScores": "examples",
    "PrefillSpeed": "speed",
    "PronunciationScores": "error_rates",
    "Scores": "perplexity",
    "Tally": "score",
    "TranslationScores": "translation",
    "check_kernels": "kernels",
    "classification_scores": "classification",
    "confusion_table": "classification",
    "describe_machine": "machine",
    "edit_distance": "error_rates",
    "error_rate": "error_rates",
    "exact_match": "error_rates",
    "held_out_examples": "examples",
    "kernels_used": "kernels",
    "masked_scores": "perplexity",
    "measure_decode": "speed",
    "measure_prefill": "speed",
    "pair_scores": "examples",
    "prefix_scores": "perplexity",
    "pronunciation_scores": "error_rates",
    "read_examples": "examples",
    "score_batches": "score",
    "text_corpus": "corpora",
    "translation_scores": "translation",
    "validation_corpus": "corpora",
}

__all__ = [
    "ClassScores",
    "ClassificationScores",
    "DecodeSpeed",
    "Examples",
    "KernelCheck",
    "KernelUse",
    "Machine",
    "Metrics",
    "PairScores",
    "PrefillSpeed",
    "PronunciationScores",
    "RunSummary",
    "Scores",
    "Tally",
    "TranslationScores",
    "check_kernels",
    "classification_scores",
    "confusion_table",
    "describe_machine",
    "edit_distance",
    "error_rate",
    "exact_match",
    "held_out_examples",
    "kernels_used",
    "list_runs",
    "masked_scores",
    "measure_decode",
    "measure_prefill",
    "pair_scores",
    "prefix_scores",
    "pronunciation_scores",
    "read_examples",
    "read_metrics",
    "score_batches",
    "summarise_run",
    "text_corpus",
    "translation_scores",
    "validation_corpus",
]


def __getattr__(name: str) -> Any:
    if name in _ON_FIRST_USE:
        return getattr(import_module(f"{__name__}.{_ON_FIRST_USE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
