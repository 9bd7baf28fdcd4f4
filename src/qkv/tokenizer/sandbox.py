"""Jinja for templates that strangers wrote: they reach nothing, and what they take is bounded.

Jinja's own sandbox keeps a template from attributes that lead elsewhere. It does not bound what a template takes: a
power, a format width or a doubled string fills the memory in one step. So here every operation that makes something
is looked at before or as it happens (operators, filters, calls, slices, literals, output), loops and calls are counted,
and only the filters and methods that are known to be harmless exist.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.filters import FILTERS, do_indent, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_TEMPLATE = 1 << 17
"""Characters of a template; those in use have at most some twenty thousand."""

_MAX_VALUE = 1 << 20  # characters of a text, or of a list written out
_MAX_WORK = 1 << 24  # characters of all that is made
_MAX_CPU_SECONDS = 2.0
_MAX_BITS = 1 << 14
_ENTRY, _STEP = 16, 64  # what an entry of a list counts, and a turn of a loop or a call
_LONGEST_SOUGHT = 256  # characters of what a method looks for: some take time by the product of both lengths
_WIDEST_INDENT = 16

_FILTERS = (
    *("abs", "capitalize", "count", "d", "default", "dictsort", "first", "float", "int", "items", "last", "length"),
    *("list", "lower", "map", "max", "min", "reject", "rejectattr", "reverse", "select", "selectattr", "sort"),
    *("string", "title", "unique", "upper"),
)
_TEXT_METHODS = (
    *("capitalize", "count", "endswith", "find", "format", "index", "isalnum", "isalpha", "isdecimal", "isdigit"),
    *("islower", "isnumeric", "isspace", "isupper", "join", "lower", "lstrip", "partition", "removeprefix"),
    *("removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines"),
    *("startswith", "strip", "title", "upper"),
)
_METHODS: dict[type, tuple[str, ...]] = {
    str: _TEXT_METHODS,
    list: ("count", "index"),
    tuple: ("count", "index"),
    dict: ("get", "items", "keys", "values"),
}
# a width or precision of three digits, or one that is given elsewhere
_WIDE_PERCENT = re.compile(r"%(?:\([^)]*\))?[-+ #0-9._^]*(?:\*|\d{3})")
_WIDE_FIELD = re.compile(r"\{[^{}]*(?:\{|\d{3})")


class LimitError(Exception):
    """A template takes more than is granted; says of what."""


class _Budget:
    """What one rendering has left. `given`: characters of what the template is given, which it may repeat."""

    def __init__(self, given: int) -> None:
        self._largest = _MAX_VALUE + 4 * given
        self._left = _MAX_WORK + 64 * given
        self._deadline = time.thread_time() + _MAX_CPU_SECONDS
        self.sizes: dict[int, tuple[Any, int]] = {}  # with the object, so that no other gets its id

    def spend(self, amount: int) -> None:
        """Account for `amount` characters."""
        self._left -= amount
        if self._left < 0:
            raise LimitError("it makes too much text, or goes on too long")
        if time.thread_time() > self._deadline:
            raise LimitError(f"it takes more than {_MAX_CPU_SECONDS:.0f} s of computing")

    def allow(self, size: int) -> None:
        """Raises LimitError if no value may be so large."""
        if size > self._largest:
            raise LimitError("it makes a text or list that is too large")

    def made(self, value: Any) -> Any:
        """Account for a new value, and return it; what is iterated once becomes a list."""
        if isinstance(value, Iterator | KeysView | ValuesView | ItemsView):
            value = list(self.counted(value))
        if isinstance(value, int) and value.bit_length() > _MAX_BITS:
            raise LimitError("it makes a number that is too large")
        if isinstance(value, str):
            self.allow(len(value))
            self.spend(len(value))
        elif isinstance(value, list | tuple | dict):
            self.allow(self.size(value))
            self.spend(_ENTRY * len(value))
        return value

    def counted(self, values: Iterable[Any]) -> Iterator[Any]:
        """The same values, each of which counts."""
        for value in values:
            self.spend(_STEP)
            yield value

    def size(self, value: Any) -> int:
        """Characters of a value written out: a list that holds one list twice counts that twice."""
        if isinstance(value, str):
            return len(value)
        if not isinstance(value, list | tuple | dict):
            return 1
        if id(value) not in self.sizes:
            inside = value.values() if isinstance(value, dict) else value
            keys = sum(map(self.size, value)) if isinstance(value, dict) else 0
            self.sizes[id(value)] = value, keys + sum(_ENTRY + self.size(each) for each in inside)
        return self.sizes[id(value)][1]


_budget: ContextVar[_Budget] = ContextVar("budget")


def render(template: jinja2.Template, variables: Mapping[str, Any], given: int) -> str:
    """The text of a template of `Sandbox`. given: characters in `variables`.

    Raises what a template can: jinja2.TemplateError, LimitError, RecursionError, and any error of an operation.
    """
    token = _budget.set(_Budget(given))
    try:
        return template.render(variables)
    finally:
        _budget.reset(token)


# --- operations -------------------------------------------------------------------------------------------------------


def _text(value: Any) -> str:
    return value if isinstance(value, str) else str(_budget.get().made(value))


def _join(pieces: Iterable[str], between: str = "") -> str:
    budget, kept, length = _budget.get(), [], 0
    for piece in pieces:
        length += len(piece) + len(between)
        budget.allow(length)
        kept.append(piece)
    budget.spend(length + len(kept))
    return between.join(kept)


@jinja2.pass_environment
def _join_filter(
    environment: jinja2.Environment, value: Iterable[Any], d: str = "", attribute: str | int | None = None
) -> str:
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    return _join(map(_text, value), _text(d))


def _replace(text: str, old: str, new: str, count: int | None = None) -> str:
    text, old, new = _text(text), _text(old), _text(new)
    times = text.count(old) if count is None or count < 0 else min(count, text.count(old))
    _budget.get().allow(len(text) + times * len(new))
    return text.replace(old, new, times)


def _trim(text: str, chars: str | None = None) -> str:
    _check_sought(chars)
    return _text(text).strip(chars)


def _check_sought(*values: Any) -> None:
    if any(isinstance(each, str) and len(each) > _LONGEST_SOUGHT for each in values):
        raise LimitError(f"it looks for a text of more than {_LONGEST_SOUGHT} characters")


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    text = _text(text)
    wide = len(width) if isinstance(width, str) else width
    _budget.get().allow(len(text) + (text.count("\n") + 1) * wide)
    return do_indent(text, width, first, blank)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as `transformers` writes it in templates; unlike Jinja's, not escaped for HTML."""
    if indent is not None and (len(indent) if isinstance(indent, str) else indent) > _WIDEST_INDENT:
        raise LimitError(f"it indents JSON by more than {_WIDEST_INDENT}")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return _join(encoder.iterencode(value))


