"""A model of ours as a Hugging Face folder, where its configuration is that of a published architecture.

Whether it is, is found out by writing and reading back: what comes back must be the same model. Dropout, initialisation
and multi-token prediction, which belong to training, are set aside.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors.torch import save_file
from torch import Tensor, nn

from qkv.checkpoint.families import MODULES, Family, named
from qkv.checkpoint.generation import write_generation
from qkv.checkpoint.mapping import Bond, bonds, published
from qkv.checkpoint.preprocessor import write_preprocessor
from qkv.checkpoint.published import Published
from qkv.checkpoint.store import Pooling, refuse_quantized, whole
from qkv.config.data import ImagesDataConfig
from qkv.config.errors import QkvError, UsageError
from qkv.config.model import ModelConfig
from qkv.config.objectives import ClassifyObjectiveConfig
from qkv.config.parts import PatchInputConfig
from qkv.config.run import Config
from qkv.config.stack import StackConfig
from qkv.nn.transformer import Transformer
from qkv.tokenizer.tokenizer import Tokenizer

log = logging.getLogger("qkv")

SHARD_BYTES = 5 * 10**9
"""Above, the weights are split into several files."""

_ANOTHER_PART = 1000
"""How many differing keys a part counts for that an architecture does not have at all."""

_TRAINING = ("init", "dropout", "output_dropout", "balance_loss", "correction_rate")
_LAYERWISE = ("attention", "cross_attention", "feed_forward", "layers")
"""Keys of a stack that its layers spell out."""


def save_hf(
    folder: Path,
    network: Transformer,
    config: Config,
    tokenizer: Tokenizer | None = None,
    *,
    source_tokenizer: Tokenizer | None = None,
    pooling: Pooling | None = None,
) -> None:
    """Write a Hugging Face folder at `folder`, which must not exist yet: it appears whole or not at all.

    Raises ConflictError, and UsageError where no published architecture is this model, naming the first key that
    differs from the nearest one.
    """
    if source_tokenizer is not None:
        raise UsageError("a published folder has one tokenizer, and this model has two", hint="--to qkv")
    refuse_quantized(network)
    family, keys = equal_family(network.config)
    architecture = _architecture(family, network.config)
    parameters = _parameters(network)
    found = bonds(family.rules(network.config), list(parameters))
    if network.mtp is not None:
        log.warning("what only training uses is left out: the blocks of multi-token prediction")
    bare = network.config.head is not None and network.config.head.kind == "none"
    fixed = {table.theirs: table.value() for table in family.fixed(network.config)}
    generation = {
        **write_generation(config.generation, tokenizer, decodes=network.config.family == "encoder-decoder"),
        **family.write_generation(config.generation.start_ids or (), tokenizer),
    }
    objective = config.objective
    if isinstance(objective, ClassifyObjectiveConfig) and objective.labels and _classifies(network.config):
        keys["id2label"] = {str(number): label for number, label in enumerate(objective.labels)}
        keys["label2id"] = {label: number for number, label in enumerate(objective.labels)}
    reads = network.config.input
    images = config.data if isinstance(config.data, ImagesDataConfig) else ImagesDataConfig()
    preprocessor = write_preprocessor(images, reads) if isinstance(reads, PatchInputConfig) else None
    with whole(folder, "Hugging Face folder") as beside:
        dtype = str(next(iter(parameters.values())).dtype).removeprefix("torch.")
        head = {"architectures": [architecture], "model_type": family.model_types[0], "torch_dtype": dtype}
        none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))  # absent, they would be the class's own
        _write_json(beside / "config.json", {**head, **none, **generation, **keys})
        if network.config.family != "encoder":
            _write_json(beside / "generation_config.json", generation)
        if tokenizer is not None:
            (tokenizer.open_ended() if network.config.family == "decoder" else tokenizer).save(beside)
        if preprocessor is not None:
            _write_json(beside / "preprocessor_config.json", preprocessor)
        if pooling is not None:
            _write_pooling(beside, pooling, network.config.d_model)
        _write_weights(beside, found, parameters, fixed, family.prefix if bare else "")


def equal_family(config: ModelConfig) -> tuple[Family, dict[str, Any]]:
    """The published architecture that this model is, and its config.json without `architectures` and `model_type`.

    Raises UsageError with the first difference from the nearest one.
    """
    refusals: list[tuple[int, Family, str]] = []
    for family in {module: named(model_type) for model_type, module in MODULES.items()}.values():
        if family.kind != config.family:
            continue
        try:
            _architecture(family, config)
            keys = family.write(config)
            different = list(_differences(config, _read_back(family, keys, config)))
        except QkvError as error:
            refusals.append((_ANOTHER_PART, family, error.what))
            continue
        if not different:
            return family, keys
        key, ours, theirs = different[0]
        refusals.append((len(different), family, f"`{key}` is {ours!r:.80}, and there it would be {theirs!r:.80}"))
    if not refusals:
        raise UsageError(f"no published architecture of family {config.family} is supported")
    _, nearest, why = min(refusals, key=lambda refusal: refusal[0])
    raise UsageError(
        f"no published architecture is this model; the nearest is {nearest.model_types[0]}: {why}",
        hint="--to qkv, which writes every model",
    )


def _architecture(family: Family, config: ModelConfig) -> str:
    """The published class with the model's head."""
    assert config.head is not None
    for architecture, kind in family.architectures.items():
        if kind == config.head.kind:
            return architecture
    raise QkvError(f"`model.head.kind: {config.head.kind}` has no equivalent in this architecture")


