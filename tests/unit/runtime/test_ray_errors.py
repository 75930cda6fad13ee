"""Which of several failures is told to the user."""

from __future__ import annotations

import pytest
from ray.exceptions import RayActorError, RayTaskError

from megappo.runtime.host import RankFaultError
from megappo.runtime.ray_errors import describe, is_cause, is_echo, one_line


def task_error(cause: Exception) -> RayTaskError:
    """As ``ray.get`` raises it for a task that raised ``cause``."""
    return RayTaskError("call", "Traceback ...", cause)


@pytest.mark.parametrize(
    ("error", "cause", "echo"),
    [
        (task_error(RankFaultError("ValueError", "data.max_len = 3", True)), True, False),
        (task_error(RankFaultError("ValueError", "a library's", False)), False, False),
        (task_error(RankFaultError("OtherRankError", "failed on rank 0", False)), False, True),
        (
            task_error(RankFaultError("RuntimeError", "closed by peer", False)),
            False,
            False,
        ),
        (task_error(OSError("no space")), False, False),
        (RayActorError(), True, False),
    ],
)
def test_what_can_be_another_ranks_fault(
    error: RayTaskError | RayActorError, cause: bool, echo: bool
) -> None:
    """A death and a refusal stand for themselves; an echo stands behind everything else."""
    assert is_cause(error) == cause
    assert is_echo(error) == echo


def test_text_is_one_line() -> None:
    """Type and text, whatever the exception."""
    assert describe(RankFaultError("OSError", "no space", False)) == "OSError: no space"
    assert describe(KeyError("a\nb")) == "KeyError: 'a\\nb'"
    assert one_line(RuntimeError("one\n  two")) == "one two"
    assert one_line(RuntimeError()) == "RuntimeError"
