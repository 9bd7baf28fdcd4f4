"""Text is tokenised once, into files that are whole, current and wide enough, or not used."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from qkv.config.errors import ConfigError, NotFoundError, QkvError
from qkv.config.run import Config
from qkv.data import cache as module
from qkv.data import documents, prepare


def settle(path: Path) -> None:
    """Make a file older than the time within which its modification time is not trusted."""
    past = time.time_ns() - 60_000_000_000
    os.utime(path, ns=(past, past))


class Corpus(NamedTuple):
    path: Path
    config: Config
    cache: Path


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n", encoding="utf-8")
    settle(path)
    data = {"train": str(path), "split": "lines", "validation": 0}
    return Corpus(path, Config.model_validate({"model": {}, "data": data}), tmp_path / "cache")


def test_documents_stand_between_bos_and_eos(corpus: Corpus, make_tokenizer: Any) -> None:
    prepared = prepare(corpus.config, make_tokenizer(bos_id=258, cls_id=259), corpus.cache)
    assert prepared.train.tokens.tolist() == [258, *b"one", 256, 258, *b"two", 256]
    assert prepared.train.document(1).tolist() == [258, *b"two", 256]
    assert prepared.train.num_tokens == 10


def test_cls_and_sep_stand_in_for_bos_and_eos(corpus: Corpus, make_tokenizer: Any) -> None:
    prepared = prepare(corpus.config, make_tokenizer(eos_id=None, cls_id=258, sep_id=259), corpus.cache)
    assert prepared.train.document(0).tolist() == [258, *b"one", 259]
    prepared = prepare(corpus.config, make_tokenizer(eos_id=None), corpus.cache)
    assert prepared.train.document(0).tolist() == [*b"one"]


def test_a_document_in_pieces_is_one_document(
    corpus: Corpus, make_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = prepare(corpus.config, make_tokenizer(bos_id=258), corpus.cache / "whole")
    monkeypatch.setattr(documents, "PIECE_CHARACTERS", 2)
    monkeypatch.setattr(module, "_BATCH_CHARACTERS", 1)
    pieces = prepare(corpus.config, make_tokenizer(bos_id=258), corpus.cache / "pieces")
    assert pieces.train.tokens.tolist() == whole.train.tokens.tolist()
    assert pieces.files[0].hashes.tolist() == whole.files[0].hashes.tolist()


@pytest.mark.parametrize(("vocab_size", "bits"), [(65_536, 16), (65_537, 32)])
def test_ids_are_as_wide_as_the_largest_needs(corpus: Corpus, make_tokenizer: Any, vocab_size: int, bits: int) -> None:
    prepared = prepare(corpus.config, make_tokenizer(vocab_size=vocab_size, eos_id=vocab_size - 1), corpus.cache)
    assert prepared.id_bits == bits
    assert prepared.files[0].manifest["dtype"] == f"uint{bits}"
    assert prepared.train.document(0).tolist() == [*b"one", vocab_size - 1]


@pytest.mark.parametrize("wrong", [260, -1, 1 << 40])
def test_an_id_outside_the_vocabulary_is_an_error(corpus: Corpus, make_tokenizer: Any, wrong: int) -> None:
    with pytest.raises(QkvError, match=f"id {wrong}, its vocabulary has 260"):
        prepare(corpus.config, make_tokenizer(eos_id=wrong), corpus.cache)


def test_the_manifest_says_what_the_ids_were_made_from(corpus: Corpus, tokenizer: Any) -> None:
    prepared = prepare(corpus.config, tokenizer, corpus.cache)
    manifest = json.loads((prepared.files[0].folder / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["format_version"] == 1
    assert (manifest["documents"], manifest["tokens"]) == (2, 8)
    assert manifest["options"] == {"kind": "text", "split": "lines", "bad_bytes": "error"}
    assert manifest["tokenizer"] == tokenizer.fingerprint
    (source,) = manifest["files"]
    assert (source["path"], source["size"], len(source["sha256"])) == (str(corpus.path), 8, 64)


# --- reuse ------------------------------------------------------------------------------------------------------------


def test_a_matching_cache_is_used_again(corpus: Corpus, make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer()
    first = prepare(corpus.config, tokenizer, corpus.cache)
    again = prepare(corpus.config, tokenizer, corpus.cache)
    assert (first.reused, again.reused, tokenizer.calls) == (False, True, 1)
    assert isinstance(again.train.tokens.base, np.memmap)
    assert again.train.tokens.tolist() == first.train.tokens.tolist()
    assert again.fingerprint == first.fingerprint


def test_a_touched_file_is_not_tokenised_again(corpus: Corpus, tokenizer: Any) -> None:
    prepare(corpus.config, tokenizer, corpus.cache)
    os.utime(corpus.path)
    assert prepare(corpus.config, tokenizer, corpus.cache).reused


@pytest.mark.parametrize("settled", [True, False])
def test_a_changed_file_of_the_same_size_is_tokenised_again(corpus: Corpus, tokenizer: Any, settled: bool) -> None:
    """Also when the change falls into the same tick of the clock as the first reading."""
    if not settled:
        os.utime(corpus.path)
    before = corpus.path.stat().st_mtime_ns
    first = prepare(corpus.config, tokenizer, corpus.cache)
    corpus.path.write_text("one\nTWO\n", encoding="utf-8")
    if not settled:
        os.utime(corpus.path, ns=(before, before))
    second = prepare(corpus.config, tokenizer, corpus.cache)
    assert not second.reused
    assert second.train.document(1).tolist() == [*b"TWO", 256]
    assert first.train.document(1).tolist() == [*b"two", 256], "what is mapped stays as it was"
    assert second.fingerprint != first.fingerprint
    assert len(list(corpus.cache.iterdir())) == 1


@pytest.mark.parametrize(
    "change",
    [{"fingerprint": "other"}, {"vocab_size": 70_000}, {"eos_id": None}, {"bos_id": 259}],
    ids=lambda change: next(iter(change)),
)
def test_another_tokenizer_is_another_cache(corpus: Corpus, make_tokenizer: Any, change: dict[str, Any]) -> None:
    prepare(corpus.config, make_tokenizer(), corpus.cache)
    assert not prepare(corpus.config, make_tokenizer(**change), corpus.cache).reused
    assert prepare(corpus.config, make_tokenizer(), corpus.cache).reused


def test_another_option_is_another_cache(corpus: Corpus, tokenizer: Any) -> None:
    prepare(corpus.config, tokenizer, corpus.cache)
    data = corpus.config.data.model_dump() | {"split": "file"}
    other = prepare(Config.model_validate({"model": {}, "data": data}), tokenizer, corpus.cache)
    assert (other.reused, other.train.num_documents) == (False, 1)


@pytest.mark.parametrize("name", ["tokens.bin", "index.bin", "hashes.bin", "manifest.json"])
@pytest.mark.parametrize("harm", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-1])])
def test_a_damaged_cache_is_made_anew(corpus: Corpus, tokenizer: Any, name: str, harm: Callable[[Path], Any]) -> None:
    prepared = prepare(corpus.config, tokenizer, corpus.cache)
    harm(prepared.files[0].folder / name)
    again = prepare(corpus.config, tokenizer, corpus.cache)
    assert not again.reused
    assert again.train.document(1).tolist() == [*b"two", 256]


# --- interruptions ----------------------------------------------------------------------------------------------------


def test_a_killed_preparation_leaves_nothing_that_is_used(
    corpus: Corpus, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"""
    import os, sys
    sys.path.insert(0, {str(Path(__file__).parent)!r})
    from conftest import ByteTokenizer
    from qkv.config.run import Config
    from qkv.data import cache, prepare

    class Dying(ByteTokenizer):
        def encode_batch(self, texts):
            return super().encode_batch(texts) if not self.calls else os._exit(9)

    cache._BATCH_CHARACTERS = 1
    data = {{"train": {str(corpus.path)!r}, "split": "lines", "validation": 0}}
    prepare(Config.model_validate({{"model": {{}}, "data": data}}), Dying(), {str(corpus.cache)!r})
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False).returncode == 9
    (left,) = corpus.cache.iterdir()
    assert left.name.endswith(".partial")
    monkeypatch.setattr(module, "_ABANDONED_S", -1)
    prepared = prepare(corpus.config, tokenizer, corpus.cache)
    assert not prepared.reused
    assert prepared.train.num_documents == 2
    assert not left.exists(), "its space is given back once it is known to be abandoned"


