"""`qkv ...` in processes of its own that can be killed; torch is imported once, by the server that forks them."""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess

needs_processes = pytest.mark.skipif(sys.platform == "win32", reason="no forkserver on Windows")


def start(*arguments: str, file_bytes: int | None = None) -> ForkServerProcess:
    """Start `qkv *arguments` in the working folder; what it prints goes to output.txt. `file_bytes` limits files."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["qkv.train.loop", "qkv.cli.progress", "qkv.cli.train"])
    process = context.Process(target=_main, args=(arguments, str(Path.cwd()), os.environ["QKV_CACHE"], file_bytes))
    process.start()
    return process


def _main(arguments: tuple[str, ...], folder: str, cache: str, file_bytes: int | None) -> None:
    from qkv.cli import main

    os.chdir(folder)
    os.environ["QKV_CACHE"] = cache
    output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if file_bytes is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    main(list(arguments))


def run(*arguments: str, file_bytes: int | None = None) -> tuple[int | None, str]:
    """Exit code and output of `qkv *arguments`."""
    process = start(*arguments, file_bytes=file_bytes)
    process.join(60)
    return process.exitcode, Path("output.txt").read_text(encoding="utf-8")
