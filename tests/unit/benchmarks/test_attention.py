"""The attention benchmark: both ways compute the same, and the line says what was asked for."""

from __future__ import annotations

import json

import pytest

from benchmarks.attention import Heads, compare, main


@pytest.mark.parametrize("lengths", [[16, 16, 16], [3, 9, 9, 1], [20]])
def test_packed_and_padded_are_compared_on_equal_results(lengths: list[int]) -> None:
    """Outputs and gradients agree, which ``compare`` checks; times are positive."""
    ours, theirs, ratio = compare(Heads(4, 2, 32), lengths, runs=2)
    assert ours > 0 and theirs > 0 and ratio > 0


def test_line(capsys: pytest.CaptureFixture[str]) -> None:
    """One JSON line."""
    main("--sequences 3 --length 8 --heads 2 --kv-heads 1 --head-dim 32 --runs 1".split())
    line = json.loads(capsys.readouterr().out)
    assert line["sequences"] == 3 and line["ratio"] > 0 and line["spread_ratio"] > 0
