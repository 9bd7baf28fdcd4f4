"""Text is UTF-8 whatever the locale says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_chinese_is_read_and_printed_as_utf_8_in_the_c_locale(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("我爱你，我们也爱你。\n" * 20, encoding="utf-8")
    # without PYTHONUTF8=0 and the coercion switched off, Python itself would rescue a careless program
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}

    def qkv(*arguments: str) -> str:
        command = [sys.executable, "-m", "qkv", "tokenizer", *arguments]
        done = subprocess.run(command, capture_output=True, env=environment, cwd=tmp_path, check=True)
        return done.stdout.decode("utf-8")

    qkv("train", "text.txt", "--kind", "char", "-o", "tokenizer")
    ids = qkv("encode", "tokenizer", "--text-file", "text.txt").split()
    assert qkv("decode", "tokenizer", *ids[:11]).rstrip("\n") == "我爱你，我们也爱你。"
