"""Checkpoint folders on disk: written under a temporary name, renamed, then named by ``latest``.

A checkpoint is ``<root>/step_N/``. The file ``<root>/latest`` holds the name of the last
whole one and is replaced only after that folder is complete, so that a crash at any moment
leaves a checkpoint to resume from. This module knows folders and names, not their contents.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path

logger = logging.getLogger(__name__)

LATEST = "latest"
_STEP = re.compile(r"step_(\d+)")
_TEMPORARY = ".writing_"


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        root: folder of the checkpoints; made at the first save.
        max_num: how many of the newest to keep; at least 1.
    """

    def __init__(self, root: Path, max_num: int) -> None:
        assert max_num >= 1
        self.root = root
        self._max_num = max_num

    def begin(self, step: int) -> Path:
        """Make an empty folder to write the checkpoint of ``step`` into, and return it.

        What an interrupted save left under a temporary name is removed.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        for leftover in self.root.glob(f"{_TEMPORARY}*"):
            if leftover.is_dir():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()
        folder = self.root / f"{_TEMPORARY}step_{step}"
        folder.mkdir()
        return folder

    def commit(self, step: int) -> Path:
        """Make the folder that ``begin(step)`` returned the latest checkpoint."""
        source, target = self.root / f"{_TEMPORARY}step_{step}", self.root / f"step_{step}"
        _sync_tree(source)
        replaced = self.root / f"{_TEMPORARY}replaced_{step}"
        if target.exists():
            os.rename(target, replaced)
        os.rename(source, target)
        _sync_folder(self.root)
        pointer = self.root / f"{_TEMPORARY}{LATEST}"
        with pointer.open("w") as file:
            file.write(target.name + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(pointer, self.root / LATEST)
        _sync_folder(self.root)
        if replaced.exists():
            shutil.rmtree(replaced)
        # Steps beyond this one were saved by an earlier run into the same folder.
        by_age = sorted(self.steps(), key=lambda other: (other <= step, other))
        for step_to_drop in by_age[: -self._max_num]:
            shutil.rmtree(self.root / f"step_{step_to_drop}")
        return target

    def steps(self) -> list[int]:
        """Steps of the whole checkpoints, ascending."""
        if not self.root.is_dir():
            return []
        found = (_STEP.fullmatch(entry.name) for entry in self.root.iterdir() if entry.is_dir())
        return sorted(int(match[1]) for match in found if match)

    def latest(self) -> Path | None:
        """The checkpoint to resume from, or None when there is none.

        Where ``latest`` names a folder that is gone, the newest whole one is taken with a
        warning.
        """
        steps = self.steps()
        if not steps:
            return None
        pointer = self.root / LATEST
        named = pointer.read_text().strip() if pointer.exists() else ""
        newest = self.root / f"step_{steps[-1]}"
        if named and (self.root / named).is_dir():
            return self.root / named
        logger.warning("%s names no checkpoint (%r): taking %s", pointer, named, newest)
        return newest


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(parent, name), "rb") as file:
                os.fsync(file.fileno())
        _sync_folder(Path(parent))
