"""`Config`, the whole tree of what can be said about a run, and the sections that have no file of their own."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from qkv.config.base import Node, contradiction
from qkv.config.data import Data, MediaDataConfig, Side, TextDataConfig
from qkv.config.model import ModelConfig
from qkv.config.numbers import MAX_VOCAB
from qkv.config.objectives import (
    CausalObjectiveConfig,
    ClassifyObjectiveConfig,
    Objective,
    PrefixObjectiveConfig,
)
from qkv.config.parts import ClassifierHeadConfig, InputConfig
from qkv.config.tokenizer import TokenizerConfig
from qkv.config.training import TrainConfig
from qkv.config.yaml_tree import dump_yaml

# --- generation -------------------------------------------------------------------------------------------------------

TokenId = Annotated[int, Field(ge=0, lt=MAX_VOCAB)]


class GenerationConfig(Node):
    """Where generated texts begin and end, and what is never in them; published models say it beside their weights.

    start_ids: what the decoder of an encoder-decoder starts from (null: the tokenizer's BOS). eos_ids: each of them
    ends a text (null: the tokenizer's EOS). suppress_ids are never written, begin_suppress_ids never first.
    """

    start_ids: tuple[TokenId, ...] | None = Field(None, min_length=1)
    eos_ids: tuple[TokenId, ...] | None = None
    suppress_ids: tuple[TokenId, ...] = ()
    begin_suppress_ids: tuple[TokenId, ...] = ()


_USUAL_DATA = {"translate": "parallel", "classify": "labelled"}
_DATA_OF_INPUT = {"patches": "images", "log-mel": "audio"}
_SIDES: dict[str, Side] = {"encoder": "source", "decoder": "target"}
"""What each stack reads."""


def _usual_objective(model: Any) -> str:
    """The objective of a model that names none: by its head where that classifies, else by its family and mask."""
    known = model if isinstance(model, Mapping) else vars(model) if isinstance(model, ModelConfig) else {}
    head = known.get("head")
    if (head.get("kind") if isinstance(head, Mapping) else getattr(head, "kind", None)) == "classifier":
        return "classify"
    family = known.get("family", "decoder")
    if family == "decoder" and known.get("prefix"):
        return "prefix"
    return {"encoder": "masked", "encoder-decoder": "translate"}.get(family, "causal")


def _usual_data(model: Any, objective: str) -> str:
    """The kind of data that an objective learns from: what the model's first stack reads, where that is no text."""
    for name in ("encoder", "input", "kind"):
        inner = model.get(name) if isinstance(model, Mapping) else getattr(model, name, None)
        model = model if inner is None and name == "encoder" else inner
    return _DATA_OF_INPUT.get(str(model), _USUAL_DATA.get(objective, "text"))


class Config(Node):
    """The whole tree: everything that makes a run."""

    model: ModelConfig
    tokenizer: TokenizerConfig = TokenizerConfig()
    objective: Objective = CausalObjectiveConfig()
    data: Data = TextDataConfig()
    train: TrainConfig = TrainConfig()
    generation: GenerationConfig = GenerationConfig()

    @model_validator(mode="before")
    @classmethod
    def _usual_objective_and_data(cls, data: Any) -> Any:
        """What is not said follows from what is: the objective from the family and the head, the data from it, and from
        the objective `prefix` that the model has one."""
        if not isinstance(data, Mapping):
            return data
        data = dict(data)
        objective = data.get("objective") or {}
        if isinstance(objective, Mapping) and not objective.get("kind"):
            data["objective"] = objective = {**objective, "kind": _usual_objective(data.get("model"))}
        kind = objective.get("kind") if isinstance(objective, Mapping) else getattr(objective, "kind", None)
        if kind == "prefix" and isinstance(data.get("model"), Mapping):
            data["model"] = {"prefix": True, **data["model"]}
        files = data.get("data") or {}
        if isinstance(files, Mapping) and not files.get("kind"):
            usual = "parallel" if isinstance(files.get("train"), Mapping) else _usual_data(data.get("model"), str(kind))
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
        if objective.module is None and self.model.prefix != isinstance(objective, PrefixObjectiveConfig):
            raise contradiction(
                "objective.kind",
                "model.prefix",
                f"{objective.kind} trains a decoder {'without' if self.model.prefix else 'with'} a prefix",
                f"model.prefix={str(not self.model.prefix).lower()}",
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
        stack = next(iter(self.model.stacks.values()))
        first: InputConfig = stack.input
        place = "model.encoder" if family == "encoder-decoder" else "model"
        known = objective.module is None and self.data.module is None
        if known and self.data.train and first.kind != self.data.reads:
            key = f"{place}.input.kind"
            raise contradiction(
                "data.kind",
                key,
                f"{self.data.kind} data are read as {self.data.reads}, not as {first.kind}",
                f"{key}={self.data.reads}",
            )
        self.data.check_stack(stack, place)
        if self.tokenizer.source is not None and family != "encoder-decoder":
            raise contradiction(
                "tokenizer.source",
                "model.family",
                f"a model of family {family} reads one kind of text",
                "one tokenizer, or model.family=encoder-decoder",
            )
        if self.tokenizer.source is not None and isinstance(self.data, MediaDataConfig):
            raise contradiction(
                "tokenizer.source", "data.kind", f"{self.data.kind} data have one kind of text", "one tokenizer"
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
        self._check_ramp()
        return self

    def _check_ramp(self) -> None:
        lengths = [stage.max_seq_len for stage in self.train.ramp if stage.max_seq_len is not None]
        if lengths and not self.objective.cuts_texts:
            raise contradiction(
                "train.ramp",
                "objective.kind",
                f"{self.objective.kind} takes its examples whole, so that no max_seq_len shortens them",
                "stages of batch_tokens",
            )
        if max(lengths, default=0) > self.model.context:
            raise contradiction(
                "train.ramp",
                "model.max_seq_len",
                f"rows of {max(lengths)} tokens are longer than the context of {self.model.context}",
                "shorter stages",
            )

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
    if "layers" in properties:  # a stack
        properties["layers"] = {"anyOf": [{"type": "null"}, properties["layers"]]}
