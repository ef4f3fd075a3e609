"""Scratch files: a file is written beside its target under another name, and replaces the target when it is complete.

A process that writes a scratch file holds a lock on it. The operating system releases the lock when the process ends, so that
an unlocked scratch file is the rest of a process that was killed.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

try:
    import fcntl
except ImportError:  # Windows: without locks, the files of killed processes stay
    fcntl = None  # type: ignore[assignment]


@contextmanager
def scratch_file(target: Path) -> Iterator[BinaryIO]:
    """An open file that replaces the target at the end of the ``with`` block, unless the block raises.

    Its permissions follow the umask. Scratch files that killed processes left for the same target are removed.
    """
    remove_leftovers(target)
    scratch, file = _create(target)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            scratch.replace(target)
    finally:
        scratch.unlink(missing_ok=True)


def remove_leftovers(target: Path) -> None:
    """Remove the scratch files of this target that no living process holds."""
    for path in target.parent.glob(".*.tmp"):
        if re.fullmatch(rf"\.{re.escape(target.name)}\.[0-9a-f]{{32}}\.tmp", path.name):
            _remove_if_unlocked(path)


def _create(target: Path) -> tuple[Path, BinaryIO]:
    while True:
        scratch = target.with_name(f".{target.name}.{uuid4().hex}.tmp")
        file = scratch.open("xb")
        if fcntl is None:
            return scratch, file
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            return scratch, file
        # Between open and lock, another process may have removed the file as a leftover.
        if scratch.exists():
            return scratch, file
        file.close()


def _remove_if_unlocked(path: Path) -> None:
    if fcntl is None or path.is_symlink():
        return
    try:
        with path.open("rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
    except (
        OSError
    ):  # a living process holds the lock, or the file belongs to another user
        return
