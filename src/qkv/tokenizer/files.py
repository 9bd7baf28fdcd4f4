"""Tokenizer files: which there are, what they say, and our own folder.

Our folder is `tokenizer.json` (the format of the `tokenizers` library) and `tokenizer_config.json` beside it. The
second says what the special tokens are for, in Hugging Face's spelling, so that `transformers` reads our folders and we
read theirs; our own additions stand under its key `qkv`. Other people's files become the same on reading.
"""

from __future__ import annotations

import base64
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from qkv.config.errors import NotFoundError, QkvError, UsageError
from qkv.tokenizer import gguf, llama2c, sentencepiece, tiktoken
from qkv.tokenizer.backends import (
    MAX_TOKENS,
    Source,
    add_tokens,
    byte_level,
    check_charsmap,
    check_vocabulary,
    damaged,
    put_around,
    unsupported,
    wordpiece,
)
from qkv.tokenizer.splits import Split

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
ROLES = ("pad", "bos", "eos", "unk", "mask", "cls", "sep")
"""What a special token can be for."""

_OTHER_CONFIG_FILES = ("special_tokens_map.json", "added_tokens.json")
_IN_FOLDERS = (
    TOKENIZER_FILE,
    f"tokenizer/{TOKENIZER_FILE}",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "source.spm",
    "*.tiktoken",
    "vocab.txt",
    "merges.txt",
    "tokenizer.bin",
)
_FORMAT_VERSION = 1
_LARGEST_FILE = 1 << 28  # bytes; those in use have some ten million
_SUPPORTED = (
    f"a folder with {TOKENIZER_FILE}, or such a file (ours or Hugging Face's); a .gguf, .tiktoken or SentencePiece "
    ".model file, Marian's source.spm or GPT-2's merges.txt beside a vocab.json, BERT's vocab.txt, llama2.c's "
    "tokenizer.bin"
)
_OWNERS = {"bart": "Bart", "gpt2": "GPT2", "mbart": "MBart", "roberta": "Roberta", "xlm-roberta": "XLMRoberta"}
"""`model_type` of a config.json -> whose tokenizer comes with such a model."""
_KINDS = {"BPE": "bpe", "Unigram": "unigram", "WordPiece": "wordpiece", "WordLevel": "word"}
_USUAL_TOKENS = {
    "pad": ("<pad>", "[PAD]", "<|pad|>"),
    "bos": ("<bos>", "<s>", "[BOS]", "<|begin_of_text|>", "<|startoftext|>", "<|endoftext|>"),
    "eos": ("<eos>", "</s>", "[EOS]", "<|endoftext|>", "<|end_of_text|>"),
    "unk": ("<unk>", "[UNK]"),
    "mask": ("<mask>", "[MASK]"),
    "cls": ("[CLS]",),
    "sep": ("[SEP]",),
}
_GPT2_ROLES = dict.fromkeys(("bos", "eos", "unk"), "<|endoftext|>")
_ROBERTA_ROLES = sentencepiece.FAIRSEQ_ROLES


def read(path: str | os.PathLike[str], encoding: str | None = None) -> Source:
    """The tokenizer in a folder or file. `encoding` names that of a tiktoken file which is not a known one.

    Raises NotFoundError, UsageError, and QkvError that tells "not supported" from "damaged".
    """
    file = _find(Path(path))
    try:
        reader = _reader(file)
        if reader is tiktoken.read:
            return _as_configured(tiktoken.read(file, encoding), file)
        if encoding is not None:
            raise UsageError("only tiktoken files need to be told their encoding", where=str(file))
        return reader(file)
    except OSError as error:
        raise QkvError(f"the tokenizer file cannot be read: {error.strerror}", where=str(file)) from None


def _find(path: Path) -> Path:
    if not path.exists():
        raise NotFoundError("there is no such tokenizer", where=str(path), hint=_SUPPORTED)
    if not path.is_dir():
        return path
    for name in _IN_FOLDERS:
        if found := sorted(file for file in path.glob(name) if file.is_file()):
            return found[0]
    raise NotFoundError(f"there is no {TOKENIZER_FILE} in this folder", where=str(path), hint=_SUPPORTED)