def _format(text: str, *arguments: Any, **named: Any) -> str:
    return _percent(text, named or arguments)


def _percent(text: str, values: Any) -> str:
    _check_form(text, _WIDE_PERCENT, text.count("%"), values)
    return str(text % values)


def _check_form(text: str, wide: re.Pattern[str], fields: int, values: Any) -> None:
    """Raises LimitError for what would make of `values` more than is allowed."""
    if wide.search(text):
        raise LimitError("it formats to a width of three digits or more")
    budget = _budget.get()
    budget.allow(len(text) + fields * budget.size(values))


def _strftime_now(form: str) -> str:
    _check_form(form, _WIDE_PERCENT, 0, ())
    return datetime.now().strftime(form)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _slice(value: Any, start: int | None, stop: int | None, step: int | None) -> Any:
    return value[start:stop:step]


class _Names(Namespace):
    """Jinja's `namespace`, whose names lead nowhere else, and which is not written out."""

    def __repr__(self) -> str:
        return "<namespace>"

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace has no {name!r}")
        super().__setitem__(name, value)


def _namespace(*pairs: Any, **named: Any) -> _Names:
    names = _Names()
    for name, value in dict(*pairs, **named).items():
        names[name] = value
    return names


def _dict(*pairs: Any, **named: Any) -> dict[Any, Any]:
    return dict(*pairs, **named)


