"""Reading text: one rule for bytes, errors with file and offset, chunks that change no piece."""

from __future__ import annotations

import errno
import gzip
import lzma
import random
import sys
import tracemalloc
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.config.errors import NotFoundError, QkvError
from qkv.tokenizer import Tokenizer
from qkv.tokenizer import text as module
from qkv.tokenizer.pieces import split
from qkv.tokenizer.text import BadBytes, Corpus, NotTextError, chunks, nearest_file, normalize, read_blocks, read_stream


def read(path: Path, bad_bytes: BadBytes = "error") -> str:
    return "".join(read_blocks(path, bad_bytes))


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks so small that characters are cut."""
    monkeypatch.setattr(module, "_BLOCK", 5)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("pack", [bytes, gzip.compress, lzma.compress])
def test_files_and_archives_are_read_by_one_rule(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    text = "\n line one\r\nzwei 我爱你🙂\t \r"
    path = tmp_path / f"a.txt{ {gzip.compress: '.gz', lzma.compress: '.xz'}.get(pack, '') }"
    path.write_bytes(pack(text.encode()))
    assert read(path) == "\n line one\nzwei 我爱你🙂\t \r"


@given(st.text("\ufeff\r\na漢🙂", max_size=30), st.integers(3, 9))
@settings(max_examples=300, deadline=None)
def test_files_are_read_as_prompts_are(text: str, block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK", block)
        assert "".join(read_stream(BytesIO(text.encode()), "a stream")) == normalize(text)


def test_only_crlf_and_a_leading_byte_order_mark_are_changed() -> None:
    assert normalize("\ufeff\ufeffa\r\n\rb\r\r\n\u2028 e\u0301\x85") == "\ufeffa\n\rb\r\n\u2028 e\u0301\x85"


@pytest.mark.usefixtures("small_blocks")
def test_a_byte_order_mark_is_dropped_at_the_start_only(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffa\ufeffb".encode())
    assert read(path) == "a\ufeffb"
    path.write_bytes(b"\xef\xbb\xbf")
    assert read(path) == ""


@pytest.mark.parametrize("bad_bytes", ["error", "replace", "drop"])
@pytest.mark.parametrize("mark", ["\ufeff", ""])
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_utf16_is_refused_by_name(tmp_path: Path, encoding: str, mark: str, bad_bytes: BadBytes) -> None:
    texts = ["some text\r\n" * 1000, "four", "一片 text", "x"]
    certain = 4 if mark else 3 if encoding.startswith("utf-32") else 2
    for text in texts[:certain]:
        (tmp_path / "a.txt").write_bytes(f"{mark}{text}".encode(encoding))
        with pytest.raises(QkvError, match=encoding[:6].upper()) as caught:
            read(tmp_path / "a.txt", bad_bytes)
        assert caught.value.where == str(tmp_path / "a.txt")
        assert "iconv" in (caught.value.hint or "")


@pytest.mark.parametrize(
    "text",
    ["a list\0 with zeros\0 between\0", "\0" * 5000, "只有中文。", "a\0b", "a\0", "a\0b\0", "a\0b\0c\0d\0e", "a\0\0\0"],
)
def test_zeros_in_utf8_are_characters(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert read(tmp_path / "a.txt") == text


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("data", "offset", "replaced", "dropped"),
    [
        (b"abc\xffdef", 3, "abc\ufffddef", "abcdef"),
        (b"abc\xe7\x88def", 3, "abc\ufffddef", "abcdef"),  # cut by the end of a block
        (b"\xef\xbb\xbfab\xff", 5, "ab\ufffd", "ab"),  # counted from the start of the file
        (b"abcdefgh\xe7\x88", 8, "abcdefgh\ufffd", "abcdefgh"),  # cut by the end of the file
    ],
)
def test_bad_bytes_are_named_replaced_or_dropped(
    tmp_path: Path, data: bytes, offset: int, replaced: str, dropped: str
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(data)
    with pytest.raises(QkvError, match="not UTF-8") as caught:
        read(path)
    assert caught.value.where == f"{path}: byte {offset}"
    assert read(path, "replace") == replaced
    assert read(path, "drop") == dropped


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"\x89PNG\r\n\x1a\n", "a PNG image"),
        (b"RIFF\x24\x00\x00\x00WAVEfmt \x10\x00\xff", "a WAV recording"),
        (b"%PDF-1.7\n%\xe2\xe3", "a PDF"),
    ],
)
def test_a_file_of_another_kind_is_named_unless_its_bytes_are_wanted(tmp_path: Path, data: bytes, kind: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(data)
    with pytest.raises(NotTextError, match=f"the file is {kind}, not a text") as caught:
        read(path)
    assert (caught.value.where, caught.value.hint) == (str(path), None)
    assert read(path, "drop") == data.decode(errors="ignore").replace("\r\n", "\n")


def test_bad_bytes_stop_training_with_file_and_offset(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"good text \xff")
    for kind in ("bpe", "unigram", "char"):
        with pytest.raises(QkvError, match="not UTF-8") as caught:
            Tokenizer.train(tmp_path / "a.txt", kind=kind)
        assert caught.value.where == f"{tmp_path / 'a.txt'}: byte 10"
    assert Tokenizer.train(tmp_path / "a.txt", kind="char", bad_bytes="drop").token_to_id("\ufffd") is None


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.gz", b"no"),
        ("a.gz", b""),
        ("a.gz", gzip.compress(b"x" * 99, mtime=0)[:-9]),
        ("a.xz", b"no"),
        ("a.xz", b""),
        ("a.xz", lzma.compress(b"x" * 99)[:-9]),
    ],
)
def test_damaged_archives_are_named(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(QkvError, match="damaged"):
        read(tmp_path / name)


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        read(tmp_path / "none.txt")
    with pytest.raises(QkvError, match="a folder stands"):
        read(tmp_path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    class Broken(BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(QkvError, match="cannot be read: Input/output error") as caught:
        list(read_stream(Broken(), "a stream"))
    assert caught.value.where == "a stream"


@given(st.text("ab \n\t.，。我1'\u3000\r", max_size=300), st.integers(1, 40), st.integers(1, 50))
@settings(max_examples=200, deadline=None)
def test_chunks_cut_no_piece(text: str, size: int, block: int) -> None:
    blocks = [text[start : start + block] for start in range(0, len(text), block)]
    cut = list(chunks(blocks, size))
    assert "".join(cut) == text
    assert all(0 < len(chunk) <= size for chunk in cut)
    assert cut == list(chunks([text], size))
    kept = list(chunks([text], size, cut_runs=False))
    assert "".join(kept) == text
    assert kept == list(chunks(blocks, size, cut_runs=False))
    assert [piece for chunk in kept for piece in split(chunk)] == split(text)


def test_a_huge_line_is_read_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "line.txt.gz"
    path.write_bytes(gzip.compress(b"word after word " * 1_250_000, 1))  # 20 MB
    corpus = Corpus(path)
    tracemalloc.start()
    characters = sum(map(len, corpus))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert characters == 20_000_000
    assert peak < 10_000_000


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="resource is a Unix module")
def test_a_50_mb_line_trains_in_bounded_memory(tmp_path: Path) -> None:
    import resource

    chance = random.Random(0)
    words = [f"{chance.choice('abcdefgh')}{chance.randrange(10_000)}" for _ in range(100_000)]
    path = tmp_path / "line.txt"
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < 50_000_000:
            file.write(" ".join(chance.choices(words, k=100_000)) + " ")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert Tokenizer.train(path, vocab_size=2000).vocab_size == 2000
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 300_000 * (1024 if sys.platform == "darwin" else 1)  # KiB; macOS counts bytes


def test_a_suffix_in_common_does_not_make_files_alike() -> None:
    assert nearest_file("jfk.wav", ["录音.wav"]) is None
    assert nearest_file("tran.txt", ["录音.wav", "train.txt"]) == "train.txt"
