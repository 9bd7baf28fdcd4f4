"""What can be said about a run: tokenizer, objective, data, training. `Config` is the whole tree."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from qkv.config.base import Kinds, Node, Part, contradiction
from qkv.config.model import ModelConfig
from qkv.config.parts import Probability, VocabSize

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
        if self.path and self.vocab_size:
            raise contradiction(
                "tokenizer.path", "tokenizer.vocab_size", "a saved tokenizer has its own size", "one of them"
            )
        return self


# --- objectives -------------------------------------------------------------------------------------------------------


class ObjectiveConfig(Part):
    """What the model is trained to predict."""


class CausalObjectiveConfig(ObjectiveConfig):
    """Every next token."""

    kind: Literal["causal"] = "causal"


class MaskedObjectiveConfig(ObjectiveConfig):
    """BERT: `rate` of the tokens are targets; of these 80 % become [MASK], 10 % a random token, 10 % stay."""

    kind: Literal["masked"] = "masked"
    rate: float = Field(0.15, gt=0, lt=1)


Objective = Annotated[ObjectiveConfig, Kinds(CausalObjectiveConfig, MaskedObjectiveConfig)]

# --- data -------------------------------------------------------------------------------------------------------------


class DataConfig(Part):
    """Files to learn from. `validation` is a fraction of the documents held out, or files of the same kind.

    `bad_bytes`: what to do with bytes that are not UTF-8: stop with file and offset, replace by U+FFFD, or drop them.
    """

    train: tuple[str, ...] = ()
    validation: float | tuple[str, ...] = 0.02
    bad_bytes: Literal["error", "replace", "drop"] = "error"

    @model_validator(mode="before")
    @classmethod
    def _one_file_is_a_list(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            data = dict(data)
            for key in ("train", "validation"):
                if isinstance(data.get(key), str):
                    data[key] = [data[key]]
        return data

    @model_validator(mode="after")
    def _fraction(self) -> Self:
        if isinstance(self.validation, float) and not 0 <= self.validation < 1:
            raise PydanticCustomError(
                "validation",
                "data.validation is a fraction from 0 to 1 or a list of files, got {got}",
                {"got": self.validation},
            )
        return self


class TextDataConfig(DataConfig):
    """Plain text: one document per file, per line, or per paragraph."""

    kind: Literal["text"] = "text"
    split: Literal["file", "lines", "blank-lines"] = "file"


class JsonlDataConfig(DataConfig):
    """One JSON object per line; its `key` is the document."""

    kind: Literal["jsonl"] = "jsonl"
    key: str = "text"


Data = Annotated[DataConfig, Kinds(TextDataConfig, JsonlDataConfig)]

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
    """How long, how fast, how much at once. Token counts are target tokens; padding is not counted."""

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


class Config(Node):
    """The whole tree: everything that makes a run."""

    model: ModelConfig
    tokenizer: TokenizerConfig = TokenizerConfig()
    objective: Objective | None = None
    data: Data = TextDataConfig()
    train: TrainConfig = TrainConfig()

    @model_validator(mode="before")
    @classmethod
    def _objective_of_family(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("objective") is None:
            model = data.get("model")
            family: object = getattr(model, "family", "decoder")
            if isinstance(model, Mapping):
                family = model.get("family", "decoder")
            if family in ("decoder", "encoder"):
                return {**data, "objective": {"kind": "masked" if family == "encoder" else "causal"}}
        return data

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        wanted = {"causal": "decoder", "masked": "encoder"}.get(self.objective.kind if self.objective else "")
        if wanted and self.objective and self.model.family != wanted:
            raise contradiction(
                "objective.kind",
                "model.family",
                f"{self.objective.kind} needs a model of family {wanted}",
                f"objective.kind={'masked' if self.model.family == 'encoder' else 'causal'}",
            )
        size, wished = self.model.vocab_size, self.tokenizer.vocab_size
        if size is not None and wished is not None and wished > size:
            raise contradiction(
                "tokenizer.vocab_size",
                "model.vocab_size",
                f"ids up to {wished - 1} would not fit an embedding of {size} rows",
                "model.vocab_size=null to take the tokenizer's",
            )
        return self

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
    if "bad_bytes" in properties:  # data
        for key in ("train", "validation"):
            properties[key] = {"anyOf": [{"type": "string"}, properties[key]]}
    if "max_seq_len" in properties:  # a stack
        properties["layers"] = {"anyOf": [{"type": "null"}, properties["layers"]]}
