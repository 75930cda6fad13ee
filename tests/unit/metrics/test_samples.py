"""The samples of a step as a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megappo.metrics.samples import SampleRow, forget_samples, write_samples


def row(response: str, label: object = None) -> SampleRow:
    """A row with the given response."""
    return SampleRow(3, "2+3=", response, label, 0.5, "stop", 4, len(response), {"ok": 1.0})


def test_rows(tmp_path: Path) -> None:
    """Every field is there, text stays readable, and no partial file is left."""
    path = write_samples(tmp_path / "samples", 7, [row("fünf", label=["5", {"x": None}])])
    assert path == tmp_path / "samples" / "step_7.jsonl"
    assert "fünf" in path.read_text(encoding="utf-8")
    assert json.loads(path.read_text(encoding="utf-8")) == {
        "prompt_id": 3,
        "prompt": "2+3=",
        "response": "fünf",
        "label": ["5", {"x": None}],
        "reward": 0.5,
        "finish_reason": "stop",
        "prompt_len": 4,
        "response_len": 4,
        "named": {"ok": 1.0},
    }
    assert [p.name for p in path.parent.iterdir()] == ["step_7.jsonl"]


@pytest.mark.parametrize("text", ["", "two\nlines", "\u2028", "\ud83d", "\x00", "😀", '"\\'])
def test_any_text_is_one_line(tmp_path: Path, text: str) -> None:
    """Odd responses come back as they were, one per line."""
    path = write_samples(tmp_path, 1, [row(text), row("next")])
    first, second = path.read_bytes().splitlines()
    assert json.loads(first)["response"] == text
    assert json.loads(second)["response"] == "next"


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    """The file of a step appears whole or not at all."""
    write_samples(tmp_path, 1, [row("old")])
    with pytest.raises(TypeError):
        write_samples(tmp_path, 1, [row("new"), row("bad", label=object())])
    assert json.loads((tmp_path / "step_1.jsonl").read_text())["response"] == "old"


@pytest.mark.parametrize(("after", "kept"), [(0, []), (2, [1, 2]), (9, [1, 2, 9]), (10, [1, 2, 9])])
def test_samples_of_later_steps_are_forgotten(tmp_path: Path, after: int, kept: list[int]) -> None:
    """What an earlier run left beyond the step goes; other files stay, a missing folder is fine."""
    for step in (1, 2, 9):
        write_samples(tmp_path, step, [row("x")])
    (tmp_path / "step_best.jsonl").write_text("mine")
    forget_samples(tmp_path, after)
    forget_samples(tmp_path / "nowhere", after)
    left = sorted(p.name for p in tmp_path.iterdir())
    assert left == sorted([*(f"step_{step}.jsonl" for step in kept), "step_best.jsonl"])
