"""Real text that every Python carries: its documentation topics and the source of its standard library."""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

LEFT_OUT = {
    *("test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__", "turtledemo"),
    "encodings",  # tables of code points, not text
    "pydoc_data",  # the topics once more: those held out would be learnt by heart
}


class BundledText(NamedTuple):
    """Two files; no document is in both."""

    train: Path
    held_out: Path


def python_text(folder: Path) -> BundledText:
    """Write the running Python's own text below `folder`, once per version: topics and files, a blank line between
    them."""
    version = ".".join(map(str, sys.version_info[:3]))
    return divide(folder, f"python-{version}", ".txt", lambda: sorted(_documents().items()), "\n\n")


def is_held_out(name: str) -> bool:
    """About one name in twenty, by its hash: the same ones everywhere."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 20 == 0


def divide(
    folder: Path, name: str, suffix: str, read: Callable[[], Iterable[tuple[str, str]]], separator: str
) -> BundledText:
    """Write the texts of (name, text) into two files by `is_held_out`, unless both are there."""
    files = BundledText(folder / f"{name}-train{suffix}", folder / f"{name}-held-out{suffix}")
    if all(path.is_file() for path in files):
        return files
    parts: dict[Path, list[str]] = {path: [] for path in files}
    for document, text in read():
        parts[files.held_out if is_held_out(document) else files.train].append(text)
    folder.mkdir(parents=True, exist_ok=True)
    for path, texts in parts.items():
        beside = path.with_suffix(".tmp")
        beside.write_text(separator.join(texts), encoding="utf-8", newline="\n")
        beside.replace(path)
    return files


def _documents() -> dict[str, str]:
    """Name -> text of every topic and every standard-library file."""
    from pydoc_data.topics import topics

    documents = {f"topic {name}": text for name, text in topics.items()}
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        inside = path.relative_to(library)
        if LEFT_OUT.isdisjoint(inside.parts):
            try:
                documents[inside.as_posix()] = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):  # a few files declare another encoding
                continue
    return documents
