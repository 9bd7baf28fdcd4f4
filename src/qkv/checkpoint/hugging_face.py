"""Folders as the Hugging Face libraries write them: `config.json`, weights, tokenizer; and sentence-transformers
folders, which say beside such a model how its vectors are pooled."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from qkv.checkpoint.few_bits import as_floats
from qkv.checkpoint.published import Published
from qkv.checkpoint.source import Source, read_json, read_object, tokenizers_of
from qkv.checkpoint.store import Pooling
from qkv.checkpoint.tensors import Stored, look_at
from qkv.config.errors import DamagedError, NotFoundError, PermissionNeededError

SAFETENSORS, PICKLED = "model.safetensors", "pytorch_model.bin"

_POOLING_MODES = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token", "max": "pooling_mode_max_tokens"}
_TENSORFLOW_NORM = {"gamma": "weight", "beta": "bias"}
"""What files converted from TensorFlow call the parameters of a LayerNorm."""


def read_folder(folder: Path, *, torch_bin: bool = False) -> Source:
    """The model in a folder with a `config.json`. Raises QkvError for what is missing, damaged or not supported."""
    config = read_object(folder / "config.json")
    generation, preprocessor = folder / "generation_config.json", folder / "preprocessor_config.json"
    weights, tensors = _weights(folder, torch_bin)
    tensors = as_floats(config, tensors, weights)
    tokenizer, source_tokenizer = tokenizers_of(folder)
    return Source(
        path=folder,
        config=config,
        generation=read_object(generation) if generation.exists() else Published({}, str(generation)),
        tensors={_usual_name(name): stored for name, stored in tensors.items()},
        weights=weights,
        tokenizer=tokenizer,
        source_tokenizer=source_tokenizer,
        preprocessor=read_object(preprocessor) if preprocessor.exists() else None,
    )


def _usual_name(name: str) -> str:
    stem, _, last = name.rpartition(".")
    return f"{stem}.{_TENSORFLOW_NORM[last]}" if last in _TENSORFLOW_NORM and stem.endswith("LayerNorm") else name


# --- weights ----------------------------------------------------------------------------------------------------------


def _weights(folder: Path, torch_bin: bool) -> tuple[Path, dict[str, Stored]]:
    """The file (or the index of several) and its tensors."""
    for name, look in ((SAFETENSORS, look_at), (PICKLED, _unpickle)):
        single, index = folder / name, folder / f"{name}.index.json"
        if not (single.is_file() or index.is_file()):
            continue
        if name == PICKLED and not torch_bin:
            raise PermissionNeededError(
                f"the weights are a pickle ({PICKLED}), which is read only when asked for",
                where=str(folder),
                hint="--torch-bin (torch_bin=True), which reads tensors and runs no code",
            )
        return (single, look(single)) if single.is_file() else (index, _shards(index, look))
    raise NotFoundError(f"the weights are missing: neither {SAFETENSORS} nor {PICKLED}", where=str(folder))


def _shards(index: Path, look: Callable[[Path], dict[str, Stored]]) -> dict[str, Stored]:
    """The tensors of all files that an index names."""
    places: Mapping[str, Any] = read_object(index).section("weight_map").keys
    found: dict[str, Stored] = {}
    for shard in sorted({str(place) for place in places.values()}):
        if shard in ("", "..") or PurePosixPath(shard).name != shard or "\\" in shard:
            raise DamagedError(f"the index names a file outside its folder: {shard!r:.200}", where=str(index))
        for name, stored in look(index.with_name(shard)).items():
            if name in found:
                raise DamagedError(f"`{name:.200}` stands in two files", where=str(index))
            found[name] = stored
    return found


def _unpickle(path: Path) -> dict[str, Stored]:
    """The tensors of a file that `torch.save` wrote, read by the loader that builds nothing but tensors."""
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except FileNotFoundError:
        raise NotFoundError("the weights are missing", where=str(path)) from None
    except pickle.UnpicklingError:  # whose text advises to trust the file
        raise DamagedError(
            "the weights cannot be read: they are damaged, or hold something else than tensors", where=str(path)
        ) from None
    except Exception as error:  # the loader trips over a damaged file in any way
        first = str(error).strip().partition("\n")[0]
        raise DamagedError(
            f"the weights cannot be read: {first or type(error).__name__:.200}", where=str(path)
        ) from None
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise DamagedError("the weights cannot be read: they are no tensors by name", where=str(path))
    return {str(name): _held(str(name), tensor, path) for name, tensor in tensors.items()}


def _held(name: str, tensor: Tensor, path: Path) -> Stored:
    """Refuses what may claim any shape: tensors that are sparse, without numbers, or one number over and over."""
    dense = tensor.device.type == "cpu" and tensor.layout is torch.strided
    if not dense or tensor.untyped_storage().nbytes() < tensor.nbytes:
        raise DamagedError(f"`{name:.200}` does not hold all of its numbers", where=str(path))
    return Stored(tuple(tensor.shape), tensor.dtype, lambda dtype: tensor if dtype is None else tensor.to(dtype))


# --- sentence-transformers --------------------------------------------------------------------------------------------


def read_sentence_transformer(folder: Path, *, torch_bin: bool = False) -> Source:
    """The model of a folder with a `modules.json`, and how its vectors are pooled."""
    where = folder / "modules.json"
    modules = read_json(where)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise DamagedError("modules.json is damaged: it holds no list of modules", where=str(where))
    found: dict[str, Path] = {}
    for module in (Published(keys, str(where)) for keys in modules):
        kind = module.text("type").rpartition(".")[2]
        if kind not in ("Transformer", "Pooling", "Normalize") or kind in found:
            raise module.unsupported(
                "type", module.text("type"), "supported: one each of Transformer, Pooling, Normalize"
            )
        place = PurePosixPath(module.text("path", ""))
        if place.is_absolute() or ".." in place.parts:
            raise DamagedError(f"modules.json names a folder outside its own: {str(place)!r:.200}", where=str(where))
        found[kind] = folder / place
    if "Transformer" not in found:
        raise DamagedError("modules.json is damaged: it names no Transformer", where=str(where))
    pooling = None
    if "Pooling" in found:
        kind = _pooling_kind(read_object(found["Pooling"] / "config.json"))
        pooling = Pooling(kind, "Normalize" in found, _longest_text(found["Transformer"]))
    return replace(read_folder(found["Transformer"], torch_bin=torch_bin), path=folder, pooling=pooling)


def _longest_text(folder: Path) -> int | None:
    """To how many tokens a text is cut: by the library's own file, or else the tokenizer's; None: neither says."""
    own = [(path, "max_seq_length") for path in sorted(folder.glob("sentence_*_config.json"))]
    for path, key in (*own, (folder / "tokenizer_config.json", "model_max_length")):
        if path.is_file() and key in (told := read_object(path)):
            limit = told.number(key)
            if limit < 1:
                raise told.unsupported(key, limit, "a number above 0")
            return int(limit)
    return None


def _pooling_kind(config: Published) -> Any:
    """mean, cls or max."""
    named = config.keys.get("pooling_mode")
    flags = [key for key, value in config.keys.items() if re.match("pooling_mode_", key) and value is True]
    for kind, key in _POOLING_MODES.items():
        if named == kind or (named is None and flags == [key]):
            return kind
    raise config.unsupported("pooling_mode", named or ", ".join(flags), f"one of {', '.join(_POOLING_MODES)}")
