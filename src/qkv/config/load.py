"""YAML to a typed tree: `extends:`, then the file's keys, then `key=value` overrides.

YAML 1.2 core schema: `1e-3` is a number, `no` and `on` are strings. Every value remembers its file and line, so that an
error can name them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError
from yaml.reader import ReaderError

from qkv.config.base import EVERY_PACKAGE
from qkv.config.errors import ConfigError, NotFoundError, PermissionNeededError, QkvError, nearest
from qkv.config.merge import replaces
from qkv.config.run import Config

PRESETS = Path(__file__).parent / "presets"
Path_ = tuple[str | int, ...]
MAX_SHOWN = 200
"""How much of a wrong value an error shows."""


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


# --- YAML 1.2 core ----------------------------------------------------------------------------------------------------

MAX_DEPTH = 64
MAX_DIGITS = 100
MAX_ALIASED = 100_000
"""How many values aliases may add to those written out: ten lines of them can stand for billions."""

_TOO_DEEP = f"nested more than {MAX_DEPTH} deep"


class _CoreLoader(yaml.SafeLoader):
    """The safe loader with YAML 1.2's rules for what is a number, a boolean or null, and limits for hostile files."""

    yaml_implicit_resolvers: dict[str, Any] = {}
    nodes = depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if getattr(event, "tag", None) is not None:  # core values need none, and a wrong one is a riddle
            raise ComposerError(problem=f"the tag `{event.tag}` is not supported", problem_mark=event.start_mark)
        if self.depth > MAX_DEPTH:
            raise ComposerError(problem=_TOO_DEEP, problem_mark=event.start_mark)
        self.nodes += 1
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _CoreDumper(yaml.SafeDumper):
    """Writes block style, and quotes what the core schema would read as something else."""

    yaml_implicit_resolvers: dict[str, Any] = {}

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _class in (_CoreLoader, _CoreDumper):
    for _tag, _pattern, _first in (
        ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
        ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
        (
            "float",
            r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
            "-+0123456789.",
        ),
        ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), list(_first))


def _integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    if len(text) > MAX_DIGITS:  # python refuses to convert or print far longer ones
        raise ConstructorError(problem=f"a number of {len(text):,} digits", problem_mark=node.start_mark)
    return int(text, 8) if text.startswith("0o") else int(text, 16) if text.startswith("0x") else int(text)


_CoreLoader.add_constructor("tag:yaml.org,2002:int", _integer)


def dump_yaml(data: Any) -> str:
    """`data` as YAML 1.2 that reads back equal."""
    return yaml.dump(data, Dumper=_CoreDumper, sort_keys=False, allow_unicode=True, width=120)


@dataclass
class Tree:
    """Plain values and where each came from."""

    data: dict[str, Any]
    origins: dict[Path_, str] = field(default_factory=dict)

    def origin(self, path: Path_) -> str | None:
        """Where the value at `path`, or the nearest mapping around it, was written."""
        while path:
            if path in self.origins:
                return self.origins[path]
            path = path[:-1]
        return self.origins.get(())


def _parse(text: str, name: str, line: int = 0) -> tuple[Any, dict[Path_, str]]:
    """Values and origins of a YAML text; `line` > 0 says that the text is an override and has no lines of its own."""
    origins: dict[Path_, str] = {}
    loader: _CoreLoader | None = None
    walked = 0

    def walk(node: yaml.Node, path: Path_) -> Any:
        nonlocal walked
        assert loader is not None
        walked += 1
        if walked > loader.nodes + MAX_ALIASED:
            raise ComposerError(problem="aliases make it too large", problem_mark=node.start_mark)
        if len(path) > MAX_DEPTH:
            raise ComposerError(problem=f"{_TOO_DEEP}: an alias within itself?", problem_mark=node.start_mark)
        origins.setdefault(path, name if line else f"{name}:{node.start_mark.line + 1}")
        if isinstance(node, yaml.MappingNode):
            result: dict[str, Any] = {}
            for key_node, value_node in node.value:
                where = name if line else f"{name}:{key_node.start_mark.line + 1}"
                key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
                if not isinstance(key, str):
                    raise ConfigError("a key must be a plain word", where=where)
                if key in result:
                    raise ConfigError(f"the key `{key}` stands here twice", where=where, hint="removing one of them")
                origins[(*path, key)] = where
                result[key] = walk(value_node, (*path, key))
            return result
        if isinstance(node, yaml.SequenceNode):
            return [walk(item, (*path, index)) for index, item in enumerate(node.value)]
        return loader.construct_object(node)

    try:
        loader = _CoreLoader(text)
        node = loader.get_single_node()
        return (None if node is None else walk(node, ())), origins
    except ReaderError as error:
        where = name if line else f"{name}:{text.count(chr(10), 0, error.position) + 1}"
        raise ConfigError(
            f"not valid YAML: the character {error.character:#04x} may not stand in it", where=where
        ) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = name if line or mark is None else f"{name}:{mark.line + 1}"
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(
            f"not valid YAML: {problem}", where=where, hint="checking indentation, colons and tabs"
        ) from None
    finally:
        if loader is not None:
            loader.dispose()


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
    data, origins = _parse(text, name)
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
        data, _ = _parse(path.read_text(encoding="utf-8-sig"), str(path))
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
    where = f"`{_cut(override)}`"
    if not equals or not re.fullmatch(r"\w[\w-]*(\.[\w-]+)*", keys):
        raise ConfigError(f"an override has the form key=value, got {where}", hint="train.steps=100")
    path: Path_ = tuple(keys.split("."))
    if len(path) > MAX_DEPTH:
        raise ConfigError(f"the override is {_TOO_DEEP}", where=where)
    value, inner = _parse(text, where, line=1)
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
    from qkv.config.model import BLOCK_KEYS

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
        raise _explain(error, tree or Tree(dict(data))) from None


