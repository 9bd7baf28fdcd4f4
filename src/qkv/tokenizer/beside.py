"""What stands beside a vocabulary in its folder, in Hugging Face's spelling: what the special tokens are for, which
tokens are added, whose tokenizer it is, the chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from qkv.config.errors import QkvError
from qkv.tokenizer.backends import MAX_TOKENS, Source, check_vocabulary, damaged, put_around, unsupported

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
ROLES = ("pad", "bos", "eos", "unk", "mask", "cls", "sep")
"""What a special token can be for."""
SUPPORTED = (
    f"a folder with {TOKENIZER_FILE}, or such a file (ours or Hugging Face's); a .gguf, .tiktoken or SentencePiece "
    ".model file, Marian's source.spm or GPT-2's merges.txt beside a vocab.json, BERT's vocab.txt, llama2.c's "
    "tokenizer.bin"
)

_OTHER_CONFIG_FILES = ("special_tokens_map.json", "added_tokens.json")
_LARGEST_FILE = 1 << 28  # bytes; those in use have some ten million
_OWNERS = {"bart": "Bart", "gpt2": "GPT2", "mbart": "MBart", "roberta": "Roberta", "xlm-roberta": "XLMRoberta"}
"""`model_type` of a config.json -> whose tokenizer comes with such a model."""
_USUAL_TOKENS = {
    "pad": ("<pad>", "[PAD]", "<|pad|>"),
    "bos": ("<bos>", "<s>", "[BOS]", "<|begin_of_text|>", "<|startoftext|>", "<|endoftext|>"),
    "eos": ("<eos>", "</s>", "[EOS]", "<|endoftext|>", "<|end_of_text|>"),
    "unk": ("<unk>", "[UNK]"),
    "mask": ("<mask>", "[MASK]"),
    "cls": ("[CLS]",),
    "sep": ("[SEP]",),
}


def config_beside(file: Path) -> dict[str, Any]:
    """tokenizer_config.json beside a tokenizer, with what older folders say in files of their own."""
    config: dict[str, Any] = {}
    for name in (*_OTHER_CONFIG_FILES, CONFIG_FILE):
        beside = file.with_name(name)
        if beside.is_file():
            told = read_json(beside)
            config |= {"added_tokens": told} if name == "added_tokens.json" else told
    return config


def class_of(config: Mapping[str, Any]) -> str:
    """Whose tokenizer a folder says it holds: "Llama" for LlamaTokenizerFast; empty where it does not say."""
    return str(config.get("tokenizer_class") or "").removesuffix("Fast").removesuffix("Tokenizer")


def owner_of(file: Path) -> str:
    """As `class_of`, where config.json beside the file may say it too: its model's type, if that is not known here."""
    beside = file.with_name("config.json")
    kind = read_json(beside).get("model_type") if beside.is_file() else None
    return class_of(config_beside(file)) or (_OWNERS.get(kind, kind) if isinstance(kind, str) else "")


def only_transformers(file: Path, owner: str) -> QkvError:
    """The error for a vocabulary that another code than ours makes a tokenizer of."""
    return unsupported(
        f"the {file.name} of a {owner} tokenizer", file, f"{TOKENIZER_FILE}, which `transformers` makes of it"
    )


def as_configured(source: Source, file: Path, usual: Mapping[str, bool] | None = None) -> Source:
    """The tokenizer as the files beside it complete it.

    They add tokens, name roles and bring a chat template. What stands around a text is what `tokenizer.json` says;
    where that is nothing, add_bos_token and add_eos_token say it, or else `usual` (role -> whether).
    """
    config, backend = config_beside(file), source.backend
    try:
        changed = _add_missing(backend, config, file)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise damaged(f"the list of added tokens: {error!r}", file.with_name(CONFIG_FILE)) from None
    roles = _roles(source, config, file)
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    if unmarked := sorted({*roles.values()} - special, key=lambda token: backend.token_to_id(token) or 0):
        changed = True
        backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in unmarked])
    if backend.num_special_tokens_to_add(is_pair=False) == 0:
        flags = {role: config.get(f"add_{role}_token", (usual or {}).get(role, False)) for role in ("bos", "eos")}
        around = [[roles[role]] if flag is True and role in roles else [] for role, flag in flags.items()]
        changed = changed or any(around)
        put_around(backend, *around)
    unk = getattr(backend.model, "unk_token", None)
    if isinstance(unk, str) and backend.token_to_id(unk) is not None:
        roles.setdefault("unk", unk)
    text = None if changed else source.text
    return replace(source, roles=roles, chat_template=_template(config, file), text=text)


