"""The error for everything that is wrong with a configuration: always one line."""

from __future__ import annotations


class ConfigError(ValueError):
    """A key is unknown, of the wrong type, out of range, or at odds with another key.

    The message is one line: the key, what was found, what is expected.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


def show(value: object, limit: int = 80) -> str:
    """``value`` as an error message shows it: on one line, cut at ``limit`` characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
