"""Which class a text, an image or a recording belongs to.

Shapes: N inputs of a batch, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qkv.config.errors import UsageError
from qkv.config.objectives import ClassifyObjectiveConfig
from qkv.config.parts import ClassifierHeadConfig
from qkv.config.run import Config
from qkv.generate.decode import evaluating
from qkv.generate.inputs import Input, batches
from qkv.generate.sampling import refuse_non_finite
from qkv.nn.transformer import Transformer


@dataclass(frozen=True)
class Classification:
    """The likeliest class of a text, an image or a recording; `probabilities` of the classes by label, the likeliest
    first."""

    label: str
    probability: float
    probabilities: dict[str, float]


def class_labels(config: Config) -> tuple[str, ...]:
    """What a classifier's classes are called, in the order of their numbers: by these where they have no names.

    Raises UsageError for a model that does not classify.
    """
    head, objective = config.model.head, config.objective
    if not isinstance(head, ClassifierHeadConfig):
        raise UsageError(
            f"a model of family {config.model.family} with a head of kind {head.kind if head else None} does not "
            "classify",
            hint="a model trained with model.head.kind=classifier",
        )
    assert head.num_classes is not None  # the network was built
    labels = objective.labels if isinstance(objective, ClassifyObjectiveConfig) else None
    if labels is None:
        return tuple(map(str, range(head.num_classes)))
    if len(labels) != head.num_classes:
        raise UsageError(
            f"the model tells {head.num_classes} classes apart, and its configuration names {len(labels)}",
            where="objective.labels",
        )
    return labels


@torch.inference_mode()
def classify(
    network: Transformer,
    inputs: Sequence[Input],
    labels: Sequence[str],
    *,
    end_id: int | None = None,
    top: int | None = None,
    batch_size: int = 32,
) -> list[Classification]:
    """The class of each text, given as ids, or of images [C, H, W] or other features [S, W], with the probabilities of
    the `top` likeliest classes (None: of all).

    A text longer than the context is cut, and still ends with `end_id`, as in training. Inputs of like length share a
    batch; none depends on the others. Raises QkvError for probabilities that are not finite.
    """
    like = next(network.parameters())
    found: dict[int, Classification] = {}
    with evaluating(network.modules()):
        for numbers, read, lengths_N in batches(
            inputs, like, batch_size, longest=network.config.context, end_id=end_id
        ):
            ranked = _ranked(network(read, lengths=lengths_N), labels, numbers, top)
            found.update(zip(numbers, ranked, strict=True))
    return [found[number] for number in range(len(inputs))]


def _ranked(logits_NC: Tensor, labels: Sequence[str], numbers: Sequence[int], top: int | None) -> list[Classification]:
    """What the scores of the inputs with these numbers say."""
    logits_NC = logits_NC.float().cpu()
    refuse_non_finite(logits_NC, list(numbers), 1)
    found = []
    p_NC, classes_NC = logits_NC.softmax(-1).sort(descending=True, stable=True)
    for p_C, classes_C in zip(p_NC.tolist(), classes_NC.tolist(), strict=True):
        ranked = {labels[c]: p for c, p in zip(classes_C, p_C, strict=True)}
        label, probability = next(iter(ranked.items()))
        found.append(Classification(label, probability, dict(list(ranked.items())[:top])))
    return found
