"""What files become, on disk: they are read once, into a folder that later runs map into memory. Texts become ids:

    <key>/tokens.bin     all ids, document after document, uint16 or uint32 (the manifest's `dtype`), little-endian
    <key>/index.bin      int64 [D + 1]: where each document begins in tokens.bin, and the end of the last one
    <key>/hashes.bin     uint64 [D]: the content of each document, for the split into training and validation
    <key>/manifest.json  what the folder was made from; written last

Images and sound become what their encoder reads, as `qkv.data.media` says:

    <key>/values.bin     the array of each file, one after the other, little-endian
    <key>/sizes.bin      int64 [D]: how many vectors the encoder makes of it
    <key>/hashes.bin     uint64 [D]: the content of each file
    <key>/manifest.json

A folder appears by rename, whole or not at all; it is used only if its manifest fits the request and its files.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qkv.config.errors import QkvError, sizes_apart
from qkv.data.documents import Piece
from qkv.data.split import ContentHash
from qkv.tokenizer.text import existing_file, open_file

if TYPE_CHECKING:
    from qkv.tokenizer.tokenizer import Tokenizer

FORMAT_VERSION = 1

_BATCH_CHARACTERS = 1 << 19
_BYTES_PER_ID = 4  # of plain text; what a trained BPE reaches, so a low estimate of the space needed
_EXPANSION = 3  # of compressed text
_SETTLED_NS = 2_000_000_000  # a file changed more recently may change again within one tick of its clock
_ABANDONED_S = 3600


@dataclass(frozen=True)
class StoredFiles:
    """What one list of files became. `reused` says that it was on disk already."""

    folder: Path
    manifest: dict[str, Any]
    reused: bool

    @property
    def hashes(self) -> NDArray[np.uint64]:
        """Content of the documents, images or recordings [D]."""
        return map_file(self.folder / "hashes.bin", "uint64")


@dataclass(frozen=True)
class TokenFiles(StoredFiles):
    """One tokenised list of files."""

    @property
    def tokens(self) -> NDArray[np.unsignedinteger[Any]]:
        """All ids [N], mapped read-only."""
        return map_file(self.folder / "tokens.bin", self.manifest["dtype"])

    @property
    def offsets(self) -> NDArray[np.int64]:
        """Where documents begin, and the last one ends [D + 1]."""
        return map_file(self.folder / "index.bin", "int64")


def tokenise(
    files: Sequence[str],
    pieces: Iterable[Piece],
    options: Mapping[str, Any],
    tokenizer: Tokenizer,
    cache_dir: Path,
    start_ids: Sequence[int] = (),
) -> TokenFiles:
    """The ids of `pieces`, which are read from `files`: from the cache when it holds exactly these, else tokenised now.

    options: all that decides which pieces the same files become (plain JSON).

    A document is [begin] ids [end]: begin is BOS or else CLS, end is EOS or else SEP, each absent when the tokenizer
    has neither; `start_ids`, where there are any, stand in the place of begin. Ids are 16 bits wide up to a vocabulary
    of 65,536 and 32 bits above.

    A source file counts as unchanged when size and modification time are, or else its SHA-256.

    Raises what reading `pieces` raises, and QkvError for a full disk, an id outside the vocabulary, or a file that
    changes while it is read.
    """
    request = _request(options, tokenizer, start_ids)
    width = np.dtype(request["dtype"]).itemsize

    def sizes(manifest: dict[str, Any]) -> dict[str, int]:
        documents = manifest["documents"]
        return {
            "tokens.bin": manifest["tokens"] * width,
            "index.bin": (documents + 1) * 8,
            "hashes.bin": documents * 8,
        }

    def write(folder: Path) -> dict[str, Any]:
        return _write_ids(folder, pieces, tokenizer, request)

    return TokenFiles(*stored(files, request, cache_dir, sizes=sizes, write=write, needed=_bytes_of_ids(files, width)))


def stored(
    files: Sequence[str],
    request: dict[str, Any],
    cache_dir: Path,
    *,
    sizes: Callable[[dict[str, Any]], dict[str, int]],
    write: Callable[[Path], dict[str, Any]],
    needed: int,
) -> tuple[Path, dict[str, Any], bool]:
    """The folder of what `files` became, its manifest, and whether it was there already.

    request: all that decides what the same bytes become (plain JSON). write: makes the files in a folder, of about
    `needed` bytes, and says what is counted; sizes: how large they are by a manifest with these counts.
    """
    paths = [str(Path(file).absolute()) for file in files]
    key = hashlib.sha256(json.dumps([request, paths]).encode()).hexdigest()[:16]
    folder = cache_dir / key
    if manifest := _usable_manifest(folder, request, files, sizes):
        return folder, manifest, True

    before = list(map(_stat, files))
    sources = list(map(_describe, files))
    cache_dir.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(cache_dir)
    _check_space(cache_dir, needed)
    partial = Path(tempfile.mkdtemp(prefix=f".{key}-", suffix=".partial", dir=cache_dir))
    try:
        counts = write(partial)
        if changed := [file for file, stat in zip(files, before, strict=True) if _stat(file) != stat]:
            raise QkvError("the file changed while it was being read", where=changed[0], hint="run it again")
        manifest = {**request, **counts, "files": sources}
        write_file(partial / "manifest.json", json.dumps(manifest, indent=1).encode())
        _publish(partial, folder)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise QkvError("the disk is full", where=str(cache_dir), hint="free some space; nothing was kept") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder, manifest, False


def _request(options: Mapping[str, Any], tokenizer: Tokenizer, start_ids: Sequence[int]) -> dict[str, Any]:
    """All that decides which ids the same bytes become."""
    return {
        "format_version": FORMAT_VERSION,
        "options": dict(options),
        "tokenizer": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "begin_id": list(start_ids) or begin_id(tokenizer),
        "end_id": end_id(tokenizer),
        "dtype": "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32",
    }


def begin_id(tokenizer: Tokenizer) -> int | None:
    """What begins a text: BOS, or else CLS."""
    return tokenizer.cls_id if tokenizer.bos_id is None else tokenizer.bos_id


def end_id(tokenizer: Tokenizer) -> int | None:
    """What ends a text: EOS, or else SEP."""
    return tokenizer.sep_id if tokenizer.eos_id is None else tokenizer.eos_id


def ends_of(manifest: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """The ids before and after every document."""
    begin, end = manifest["begin_id"], manifest["end_id"]
    return begin if isinstance(begin, list) else [] if begin is None else [begin], [] if end is None else [end]


# --- writing ----------------------------------------------------------------------------------------------------------


def _write_ids(folder: Path, pieces: Iterable[Piece], tokenizer: Tokenizer, request: dict[str, Any]) -> dict[str, Any]:
    begin, end = ends_of(request)
    offsets, hashes, content = array("q", [0]), array("Q"), ContentHash()
    total, inside = 0, False
    with (folder / "tokens.bin").open("wb") as file:
        for batch in _batches(pieces):
            ids: list[int] = []
            for piece, piece_ids in zip(batch, tokenizer.encode_batch([piece.text for piece in batch]), strict=True):
                content.update(piece.text)
                ids += piece_ids if inside else begin + piece_ids
                inside = not piece.ends
                if piece.ends:
                    ids += end
                    offsets.append(total + len(ids))
                    hashes.append(content.value())
                    content = ContentHash()
            file.write(_as_bytes(ids, request))
            total += len(ids)
        flush(file)
    write_file(folder / "index.bin", np.array(offsets, "<i8").tobytes())
    write_file(folder / "hashes.bin", np.array(hashes, "<u8").tobytes())
    return {"documents": len(hashes), "tokens": total}


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch, characters = [], 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _as_bytes(ids: list[int], request: dict[str, Any]) -> bytes:
    wide = np.array(ids, np.int64)
    if wide.size and not 0 <= wide.min() <= wide.max() < request["vocab_size"]:
        wrong = wide.max() if wide.max() >= request["vocab_size"] else wide.min()
        raise QkvError(f"the tokenizer gave the id {wrong}, its vocabulary has {request['vocab_size']}")
    return wide.astype(np.dtype(request["dtype"]).newbyteorder("<")).tobytes()


def write_file(path: Path, content: bytes) -> None:
    """A file that has reached the disk."""
    with path.open("wb") as file:
        file.write(content)
        flush(file)


def flush(file: IO[bytes]) -> None:
    """What was written reaches the disk."""
    file.flush()
    os.fsync(file.fileno())


def _publish(partial: Path, folder: Path) -> None:
    """Rename into place. A process that made the same folder meanwhile is replaced, by the same content."""
    replaced = partial.with_name(f"{partial.stem}-replaced.partial")
    for _ in range(3):
        with suppress(FileNotFoundError):
            folder.rename(replaced)
        try:
            partial.rename(folder)
            break
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        finally:
            shutil.rmtree(replaced, ignore_errors=True)


def _remove_abandoned(cache_dir: Path) -> None:
    """What killed processes left; a live one has written within the hour."""
    for folder in cache_dir.glob(".????????????????-*.partial"):
        with suppress(OSError):
            if time.time() - max(entry.stat().st_mtime for entry in (folder, *folder.iterdir())) > _ABANDONED_S:
                shutil.rmtree(folder)


def _bytes_of_ids(files: Sequence[str], width: int) -> int:
    """About how many bytes the ids of these files take."""
    sizes = [_stat(file)[0] * (_EXPANSION if file.endswith((".gz", ".xz")) else 1) for file in files]
    return sum(sizes) // _BYTES_PER_ID * width


def _check_space(cache_dir: Path, needed: int) -> None:
    free = shutil.disk_usage(cache_dir).free
    if needed > free:
        wanted, there = sizes_apart(needed, free)
        raise QkvError(f"about {wanted} are needed for the data, {there} are free", where=str(cache_dir))


# --- reading ----------------------------------------------------------------------------------------------------------


def _usable_manifest(
    folder: Path,
    request: dict[str, Any],
    files: Sequence[str],
    sizes: Callable[[dict[str, Any]], dict[str, int]],
) -> dict[str, Any] | None:
    """The manifest of a complete folder made from the same request and the same bytes."""
    try:
        manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        whole = all((folder / name).stat().st_size == size for name, size in sizes(manifest).items())
        same = all(manifest[key] == value for key, value in request.items())
        if whole and same and all(map(_unchanged, files, manifest["files"])):
            return manifest
    except (OSError, ValueError, KeyError, TypeError):  # absent, incomplete or damaged: made anew
        pass
    return None


def _describe(file: str) -> dict[str, Any]:
    size, modified = _stat(file)
    with open_file(Path(file), decompress=False) as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    settled = time.time_ns() - modified > _SETTLED_NS
    return {"path": file, "size": size, "mtime_ns": modified if settled else None, "sha256": digest}


def _unchanged(file: str, source: dict[str, Any]) -> bool:
    size, modified = _stat(file)
    if size != source["size"]:
        return False
    return modified == source["mtime_ns"] or bool(_describe(file)["sha256"] == source["sha256"])


def _stat(file: str) -> tuple[int, int]:
    status = existing_file(Path(file)).stat()
    return status.st_size, status.st_mtime_ns


def map_file(path: Path, dtype: str) -> NDArray[Any]:
    """The numbers in a file, mapped read-only."""
    little_endian = np.dtype(dtype).newbyteorder("<")
    if path.stat().st_size == 0:  # cannot be mapped
        return np.empty(0, little_endian)
    return np.asarray(np.memmap(path, little_endian, mode="r"))  # slices of np.memmap are ten times slower to take
