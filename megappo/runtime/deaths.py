"""What ended a process of a run, as far as can be told from outside. Knows no runtime."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

END_BYTES = 16384


def cause_of_death(log_path: Path, report: str) -> str:
    """In a few words, what ended a process.

    Only a process's parent is told the signal that ended it, and that is not us. But a fatal
    signal that can be handled is in the log, written by the process as it died; an exit that
    it had a say in is in the report; and what leaves no trace is most likely the signal that
    cannot be handled.

    Args:
        log_path: where the process wrote.
        report: what is said of it by whoever started it.
    """
    end = b""
    with contextlib.suppress(OSError), log_path.open("rb") as file:
        file.seek(max(log_path.stat().st_size - END_BYTES, 0))
        end = file.read()
    written = re.findall(rb"\*\*\* (SIG[A-Z0-9]+) received", end)
    if written:
        return f"killed by {written[-1].decode()}"
    if told := re.search(r"receives a (SIG[A-Z0-9]+)", report):
        return f"killed by {told[1]}"
    if code := re.search(r"exits with an exit code (\d+)", report):
        return f"exited with code {code[1]}"
    return "killed by SIGKILL (by hand, or for want of memory), or gone without a trace"
