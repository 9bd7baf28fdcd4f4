"""What a network gives to the labels of batches. B rows, T slots, N targets, V vocabulary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch.nn import functional as F

from qkv.config.errors import QkvError, UsageError
from qkv.data.rows import Batch
from qkv.nn import IGNORE, Transformer


@dataclass
class Tally:
    """Sums over targets. `nats`: cross-entropy, each in float32, summed in float64. `correct`: those the highest logit
    names. `ids`: how often each id was a target."""

    nats: float = 0.0
    targets: int = 0
    correct: int = 0
    ids: Counter[int] = field(default_factory=Counter)

    @property
    def loss(self) -> float:
        """Nats per target."""
        return self.nats / self.targets


@torch.inference_mode()
def score_batches(network: Transformer, batches: Iterable[Batch]) -> Tally:
    """The network's answers against the labels, without dropout or label smoothing; the mode it is in is kept.

    Rows are summed one by one, so that how they are batched shows in the last digits at most. Raises UsageError for a
    model that predicts no tokens or needs a source, QkvError for logits that are not finite.
    """
    check_predicts_tokens(network)
    device = next(network.parameters()).device
    was_training = network.training
    network.eval()
    tally = Tally()
    try:
        for batch in batches:
            tally.ids.update(batch.labels[batch.labels != IGNORE].tolist())
            _score(network, batch.to(device), tally)
    finally:
        network.train(was_training)
    tally.targets = tally.ids.total()
    return tally


def _score(network: Transformer, batch: Batch, tally: Tally) -> None:
    logits_BTV = network(batch.inputs, **batch.arguments)
    for logits_TV, labels_T in zip(logits_BTV, batch.labels, strict=True):
        chosen_T = labels_T != IGNORE
        logits_NV, labels_N = logits_TV[chosen_T].float(), labels_T[chosen_T]
        losses_N = F.cross_entropy(logits_NV, labels_N, reduction="none").cpu().double()
        if not losses_N.isfinite().all():
            slot = int(chosen_T.nonzero()[int((~losses_N.isfinite()).nonzero()[0])])
            raise QkvError(
                f"the model's answer is not finite (token {slot} of a window)",
                hint="--dtype fp32, or an earlier checkpoint",
            )
        tally.nats += float(losses_N.sum())
        tally.correct += int((logits_NV.argmax(-1) == labels_N).sum())


def check_predicts_tokens(network: Transformer) -> None:
    """Raise UsageError unless the network maps ids to a score per token of the vocabulary."""
    config = network.config
    if config.family == "encoder-decoder":
        raise UsageError("an encoder-decoder is scored on pairs of source and target, not on plain text")
    if config.head is None or not config.head.predicts_tokens:
        kind = config.head.kind if config.head else "none"
        raise UsageError(
            f"a model with a head of kind {kind} predicts no tokens, so it has no perplexity",
            hint="classify" if kind == "classifier" else "embed",
        )
