"""The configurations that examples ship are read, and break no rule."""

from __future__ import annotations

from pathlib import Path

import pytest

from megappo.config import ConfigError, check, load

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize(
    "path", sorted(EXAMPLES.rglob("*.yaml")), ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_example(path: Path) -> None:
    """What a run makes first (its model, its prompts) may be missing; nothing else is wrong."""
    config = load(["--config", str(path)])
    try:
        check(config)
    except ConfigError as error:
        assert "no such f" in str(error)
