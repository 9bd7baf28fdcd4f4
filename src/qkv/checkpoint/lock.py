"""One process at a time trains in a run folder: a lock that the system drops with its holder, however that ends.

`<run>/.lock` names its holder for those who find it taken; the file stays, and means nothing without the lock.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from qkv.config.errors import ConflictError, QkvError

NAME = ".lock"
_HELD = (errno.EAGAIN, errno.EACCES, errno.EDEADLK)
_UNKNOWN = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
_PATIENCE_S = 0.5  # who only looks holds the lock for an instant

if sys.platform == "win32":
    import msvcrt

    def _lock(descriptor: int, *, shared: bool) -> None:
        os.lseek(descriptor, 1 << 20, os.SEEK_SET)  # a byte that is locked cannot be read
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _lock(descriptor: int, *, shared: bool) -> None:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)


def _taken(descriptor: int, *, shared: bool = False) -> bool:
    """Whether the lock could be had; a file system that knows no locks gives it to everybody."""
    try:
        _lock(descriptor, shared=shared)
    except OSError as error:
        if error.errno in _HELD:
            return False
        if error.errno not in _UNKNOWN:
            raise
    return True


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Hold a run folder. Raises ConflictError naming the process that holds it already, QkvError where it cannot be
    written."""
    try:
        descriptor = os.open(run / NAME, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise _unwritable(run, error) from None
    try:
        _require(descriptor, run)
        try:
            yield
        finally:
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _require(descriptor: int, run: Path) -> None:
    end = time.monotonic() + _PATIENCE_S
    try:
        while not _taken(descriptor):
            if time.monotonic() > end:
                raise in_use(run, _read(descriptor))
            time.sleep(0.02)
        os.ftruncate(descriptor, 0)
        os.lseek(descriptor, 0, os.SEEK_SET)
        who = f"process {os.getpid()} on {socket.gethostname()} since {datetime.now():%Y-%m-%d %H:%M:%S}"
        os.write(descriptor, who.encode())
    except OSError as error:
        raise _unwritable(run, error) from None


def holder(run: Path) -> str | None:
    """Who trains in this run folder now: "process 17 on ada since 2026-08-01 12:00:00"; None where nobody does."""
    if not (run / NAME).is_file():  # to open a named pipe would wait for ever
        return None
    try:
        descriptor = os.open(run / NAME, os.O_RDONLY)
    except OSError:
        return None
    try:
        return None if _taken(descriptor, shared=True) else _read(descriptor)
    finally:
        os.close(descriptor)


def _read(descriptor: int) -> str:
    os.lseek(descriptor, 0, os.SEEK_SET)
    return os.read(descriptor, 400).decode("utf-8", errors="replace") or "another process"


def in_use(run: Path, who: str) -> ConflictError:
    """The error for a run folder that `who` holds."""
    return ConflictError(f"the run is going on in {who}", where=str(run), hint="waiting for its end, or Ctrl-C there")


def _unwritable(run: Path, error: OSError) -> QkvError:
    return QkvError(f"the run folder cannot be written: {error.strerror}", where=str(run / NAME))
