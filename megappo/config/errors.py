"""Errors that end a run with one line: a user's mistake, or a rank that failed."""

from __future__ import annotations

SIGNAL_EXIT_BASE = 128  # a process that a signal stopped exits with this plus its number


class ConfigError(ValueError):
    """A key is unknown, of the wrong type, out of range, or at odds with another key.

    The message is one line: the key, what was found, what is expected.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class RunFailedError(RuntimeError):
    """A part of the run failed for a reason that is no user's mistake.

    The message is one line: which part, the cause, and where its log is.
    """


class OtherRankError(RuntimeError):
    """This rank stopped because another one failed, whose own error says why."""


def is_user_error(error: BaseException) -> bool:
    """Whether megappo's own code refused something, rather than a library failed in it."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    module = frame.tb_frame.f_globals.get("__name__", "") if frame is not None else ""
    return isinstance(error, ValueError) and module.split(".")[0] == "megappo"


def show(value: object, limit: int = 80) -> str:
    """``value`` as an error message shows it: on one line; of a long one, both ends."""
    text = " ".join(repr(value).split())
    if len(text) <= limit:
        return text
    end = limit // 2  # the name of a file is at the end of its path
    return text[: limit - end - 1] + "…" + text[-end:]