def _explain(error: ValidationError, tree: Tree) -> QkvError:
    """One readable error of what pydantic found; a mistake in a shared key is told once, not once per layer."""
    seen: set[str] = set()
    lines: list[tuple[str, str, str | None]] = []
    meant = ""  # what the hint of the first mistake says already
    for detail in error.errors(include_url=False):
        context = detail.get("ctx") or {}
        path: Path_ = tuple(detail["loc"])
        if detail["type"] == "unknown_key":
            path = (*path, context["key"])
        path = _written(path, tree)
        message = _message(detail)
        if message in seen:  # a mistake in a key that all layers share
            continue
        if not seen:
            meant = context.get("meant", "")
        seen.add(message)
        place = ".".join(map(str, path))
        origin = tree.origin(path)
        lines.append(
            (message, f"{origin}, key `{place}`" if origin and place else origin or f"`{place}`", context.get("hint"))
        )
    what, where, hint = lines[0]
    what = what.removesuffix(meant)
    for message, place, _ in lines[1:]:
        what += f"\n  also: {message} ({place})"
    asks = any(detail["type"] == "package_not_allowed" for detail in error.errors(include_url=False))
    return (PermissionNeededError if asks else ConfigError)(what, where=where, hint=hint)


def _written(path: Path_, tree: Tree) -> Path_:
    """Where the user wrote what stands at `path` of the spelled-out tree: a layer's key may be a shared key."""
    if path[:1] != ("model",) or path in tree.origins:
        return path
    candidates = [path]
    inner = path[1:]
    if inner[:1] in (("encoder",), ("decoder",)):
        side, inner = inner[:1], inner[1:]
        if inner[:1] == ("layers",):
            candidates.append(("model", *side, *inner[2:]))
        candidates.append(("model", *inner))
    if inner[:1] == ("layers",):
        # layer 7 may be the second entry of a pattern of three
        place = path[: len(path) - len(inner) + 1]
        entries = {p[len(place)] for p in tree.origins if p[: len(place)] == place and len(p) > len(place)}
        candidates += [(*place, entry, *inner[2:]) for entry in sorted(entries, key=str)]
        candidates.append(("model", *inner[2:]))
    if candidates[-1][1:2] == ("cross_attention",):
        candidates.append(("model", "attention", *candidates[-1][2:]))
    for candidate in candidates:
        if candidate in tree.origins:
            return candidate
    return candidates[-1] if len(candidates) > 1 else path


def _message(detail: Any) -> str:
    kind, value = detail["type"], detail.get("input")
    if kind == "missing":
        return f"there is no `{detail['loc'][-1]}`"
    custom = (
        "unknown_key",
        "unknown_kind",
        "contradiction",
        "not_a_mapping",
        "layers",
        "repeat",
        "sides",
        "package_not_allowed",
        "import_failed",
        "wrong_part",
        "no_module",
    )
    message = str(detail["msg"])
    if kind in custom:
        return message
    message = "expected a list" if kind == "tuple_type" else message[0].lower() + message[1:]
    shown = "true" if value is True else "false" if value is False else repr(value)  # as YAML spells them
    return f"{message}, got {_cut(shown)}"


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."