def _reader(file: Path) -> Callable[..., Source]:
    with file.open("rb") as opened:
        head = opened.read(4096)
    if file.suffix in (".model", ".tiktoken") and tiktoken.is_rank_file(head):
        return tiktoken.read
    if file.suffix not in _READERS:
        name = file.suffix or file.name
        raise QkvError(f"{name} files are not supported as tokenizers", where=str(file), hint=_SUPPORTED)
    if file.suffix != ".gguf":  # which holds a model too
        _check_size(file)
    return _READERS[file.suffix]


def _check_size(file: Path) -> None:
    if file.stat().st_size > _LARGEST_FILE:
        raise damaged(f"it has {file.stat().st_size:,} bytes", file)


# --- tokenizer.json ---------------------------------------------------------------------------------------------------


def _read_json(file: Path) -> Source:
    text = _text(file)
    tree = _json(text, file)
    if not isinstance(tree.get("model"), dict):
        raise QkvError("this JSON file is not a tokenizer", where=str(file), hint=_SUPPORTED)
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
    config = _config(file)
    ours = config.get("qkv")
    if isinstance(ours, dict) and ours.get("format_version") != _FORMAT_VERSION:
        raise QkvError(
            f"tokenizer format {ours.get('format_version')} is not supported, only {_FORMAT_VERSION}",
            where=str(file.with_name(CONFIG_FILE)),
        )
    kind = ours.get("kind") if isinstance(ours, dict) else None
    source = _as_configured(Source(backend, kind if isinstance(kind, str) else _kind(tree), text=text), file)
    return source if not isinstance(ours, dict) or "ids" not in ours else _with_ids(source, ours["ids"], file)


def _with_ids(source: Source, ids: Any, file: Path) -> Source:
    """The tokenizer with the ids that our own addition gives its pieces."""
    beside = file.with_name(CONFIG_FILE)
    ids = _checked_ids(ids, beside)
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


# --- SentencePiece and BERT -------------------------------------------------------------------------------------------


def _read_sentencepiece(file: Path) -> Source:
    """A `.model`; its folder says whose it is, and with that what stands around a text (on its own: <s> before)."""
    if file.name == "sentencepiece.bpe.model":
        return _read_fairseq(file)
    source = sentencepiece.read(file)
    config = _config(file)
    owner = _class(config)
    if owner not in ("", "Llama", "CodeLlama", "Gemma", "T5"):
        raise _only_transformers(file, owner)
    if owner == "T5":
        count = config.get("extra_ids", 100)
        if not isinstance(count, int) or not 0 <= count <= 1000:
            raise damaged(f"extra_ids is {count!r}", file.with_name(CONFIG_FILE))
        extra = [AddedToken(f"<extra_id_{n}>", special=True, normalized=False) for n in reversed(range(count))]
        source.backend.add_tokens(extra)
    usual = {"eos": True} if owner == "T5" else {"bos": True}
    return _as_configured(source, file, usual)


def _read_fairseq(file: Path) -> Source:
    """The `.model` of XLM-R (around a text: <s> and </s>) or mBART (after it: </s> and the language, src_lang)."""
    owner = _owner(file) or "XLMRoberta"
    if owner not in ("XLMRoberta", "MBart"):
        raise _only_transformers(file, owner)
    if owner == "XLMRoberta":
        source = sentencepiece.read_fairseq(file)
        put_around(source.backend, ["<s>"], ["</s>"])
        return _as_configured(source, file)
    source = sentencepiece.read_fairseq(file, sentencepiece.MBART_LANGUAGES)
    language = _config(file).get("src_lang") or "en_XX"
    if language not in sentencepiece.MBART_LANGUAGES:
        raise unsupported(
            f"the language {language!r:.80}", file.with_name(CONFIG_FILE), ", ".join(sentencepiece.MBART_LANGUAGES)
        )
    put_around(source.backend, [], ["</s>", language])
    return _as_configured(source, file)


