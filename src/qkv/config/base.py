"""What every node of the configuration tree has in common, and how a `kind` chooses a class.

Importing this room never imports torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from qkv.config.errors import nearest

EVERY_PACKAGE = ("*",)
"""`allow` of a configuration that the user trains from: its import paths are the user's own choice."""


MAX_COUNT = 2**53
"""Every step, token and seed stays exact in a JSON reader, and in 64 bits."""

MAX_NUMBER = 3.4028234663852886e38
"""The largest number of float32, in which networks compute."""

Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]


class Node(BaseModel):
    """A frozen mapping whose unknown keys are errors that name the nearest known key."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _no_unknown_key(cls, data: Any) -> Any:
        if data is None:  # an empty YAML section
            return {}
        if isinstance(data, Mapping):
            for key in data:
                if key not in cls.model_fields:
                    guess = nearest(str(key), cls.model_fields)
                    known = ", ".join(cls.model_fields)
                    hint = f"`{guess}`" if guess else f"one of: {known}"
                    raise PydanticCustomError(
                        "unknown_key",
                        "unknown key `{key}`{meant}",
                        {"key": str(key), "hint": hint, "meant": _meant(guess)},
                    )
        return data

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        if info.field_name and any(isinstance(item, bool) for item in (value if _is_list(value) else [value])):
            wanted = cls.model_fields[info.field_name].annotation
            if not _mentions(wanted, bool) and (_mentions(wanted, int) or _mentions(wanted, float)):
                raise PydanticCustomError("not_a_number", "expected a number")  # python's own bool is an int
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _within_float32(cls, value: Any) -> Any:
        if any(isinstance(item, float) and abs(item) > MAX_NUMBER for item in (value if _is_list(value) else [value])):
            raise PydanticCustomError(
                "beyond_float32", "input should be at most {limit} in size", {"limit": f"{MAX_NUMBER:g}"}
            )
        return value


def _meant(guess: str | None) -> str:
    return f", did you mean `{guess}`?" if guess else ""


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _mentions(annotation: Any, wanted: type) -> bool:
    return annotation is wanted or any(_mentions(inner, wanted) for inner in get_args(annotation))


class Part(Node):
    """A swappable part: `kind` says which.

    A third-party part is a subclass of a base (`NormConfig`), or of a kind whose keys it shares (`RMSNormConfig`). It
    is named in YAML by its import path (`kind: "package.module:ConfigClass"`) and names the class of its module in
    `module` (`"package.module:ModuleClass"`, built as `ModuleClass(config, dims)`).
    """

    kind: str = ""
    module: ClassVar[str | None] = None

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        super().__pydantic_init_subclass__(**options)
        if cls.module is not None:  # it may be derived from a built-in part, whose kind it is not
            cls.model_fields["kind"] = FieldInfo(annotation=str, default=f"{cls.__module__}:{cls.__qualname__}")
            cls.model_rebuild(force=True)


def _built_in_kinds(part: type[Part]) -> tuple[str, ...]:
    """The kinds a class declares as `kind: Literal[...]`; a third-party class declares none."""
    return get_args(part.model_fields["kind"].annotation)


class Kinds:
    """Annotation: the value is one of these classes, chosen by its `kind` (the first class when there is none).

    Use as `Annotated[NormConfig, Kinds(RMSNormConfig, LayerNormConfig)]`: to a type checker the field is a NormConfig.
    """

    def __init__(self, *parts: type[Part]) -> None:
        self.parts = parts
        self.by_kind = {kind: part for part in parts for kind in _built_in_kinds(part)}

    def __get_pydantic_core_schema__(self, base: type[Part], handler: GetCoreSchemaHandler) -> CoreSchema:
        def validate(value: Any, info: core_schema.ValidationInfo) -> Part:
            if isinstance(value, base):
                return value
            if value is None:
                value = {}
            if not isinstance(value, Mapping):
                raise PydanticCustomError(
                    "not_a_mapping",
                    "expected a mapping such as {example}, got {value}",
                    {"example": f"{{kind: {next(iter(self.by_kind))}}}", "value": repr(value)},
                )
            return self._class_of(value, base, info).model_validate(value, context=info.context)

        return core_schema.with_info_plain_validator_function(
            validate,
            serialization=core_schema.plain_serializer_function_ser_schema(lambda part: part.model_dump(mode="json")),
        )

    def _class_of(self, value: Mapping[str, Any], base: type[Part], info: core_schema.ValidationInfo) -> type[Part]:
        kind = value.get("kind")
        if kind is None:
            return self.parts[0]
        if isinstance(kind, str) and kind in self.by_kind:
            return self.by_kind[kind]
        if isinstance(kind, str) and ":" in kind:
            return import_part(kind, base, allow=(info.context or {}).get("allow", ()))
        guess = nearest(str(kind), self.by_kind)
        hint = (
            f"`{guess}`"
            if guess
            else f"one of: {', '.join(self.by_kind)}; a part of your own is `package.module:Class`"
        )
        raise PydanticCustomError(
            "unknown_kind", "unknown kind `{kind}`{meant}", {"kind": str(kind), "hint": hint, "meant": _meant(guess)}
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        options = [handler(part.__pydantic_core_schema__) for part in self.parts]
        plugin = {
            "type": "object",
            "properties": {"kind": {"type": "string", "pattern": r"^[\w.]+:\w+$"}},
            "required": ["kind"],
            "description": "a third-party part, by the import path of its configuration class",
        }
        return {"anyOf": [*options, plugin]}


def packages_of(tree: Any) -> list[str]:
    """The packages whose parts a configuration, or a piece of it, names by import path."""
    if isinstance(tree, Node):
        tree = tree.model_dump()
    found = set()
    if isinstance(tree, Mapping):
        kind = tree.get("kind")
        if isinstance(kind, str) and ":" in kind:
            found.add(kind.partition(":")[0].partition(".")[0])
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        found.update(name for piece in tree for name in packages_of(piece))
    return sorted(found)


def import_object(path: str) -> Any:
    """The object that `package.module:Name` names. Raises ImportError or AttributeError."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def import_part(path: str, base: type[Part], allow: tuple[str, ...]) -> type[Part]:
    """The third-party configuration class at `path`; refused unless `allow` names its package (or is `("*",)`)."""
    package = path.partition(":")[0].partition(".")[0]
    if allow != EVERY_PACKAGE and package not in allow:
        raise PydanticCustomError(
            "package_not_allowed",
            "`{path}` would run code of the package `{package}`, which is not allowed",
            {"path": path, "package": package, "hint": f"--allow-package {package} if you trust that package"},
        )
    try:
        part = import_object(path)
    except Exception as error:  # whatever a stranger's module raises while it is imported
        raise PydanticCustomError(
            "import_failed",
            "cannot import `{path}`: {error}",
            {
                "path": path,
                "error": f"{type(error).__name__}: {error}",
                "hint": "package.module:ConfigClass, and PYTHONPATH=. for a module in this folder",
            },
        ) from error
    if not (isinstance(part, type) and issubclass(part, base)):
        raise PydanticCustomError(
            "wrong_part",
            "`{path}` is not a {base}",
            {"path": path, "base": base.__name__, "hint": f"a subclass of qkv.config.{base.__name__}"},
        )
    if part.module is None:
        raise PydanticCustomError(
            "no_module",
            "`{path}` does not say which module it builds",
            {"path": path, "hint": f'module: ClassVar[str] = "package.module:ModuleClass" in {part.__name__}'},
        )
    return part


def contradiction(first: str, second: str, why: str, hint: str) -> PydanticCustomError:
    """Two keys that cannot both be meant; the message names both."""
    return PydanticCustomError(
        "contradiction",
        "`{first}` and `{second}` contradict each other: {why}",
        {"first": first, "second": second, "why": why, "hint": hint},
    )
