"""Runs one thing in a forked child, and says how long it took and how much memory it had.

Anonymous memory is what counts: pages of files that are read or written can be dropped at
any time. The child starts with what the parent has imported.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

INTERVAL_S = 0.002


@dataclass(frozen=True)
class Usage:
    """What a call took.

    Attributes:
        seconds: wall time.
        cpu_seconds: of the child and its processes, in user and kernel mode.
        peak_anonymous_bytes: most anonymous memory, beyond what the child had at its start.
    """

    seconds: float
    cpu_seconds: float
    peak_anonymous_bytes: int


def anonymous_bytes() -> int:
    """Anonymous memory of this process now."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("this kernel does not say RssAnon")


def measured(function: Callable[..., Any], *args: Any) -> Usage:
    """Calls ``function(*args)`` in a forked child.

    Raises:
        RuntimeError: with the traceback of a call that failed.
    """
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=_child, args=(theirs, function, args)
    )
    process.start()
    theirs.close()
    try:
        result = ours.recv()
    except EOFError:
        raise RuntimeError("the child died without a word") from None
    finally:
        process.join()
    if not isinstance(result, Usage):
        raise RuntimeError(f"the child failed:\n{result}")
    return result


class Watch:
    """Takes the time of what runs inside of ``with``, and looks at its memory all the while."""

    def __enter__(self) -> Watch:
        self._start = self._peak = anonymous_bytes()
        self._done = threading.Event()
        self._watcher = threading.Thread(target=self._look, daemon=True)
        self._watcher.start()
        self._before, self._cpu = time.perf_counter(), os.times()
        return self

    def __exit__(self, *unused: object) -> None:
        seconds, cpu = time.perf_counter() - self._before, os.times()
        self._done.set()
        self._watcher.join()
        peak = max(self._peak, anonymous_bytes())
        # User and system, also of processes that were waited for.
        cpu_seconds = sum(cpu[:4]) - sum(self._cpu[:4])
        self.usage = Usage(seconds, cpu_seconds, peak - self._start)

    def _look(self) -> None:
        while not self._done.wait(INTERVAL_S):
            self._peak = max(self._peak, anonymous_bytes())


def _child(pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        with Watch() as watch:
            kept = function(*args)  # what it returns still counts in the last look at the memory
    except BaseException:
        pipe.send(traceback.format_exc())
        os._exit(1)
    del kept
    pipe.send(watch.usage)
    os._exit(0)
