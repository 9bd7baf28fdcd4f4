"""The model that a path names, in whatever format.

Our own folders are read by `store`. Of the others, a reader per container presents a `Source`, and the family of its
`model_type` says what the keys and names mean.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qkv.checkpoint import ctranslate2, llama2c
from qkv.checkpoint.families import Family, clip, family_of
from qkv.checkpoint.fetch import MODELS, named_model
from qkv.checkpoint.generation import read_generation
from qkv.checkpoint.gguf import read_gguf
from qkv.checkpoint.hugging_face import read_folder, read_sentence_transformer
from qkv.checkpoint.mapping import Bond, Same, bonds
from qkv.checkpoint.preprocessor import read_preprocessor
from qkv.checkpoint.published import Published
from qkv.checkpoint.source import Source
from qkv.checkpoint.store import Loaded, build_empty, load_checkpoint
from qkv.checkpoint.tensors import FLOATS, Packed, Stored, check, fill, shared
from qkv.config.errors import ConfigError, DamagedError, NotFoundError, QkvError, UsageError
from qkv.config.load import preset_names, validate
from qkv.config.model import ModelConfig
from qkv.config.run import Config
from qkv.nn.quantized import QuantizedLinear
from qkv.nn.transformer import Transformer
from qkv.tokenizer.gguf_header import MAGIC
from qkv.tokenizer.text import nearest_file

log = logging.getLogger("qkv")
SUPPORTED = "a folder of qkv or Hugging Face, a .gguf file, a llama2.c .bin file, or a CTranslate2 folder of Whisper"
FIXED_TOLERANCE = 1e-3
"""How far a published table may be from the one computed here: older ones were rounded to float16."""


def load_model(
    path: Path,
    *,
    dtype: torch.dtype | None = None,
    quantize: str | None = None,
    allow: tuple[str, ...] = (),
    torch_bin: bool = False,
) -> Loaded:
    """The model at `path`, or the fetched one of this name (see `fetch`), on the CPU. Of a folder with two models
    (CLIP) `FOLDER#text` or `FOLDER#image` is one.

    dtype: the precision of the weights; None is the file's own. quantize: "keep" leaves the matrices that a GGUF file
    holds as blocks so, to be dequantised when used; the vocabulary's, norms and biases are as without it. allow:
    packages whose parts a configuration of ours may import. torch_bin: weights that are a pickle may be read, by
    torch's loader that builds tensors only.

    Raises NotFoundError, DamagedError, and QkvError for what is not supported. Whatever is wrong with names, shapes or
    types is found before memory is taken.
    """
    path, side = _meant(path)
    if quantize not in (None, "keep"):
        raise UsageError(f"quantize={quantize} is not supported yet", hint='dtype=bf16, or "keep" for a GGUF file')
    source = _read(path, side, torch_bin)
    if source is None:
        _refuse_misspelt(path)
        if quantize is not None:
            raise UsageError("this model has no quantised weights to keep", where=str(path), hint="a GGUF file")
        return load_checkpoint(path, dtype=dtype, allow=allow)
    return _assemble(source, dtype, quantize)


def _refuse_misspelt(path: Path) -> None:
    """Raises NotFoundError for a path that leads nowhere and is nearly that of a model, or the name of a known one."""
    if path.exists() or str(path) in preset_names():
        return
    beside = list(path.parent.iterdir()) if path.parent.is_dir() else []
    places = {entry.name: str(entry) for entry in beside if entry.is_dir() or entry.suffix in (".gguf", ".bin")}
    if path.name == str(path):
        places.update({name: name for name in MODELS})
    if guess := nearest_file(path.name, places):
        raise NotFoundError("there is no such file or folder", where=str(path), hint=f"`{places[guess]}`")


def published_config(path: Path, *, torch_bin: bool = False) -> Config | None:
    """The configuration of a published model, whose weights are looked at only; None where `path` is none."""
    path, side = _meant(path)
    if not path.exists() or (path.is_file() and path.suffix not in (".gguf", ".bin")):
        return None
    source = _read(path, side, torch_bin)
    if source is None:
        return None
    family = family_of(source.config)
    return _configuration(_in_usual_names(source, family), family)


def _meant(path: Path) -> tuple[Path, str | None]:
    """The path, and which of its two models is meant, where that is said behind `#`."""
    stem, _, side = path.name.rpartition("#")
    if stem and not path.exists():
        return named_model(path.with_name(stem)), side
    return named_model(path), None


def _read(path: Path, side: str | None, torch_bin: bool) -> Source | None:
    """What the container's reader makes of it; None: a folder of ours, or nothing."""
    try:
        source = _read_file(path) if path.is_file() else _read_folder(path, torch_bin)
    except OSError as error:
        raise QkvError(f"the model cannot be read: {error.strerror}", where=str(error.filename or path)) from None
    if source is not None and source.config.keys.get("model_type") == clip.BOTH:
        return clip.one_side(source, side)
    if side is not None and path.exists():
        raise UsageError(f"there is one model, and none is called `{side:.80}`", where=str(path), hint=str(path))
    return source


