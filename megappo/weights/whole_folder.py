"""A folder that appears whole or not at all: written under another name, synced, renamed.

Knows nothing of what is in it. Killed at any moment, a writer leaves at most a hidden
``.writing_NAME`` beside the target, which the next writer of that target removes.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

CHUNK_BYTES = 256 * 1024
WRITE_BACK_BYTES = 1024**2


class WholeFolder:
    """A folder in the making.

    Args:
        target: The name that it gets at the end; whatever has that name then is replaced.

    Raises:
        ValueError: another process is writing the same folder.

    Attributes:
        path: Where to write meanwhile; exists and is empty after construction.
    """

    def __init__(self, target: Path) -> None:
        """Makes the folder to write into."""
        self.target = target.resolve()  # what a link points to is replaced, not the link
        self.path = self.target.with_name(f".writing_{self.target.name}")
        self._replaced = self.target.with_name(f".replaced_{self.target.name}")
        if self._replaced.exists() and not self.target.exists():
            self._replaced.rename(self.target)  # a writer was killed between its two renames
        if self.path.exists():
            os.close(self._lock())  # refuses what another process is writing
            shutil.rmtree(self.path)
        self.path.mkdir(parents=True)
        self._held: int | None = self._lock()

    def _lock(self) -> int:
        """A handle that keeps other writers away until it is closed, at the latest by death."""
        handle = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise ValueError(f"another process is writing {self.target}") from None
        return handle

    def discard(self) -> None:
        """Removes what was written, unless it was committed."""
        if self._held is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._held)
            self._held = None

    def commit(self) -> None:
        """Puts everything on disk and gives the folder its name."""
        for folder, _, names in os.walk(self.path):
            for name in (*names, "."):
                sync(Path(folder) / name)
        shutil.rmtree(self._replaced, ignore_errors=True)
        if self.target.exists():
            self.target.rename(self._replaced)
        self.path.rename(self.target)
        sync(self.target.parent)
        shutil.rmtree(self._replaced, ignore_errors=True)
        if self._held is not None:
            os.close(self._held)
            self._held = None


def write_at(handle: int, data: memoryview, offset: int) -> None:
    """Writes bytes to a place in a file, and has the disk begin with them if they are many.

    Chunks that fit a processor's cache take two thirds of the time of one large write out of a
    mapped file. Linux starts to write pages that it is told are not needed soon, and keeps
    those that are still dirty in its cache; so the sync at the end is short.
    """
    size = len(data)
    done = 0
    while done < size:
        done += os.pwrite(handle, data[done : done + CHUNK_BYTES], offset + done)
    if size >= WRITE_BACK_BYTES:
        os.posix_fadvise(handle, offset, size, os.POSIX_FADV_DONTNEED)


def sync(path: Path) -> None:
    """Puts a file or a folder's entries on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
