"""What is said of a process that died, from what its log holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from megappo.runtime.deaths import END_BYTES, cause_of_death

# What Ray 2.60 said of actors that were sent a signal, or called sys.exit(7).
GONE = (
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR "
    "Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of file. "
    "Some common causes include: (1) the process was killed by the OOM killer due to high memory "
    "usage, (2) ray stop --force was called, or (3) the worker crashed unexpectedly due to SIGSEGV"
)
TERMINATED = (
    "Worker exit detail: Worker exits unexpectedly. Worker exits with an exit code 1. The process "
    "receives a SIGTERM."
)
EXITED = "Worker exit detail: Worker exits unexpectedly. Worker exits with an exit code 7."


@pytest.mark.parametrize("before", [b"", b"weights loaded\n" * END_BYTES])
def test_a_signal_in_the_log_is_named(tmp_path: Path, before: bytes) -> None:
    """The last one, however long the log is."""
    log = tmp_path / "rank_0.log"
    log.write_bytes(before + b"*** SIGTERM received at time=1 ***\n*** SIGBUS received at time=2\n")
    assert cause_of_death(log, GONE) == "killed by SIGBUS"


@pytest.mark.parametrize(
    ("report", "cause"),
    [
        (TERMINATED, "killed by SIGTERM"),
        (EXITED, "exited with code 7"),
        (GONE, "killed by SIGKILL (by hand, or for want of memory), or gone without a trace"),
    ],
)
def test_a_log_without_a_signal_or_no_log_at_all(tmp_path: Path, report: str, cause: str) -> None:
    """The report decides; signals that it only guesses at do not count."""
    (tmp_path / "rank_0.log").write_text("weights loaded\n")
    for name in ("rank_0.log", "rank_1.log"):
        assert cause_of_death(tmp_path / name, report) == cause