def _read_folder(path: Path, torch_bin: bool) -> Source | None:
    """By the file that tells what it is."""
    if (path / "state.json").is_file() or (path / "checkpoints").is_dir():
        return None
    if (path / "modules.json").is_file():
        return read_sentence_transformer(path, torch_bin=torch_bin)
    if (path / "model.bin").is_file() and ctranslate2.is_ours(path / "model.bin"):
        return ctranslate2.read(path)
    if (path / "config.json").is_file():
        return read_folder(path, torch_bin=torch_bin)
    return None


def _read_file(path: Path) -> Source:
    """By what the file begins with, not by its name."""
    with path.open("rb") as file:
        start = file.read(64)
    if start.startswith(MAGIC):
        return read_gguf(path)
    if ctranslate2.is_ours(path):
        return ctranslate2.read(path.parent)
    if start.startswith(b"PK\x03\x04") and path.suffix not in (".bin", ".pt", ".pth"):
        raise UsageError("a zip is not read as it is", where=str(path), hint="unpacking it, and the folder in it")
    if path.suffix == ".bin" and llama2c.is_ours(path):
        return llama2c.read(path)
    raise UsageError("this file by itself is no model", where=str(path), hint=SUPPORTED)


# --- from names and keys to a network ---------------------------------------------------------------------------------


def _assemble(source: Source, dtype: torch.dtype | None, quantize: str | None) -> Loaded:
    """The network of a published checkpoint, with its weights."""
    family = family_of(source.config)
    source = _in_usual_names(source, family)
    config = _configuration(source, family)
    network = build_empty(config.model, Path(source.config.where))
    names = _Names.of(network, family, source.tensors)
    chosen = {name: source.tensors[place] for name, place in names.places.items()}
    check(network, names.bonds, chosen, source.weights, names.unexpected)
    for what in names.left_out:
        log.warning("%s is left out: a model here has no place for it", what)
    _check_fixed(family, config.model, names, source)
    _check_copies(names, source)
    kept = _keep_blocks(network, names.bonds, chosen) if quantize else {}
    if quantize and not kept:
        raise UsageError("this model has no quantised weights to keep", where=str(source.path), hint="a GGUF file")
    left = [bond for bond in names.bonds if not kept.keys() & bond.ours]
    fill(network, left, chosen, dtype or _widest(chosen))
    for module, packed in kept.values():
        module.blocks = packed.read()
    return Loaded(
        network, source.tokenizer, source.source_tokenizer, config, source.path, state={}, pooling=source.pooling
    )


def _widest(stored: Mapping[str, Stored]) -> torch.dtype:
    """One precision that holds all values: files may mix them."""
    return reduce(torch.promote_types, (tensor.dtype for tensor in stored.values() if tensor.dtype in FLOATS))