def test_a_partial_folder_in_use_is_left_alone(corpus: Corpus, tokenizer: Any) -> None:
    key = prepare(corpus.config, tokenizer, corpus.cache).files[0].folder
    other = key.with_name(f".{key.name}-other.partial")
    key.rename(other)
    prepare(corpus.config, tokenizer, corpus.cache)
    assert other.exists()


def test_two_processes_at_once_agree(corpus: Corpus, make_tokenizer: Any) -> None:
    """The second finishes while the first is at work."""

    class Slow(make_tokenizer):  # type: ignore[misc]
        def encode_batch(self, texts: list[str]) -> list[list[int]]:
            prepare(corpus.config, make_tokenizer(), corpus.cache)
            return super().encode_batch(texts)  # type: ignore[no-any-return]

    prepared = prepare(corpus.config, Slow(), corpus.cache)
    assert prepared.train.document(1).tolist() == [*b"two", 256]
    assert len(list(corpus.cache.iterdir())) == 1


def test_a_file_that_changes_while_it_is_read_is_an_error(corpus: Corpus, make_tokenizer: Any) -> None:
    class Meddling(make_tokenizer):  # type: ignore[misc]
        def encode_batch(self, texts: list[str]) -> list[list[int]]:
            corpus.path.write_text("three\n", encoding="utf-8")
            return super().encode_batch(texts)  # type: ignore[no-any-return]

    with pytest.raises(QkvError, match="changed while") as caught:
        prepare(corpus.config, Meddling(), corpus.cache)
    assert caught.value.where == str(corpus.path)
    assert not list(corpus.cache.iterdir())


