"""The precision benchmark measures what its lines say."""

from __future__ import annotations

from benchmarks.gloo_ranks import run_ranks
from benchmarks.precision import CASES, measure


def test_every_case_of_a_depth() -> None:
    """All but fp32, each off by something; with two layers, both ends left alone is fp32."""
    [lines] = run_ranks(1, measure, 2, 0)
    assert [line["case"] for line in lines] == [name for name in CASES if name != "fp32"]
    for line in lines:
        if "left alone" in line["case"]:
            assert line["mean"] == line["max"] == 0
        else:
            assert 0 < line["mean"] < line["max"] < line["spread"]