def _classifies(config: ModelConfig) -> bool:
    return config.head is not None and config.head.kind == "classifier"


def _read_back(family: Family, keys: Mapping[str, Any], config: ModelConfig) -> ModelConfig:
    assert config.head is not None
    rules = family.rules(config)
    parameters = list(_parameters(Transformer(config, device="meta")))
    try:
        tensors = [name for bond in bonds(rules, parameters) for name in bond.theirs]
    except LookupError:  # the architecture has no such part, and the configurations will differ in it
        tensors = []
    try:
        return ModelConfig.model_validate(family.read(Published(keys, "config.json", tensors), config.head.kind))
    except ValidationError as error:
        raise QkvError(f"it cannot be written: {error.errors()[0]['msg']}") from None


def _parameters(network: Transformer) -> dict[str, nn.Parameter]:
    """All that the trained model reads with."""
    return {name: parameter for name, parameter in network.named_parameters() if not name.startswith("mtp.")}


# --- where two configurations differ ----------------------------------------------------------------------------------


def _differences(ours: ModelConfig, theirs: ModelConfig) -> Iterator[tuple[str, Any, Any]]:
    """(key, ours, theirs) wherever the models themselves differ."""
    a, b = _spelled(ours), _spelled(theirs)
    for key in dict.fromkeys([*a, *b]):
        if a.get(key) != b.get(key):
            yield key, a.get(key), b.get(key)


def _spelled(config: ModelConfig) -> dict[str, Any]:
    """Everything that makes the network, as key -> value; layers that are all alike are told once."""
    alone = config.family != "encoder-decoder"
    told = {f"model.{key}": value for key in ("family", "tie_embeddings") for value in (getattr(config, key),)}
    for side, stack in config.stacks.items():
        told.update(_spelled_stack(stack, "model" if alone else f"model.{side}"))
    assert config.head is not None
    told.update(_flat(config.head.model_dump(mode="json"), "model.head"))
    return told


def _spelled_stack(stack: StackConfig, place: str) -> dict[str, Any]:
    own = {key: getattr(stack, key) for key in StackConfig.model_fields if key not in _LAYERWISE}
    if not stack.position.absolute:
        del own["position"]  # the layers' own
    told: dict[str, Any] = {}
    for key, value in own.items():
        told.update(_flat(value.model_dump(mode="json") if hasattr(value, "model_dump") else value, f"{place}.{key}"))
    layers = [_flat(layer.model_dump(mode="json"), "") for layer in stack.layers]
    for key in dict.fromkeys(key for layer in layers for key in layer):
        values = [layer.get(key) for layer in layers]
        told[place + key] = values[0] if all(value == values[0] for value in values) else values
    return told


def _flat(value: Any, place: str) -> dict[str, Any]:
    """A tree as dotted key -> value, without what only training reads."""
    if not isinstance(value, Mapping):
        return {} if place.rpartition(".")[2] in _TRAINING else {place: value}
    found: dict[str, Any] = {}
    for key, inner in value.items():
        found.update(_flat(inner, f"{place}.{key}"))
    return found


# --- files ------------------------------------------------------------------------------------------------------------


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def _write_weights(
    folder: Path, found: Sequence[Bond], parameters: Mapping[str, Tensor], fixed: Mapping[str, Tensor], prefix: str
) -> None:
    """The tensors by their published names, in as few files as SHARD_BYTES allows; one file's are made at a time."""
    groups: list[list[Bond]] = [[]]
    size = 0
    for bond in found:
        own = sum(parameters[name].nbytes for name in bond.ours)
        if groups[-1] and size + own > SHARD_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(bond)
        size += own
    places: dict[str, str] = {}
    total = 0
    for number, group in enumerate(groups, 1):
        name = "model.safetensors" if len(groups) == 1 else f"model-{number:05}-of-{len(groups):05}.safetensors"
        tensors = {**published(group, parameters), **(fixed if number == 1 else {})}
        tensors = {theirs.removeprefix(prefix): tensor.contiguous().cpu() for theirs, tensor in tensors.items()}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        places.update(dict.fromkeys(tensors, name))
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(groups) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        _write_json(folder / "model.safetensors.index.json", index)


def _write_pooling(folder: Path, pooling: Pooling, width: int) -> None:
    """What the sentence-transformers library reads."""
    modes = {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens", "max": "pooling_mode_max_tokens"}
    (folder / "1_Pooling").mkdir()
    flags = {key: kind == pooling.kind for kind, key in modes.items()}
    _write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": width, **flags})
    if pooling.max_seq_len is not None:
        _write_json(folder / "sentence_bert_config.json", {"max_seq_length": pooling.max_seq_len})
    kinds = [
        ("Transformer", ""),
        ("Pooling", "1_Pooling"),
        *([("Normalize", "2_Normalize")] if pooling.normalise else []),
    ]
    _write_json(
        folder / "modules.json",
        [
            {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for number, (kind, path) in enumerate(kinds)
        ],
    )