def _read_marian(file: Path) -> Source:
    """One side's `.spm` of a Marian folder: its pieces have the ids that vocab.json gives them (target_vocab.json, if
    the translations have their own), what is in none is unknown; after a text stands </s>.

    The punctuation of a text stays as it is; `transformers` first has it normalised, where sacremoses is installed.
    """
    own = file.with_name("target_vocab.json")
    ids = _read_ids(own if file.name == "target.spm" and own.is_file() else file.with_name("vocab.json"))
    source = sentencepiece.read(file)
    roles = {role: token for role, token in (("pad", "<pad>"), ("eos", "</s>"), ("unk", "<unk>")) if token in ids}
    if not {"eos", "unk"} <= roles.keys():
        raise damaged("its vocabulary has no </s>, or no <unk>", file.with_name("vocab.json"))
    source.backend.add_special_tokens([AddedToken(token, normalized=False) for token in roles.values()])
    languages = [token for token in ids if re.fullmatch(">>.+<<", token)]
    source.backend.add_tokens([AddedToken(token, normalized=False) for token in languages])
    put_around(source.backend, [], ["</s>"])
    return replace(source, roles=roles, ids=ids)


def _read_ids(file: Path) -> dict[str, int]:
    """A vocab.json: token -> id."""
    if not file.is_file():
        raise damaged(f"it needs a {file.name} beside it", file.parent)
    return _checked_ids(_json(_text(file), file), file)


def _checked_ids(ids: Any, file: Path) -> dict[str, int]:
    """Raises QkvError unless every token of a vocabulary has an id of its own."""
    if not isinstance(ids, dict) or not all(
        type(number) is int and 0 <= number < MAX_TOKENS for number in ids.values()
    ):
        raise damaged("it does not give each token an id", file)
    if len(set(ids.values())) < len(ids):
        raise damaged("it gives an id to two tokens", file)
    check_vocabulary(list(ids), file)
    return ids


def _read_merges(file: Path) -> Source:
    """The merges.txt and vocab.json of GPT-2, and of RoBERTa and BART.

    The latter put <s> and </s> around a text, and their mask takes the space before it, as they were trained.
    """
    vocab = _read_ids(file.with_name("vocab.json"))
    owner = _owner(file) or ("Roberta" if "<s>" in vocab else "GPT2")
    if owner not in ("GPT2", "Roberta", "Bart"):
        raise _only_transformers(file, owner)
    lines = _text(file).removesuffix("\n").split("\n")
    merges = [line.removesuffix("\r").split(" ") for line in lines[lines[0].startswith("#version") :]]
    if wrong := [merge for merge in merges if len(merge) != 2]:
        raise damaged(f"{' '.join(wrong[0])!r:.80} is no pair of tokens", file)
    split = Split(prefix_space=_config(file).get("add_prefix_space") is True)
    backend = byte_level(vocab, [(left, right) for left, right in merges], split, file)
    usual = _GPT2_ROLES if owner == "GPT2" else _ROBERTA_ROLES
    roles = {role: token for role, token in usual.items() if token in vocab}
    add_tokens(backend, {token: vocab[token] for role, token in roles.items() if role != "mask"}, file, special=True)
    if "mask" in roles:
        backend.add_tokens([AddedToken(roles["mask"], special=True, normalized=False, lstrip=True)])
    if owner != "GPT2":
        if not {"cls", "sep"} <= roles.keys():
            raise damaged("its vocabulary has no <s>, or no </s>", file.with_name("vocab.json"))
        put_around(backend, [roles["cls"]], [roles["sep"]])
    return _as_configured(Source(backend, "bpe", roles), file)


