"""Files whose lines are records: pairs of texts, texts with a label, and files with either. Lines end at "\\n" only.

A record keeps its place: a column of a file has one text per record, blank ones included.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from qkv.config.data import DataConfig, LabelledDataConfig, MediaDataConfig, ParallelDataConfig, Side, SideFiles
from qkv.config.errors import NotFoundError, QkvError, nearest
from qkv.config.objectives import spelled_label
from qkv.data.documents import PIECE_CHARACTERS, Piece, json_record, lines_of, valid_text
from qkv.tokenizer.text import BadBytes, chunks, normalize, read_blocks

Part = Literal["train", "validation"]
_ARCHIVES = (".gz", ".xz")


class Record(NamedTuple):
    """One record of a file, and where it is (file:line)."""

    fields: Mapping[str, object]
    where: str


class MediaRecord(NamedTuple):
    """An image or sound file, its text or label, and where that is told: in a line of `origin`, or by its folder."""

    file: str
    text: str
    where: str
    origin: str


def files_of(data: DataConfig, part: Part, side: Side | None = None) -> tuple[str, ...]:
    """The files of one part of the data: all of them, or those that hold `side` of parallel data."""
    files = getattr(data, part)
    if isinstance(files, float):
        return ()
    if not isinstance(files, SideFiles):
        return tuple(files)
    if side is None:
        return files.source + files.target
    return getattr(files, _side_in_files(data, side))  # type: ignore[no-any-return]


def read_side(data: ParallelDataConfig, part: Part, side: Side) -> Iterator[Piece]:
    """One side of all pairs, one document per pair. Raises QkvError for a line that is no pair (file:line); that files
    read side by side have equally many is for `check_sides` to say."""
    files = getattr(data, part)
    if isinstance(files, SideFiles):
        return pieces(line for file in files_of(data, part, side) for line in lines_of(Path(file), data.bad_bytes))
    key = data.source_key if _side_in_files(data, side) == "source" else data.target_key
    return pieces(_text(record, key, data) for file in files for record in _pair_records(Path(file), data))


def check_sides(data: ParallelDataConfig, part: Part) -> None:
    """Raise QkvError for two files, read side by side, that differ in lines: these belong together by their number
    alone, so one more or less would shift all pairs after it."""
    files = getattr(data, part)
    if not isinstance(files, SideFiles):
        return
    for source, target in zip(files.source, files.target, strict=True):
        counts = [count_lines(Path(file), data.bad_bytes) for file in (source, target)]
        if counts[0] != counts[1]:
            raise QkvError(
                f"{source} has {counts[0]:,} lines and {target} has {counts[1]:,}: they do not belong together",
                where=source if counts[0] > counts[1] else target,
                hint='files with one line per pair; only "\\n" ends a line',
            )


def read_texts(data: LabelledDataConfig, part: Part) -> Iterator[Piece]:
    """The texts of labelled data, one document per record. Raises QkvError for a record without one (file:line)."""
    records = (record for file in files_of(data, part) for record in _labelled_records(Path(file), data))
    return pieces(_text(record, data.text_key, data) for record in records)


def read_labels(data: LabelledDataConfig, part: Part) -> Iterator[tuple[str, str]]:
    """(label, where) of each record. Raises QkvError for a record without a label (file:line)."""
    for file in files_of(data, part):
        for record in _labelled_records(Path(file), data):
            yield _label(record, data.label_key), record.where


def read_media(data: MediaDataConfig, part: Part, *, labelled: bool) -> Iterator[MediaRecord]:
    """Every file with its label, or with its text, a blank one being "". Raises QkvError for a record without them
    (file:line), NotFoundError for a file that is not there."""
    for place in files_of(data, part):
        folder = Path(place)
        yield from _folder_records(folder) if folder.is_dir() else _table_records(folder, data, labelled)


def _folder_records(folder: Path) -> Iterator[MediaRecord]:
    """The files of the folders in `folder`, in the order of their names; hidden ones are no data."""
    found = False
    for inner in sorted(folder.iterdir()):
        if inner.name.startswith(".") or not inner.is_dir():
            continue
        for file in sorted(inner.iterdir()):
            if not file.name.startswith("."):
                found = True
                yield MediaRecord(str(file), normalize(inner.name), str(file), str(file))
    if not found:
        raise QkvError(
            "the folder holds no folders with files in them",
            where=str(folder),
            hint="a folder for each text or label, called like it, or a table of the files",
        )


def _table_records(path: Path, data: MediaDataConfig, labelled: bool) -> Iterator[MediaRecord]:
    option, key = ("label_key", data.label_key) if labelled else ("text_key", data.text_key)
    for record in _records(path, data, {"file_key": data.file_key, option: key}):
        name = record.fields[data.file_key]
        if not isinstance(name, str) or not name:
            raise QkvError(f"`{data.file_key}` is no name of a file", where=record.where)
        file = path.parent / name
        if not _is_file(file):
            raise NotFoundError(f"there is no file {file}", where=record.where)
        text = _label(record, key) if labelled else normalize(_text(record, key, data))
        yield MediaRecord(str(file), text if text.strip() else "", record.where, str(path))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long for one
        return False


def _label(record: Record, key: str) -> str:
    label = spelled_label(record.fields[key])
    if not isinstance(label, str):
        raise QkvError(f"`{key}` is not a word but {type(label).__name__}", where=record.where)
    if not label.strip():
        raise QkvError(f"`{key}` is empty: every record has a label", where=record.where)
    return label.strip()


def _side_in_files(data: DataConfig, side: Side) -> Side:
    """What a side of the pairs is called in the files."""
    if isinstance(data, ParallelDataConfig) and data.reverse:
        return "target" if side == "source" else "source"
    return side


def count_lines(path: Path, bad_bytes: BadBytes = "replace") -> int:
    """How many lines `lines_of` gives."""
    count, last = 0, "\n"
    for block in read_blocks(path, bad_bytes, option="data.bad_bytes"):
        count += block.count("\n")
        last = block or last
    return count + (not last.endswith("\n"))


def pieces(texts: Iterable[str]) -> Iterator[Piece]:
    """One document per text, as a model sees it alone; a text of spaces only is an empty one."""
    for text in map(normalize, texts):
        *begin, end = chunks([text], PIECE_CHARACTERS) if text.strip() else [""]
        yield from (Piece(part, False) for part in begin)
        yield Piece(end, True)


def _text(record: Record, key: str, data: DataConfig) -> str:
    text = record.fields[key]
    if not isinstance(text, str):
        raise QkvError(f"`{key}` is not a string but {type(text).__name__}", where=record.where)
    return valid_text(text, key, data.bad_bytes, record.where)


def _pair_records(path: Path, data: ParallelDataConfig) -> Iterator[Record]:
    keys = {"source_key": data.source_key, "target_key": data.target_key}
    if _suffix(path) == ".jsonl":
        yield from _json_records(path, data, keys)
        return
    for number, line in enumerate(lines_of(path, data.bad_bytes), 1):
        if line.strip():
            fields = line.split("\t")
            if len(fields) != 2:
                raise QkvError(
                    f"a pair is source, tab, target: this line has {len(fields) - 1} tabs",
                    where=f"{path}:{number}",
                    hint="two columns, or {source: [FILE], target: [FILE]} for files that are read side by side",
                )
            yield Record(dict(zip(keys.values(), fields, strict=True)), f"{path}:{number}")


def _labelled_records(path: Path, data: LabelledDataConfig) -> Iterator[Record]:
    return _records(path, data, {"text_key": data.text_key, "label_key": data.label_key})


def _records(path: Path, data: DataConfig, keys: Mapping[str, str]) -> Iterator[Record]:
    """The lines of a table, whichever kind of file it is."""
    reader = {".jsonl": _json_records, ".csv": _csv_records}.get(_suffix(path), _tsv_records)
    return reader(path, data, keys)


def _json_records(path: Path, data: DataConfig, keys: Mapping[str, str]) -> Iterator[Record]:
    for number, line in enumerate(lines_of(path, data.bad_bytes), 1):
        if line.strip():
            where = f"{path}:{number}"
            yield Record(json_record(line, {f"data.{option}": key for option, key in keys.items()}, where), where)


def _tsv_records(path: Path, data: DataConfig, keys: Mapping[str, str]) -> Iterator[Record]:
    rows = ((line.split("\t"), number) for number, line in enumerate(lines_of(path, data.bad_bytes), 1) if line.strip())
    yield from _table(path, rows, keys)


def _csv_records(path: Path, data: DataConfig, keys: Mapping[str, str]) -> Iterator[Record]:
    reader = csv.reader((f"{line}\n" for line in lines_of(path, data.bad_bytes)), strict=True)
    try:
        yield from _table(path, ((row, reader.line_num) for row in reader if row), keys)
    except csv.Error as error:
        raise QkvError(f"the line is not CSV: {error}", where=f"{path}:{reader.line_num}") from error


def _table(path: Path, rows: Iterator[tuple[Sequence[str], int]], keys: Mapping[str, str]) -> Iterator[Record]:
    """Rows under their header, at least one."""
    header, first = next(rows, ((), 0))
    if not header:
        raise QkvError("the file is empty", where=str(path), hint="a first line that names the columns, and records")
    names = [name.strip() for name in header]
    for option, key in keys.items():
        if key not in names:
            raise QkvError(
                f"the header has no column `{key}`",
                where=f"{path}:{first}",
                hint=f"data.{option}={nearest(key, names) or 'NAME'}, or a first line that names the columns",
            )
        if names.count(key) > 1:
            raise QkvError(f"the header names several columns `{key}`", where=f"{path}:{first}")
    number = first
    for row, number in rows:
        if len(row) != len(names):
            raise QkvError(
                f"the header names {len(names)} columns, and this record has {len(row)}", where=f"{path}:{number}"
            )
        yield Record(dict(zip(names, row, strict=True)), f"{path}:{number}")
    if number == first:
        raise QkvError("the table holds no example: nothing follows its header", where=f"{path}:{first}")


def _suffix(path: Path) -> str:
    """The kind of file, whatever it is packed in."""
    return Path(path.stem).suffix if path.suffix in _ARCHIVES else path.suffix
