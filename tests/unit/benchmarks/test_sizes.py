"""Sizes on the command line."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.sizes import count


@pytest.mark.parametrize(
    ("text", "value"),
    [("100M", 10**8), ("1.5B", 15 * 10**8), ("1B", 10**9), ("250K", 250_000), ("12345", 12345)],
)
def test_counts(text: str, value: int) -> None:
    """B is a thousand millions, not bytes."""
    assert count(text) == value


@pytest.mark.parametrize("text", ["", "M", "1G", "-1M", "1e9", "100 M"])
def test_what_is_no_count(text: str) -> None:
    """Refused by name."""
    with pytest.raises(argparse.ArgumentTypeError, match="is not a number like 100M"):
        count(text)