def _read_vocab_txt(file: Path) -> Source:
    """BERT's vocabulary, a piece on each line. Without a word on it, text is lower-cased if no piece has a capital."""
    tokens = [line.removesuffix("\r") for line in _text(file).removesuffix("\n").split("\n")]
    check_vocabulary(tokens, file)
    config = _config(file)
    if _class(config) not in ("", "Bert", "DistilBert", "Electra"):
        raise unsupported(f"vocab.txt of a {_class(config)} tokenizer", file)
    words = [token for token in tokens if not token.startswith("[")]
    strip_accents = config.get("strip_accents")
    if strip_accents not in (None, True, False):
        raise damaged(f"strip_accents is {strip_accents!r}", file.with_name(CONFIG_FILE))
    source = Source(
        wordpiece(
            {token: place for place, token in enumerate(tokens)},
            "[UNK]",
            lowercase=bool(config.get("do_lower_case", all(word == word.lower() for word in words))),
            strip_accents=strip_accents,
            chinese=bool(config.get("tokenize_chinese_chars", True)),
            where=file,
        ),
        "wordpiece",
        {role: f"[{role.upper()}]" for role in ("pad", "unk", "cls", "sep", "mask") if f"[{role.upper()}]" in tokens},
    )
    source.backend.add_special_tokens(sorted(source.roles.values(), key=tokens.index))
    put_around(source.backend, *([source.roles[role]] if role in source.roles else [] for role in ("cls", "sep")))
    return _as_configured(source, file)


def _class(config: Mapping[str, Any]) -> str:
    """Whose tokenizer a folder says it holds: "Llama" for LlamaTokenizerFast; empty where it does not say."""
    return str(config.get("tokenizer_class") or "").removesuffix("Fast").removesuffix("Tokenizer")


def _owner(file: Path) -> str:
    """As `_class`, where config.json beside the file may say it too: its model's type, if that is not known here."""
    beside = file.with_name("config.json")
    kind = _json(_text(beside), beside).get("model_type") if beside.is_file() else None
    return _class(_config(file)) or (_OWNERS.get(kind, kind) if isinstance(kind, str) else "")


def _only_transformers(file: Path, owner: str) -> QkvError:
    return unsupported(
        f"the {file.name} of a {owner} tokenizer", file, f"{TOKENIZER_FILE}, which `transformers` makes of it"
    )


def _read_txt(file: Path) -> Source:
    return _read_merges(file) if file.name == "merges.txt" else _read_vocab_txt(file)


_READERS: dict[str, Callable[[Path], Source]] = {
    ".json": _read_json,
    ".gguf": gguf.read,
    ".model": _read_sentencepiece,
    ".spm": _read_marian,
    ".txt": _read_txt,
    ".bin": llama2c.read,
}


# --- what stands beside the vocabulary --------------------------------------------------------------------------------


def _config(file: Path) -> dict[str, Any]:
    """tokenizer_config.json beside a tokenizer, with what older folders say in files of their own."""
    config: dict[str, Any] = {}
    for name in (*_OTHER_CONFIG_FILES, CONFIG_FILE):
        beside = file.with_name(name)
        if beside.is_file():
            told = _json(_text(beside), beside)
            config |= {"added_tokens": told} if name == "added_tokens.json" else told
    return config


def _as_configured(source: Source, file: Path, usual: Mapping[str, bool] | None = None) -> Source:
    """The tokenizer as the files beside it complete it.

    They add tokens, name roles and bring a chat template. What stands around a text is what `tokenizer.json` says;
    where that is nothing, add_bos_token and add_eos_token say it, or else `usual` (role -> whether).
    """
    config, backend = _config(file), source.backend
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
        return _text(own)
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _text(file: Path) -> str:
    _check_size(file)
    try:
        return file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise damaged("not UTF-8", f"{file}: byte {error.start}") from None


def _json(text: str, file: Path) -> dict[str, Any]:
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        raise damaged(error.msg, f"{file}:{error.lineno}") from None
    except RecursionError:
        raise damaged("nested too deeply", file) from None
    if not isinstance(tree, dict):
        raise QkvError("this JSON file is not a tokenizer", where=str(file), hint=_SUPPORTED)
    return tree


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
