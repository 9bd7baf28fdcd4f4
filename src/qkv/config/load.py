"""A file or preset to a typed tree: `extends:`, then the file's keys, then `key=value` overrides."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from qkv.config.base import EVERY_PACKAGE
from qkv.config.block import BLOCK_KEYS
from qkv.config.errors import ConfigError, NotFoundError, nearest
from qkv.config.merge import replaces
from qkv.config.mistakes import explained, shortened
from qkv.config.run import Config
from qkv.config.yaml_tree import MAX_DEPTH, TOO_DEEP, Path_, Tree, parse

PRESETS = Path(__file__).parent / "presets"


def preset_names() -> list[str]:
    """The names of the presets that come with qkv, sorted."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def preset_text(name: str) -> str:
    """The text of a preset's file. Raises NotFoundError naming the nearest preset."""
    if name not in preset_names():
        guess = nearest(name, preset_names())
        raise NotFoundError(
            f"no preset is called `{name}`", hint=f"`{guess}`" if guess else "`qkv presets` for the list"
        )
    return (PRESETS / f"{name}.yaml").read_text(encoding="utf-8")


def preset_summary(name: str) -> str:
    """A preset in a line: the comment that opens its file."""
    return preset_text(name).partition("\n")[0].lstrip("# ")


# --- layers of a configuration ----------------------------------------------------------------------------------------


def _read(source: str | Path, seen: tuple[Path, ...] = (), base: Path | None = None) -> Tree:
    path = _locate(source, base)
    if path in seen:
        chain = " -> ".join(p.name for p in (*seen, path))
        raise ConfigError(f"`extends` goes in a circle: {chain}", where=str(seen[-1]))
    if len(seen) > MAX_DEPTH:
        raise ConfigError(f"more than {MAX_DEPTH} files that extend each other", where=str(path))
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 text (byte {error.start})", where=str(path), hint="saving it as UTF-8") from None
    except OSError as error:
        raise NotFoundError(f"cannot read the configuration: {error.strerror}", where=str(path)) from None
    name = f"preset {path.stem}" if path.parent == PRESETS else str(path)
    data, origins = parse(text, name)
    origins.setdefault((), name)
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError("a configuration is a mapping of keys to values", where=name, hint="`qkv new PRESET`")
    parent = data.pop("extends", None)
    tree = Tree(data, origins)
    if parent is None:
        return tree
    if not isinstance(parent, str):
        raise ConfigError("`extends` names a preset or a path", where=origins[("extends",)])
    below = _read(parent, (*seen, path), path.parent)
    _overlay(below, tree.data, tree.origins)
    return below


def _locate(source: str | Path, base: Path | None) -> Path:
    """The file that a path or a preset's name means."""
    path = Path(source)
    for candidate in ([base / path] if base else []) + [path]:
        for file in (candidate, candidate / "config.yaml"):  # the second in a run or checkpoint folder
            with suppress(OSError):  # a name that the file system refuses is the name of no file
                if file.is_file():
                    return file.resolve()
    if str(source) in preset_names():
        return PRESETS / f"{source}.yaml"
    guess = nearest(str(source), preset_names())
    raise NotFoundError(
        f"no configuration file and no preset is called `{source}`",
        hint=f"`{guess}`" if guess else "`qkv presets` for the list",
    )


def preset_of(source: str | Path) -> str | None:
    """The preset that a configuration is, or the nearest that it extends; None where there is none."""
    base: Path | None = None
    while True:
        path = _locate(source, base)
        if path.parent == PRESETS:
            return path.stem
        data, _ = parse(path.read_text(encoding="utf-8-sig"), str(path))
        if not data or "extends" not in data:
            return None
        source, base = data["extends"], path.parent


def _overlay(tree: Tree, data: Mapping[str, Any], origins: Mapping[Path_, str], path: Path_ = ()) -> None:
    """Merge `data` over `tree` in place, origins included."""
    target = _at(tree.data, path)
    for key, value in data.items():
        here = (*path, key)
        below = target.get(key)
        if isinstance(below, dict) and isinstance(value, Mapping) and not _replaces(here, below, value):
            tree.origins.setdefault(here, origins.get(here, ""))
            _overlay(tree, value, origins, here)
            continue
        for old in [p for p in tree.origins if p[: len(here)] == here]:
            del tree.origins[old]
        tree.origins.update({p: where for p, where in origins.items() if p[: len(here)] == here})
        target[key] = value


def _replaces(path: Path_, below: Mapping[str, Any], above: Mapping[str, Any]) -> bool:
    """Whether `above` is another kind than `below`; of a tokenizer also whether it is had in another way."""
    way = _way_of_tokenizer(above) if path[0] == "tokenizer" else None
    return replaces(below, above) or (way is not None and way != (_way_of_tokenizer(below) or "kind"))


def _way_of_tokenizer(tokenizer: Mapping[str, Any]) -> str | None:
    """One for each side, a saved one, or one to be trained; None: it does not say."""
    for way, key in (("sides", "source"), ("sides", "target"), ("path", "path"), ("kind", "kind")):
        if tokenizer.get(key) is not None:
            return way
    return None


