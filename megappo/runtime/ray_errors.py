"""What Ray's errors say of a run's processes: which of several failures was the first.

A rank that dies or refuses breaks what the others wait for, and their errors may arrive
before its own. Knows no actors; ``ray.py`` collects the errors.
"""

from __future__ import annotations

from ray.exceptions import RayActorError, RayTaskError

from megappo.config.errors import OtherRankError
from megappo.runtime.host import RankFaultError


def is_cause(error: RayTaskError | RayActorError) -> bool:
    """Whether it cannot be the result of another process's failure: a death, or a user's error."""
    cause = getattr(error, "cause", None)
    refused = isinstance(cause, RankFaultError) and cause.user_error
    return refused or isinstance(error, RayActorError)


def is_echo(error: RayTaskError | RayActorError) -> bool:
    """Whether the process says itself that another one failed."""
    cause = getattr(error, "cause", None)
    return isinstance(cause, RankFaultError) and cause.kind == OtherRankError.__name__


def describe(cause: BaseException) -> str:
    """Type and text of what a rank raised."""
    if isinstance(cause, RankFaultError):
        return f"{cause.kind}: {cause.text}"
    return f"{type(cause).__name__}: {one_line(cause)}"


def one_line(error: BaseException) -> str:
    """The text of an error without line breaks; of one without text, its type."""
    return " ".join(str(error).split()) or type(error).__name__