def test_free_space_is_checked_before_anything_is_written(
    corpus: Corpus, make_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = make_tokenizer()
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    with pytest.raises(QkvError, match="are needed for the data, 0 bytes are free"):
        prepare(corpus.config, tokenizer, corpus.cache)
    assert tokenizer.calls == 0


def test_a_full_disk_is_an_error_that_leaves_nothing(
    corpus: Corpus, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "flush", full)
    with pytest.raises(QkvError, match="the disk is full"):
        prepare(corpus.config, tokenizer, corpus.cache)
    assert not list(corpus.cache.iterdir())


# --- what there is to read --------------------------------------------------------------------------------------------


def test_nothing_to_train_on_is_an_error(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to train on"):
        prepare(Config.model_validate({"model": {}}), tokenizer, tmp_path)


def test_a_missing_file_leaves_no_cache(tokenizer: Any, tmp_path: Path) -> None:
    config = Config.model_validate({"model": {}, "data": {"train": str(tmp_path / "none.txt")}})
    with pytest.raises(NotFoundError):
        prepare(config, tokenizer, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_an_empty_file_gives_no_documents(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    config = Config.model_validate({"model": {}, "data": {"train": str(tmp_path / "a.txt")}})
    assert prepare(config, tokenizer, tmp_path / "cache").train.num_documents == 0


def test_reading_and_preparing_need_no_torch() -> None:
    script = "import sys, qkv.data.documents, qkv.data.prepare; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_one_line_of_50_megabytes_needs_little_memory(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"The same words again and again. " * (50_000_000 // 32))
    script = f"""
    import resource, sys
    sys.path.insert(0, {str(Path(__file__).parent)!r})
    from conftest import ByteTokenizer
    from qkv.config.run import Config
    from qkv.data import prepare

    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    data = {{"train": {str(tmp_path / "a.txt")!r}, "split": sys.argv[1], "validation": 0}}
    config, before = Config.model_validate({{"model": {{}}, "data": data}}), peak()
    prepared = prepare(config, ByteTokenizer(), {str(tmp_path / "cache")!r})
    assert prepared.train.num_tokens == 50_000_001 - 50_000_000 % 32, prepared.train.num_tokens
    print(peak() - before)
    """
    for split in ("file", "lines"):
        command = [sys.executable, "-c", textwrap.dedent(script), split]
        megabytes = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        assert megabytes < 60