def _add_missing(backend: tokenizers.Tokenizer, config: Mapping[str, Any], file: Path) -> bool:
    """Add tokens that only the configuration lists; whether there were any."""
    added = False
    listed = {token: {"content": token, "id": token_id} for token, token_id in config.get("added_tokens", {}).items()}
    for token_id, told in (config.get("added_tokens_decoder") or {}).items():
        listed[told["content"]] = {**told, "id": int(token_id)}
    for token in sorted(listed.values(), key=lambda token: token["id"]):
        if backend.token_to_id(token["content"]) is None:
            flags = {key: token[key] for key in ("lstrip", "rstrip", "normalized", "single_word") if key in token}
            added = True
            backend.add_tokens([AddedToken(token["content"], special=token.get("special", False), **flags)])
            if backend.token_to_id(token["content"]) != token["id"]:
                raise damaged(f"the token {token['content']!r} cannot have the id {token['id']}", file)
    return added


def _roles(source: Source, config: Mapping[str, Any], file: Path) -> dict[str, str]:
    backend, roles = source.backend, dict(source.roles)
    named = [role for role in ROLES if f"{role}_token" in config]
    for role in named:
        token = config[f"{role}_token"]
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and backend.token_to_id(token) is not None:
            roles[role] = token
        elif token is None:
            roles.pop(role, None)
        elif "qkv" in config:
            raise damaged(f"no token {token!r} for the role {role}", file.with_name(CONFIG_FILE))
    if not named and not roles:
        special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
        for role, usual in _USUAL_TOKENS.items():
            if found := [token for token in usual if token in special]:
                roles[role] = found[0]
    return roles


def _template(config: Mapping[str, Any], file: Path) -> str | None:
    """The chat template: a file of its own, or in the configuration, where several may have names."""
    own = file.with_name(TEMPLATE_FILE)
    if own.is_file():
        return read_text(own)
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


# --- reading ----------------------------------------------------------------------------------------------------------


def read_text(file: Path) -> str:
    """The text of a file beside a vocabulary, or of the vocabulary. Raises QkvError: not UTF-8, or absurdly large."""
    check_size(file)
    try:
        return file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise damaged("not UTF-8", f"{file}: byte {error.start}") from None


def read_json(file: Path) -> dict[str, Any]:
    """The mapping in a JSON file. Raises QkvError for one that is damaged, or no mapping."""
    return parse_json(read_text(file), file)


def parse_json(text: str, file: Path) -> dict[str, Any]:
    """As `read_json`, of the text that was read from `file`."""
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        raise damaged(error.msg, f"{file}:{error.lineno}") from None
    except RecursionError:
        raise damaged("nested too deeply", file) from None
    if not isinstance(tree, dict):
        raise QkvError("this JSON file is not a tokenizer", where=str(file), hint=SUPPORTED)
    return tree


def read_ids(file: Path) -> dict[str, int]:
    """A vocab.json: token -> id."""
    if not file.is_file():
        raise damaged(f"it needs a {file.name} beside it", file.parent)
    return checked_ids(read_json(file), file)


def checked_ids(ids: Any, file: Path) -> dict[str, int]:
    """Raises QkvError unless every token of a vocabulary has an id of its own."""
    if not isinstance(ids, dict) or not all(
        type(number) is int and 0 <= number < MAX_TOKENS for number in ids.values()
    ):
        raise damaged("it does not give each token an id", file)
    if len(set(ids.values())) < len(ids):
        raise damaged("it gives an id to two tokens", file)
    check_vocabulary(list(ids), file)
    return ids


def check_size(file: Path) -> None:
    """Raises QkvError for a file that nobody should hold in memory."""
    if file.stat().st_size > _LARGEST_FILE:
        raise damaged(f"it has {file.stat().st_size:,} bytes", file)
