"""What can be said about a run: tokenizer, objective, data, training. `Config` is the whole tree."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from qkv.config.base import Kinds, Node, Part, contradiction
from qkv.config.model import Family, ModelConfig
from qkv.config.parts import ClassifierHeadConfig, Probability, TokenInputConfig, VocabSize

MAX_COUNT = 2**53
"""Every step, token and seed stays exact in a JSON reader, and in 64 bits."""

Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]

# --- tokenizer --------------------------------------------------------------------------------------------------------


class TokenizerConfig(Node):
    """How text becomes ids: trained on the training text (`kind`, `vocab_size`), reused (`path`), or one per side.

    `lowercase` and the like are the business of an imported tokenizer; a trained one keeps every byte.
    """

    kind: Literal["bpe", "unigram", "wordpiece", "word", "char", "byte"] = "bpe"
    vocab_size: VocabSize | None = None
    path: str | None = None
    source: TokenizerConfig | None = None
    target: TokenizerConfig | None = None

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.source is None) != (self.target is None):
            raise contradiction("tokenizer.source", "tokenizer.target", "only one is given", "both, or neither")
        if self.source and self.path:
            raise contradiction(
                "tokenizer.source", "tokenizer.path", "one or two tokenizers?", "source.path, target.path"
            )
        for side in ("source", "target"):
            inner: TokenizerConfig | None = getattr(self, side)
            if inner is not None and inner.source is not None:
                raise contradiction(f"tokenizer.{side}.source", f"tokenizer.{side}", "a side has one tokenizer", "one")
        if self.path and self.vocab_size:
            raise contradiction(
                "tokenizer.path", "tokenizer.vocab_size", "a saved tokenizer has its own size", "one of them"
            )
        return self


# --- objectives -------------------------------------------------------------------------------------------------------


class ObjectiveConfig(Part):
    """What the model is trained to predict. `families` can learn it, from data of one of `data_kinds`."""

    families: ClassVar[tuple[Family, ...]] = ("decoder", "encoder", "encoder-decoder")
    data_kinds: ClassVar[tuple[str, ...]] = ("text", "jsonl")

    @property
    def without_noise(self) -> Self:
        """What validation asks: the same, without noise that is there to regularise."""
        return self


class CausalObjectiveConfig(ObjectiveConfig):
    """Every next token."""

    families: ClassVar[tuple[Family, ...]] = ("decoder",)
    kind: Literal["causal"] = "causal"


class MaskedObjectiveConfig(ObjectiveConfig):
    """BERT: `rate` of the tokens are targets; of these 80 % become [MASK], 10 % a random token, 10 % stay."""

    families: ClassVar[tuple[Family, ...]] = ("encoder",)
    kind: Literal["masked"] = "masked"
    rate: float = Field(0.15, gt=0, lt=1)


class TranslateObjectiveConfig(ObjectiveConfig):
    """Every next token of the target, given its source.

    `measure` is what validation is judged by beside the loss, on translations of the first `measure_examples` sources
    by greedy decoding; sources that repeat are one example with several right answers for exact-match.
    """

    families: ClassVar[tuple[Family, ...]] = ("encoder-decoder",)
    data_kinds: ClassVar[tuple[str, ...]] = ("parallel",)
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
    """The label of a text. `labels` names the classes in the order of their numbers; null: those of the training data,
    sorted. `token_dropout` is the share of a text's tokens that training hides behind the mask token, drawn anew every
    time (word dropout: Iyyer et al. 2015). `measure` is what validation is judged by beside the loss."""

    families: ClassVar[tuple[Family, ...]] = ("encoder", "decoder")
    data_kinds: ClassVar[tuple[str, ...]] = ("labelled",)
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
        MaskedObjectiveConfig,
        TranslateObjectiveConfig,
        DenoiseObjectiveConfig,
        SpanObjectiveConfig,
        ClassifyObjectiveConfig,
    ),
]

# --- data -------------------------------------------------------------------------------------------------------------

Files = tuple[str, ...]
Side = Literal["source", "target"]


class SideFiles(Node):
    """Files whose lines belong together: line n of the sources to line n of the targets."""

    source: Files = ()
    target: Files = ()

    @field_validator("source", "target", mode="before")
    @classmethod
    def _one_file_is_a_list(cls, files: Any) -> Any:
        return _listed(files)

    @model_validator(mode="after")
    def _side_by_side(self) -> Self:
        hint = {"hint": "{source: [FILE], target: [FILE]}"}
        for side, files in (("source", self.source), ("target", self.target)):
            if not files:
                raise PydanticCustomError("sides", "there are no {side} files", {"side": side, **hint})
        if len(self.source) != len(self.target):
            raise PydanticCustomError("sides", "there are not as many source files as target files", hint)
        return self


def _listed(files: Any) -> Any:
    """One file is a list of one."""
    return (files,) if isinstance(files, str) else files


class DataConfig(Part):
    """Files to learn from. `validation` is a fraction of the documents held out, or files of the same kind.

    `bad_bytes`: what to do with bytes that are not UTF-8: stop with file and offset, replace by U+FFFD, or drop them.
    """

    train: Files | SideFiles = ()
    validation: float | Files | SideFiles = 0.02
    bad_bytes: Literal["error", "replace", "drop"] = "error"

    @field_validator("train", "validation", mode="before")
    @classmethod
    def _files(cls, files: Any, info: ValidationInfo) -> Any:
        """One form of files at a time, so that an error speaks of the form that was meant."""
        files = _listed(files)
        if isinstance(files, SideFiles | Mapping):
            if issubclass(cls, ListedDataConfig):
                raise contradiction(
                    "data.kind",
                    f"data.{info.field_name}",
                    "only parallel data have a source and a target",
                    "data.kind=parallel",
                )
            return SideFiles.model_validate(files)
        if isinstance(files, list | tuple) and all(isinstance(file, str) for file in files):
            return files
        if info.field_name == "train":
            raise PydanticCustomError("files", "expected a file or a list of files")
        if not isinstance(files, int | float) or isinstance(files, bool) or not 0 <= files < 1:
            raise PydanticCustomError("fraction", "expected a fraction from 0 to below 1, or files")
        return files


class ListedDataConfig(DataConfig):
    """Data that are one list of files."""

    train: Files = ()
    validation: float | Files = 0.02


class TextDataConfig(ListedDataConfig):
    """Plain text: one document per file, per line, or per paragraph."""

    kind: Literal["text"] = "text"
    split: Literal["file", "lines", "blank-lines"] = "file"


class JsonlDataConfig(ListedDataConfig):
    """One JSON object per line; its `key` is the document."""

    kind: Literal["jsonl"] = "jsonl"
    key: str = "text"


class ParallelDataConfig(DataConfig):
    """Pairs of a source and a target: two lists of files, line by line, or TSV (source, tab, target) and JSONL files,
    whose keys are `source_key` and `target_key`. `reverse` exchanges the sides of every pair.

    Pairs with an empty side, or one that the model's context does not hold, are left out, and their number is said.
    """

    kind: Literal["parallel"] = "parallel"
    source_key: str = "source"
    target_key: str = "target"
    reverse: bool = False

    @model_validator(mode="after")
    def _two_keys(self) -> Self:
        if self.source_key == self.target_key:
            raise contradiction("data.source_key", "data.target_key", "they are the same key", "two keys")
        return self


class LabelledDataConfig(ListedDataConfig):
    """Texts with a label: TSV or CSV files with a header, or JSONL; `text_key` and `label_key` name their columns.

    A text longer than the model's context is cut, and the number of those is said.
    """

    kind: Literal["labelled"] = "labelled"
    text_key: str = "text"
    label_key: str = "label"

    @model_validator(mode="after")
    def _two_keys(self) -> Self:
        if self.text_key == self.label_key:
            raise contradiction("data.text_key", "data.label_key", "they are the same key", "two keys")
        return self


Data = Annotated[DataConfig, Kinds(TextDataConfig, JsonlDataConfig, ParallelDataConfig, LabelledDataConfig)]

# --- training ---------------------------------------------------------------------------------------------------------


class OptimizerConfig(Part):
    """`lr` is the peak of the schedule. Weight decay acts on matrices only."""

    lr: float = Field(1e-3, gt=0)
    weight_decay: float = Field(0.1, ge=0)


class AdamWConfig(OptimizerConfig):
    kind: Literal["adamw"] = "adamw"
    betas: tuple[Probability, Probability] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)


class MuonConfig(OptimizerConfig):
    """Muon on the hidden matrices (`lr`, `momentum`), AdamW (`adam_lr`, `betas`, `eps`) on the rest."""

    kind: Literal["muon"] = "muon"
    lr: float = Field(0.02, gt=0)
    momentum: Probability = 0.95
    adam_lr: float = Field(3e-3, gt=0)
    betas: tuple[Probability, Probability] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)


Optimizer = Annotated[OptimizerConfig, Kinds(AdamWConfig, MuonConfig)]


class ScheduleConfig(Part):
    """The learning rate over the steps, as a share of its peak; `warmup` steps rise linearly and never use 0."""

    warmup: int = Field(0, ge=0, le=MAX_COUNT)


class CosineScheduleConfig(ScheduleConfig):
    """Half a cosine from the peak to `final` of it."""

    kind: Literal["cosine"] = "cosine"
    final: float = Field(0.1, ge=0, le=1)


class WSDScheduleConfig(ScheduleConfig):
    """Warm up, stay, and fall linearly to `final` over the last `decay` of the steps."""

    kind: Literal["wsd"] = "wsd"
    decay: float = Field(0.2, ge=0, le=1)
    final: float = Field(0.0, ge=0, le=1)


class InverseSqrtScheduleConfig(ScheduleConfig):
    """2017: rises for `warmup` steps, then falls with the inverse square root of the step."""

    kind: Literal["inverse-sqrt"] = "inverse-sqrt"
    warmup: Count = 4000


class ConstantScheduleConfig(ScheduleConfig):
    kind: Literal["constant"] = "constant"


Schedule = Annotated[
    ScheduleConfig, Kinds(CosineScheduleConfig, WSDScheduleConfig, InverseSqrtScheduleConfig, ConstantScheduleConfig)
]


class TrainConfig(Node):
    """How long, how fast, how much at once. Token counts are target tokens, of texts with a label their tokens; padding
    is not counted."""

    steps: Count = 1000
    batch_tokens: Count = 16384
    micro_batch_tokens: Count | None = None
    optimizer: Optimizer = AdamWConfig()
    schedule: Schedule = CosineScheduleConfig()
    clip: float | None = Field(1.0, gt=0)
    label_smoothing: Probability = 0.0
    log_every: Count = 10
    eval_every: Count | None = 250
    save_every: Count | None = 250
    keep: Count = 2
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    compile: Literal["auto", "on", "off"] = "auto"
    device: str = "auto"
    seed: int = Field(0, ge=0, le=MAX_COUNT)

    @model_validator(mode="after")
    def _warmup_fits(self) -> Self:
        if self.schedule.warmup > self.steps and not isinstance(self.schedule, InverseSqrtScheduleConfig):
            raise contradiction(
                "train.schedule.warmup",
                "train.steps",
                f"the peak would come at step {self.schedule.warmup} of {self.steps}",
                "a shorter warmup or more steps",
            )
        return self


_USUAL_DATA = {"translate": "parallel", "classify": "labelled"}
_SIDES: dict[str, Side] = {"encoder": "source", "decoder": "target"}
"""What each stack reads."""


def _usual_objective(model: Any) -> str:
    """The objective of a model that names none: by its head where that classifies, else by its family."""
    known = model if isinstance(model, Mapping) else vars(model) if isinstance(model, ModelConfig) else {}
    head = known.get("head")
    if (head.get("kind") if isinstance(head, Mapping) else getattr(head, "kind", None)) == "classifier":
        return "classify"
    family = known.get("family", "decoder")
    return {"encoder": "masked", "encoder-decoder": "translate"}.get(family, "causal")


class Config(Node):
    """The whole tree: everything that makes a run."""

    model: ModelConfig
    tokenizer: TokenizerConfig = TokenizerConfig()
    objective: Objective = CausalObjectiveConfig()
    data: Data = TextDataConfig()
    train: TrainConfig = TrainConfig()

    @model_validator(mode="before")
    @classmethod
    def _usual_objective_and_data(cls, data: Any) -> Any:
        """What is not said follows from what is: the objective from the family and the head, the data from it."""
        if not isinstance(data, Mapping):
            return data
        data = dict(data)
        objective = data.get("objective") or {}
        if isinstance(objective, Mapping) and not objective.get("kind"):
            data["objective"] = objective = {**objective, "kind": _usual_objective(data.get("model"))}
        kind = objective.get("kind") if isinstance(objective, Mapping) else getattr(objective, "kind", None)
        files = data.get("data") or {}
        if isinstance(files, Mapping) and not files.get("kind"):
            usual = "parallel" if isinstance(files.get("train"), Mapping) else _USUAL_DATA.get(str(kind), "text")
            data["data"] = {**files, "kind": usual}
        return data

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        objective, family = self.objective, self.model.family
        if family not in objective.families:
            usual = _usual_objective(self.model)
            raise contradiction(
                "objective.kind",
                "model.family",
                f"{objective.kind} needs a model of family {' or '.join(objective.families)}",
                f"model.family={objective.families[0]}" if usual == objective.kind else f"objective.kind={usual}",
            )
        classifies = isinstance(objective, ClassifyObjectiveConfig)
        head = self.model.head
        if objective.module is None and classifies != isinstance(head, ClassifierHeadConfig):
            raise contradiction(
                "objective.kind",
                "model.head.kind",
                f"{objective.kind} does not train a head of kind {head.kind if head else None}",
                "model.head.kind=classifier" if classifies else f"objective.kind={_usual_objective(self.model)}",
            )
        if isinstance(head, ClassifierHeadConfig) and family == "decoder" and head.pooling == "first":
            raise contradiction(
                "model.family",
                "model.head.pooling",
                "the first token of a decoder has seen nothing of the text",
                "model.head.pooling=last",
            )
        if self.data.module is None and self.data.train and self.data.kind not in objective.data_kinds:
            raise contradiction(
                "objective.kind",
                "data.kind",
                f"{objective.kind} is not learnt from {self.data.kind} data",
                f"data.kind={objective.data_kinds[0]}",
            )
        for side, stack in self.model.stacks.items():
            if objective.module is None and self.data.train and not isinstance(stack.input, TokenInputConfig):
                key = f"model.{side}.input.kind" if len(self.model.stacks) == 2 else "model.input.kind"
                raise contradiction(
                    "objective.kind",
                    key,
                    f"{objective.kind} is learnt from text, which is read as tokens",
                    f"{key}=tokens",
                )
        if self.tokenizer.source is not None and family != "encoder-decoder":
            raise contradiction(
                "tokenizer.source",
                "model.family",
                f"a model of family {family} reads one kind of text",
                "one tokenizer, or model.family=encoder-decoder",
            )
        if self.tokenizer.source is not None and "parallel" not in objective.data_kinds:
            raise contradiction(
                "tokenizer.source",
                "objective.kind",
                f"{objective.kind} reads and writes one kind of text",
                "one tokenizer",
            )
        if self.tokenizer.source is not None and self.model.tie_embeddings in ("source-target", "all"):
            raise contradiction(
                "tokenizer.source",
                "model.tie_embeddings",
                "two vocabularies cannot share one embedding",
                "model.tie_embeddings=head, or one tokenizer",
            )
        self._check_vocabulary()
        return self

    def _check_vocabulary(self) -> None:
        for side, stack in self.model.stacks.items():
            name = _SIDES[side]
            own: TokenizerConfig | None = getattr(self.tokenizer, name)
            size, wished = stack.vocab_size, (own or self.tokenizer).vocab_size
            if size is not None and wished is not None and wished > size:
                raise contradiction(
                    "tokenizer.vocab_size" if own is None else f"tokenizer.{name}.vocab_size",
                    "model.vocab_size" if own is None else f"model.{side}.vocab_size",
                    f"ids up to {wished - 1} would not fit an embedding of {size} rows",
                    "model.vocab_size=null to take the tokenizer's",
                )

    @classmethod
    def load(cls, path: str | Path, *overrides: str, allow: tuple[str, ...] | None = None) -> Config:
        """The configuration in a YAML file (or of a preset's name), with `key=value` overrides applied in order.

        allow: packages whose parts it may import; None: every one, but none for a model folder.

        Raises ConfigError naming file, line and the nearest key; NotFoundError.
        """
        from qkv.config.load import load_config

        return load_config(path, overrides, allow)

    def to_yaml(self) -> str:
        """The resolved tree as YAML: enough to rebuild the model."""
        from qkv.config.load import dump_yaml

        return dump_yaml(self.model_dump(mode="json"))

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """The JSON Schema of configuration files, for editors."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # pydantic warns of defaults it writes in their short form
            schema = cls.model_json_schema()
        parent = {"type": "string", "description": "a preset's name or a path; keys here override it"}
        schema["properties"]["extends"] = parent
        schema.pop("required", None)  # the parent may have it
        _allow_short_forms(schema)
        return schema


def _allow_short_forms(schema: Any) -> None:
    """What files may say before it is spelled out: a pattern's `repeat`, one file instead of a list, empty sections."""
    for part in schema.values() if isinstance(schema, dict) else schema:
        if isinstance(part, dict | list):
            _allow_short_forms(part)
    properties = schema.get("properties", {}) if isinstance(schema, dict) else {}
    if "cross_attention" in properties and "vocab_size" not in properties:  # a layer
        properties["repeat"] = {"type": "integer", "minimum": 1}
    if "bad_bytes" in properties or set(properties) == {"source", "target"}:  # data, files side by side
        for key in properties.keys() & {"train", "validation", "source", "target"}:
            properties[key] = {"anyOf": [{"type": "string"}, properties[key]]}
    if "max_seq_len" in properties:  # a stack
        properties["layers"] = {"anyOf": [{"type": "null"}, properties["layers"]]}
