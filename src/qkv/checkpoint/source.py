"""What a published checkpoint holds, whatever its container: keys, names and arrangement of the Hugging Face format.

A reader per container (`hugging_face`, `gguf`, `llama2c`, `ctranslate2`) makes one; `load` builds the network from it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qkv.checkpoint.published import Published
from qkv.checkpoint.store import Pooling
from qkv.checkpoint.tensors import Stored, without_doubles
from qkv.config.errors import DamagedError, NotFoundError, QkvError
from qkv.tokenizer.tokenizer import Tokenizer

log = logging.getLogger("qkv")
_LARGEST_JSON = 1 << 26  # bytes


@dataclass(frozen=True)
class Source:
    """A published model.

    config: its config.json. generation: its generation_config.json, empty where there is none. preprocessor: its
    preprocessor_config.json, None where there is none. tensors: by published name, not read yet. path: what was loaded;
    `weights`: what errors about a tensor name.
    """

    path: Path
    config: Published
    generation: Published
    tensors: Mapping[str, Stored]
    weights: Path
    tokenizer: Tokenizer | None = None
    source_tokenizer: Tokenizer | None = None
    pooling: Pooling | None = None
    preprocessor: Published | None = None


def tokenizer_of(path: Path) -> Tokenizer | None:
    """The tokenizer in a folder or file; None where there is none, or, with a warning, where it is not supported.

    Raises DamagedError.
    """
    try:
        return Tokenizer.load(path)
    except NotFoundError:
        return None
    except DamagedError:
        raise
    except QkvError as error:
        log.warning("the model is loaded without its tokenizer, and reads ids only: %s", error)
        return None


def tokenizers_of(folder: Path) -> tuple[Tokenizer | None, Tokenizer | None]:
    """(the tokenizer in a folder, that of the sources where it is another one), each as `tokenizer_of` has it."""
    target = folder / "target.spm"
    if target.is_file() and not (folder / "tokenizer.json").is_file():
        return tokenizer_of(target), tokenizer_of(folder)
    return tokenizer_of(folder), None


def half_split_rows(count: int, heads: int) -> Tensor:
    """Where each row of a query or key projection comes from when channel pairs (2i, 2i + 1) of every head, which Meta
    and llama.cpp rotate, become (i, i + D/2)."""
    return torch.arange(count).view(heads, -1, 2).transpose(1, 2).flatten()


def read_json(path: Path) -> Any:
    """A small JSON file. Raises NotFoundError, or DamagedError for what is none, endless, or says a thing twice."""
    if path.is_dir():
        raise DamagedError(f"{path.name} is a folder, and a file is expected", where=str(path))
    if not path.is_file():
        raise NotFoundError(f"{path.name} is missing", where=str(path.parent))
    try:
        if path.stat().st_size > _LARGEST_JSON:
            raise DamagedError(
                f"{path.name} is no configuration: it has {path.stat().st_size:,} bytes", where=str(path)
            )
        return json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=without_doubles)
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedError(f"{path.name} is damaged: {error}", where=str(path)) from None


def read_object(path: Path) -> Published:
    """A small JSON file that holds an object."""
    keys = read_json(path)
    if not isinstance(keys, dict):
        raise DamagedError(f"{path.name} is damaged: it holds no object", where=str(path))
    return Published(keys, str(path))
