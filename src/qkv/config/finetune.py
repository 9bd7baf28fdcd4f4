"""The configuration of a run that starts from a trained model: what the run says, over what the model is.

The run may give the model another head, other dropouts and another context, and it may untie matrices. Everything else
about the model, and its tokenizer, is as it was trained.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from qkv.config.block import BLOCK_KEYS
from qkv.config.data import ImagesDataConfig
from qkv.config.errors import ConfigError
from qkv.config.load import allowed_packages, read_tree, validate
from qkv.config.merge import difference
from qkv.config.model import ModelConfig
from qkv.config.run import Config
from qkv.config.stack import StackConfig
from qkv.config.yaml_tree import Path_, Tree

_FREE = ("head", "init", "max_seq_len")
"""Keys of a model that a run may change; so are all dropouts and `mtp.weight`, and `tie_embeddings` may become none."""


def finetune_config(
    source: str | Path, overrides: Iterable[str], trained: Config, model: str, allow: tuple[str, ...] | None = None
) -> Config:
    """What a file or preset, which needs no `model` section, and `key=value` overrides say, over `trained`.

    model: what errors call the trained model. Raises what `load_config` raises, and ConfigError for a key of the model
    or its tokenizer that may not change, naming both values.
    """
    beneath = {
        "model": folded(trained.model),
        **trained.model_dump(mode="json", include={"tokenizer", "generation"}),
    }
    if isinstance(trained.data, ImagesDataConfig):  # what the model is used to
        how = {"kind", "mean", "std", "resample", "fit", "crop"}
        beneath["data"] = trained.data.model_dump(mode="json", include=how)
    tree = read_tree(source, overrides, beneath=beneath, origin=model)
    if isinstance(tree.data["model"], Mapping):  # another family would have stranger errors first
        _check_same(tree, ("model", "family"), tree.data["model"].get("family"), trained.model.family)
    config = validate(tree.data, allowed_packages(source, allow), tree)
    for section in ("model", "tokenizer"):
        ours, theirs = (one.model_dump(mode="json", include={section})[section] for one in (config, trained))
        _check_same(tree, (section,), ours, theirs)
    return config


def _check_same(tree: Tree, path: Path_, ours: Any, theirs: Any) -> None:
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        # what the run itself says first: the rest follows from it
        for key in sorted({**theirs, **ours}, key=lambda key: (*path, key) not in tree.origins):
            if not _may_become(path, key, ours.get(key)):
                _check_same(tree, (*path, key), ours.get(key), theirs.get(key))
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            _check_same(tree, (*path, index), *pair)
    elif ours != theirs:
        key = ".".join(map(str, path))
        raise ConfigError(
            f"`{key}` is {json.dumps(theirs)} in the model, and may not become {json.dumps(ours)}",
            where=tree.origin(path),
            hint=f"leaving `{key}` out, or a new model: `qkv train`",
        )


def _may_become(path: Path_, key: str, value: Any) -> bool:
    if path[0] != "model":
        return False
    if key == "cross_attention" and "layers" not in path:  # what of it reaches a layer is compared there
        return True
    if (*path, key) == ("model", "mtp", "weight"):
        return True
    return key in _FREE or "dropout" in key or (key == "tie_embeddings" and value == "none")


# --- the inverse of spelling out --------------------------------------------------------------------------------------


def folded(model: ModelConfig) -> dict[str, Any]:
    """Plain values that spell out to `model` and say each shared key once, so that to override it is to override it
    for every layer."""
    tree = model.model_dump(mode="json")
    if model.encoder is None or model.decoder is None:
        return _folded_stack(tree)
    shared = {key: tree[key] for key in StackConfig.model_fields if key not in ("input", "layers", "cross_attention")}
    for side in ("encoder", "decoder"):
        tree[side] = difference(_folded_stack(tree[side]), shared)
    return {key: value for key, value in tree.items() if key not in ("layers", "cross_attention")}


def _folded_stack(stack: dict[str, Any]) -> dict[str, Any]:
    """A stack whose layers say only what they do not share."""
    shared = {key: stack[key] for key in BLOCK_KEYS if key != "cross_attention"}
    layers, cross = [], []
    for layer in stack["layers"]:
        layers.append(difference({key: layer[key] for key in shared}, shared))
        cross.append(_folded_cross(layer["cross_attention"], layer["attention"]))
    shared_cross = cross[0]
    if any(one != shared_cross for one in cross):
        shared_cross = None
        for layer, own in zip(layers, cross, strict=True):
            layer["cross_attention"] = own
    return {**stack, "layers": layers if any(layers) else None, "cross_attention": shared_cross or None}


def _folded_cross(cross: dict[str, Any] | None, attention: dict[str, Any]) -> dict[str, Any] | None:
    """What cross-attention does not take over from self-attention."""
    if cross is None:
        return None
    return difference(cross, {**attention, "window": None} if "window" in attention else attention)