def _keep_blocks(
    network: Transformer, found: Sequence[Bond], stored: Mapping[str, Stored]
) -> dict[str, tuple[QuantizedLinear, Packed]]:
    """Replace every linear map whose matrix the file holds as blocks, and that stays as it is; by parameter name."""
    kept = {}
    for bond in found:
        packed = stored[bond.theirs[0]].packed
        path, _, last = bond.ours[0].rpartition(".")
        module = network.get_submodule(path)
        if packed is None or not isinstance(bond.view, Same) or not isinstance(module, nn.Linear) or last != "weight":
            continue
        parent, _, own = path.rpartition(".")
        rows, width = module.weight.shape
        with torch.device("meta"):
            quantized = QuantizedLinear(packed.kind, rows, width, bias=module.bias is not None)
        setattr(network.get_submodule(parent), own, quantized)
        kept[bond.ours[0]] = (quantized, packed)
    return kept


def _in_usual_names(source: Source, family: Family) -> Source:
    """The same, with the names that the family knows."""
    tensors: dict[str, Stored] = {}
    for name, stored in source.tensors.items():
        for start, meant in family.renames:
            name = re.sub(rf"\A(?:{start})", meant, name)
        if name in tensors:
            raise DamagedError(f"`{name:.200}` stands there twice, under two names", where=str(source.weights))
        tensors[name] = stored
    return replace(source, config=Published(source.config.keys, source.config.where, tensors), tensors=tensors)


def _configuration(source: Source, family: Family) -> Config:
    """Our configuration of it."""
    try:
        return validate(_sections(source, family), allow=())
    except ConfigError as error:
        place = f"{source.config.where}, read as {error.where}"
        raise DamagedError(f"no model has this configuration: {error.what}", where=place) from None


def _sections(source: Source, family: Family) -> dict[str, Any]:
    """Our configuration, as plain values."""
    published = source.config
    architecture = next(iter(published.list("architectures")), None)
    if not isinstance(architecture, str) or architecture not in family.architectures:
        raise QkvError(
            f"models of class `{architecture!s:.80}` are not supported",
            where=published.where,
            hint=f"supported of this type: {', '.join(family.architectures)}",
        )
    model = family.read(published, family.architectures[architecture])
    _check_depth(model, source)
    generation = {**read_generation(published, source.generation), **family.generation(published, source.generation)}
    if model["family"] != "encoder-decoder":
        generation.pop("start_ids", None)
    tokenizer = _tokenizer(source, one_vocabulary=model.get("tie_embeddings") == "all")
    sections: dict[str, Any] = {"model": model, "tokenizer": tokenizer, "generation": generation}
    if model["head"]["kind"] == "classifier" and (labels := _labels(published)):
        sections["objective"] = {"kind": "classify", "labels": labels}
    if source.preprocessor is not None and model.get("input", {}).get("kind") == "patches":
        sections["data"] = read_preprocessor(source.preprocessor, model["input"])
    return sections


def _tokenizer(source: Source, *, one_vocabulary: bool) -> dict[str, Any]:
    """What the configuration says of the tokenizers that come with the model; two may share `one_vocabulary`."""
    if source.tokenizer is None:
        return {}
    target = {"kind": source.tokenizer.kind}
    if source.source_tokenizer is None or one_vocabulary:
        return target
    return {"source": {"kind": source.source_tokenizer.kind}, "target": target}


def _check_depth(model: Mapping[str, Any], source: Source) -> None:
    """Refuse more layers than there are tensors, before thousands of them are built to find each one missing."""
    if model.get("share_layers"):
        return
    for stack in (model, model.get("encoder") or {}, model.get("decoder") or {}):
        count = stack.get("num_layers", 1)
        if count > len(source.tensors):
            raise DamagedError(
                f"the configuration tells of {count} layers, and there are {len(source.tensors)} tensors",
                where=source.config.where,
            )


