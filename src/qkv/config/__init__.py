"""The typed tree: everything one can say about a model, a tokenizer, data and a run. Never imports torch.

Names are imported on first use, so that `qkv.config.errors` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_MODULES = (
    "run",
    "model",
    "stack",
    "block",
    "training",
    "tokenizer",
    "objectives",
    "data",
    "parts",
    "attention",
    "feed_forward",
    "positions",
    "residuals",
    "base",
    "load",
    "yaml_tree",
    "errors",
)


def __getattr__(name: str) -> Any:
    if not name.startswith("_"):
        for module in _MODULES:
            found = getattr(import_module(f"{__name__}.{module}"), name, None)
            if found is not None:
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    names: set[str] = set()
    for module in _MODULES:
        found = import_module(f"{__name__}.{module}")
        names.update(name for name, value in vars(found).items() if getattr(value, "__module__", "") == found.__name__)
    return sorted(name for name in names if not name.startswith("_"))
