"""What a check says of a configuration that it refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megappo.config import Config, ConfigError, check

Make = Callable[..., Config]


def refusal(config: Config) -> str:
    """The message that ``config`` is refused with; always one line."""
    with pytest.raises(ConfigError) as caught:
        check(config)
    message = str(caught.value)
    assert "\n" not in message
    return message
