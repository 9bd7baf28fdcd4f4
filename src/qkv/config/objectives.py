"""What a model can be trained to predict."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from qkv.config.base import Count, Kinds, Part
from qkv.config.model import Family
from qkv.config.numbers import Probability


class ObjectiveConfig(Part):
    """What the model is trained to predict. `families` can learn it, from data of one of `data_kinds`; `cuts_texts`:
    into rows of any length."""

    families: ClassVar[tuple[Family, ...]] = ("decoder", "encoder", "encoder-decoder")
    data_kinds: ClassVar[tuple[str, ...]] = ("text", "jsonl")
    cuts_texts: ClassVar[bool] = True

    @property
    def without_noise(self) -> Self:
        """What validation asks: the same, without noise that is there to regularise."""
        return self


class CausalObjectiveConfig(ObjectiveConfig):
    """Every next token."""

    families: ClassVar[tuple[Family, ...]] = ("decoder",)
    kind: Literal["causal"] = "causal"


class PrefixObjectiveConfig(ObjectiveConfig):
    """Every next token of what follows a prefix, whose tokens see each other (arXiv 1910.10683, 3.2.1). Its length, of
    one token to all but the last, is drawn anew every time."""

    families: ClassVar[tuple[Family, ...]] = ("decoder",)
    kind: Literal["prefix"] = "prefix"


class MaskedObjectiveConfig(ObjectiveConfig):
    """BERT: `rate` of the tokens are targets; of these 80 % become [MASK], 10 % a random token, 10 % stay."""

    families: ClassVar[tuple[Family, ...]] = ("encoder",)
    kind: Literal["masked"] = "masked"
    rate: float = Field(0.15, gt=0, lt=1)


class TranslateObjectiveConfig(ObjectiveConfig):
    """Every next token of the target, given its source: a text, an image or a recording.

    `measure` is what validation is judged by beside the loss, on translations of the first `measure_examples` sources
    by greedy decoding; sources that repeat are one example with several right answers for exact-match.
    """

    families: ClassVar[tuple[Family, ...]] = ("encoder-decoder",)
    data_kinds: ClassVar[tuple[str, ...]] = ("parallel", "images", "audio")
    cuts_texts: ClassVar[bool] = False
    kind: Literal["translate"] = "translate"
    measure: Literal["bleu", "chrf", "exact-match", "word-error-rate", "character-error-rate"] = "bleu"
    measure_examples: Count = 500


class DenoiseObjectiveConfig(ObjectiveConfig):
    """BART's text infilling (arXiv 1910.13461, 2.2): spans, `rate` of the tokens in all and Poisson(`mean_span`) long
    each, are replaced by one [MASK] each; the target is the whole text."""

    families: ClassVar[tuple[Family, ...]] = ("encoder-decoder",)
    kind: Literal["denoise"] = "denoise"
    rate: float = Field(0.3, gt=0, lt=1)
    mean_span: float = Field(3.0, ge=1, le=1000)


class SpanObjectiveConfig(ObjectiveConfig):
    """T5's span corruption (arXiv 1910.10683, 3.1.4): spans of `mean_span` tokens on average, `rate` of all tokens, are
    replaced by one sentinel each; the target is each sentinel followed by what it stands for."""

    families: ClassVar[tuple[Family, ...]] = ("encoder-decoder",)
    kind: Literal["span"] = "span"
    rate: float = Field(0.15, gt=0, lt=1)
    mean_span: float = Field(3.0, ge=1, le=1000)


class ClassifyObjectiveConfig(ObjectiveConfig):
    """The label of a text, an image or a recording. `labels` names the classes in the order of their numbers; null:
    those of the training data, sorted. `token_dropout` is the share of a text's tokens that training hides behind the
    mask token, drawn anew every time (word dropout: Iyyer et al. 2015). `measure` is what validation is judged by
    beside the loss."""

    families: ClassVar[tuple[Family, ...]] = ("encoder", "decoder")
    data_kinds: ClassVar[tuple[str, ...]] = ("labelled", "images", "audio")
    cuts_texts: ClassVar[bool] = False
    kind: Literal["classify"] = "classify"
    labels: tuple[str, ...] | None = Field(None, min_length=2)
    token_dropout: Probability = 0.0
    measure: Literal["accuracy", "f1"] = "accuracy"

    @property
    def without_noise(self) -> Self:
        return self.model_copy(update={"token_dropout": 0.0})

    @field_validator("labels", mode="before")
    @classmethod
    def _spelled(cls, labels: Any) -> Any:
        return tuple(map(spelled_label, labels)) if isinstance(labels, list | tuple) else labels

    @field_validator("labels")
    @classmethod
    def _each_once(cls, labels: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if labels is not None and len(set(labels)) < len(labels):
            raise PydanticCustomError("twice", "a class is named twice")
        return labels


def spelled_label(label: Any) -> Any:
    """Labels such as 0, 1 and true, which are no strings in JSON and YAML, as they are spelled there."""
    return json.dumps(label) if isinstance(label, int) else label


Objective = Annotated[
    ObjectiveConfig,
    Kinds(
        CausalObjectiveConfig,
        PrefixObjectiveConfig,
        MaskedObjectiveConfig,
        TranslateObjectiveConfig,
        DenoiseObjectiveConfig,
        SpanObjectiveConfig,
        ClassifyObjectiveConfig,
    ),
]
