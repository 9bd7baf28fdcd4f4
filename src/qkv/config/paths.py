"""Where qkv keeps what can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """The folder for prepared data and fetched models: $QKV_CACHE, or ~/.cache/qkv."""
    named = os.environ.get("QKV_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "qkv"