def _labels(published: Published) -> list[str]:
    """The names of the classes, in order; none where not all have one."""
    told = published.section("id2label").keys
    names = [told.get(str(number)) for number in range(len(told))]
    return [str(name) for name in names] if all(isinstance(name, str) for name in names) else []


@dataclass
class _Names:
    """Where in a file what a family calls its tensors stands.

    bonds: parameters and the family's names. places: of each name, what it is called in the file, where it is there.
    copies: pairs of names in the file that must hold the same. fixed: of each table, its name in the file.
    unexpected: names in the file that belong nowhere. left_out: what is not loaded, in words.
    """

    bonds: list[Bond]
    places: dict[str, str]
    copies: list[tuple[str, str]]
    fixed: dict[str, str]
    unexpected: set[str]
    left_out: list[str]

    @classmethod
    def of(cls, network: Transformer, family: Family, tensors: Mapping[str, Stored]) -> _Names:
        config = network.config
        # the names of a bare model ("LlamaModel"), and of some whole ones, lack the prefix
        bare = not any(name.startswith(family.prefix) for name in tensors)

        def place(name: str) -> str:
            return name.removeprefix(family.prefix) if bare else name

        rules = family.rules(config)
        found = bonds(rules, [name for name, _ in network.named_parameters()])
        same: dict[str, list[str]] = {name: [name] for bond in found for name in bond.theirs}
        for ours, owner in shared(network).items():
            for name, first in zip(_published_names(rules, ours), _published_names(rules, owner), strict=False):
                same[first].append(name)
        for copy, original in family.copies(config).items():
            if original in same:
                same[original].append(copy)
        places, copies, known = {}, [], set()
        for name, others in same.items():
            here = [place(other) for other in dict.fromkeys(others) if place(other) in tensors]
            known.update(here)
            if here:
                places[name] = here[0]
                copies += [(here[0], other) for other in here[1:]]
        fixed = {table.theirs: place(table.theirs) for table in family.fixed(config)}
        rest = tensors.keys() - known - set(fixed.values())

        def called(pattern: str) -> set[str]:
            return {name for name in rest if any(re.fullmatch(pattern, one) for one in (name, family.prefix + name))}

        left_out = {what: called(pattern) for pattern, what in family.left_out(config).items()}
        unexpected = rest.difference(*map(called, family.ignored), *left_out.values())
        return cls(found, places, copies, fixed, unexpected, [what for what, names in left_out.items() if names])


def _published_names(rules: Any, parameter: str) -> tuple[str, ...]:
    """What a family calls one parameter; nothing where no rule meets it by itself."""
    try:
        return bonds(rules, [parameter])[0].theirs
    except LookupError:
        return ()


def _check_fixed(family: Family, config: ModelConfig, names: _Names, source: Source) -> None:
    """Refuse a published table that is not the one that is computed here."""
    for table in family.fixed(config):
        stored = source.tensors.get(names.fixed[table.theirs])
        if stored is None:
            continue
        with torch.device("meta"):  # a configuration may claim any length
            shape = tuple(table.value().shape)
        if stored.shape != shape:
            raise DamagedError(
                f"{table.theirs} has shape {list(stored.shape)}, expected {list(shape)}", where=str(source.weights)
            )
        difference = (stored.read(torch.float32) - table.value()).abs().max().item()
        if not difference <= FIXED_TOLERANCE:
            raise DamagedError(
                f"{table.theirs} should be a table that is computed, and differs from it by {difference:.3g}",
                where=str(source.weights),
            )


def _check_copies(names: _Names, source: Source) -> None:
    """Refuse a tensor that should repeat another, and does not."""
    for first, copy in names.copies:
        one, other = source.tensors[first], source.tensors[copy]
        if one.shape != other.shape or not torch.equal(one.read(torch.float32), other.read(torch.float32)):
            raise DamagedError(
                f"{copy} differs from {first}, and the configuration says that they are one matrix",
                where=str(source.weights),
            )
