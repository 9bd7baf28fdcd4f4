"""qkv: the Transformer, all three families from one configuration.

Everything here is imported on first use, so that `import qkv` stays fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qkv.config.errors import QkvError as QkvError
    from qkv.config.run import Config as Config
    from qkv.model import Model as Model
    from qkv.model import load as load
    from qkv.nn.transformer import Transformer as Transformer
    from qkv.tokenizer.tokenizer import Tokenizer as Tokenizer
    from qkv.train.finetune import finetune as finetune
    from qkv.train.loop import fit as fit
    from qkv.train.resume import resume as resume

__version__ = "0.1.0.dev0"

_NAMES = {
    "Config": "qkv.config.run",
    "Model": "qkv.model",
    "QkvError": "qkv.config.errors",
    "Tokenizer": "qkv.tokenizer.tokenizer",
    "Transformer": "qkv.nn.transformer",
    "finetune": "qkv.train.finetune",
    "fit": "qkv.train.loop",
    "load": "qkv.model",
    "resume": "qkv.train.resume",
}
_MODULES = ("config", "data", "evaluate", "generate", "inspect", "nn", "tokenizer", "train")

__all__ = ["__version__", *_NAMES, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(import_module(_NAMES[name]), name)
    if name in _MODULES:
        return import_module(f"qkv.{name}")
    raise AttributeError(f"module 'qkv' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
