"""Tokenizer folders: `tokenizer.json` (the format of the `tokenizers` library) and `tokenizer_config.json` beside it.

The second file says what the special tokens are for, in Hugging Face's spelling, so that `transformers` reads our
folders and we read theirs; our own additions stand under its key `qkv`.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from qkv.config.errors import NotFoundError, QkvError

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
ROLES = ("pad", "bos", "eos", "unk", "mask", "cls", "sep")
"""What a special token can be for."""

_FORMAT_VERSION = 1
_SUPPORTED = f"a folder with {TOKENIZER_FILE}, or such a file (ours or Hugging Face's)"
_LARGEST_ID = 1 << 24  # a file that claims more would make somebody allocate an embedding for it
_KINDS = {"BPE": "bpe", "Unigram": "unigram", "WordPiece": "wordpiece", "WordLevel": "word"}
_USUAL_TOKENS = {
    "pad": ("<pad>", "[PAD]", "<|pad|>"),
    "bos": ("<bos>", "<s>", "[BOS]", "<|begin_of_text|>", "<|startoftext|>"),
    "eos": ("<eos>", "</s>", "[EOS]", "<|endoftext|>", "<|end_of_text|>"),
    "unk": ("<unk>", "[UNK]"),
    "mask": ("<mask>", "[MASK]"),
    "cls": ("[CLS]",),
    "sep": ("[SEP]",),
}


def read(path: str | os.PathLike[str]) -> tuple[str, str, dict[str, str]]:
    """(the JSON, kind, role -> special token) from a folder or a `tokenizer.json`.

    Raises NotFoundError, and QkvError that tells "not supported" from "damaged".
    """
    file = _find(Path(path))
    text = _text(file)
    tree = _json(text, file)
    if not isinstance(tree.get("model"), dict):
        raise QkvError("this JSON file is not a tokenizer", where=str(file), hint=_SUPPORTED)
    for section, known in (("model", models), ("normalizer", normalizers), ("pre_tokenizer", pre_tokenizers)):
        for name in _types(tree.get(section)):
            if not hasattr(known, name):
                raise QkvError(f"a tokenizer with the {section} {name!r} is not supported", where=str(file))
    try:
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise QkvError(f"the tokenizer file is damaged: {error}", where=str(file)) from None
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if not 0 <= largest < _LARGEST_ID:
        raise QkvError(f"the tokenizer file is damaged: its largest id is {largest}", where=str(file))

    config_file = file.with_name(CONFIG_FILE)
    config = _json(_text(config_file), config_file) if config_file.is_file() else {}
    ours = config.get("qkv")
    if isinstance(ours, dict) and ours.get("format_version") != _FORMAT_VERSION:
        raise QkvError(
            f"tokenizer format {ours.get('format_version')} is not supported, only {_FORMAT_VERSION}",
            where=str(config_file),
        )
    kind = ours.get("kind") if isinstance(ours, dict) else None
    return text, kind if isinstance(kind, str) else _kind(tree), _roles(tokenizer, config, config_file)


def write(folder: str | os.PathLike[str], text: str, kind: str, roles: Mapping[str, str]) -> None:
    """Write both files; each appears whole or not at all, `tokenizer.json` last. Existing ones are replaced."""
    folder = Path(folder)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {f"{role}_token": roles[role] for role in ROLES if role in roles}
    config["qkv"] = {"format_version": _FORMAT_VERSION, "kind": kind}
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


def _find(path: Path) -> Path:
    if not path.exists():
        raise NotFoundError("there is no such tokenizer", where=str(path), hint=_SUPPORTED)
    if path.is_dir():
        for file in (path / TOKENIZER_FILE, path / "tokenizer" / TOKENIZER_FILE):
            if file.is_file():
                return file
        raise NotFoundError(f"there is no {TOKENIZER_FILE} in this folder", where=str(path), hint=_SUPPORTED)
    if path.suffix != ".json":
        raise QkvError(
            f"{path.suffix or path.name} files are not supported as tokenizers", where=str(path), hint=_SUPPORTED
        )
    return path


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise QkvError("the tokenizer file is damaged: not UTF-8", where=f"{file}: byte {error.start}") from None
    except OSError as error:
        raise QkvError(f"the tokenizer file cannot be read: {error.strerror}", where=str(file)) from None


def _json(text: str, file: Path) -> dict[str, Any]:
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        raise QkvError(f"the tokenizer file is damaged: {error.msg}", where=f"{file}:{error.lineno}") from None
    except RecursionError:
        raise QkvError("the tokenizer file is damaged: nested too deeply", where=str(file)) from None
    if not isinstance(tree, dict):
        raise QkvError("this JSON file is not a tokenizer", where=str(file), hint=_SUPPORTED)
    return tree


def _types(part: Any) -> Iterator[str]:
    """The types of a component and of the sequence it may be."""
    if isinstance(part, dict):
        if isinstance(part.get("type"), str):
            yield part["type"]
        for parts in (part.get("normalizers"), part.get("pretokenizers")):
            for inner in parts if isinstance(parts, list) else ():
                yield from _types(inner)


def _kind(tree: Mapping[str, Any]) -> str:
    """Of a file that does not say: by its model, which the library has accepted."""
    model = tree["model"]
    named = model.get("type") or ("Unigram" if "unk_id" in model else "BPE" if "merges" in model else "WordPiece")
    if named == "BPE" and not model.get("merges"):
        return "byte" if "ByteLevel" in json.dumps(tree.get("pre_tokenizer")) else "char"
    return _KINDS.get(named, named.lower())


def _roles(tokenizer: tokenizers.Tokenizer, config: Mapping[str, Any], file: Path) -> dict[str, str]:
    roles: dict[str, str] = {}
    for role in ROLES:
        token = config.get(f"{role}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and tokenizer.token_to_id(token) is not None:
            roles[role] = token
        elif token is not None and "qkv" in config:
            raise QkvError(f"the tokenizer is damaged: no token {token!r} for the role {role}", where=str(file))
    if not config:
        special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
        for role, usual in _USUAL_TOKENS.items():
            if found := [token for token in usual if token in special]:
                roles[role] = found[0]
    unk = getattr(tokenizer.model, "unk_token", None)
    if isinstance(unk, str):
        roles.setdefault("unk", unk)
    return roles
