"""Sizes of a model that follow from what it learns with."""

from __future__ import annotations

from qkv.config.errors import ConfigError
from qkv.config.objectives import ClassifyObjectiveConfig
from qkv.config.parts import ClassifierHeadConfig
from qkv.config.run import Config
from qkv.tokenizer.tokenizer import Tokenizer


def sized(
    config: Config, tokenizer: Tokenizer | None, source_tokenizer: Tokenizer | None, labels: tuple[str, ...]
) -> Config:
    """The configuration with what the tokenizers and the labels say, where nothing was given.

    Raises ConfigError for a vocabulary smaller than the tokenizer's, and for as many classes as there are not labels.
    """
    model, objective = config.model, config.objective
    if tokenizer is not None:
        sizes = {"decoder": tokenizer.vocab_size, "encoder": (source_tokenizer or tokenizer).vocab_size}
        for side, stack in model.stacks.items():
            if stack.vocab_size is not None and stack.vocab_size < sizes[side]:
                key = f"model.{side}.vocab_size" if len(model.stacks) == 2 else "model.vocab_size"
                raise ConfigError(
                    f"`{key}` is {stack.vocab_size}, and the tokenizer has {sizes[side]} ids",
                    hint="model.vocab_size=null to take the tokenizer's",
                )
        model = model.with_vocab_size(sizes["decoder"], sizes["encoder"])
    if isinstance(objective, ClassifyObjectiveConfig) and isinstance(model.head, ClassifierHeadConfig):
        wanted = model.head.num_classes
        if wanted is not None and wanted != len(labels):
            raise ConfigError(
                f"`model.head.num_classes` is {wanted}, and there are {len(labels)} labels: {', '.join(labels[:10])}",
                hint="model.head.num_classes=null to take the data's",
            )
        model = model.model_copy(update={"head": model.head.model_copy(update={"num_classes": len(labels)})})
        objective = objective.model_copy(update={"labels": labels})
    return config.model_copy(update={"model": model, "objective": objective})
