"""The typed tree: everything one can say about a model, a tokenizer, data and a run. Never imports torch.

Names are imported on first use, so that `qkv.config.errors` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_MODULES = ("run", "model", "base", "load", "errors")


def __getattr__(name: str) -> Any:
    if not name.startswith("_"):
        for module in _MODULES:
            found = getattr(import_module(f"{__name__}.{module}"), name, None)
            if found is not None:
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