def _accounted(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose results count."""

    @wraps(function)
    def run(*arguments: Any, **named: Any) -> Any:
        budget = _budget.get()
        budget.spend(_STEP)
        return budget.made(function(*arguments, **named))

    return run


# --- the language -----------------------------------------------------------------------------------------------------


class _Generation(Extension):
    """`{% generation %}`, by which templates mark what the model wrote: its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Accounting(NodeTransformer):
    """Puts a filter where Jinja has an operation that cannot be intercepted otherwise."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "counted")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes), "join")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        bounds = (node.arg.start, node.arg.stop, node.arg.step)
        return _filtered(node.node, "slice", [nodes.Const(None) if bound is None else bound for bound in bounds])

    def visit_List(self, node: nodes.List | nodes.Tuple | nodes.Dict) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") == "store" else _filtered(node, "made")

    visit_Tuple = visit_Dict = visit_List

    def visit_Include(self, node: nodes.Node) -> nodes.Node:  # noqa: N802
        raise jinja2.TemplateError("it reads other templates")

    visit_Extends = visit_Import = visit_FromImport = visit_Include


def _filtered(node: nodes.Node, name: str, arguments: list[nodes.Expr] | None = None) -> nodes.Filter:
    return nodes.Filter(node, name, arguments or [], [], None, None, lineno=node.lineno)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment in which chat templates are compiled and rendered, as `transformers` sets it up."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
            optimized=False,  # nothing is computed while compiling
            finalize=_finalize,
        )
        own: dict[str, Callable[..., Any]] = {
            "counted": lambda values: _budget.get().counted(values),
            "e": _text,
            "escape": _text,
            "format": _format,
            "indent": _indent,
            "join": _join_filter,
            "made": lambda value: value,
            "replace": _replace,
            "safe": _text,
            "slice": _slice,
            "tojson": _tojson,
            "trim": _trim,
        }
        usual = {name: FILTERS[name] for name in _FILTERS}
        self.filters = {name: _accounted(function) for name, function in (usual | own).items()}
        self.filters["counted"] = own["counted"]
        self.globals = {
            "range": self.globals["range"],  # the sandbox's, of at most 100,000 numbers
            "dict": _dict,
            "namespace": _namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Accounting().visit(super()._parse(source, name, filename))
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, names in _METHODS.items():
            if isinstance(obj, kind):
                return attr in names
        return isinstance(obj, Namespace | LoopContext) and super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        raise SecurityError(f"it may not use {attribute!r} of a {type(obj).__name__}")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget.get()
        if operator == "*":
            for one, times in ((left, right), (right, left)):
                if isinstance(one, str | list | tuple) and isinstance(times, int):
                    budget.allow(len(one) * times)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * right > _MAX_BITS:
                raise LimitError("it makes a number that is too large")
        elif operator == "%" and isinstance(left, str):
            return budget.made(_percent(left, right))
        return budget.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *arguments: Any, **named: Any) -> Any:  # noqa: N805
        budget = _budget.get()
        sized = (str, list, tuple, dict, range)
        budget.spend(_STEP + sum(len(each) for each in arguments if isinstance(each, sized)))
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            if __obj.__name__ == "replace":
                return budget.made(_replace(owner, *arguments, **named))
            if __obj.__name__ == "join":
                return _join(arguments[0], owner)
            _check_sought(*arguments, *named.values())
        return budget.made(super().call(__context, __obj, *arguments, **named))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        form = super().wrap_str_format(value)
        if form is None:
            return None

        def run(*arguments: Any, **named: Any) -> str:
            text = value.__self__.replace("{{", "").replace("}}", "")
            _check_form(text, _WIDE_FIELD, text.count("{"), (arguments, named))
            return form(*arguments, **named)

        return run

    def concat(self, pieces: Iterable[str]) -> str:
        """What a block, a macro or the template itself puts out."""
        return _join(pieces)


@jinja2.pass_context
def _finalize(context: Context, value: Any) -> str:
    _budget.get().spend(1)
    return _text(value)
