"""`tokenizer.json`, the format of the `tokenizers` library: other people's, and our own folder.

Ours is that file and `tokenizer_config.json` beside it, which says what the special tokens are for, so that
`transformers` reads our folders and we read theirs; our own additions stand under its key `qkv`.
"""

from __future__ import annotations

import base64
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from qkv.config.errors import QkvError
from qkv.tokenizer.backends import MAX_TOKENS, Source, check_charsmap, damaged, unsupported
from qkv.tokenizer.beside import (
    CONFIG_FILE,
    ROLES,
    SUPPORTED,
    TOKENIZER_FILE,
    as_configured,
    checked_ids,
    config_beside,
    parse_json,
    read_text,
)

_FORMAT_VERSION = 1
_KINDS = {"BPE": "bpe", "Unigram": "unigram", "WordPiece": "wordpiece", "WordLevel": "word"}


def read(file: Path) -> Source:
    """The tokenizer in a `tokenizer.json`, as the files beside it complete it. Raises QkvError."""
    text = read_text(file)
    tree = parse_json(text, file)
    if not isinstance(tree.get("model"), dict):
        raise QkvError("this JSON file is not a tokenizer", where=str(file), hint=SUPPORTED)
    for section, known in (("model", models), ("normalizer", normalizers), ("pre_tokenizer", pre_tokenizers)):
        for part in _parts(tree.get(section)):
            if not hasattr(known, part["type"]):
                raise unsupported(f"a tokenizer with the {section} {part['type']!r}", file)
            if part["type"] == "Precompiled":
                check_charsmap(_base64(part.get("precompiled_charsmap"), file), file)
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise damaged(str(error), file) from None
    _check_template(tree.get("post_processor"), file)
    if _kind(tree) == "unigram" and tree["model"].get("unk_id") is None:
        raise unsupported("a unigram tokenizer without a piece for what is unknown", file)
    largest = max(backend.get_vocab().values(), default=-1)
    if not 0 <= largest < MAX_TOKENS:
        raise damaged(f"its largest id is {largest}", file)
    config = config_beside(file)
    ours = config.get("qkv")
    if isinstance(ours, dict) and ours.get("format_version") != _FORMAT_VERSION:
        raise QkvError(
            f"tokenizer format {ours.get('format_version')} is not supported, only {_FORMAT_VERSION}",
            where=str(file.with_name(CONFIG_FILE)),
        )
    kind = ours.get("kind") if isinstance(ours, dict) else None
    source = as_configured(Source(backend, kind if isinstance(kind, str) else _kind(tree), text=text), file)
    return source if not isinstance(ours, dict) or "ids" not in ours else _with_ids(source, ours["ids"], file)


def _with_ids(source: Source, ids: Any, file: Path) -> Source:
    """The tokenizer with the ids that our own addition gives its pieces."""
    beside = file.with_name(CONFIG_FILE)
    ids = checked_ids(ids, beside)
    if missing := {*source.roles.values()} - ids.keys() or {"unk"} - source.roles.keys():
        raise damaged(f"it gives no id for {min(missing)}", beside)
    return replace(source, ids=ids)


def _check_template(part: Any, file: Path) -> None:
    """Raises QkvError for a template with tokens that it does not give ids, on which the library would stop later."""
    if not isinstance(part, dict):
        return
    for inner in part.get("processors") or ():
        _check_template(inner, file)
    known = part.get("special_tokens") or {}
    for piece in (*(part.get("single") or ()), *(part.get("pair") or ())):
        token = piece.get("SpecialToken") if isinstance(piece, dict) else None
        if isinstance(token, dict) and token.get("id") not in known:
            raise damaged(f"its template uses {token.get('id')!r}, which has no id", file)


def _base64(text: Any, file: Path) -> bytes:
    try:
        return base64.b64decode(text or b"", validate=True)
    except (TypeError, ValueError) as error:
        raise damaged(f"its character map is not base64: {error}", file) from None


def _parts(part: Any) -> Iterator[dict[str, Any]]:
    """A component and those of the sequence it may be."""
    if isinstance(part, dict):
        if isinstance(part.get("type"), str):
            yield part
        for parts in (part.get("normalizers"), part.get("pretokenizers")):
            for inner in parts if isinstance(parts, list) else ():
                yield from _parts(inner)


def _kind(tree: Mapping[str, Any]) -> str:
    """Of a file that does not say: by its model, which the library has accepted."""
    model = tree["model"]
    named = model.get("type") or ("Unigram" if "unk_id" in model else "BPE" if "merges" in model else "WordPiece")
    if named == "BPE" and not model.get("merges"):
        return "byte" if "ByteLevel" in json.dumps(tree.get("pre_tokenizer")) else "char"
    return _KINDS.get(named, named.lower())


# --- writing ----------------------------------------------------------------------------------------------------------


def write(
    folder: str | os.PathLike[str],
    text: str,
    kind: str,
    roles: Mapping[str, str],
    chat_template: str | None,
    ids: Mapping[str, int] | None,
) -> None:
    """Write our folder, `text` as its tokenizer.json. Each file appears whole or not at all, tokenizer.json last.

    Existing files are replaced.
    """
    folder = Path(folder)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {f"{role}_token": roles[role] for role in ROLES if role in roles}
    if chat_template is not None:
        config["chat_template"] = chat_template
    config["qkv"] = {"format_version": _FORMAT_VERSION, "kind": kind, **({} if ids is None else {"ids": dict(ids)})}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_whole(folder / CONFIG_FILE, json.dumps(config, ensure_ascii=False, indent=2) + "\n")
        _write_whole(folder / TOKENIZER_FILE, text)
    except OSError as error:
        raise QkvError(f"the tokenizer cannot be saved: {error.strerror}", where=str(folder)) from None


def _write_whole(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)  # mkstemp's are private
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