def _at(data: Any, path: Path_) -> Any:
    for key in path:
        data = data[key]
    return data


def _apply_override(tree: Tree, override: str) -> None:
    keys, equals, text = override.partition("=")
    where = f"`{shortened(override)}`"
    if not equals or not re.fullmatch(r"\w[\w-]*(\.[\w-]+)*", keys):
        raise ConfigError(f"an override has the form key=value, got {where}", hint="train.steps=100")
    path: Path_ = tuple(keys.split("."))
    if len(path) > MAX_DEPTH:
        raise ConfigError(f"the override is {TOO_DEEP}", where=where)
    value, inner = parse(text, where, line=1)
    origins = {path[:n]: where for n in range(1, len(path))} | {
        (*path, *below): place for below, place in inner.items()
    }
    _refuse_shadowed(tree, path, where)
    target: Any = tree.data
    for depth, key in enumerate(path[:-1]):
        if isinstance(target, list):
            target = target[_index(target, str(key), where)]
            continue
        if not isinstance(target.get(key), dict | list):
            target[key] = {}
            tree.origins[path[: depth + 1]] = where
        target = target[key]
    if isinstance(target, list):
        target[_index(target, str(path[-1]), where)] = value
        tree.origins.update(origins)
        return
    nested: Any = value
    for key in reversed(path):
        nested = {key: nested}
    if path[-1] == "kind" and path[:-1]:  # a changed kind replaces its object
        parent = path[:-1]
        if replaces(_at(tree.data, parent), {"kind": value}):
            for old in [p for p in tree.origins if p[: len(parent)] == parent]:
                del tree.origins[old]
            _at(tree.data, parent[:-1])[parent[-1]] = {}
    _overlay(tree, nested, origins)


def _index(items: list[Any], key: str, where: str) -> int:
    if not key.isdigit() or int(key) >= len(items):
        raise ConfigError(f"`{key}` is no index into a list of {len(items)}", where=where, hint="0, 1, ...")
    return int(key)


def _refuse_shadowed(tree: Tree, path: Path_, where: str) -> None:
    """An override of a shared key that every layer spells out for itself would change nothing, in silence."""
    model = tree.data.get("model")
    if path[0] != "model" or not isinstance(model, dict):
        return
    inner = path[1:]
    stacks: list[tuple[Path_, Any]] = [
        ((), model),
        (("encoder",), model.get("encoder")),
        (("decoder",), model.get("decoder")),
    ]
    if inner and inner[0] in ("encoder", "decoder"):
        stacks = [((inner[0],), model.get(str(inner[0])))]
        inner = inner[1:]
    if not inner or inner[0] not in BLOCK_KEYS:
        return
    spelled = [(place, stack["layers"]) for place, stack in stacks if isinstance(stack, dict) and stack.get("layers")]
    if spelled and all(_has(layer, inner) for _, layers in spelled for layer in layers):
        place = ".".join(["model", *map(str, spelled[0][0]), "layers"])
        raise ConfigError(
            f"the override changes nothing: every entry of `{place}` has its own `{'.'.join(map(str, inner))}`",
            where=where,
            hint=f"`{place}=null` first, to go back to the shared keys, or an override of each layer",
        )


def _has(data: Any, path: Path_) -> bool:
    for key in path:
        if not isinstance(data, Mapping) or key not in data:
            return False
        data = data[key]
    return True


# --- the tree ---------------------------------------------------------------------------------------------------------


def load_config(source: str | Path, overrides: Iterable[str] = (), allow: tuple[str, ...] | None = None) -> Config:
    """The typed tree of a file or preset, or of a model folder.

    allow: the packages whose parts it may import (see Part). None: every package of a file that the user names, whose
    import paths are the user's own choice, and none of a folder, which may be a stranger's.
    """
    tree = read_tree(source, overrides)
    return validate(tree.data, allowed_packages(source, allow), tree)


def allowed_packages(source: str | Path, allow: tuple[str, ...] | None) -> tuple[str, ...]:
    """`allow`, or what None stands for (see `load_config`)."""
    if allow is not None:
        return allow
    return () if os.path.isdir(source) else EVERY_PACKAGE  # noqa: PTH112 (Path.is_dir raises for a long name)


def read_tree(
    source: str | Path,
    overrides: Iterable[str] = (),
    *,
    beneath: Mapping[str, Any] | None = None,
    origin: str = "",
) -> Tree:
    """The plain values of a file or preset with its overrides, over those `beneath`, which come from `origin`."""
    tree = _read(source)
    if beneath is not None:
        above, tree = tree, Tree(dict(beneath), dict.fromkeys(((key,) for key in beneath), origin))
        tree.origins[()] = above.origins[()]
        _overlay(tree, above.data, above.origins)
    for override in overrides:
        _apply_override(tree, override)
    return tree


def validate(data: Mapping[str, Any], allow: tuple[str, ...], tree: Tree | None = None) -> Config:
    """The typed tree of plain values. Raises ConfigError naming every mistake with its place."""
    try:
        return Config.model_validate(data, context={"allow": allow})
    except ValidationError as error:
        raise explained(error, tree or Tree(dict(data))) from None
