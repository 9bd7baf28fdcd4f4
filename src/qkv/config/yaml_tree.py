"""YAML 1.2 core to plain values that remember where they were written, and back.

By its schema `1e-3` is a number, `no` and `on` are strings. Every value keeps its file and line, so that an error can
name them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError
from yaml.reader import ReaderError

from qkv.config.errors import ConfigError

Path_ = tuple[str | int, ...]
"""The keys and indices that lead to a value."""

MAX_DEPTH = 64
MAX_DIGITS = 100
MAX_ALIASED = 100_000
"""How many values aliases may add to those written out: ten lines of them can stand for billions."""

TOO_DEEP = f"nested more than {MAX_DEPTH} deep"


class _CoreLoader(yaml.SafeLoader):
    """The safe loader with YAML 1.2's rules for what is a number, a boolean or null, and limits for hostile files."""

    yaml_implicit_resolvers: dict[str, Any] = {}
    nodes = depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if getattr(event, "tag", None) is not None:  # core values need none, and a wrong one is a riddle
            raise ComposerError(problem=f"the tag `{event.tag}` is not supported", problem_mark=event.start_mark)
        if self.depth > MAX_DEPTH:
            raise ComposerError(problem=TOO_DEEP, problem_mark=event.start_mark)
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


def parse(text: str, name: str, line: int = 0) -> tuple[Any, dict[Path_, str]]:
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
            raise ComposerError(problem=f"{TOO_DEEP}: an alias within itself?", problem_mark=node.start_mark)
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
