"""The flat list of keys agrees with the schema, and every key is documented."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import pytest

from megappo.config.keys import describe, entries, groups, keys
from megappo.config.schema import Config


def leaves(instance: Any, prefix: str = "") -> dict[str, object]:
    """Every field that holds no dataclass, by dotted name."""
    found: dict[str, object] = {}
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        if dataclasses.is_dataclass(value):
            found |= leaves(value, f"{prefix}{field.name}.")
        else:
            found[prefix + field.name] = value
    return found


def test_keys_are_the_fields_of_the_schema() -> None:
    """Names, order and defaults are the dataclasses', per-group defaults included."""
    assert {name: key.default for name, key in keys().items()} == leaves(Config())
    assert keys()["actor.adam.lr"].default == 1e-6
    assert keys()["critic.adam.lr"].default == 9e-6


def test_every_entry_has_one_doc_line() -> None:
    """A field without a doc line would be an undocumented key."""
    for entry in entries():
        assert entry.doc.endswith("."), entry
        assert "\n" not in entry.doc


def test_groups_come_before_their_keys() -> None:
    """The order is the schema's, so that help and documentation read top-down."""
    names = [entry.name for entry in entries()]
    assert names.index("actor") < names.index("actor.adam") < names.index("actor.adam.lr")
    assert set(groups()).isdisjoint(keys())


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (int, "a whole number"),
        (float | None, "a number or null"),
        (tuple[float, float], "a list of 2 numbers"),
        (tuple[float, float] | None, "a list of 2 numbers or null"),
        (Literal["a", "b"], "a or b"),
        (Literal["a", "b"] | None, "a or b or null"),
    ],
)
def test_describe(hint: Any, words: str) -> None:
    """Types are told in words that a YAML writer knows."""
    assert describe(hint) == words
