"""What is read from a finished run, and that the documented script is the real one."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

import pytest

from examples.outcome import first_and_last, greedy_responses
from tests.support.models import make_llama

ROOT = Path(__file__).parents[3]


def test_first_and_last(tmp_path: Path) -> None:
    """Rows without the metric do not count."""
    values = [{"step": 0, "eval/x": 0.25}, {"step": 1}, {"step": 2, "eval/x": 0.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in values))
    assert first_and_last(tmp_path, "eval/x") == (0.25, 0.5)
    with pytest.raises(ValueError, match="eval/y"):
        first_and_last(tmp_path, "eval/y")


def test_greedy_responses_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    """Prompts of different lengths are answered together as they are alone."""
    folder = make_llama(tmp_path / "model")
    prompts = ["a", "bcd", "ef"]
    together = greedy_responses(folder, prompts, max_new_tokens=4)
    alone = [greedy_responses(folder, [p], max_new_tokens=4)[0] for p in prompts]
    assert together == alone


def test_documented_script_is_the_example() -> None:
    """The code in docs/contract.md is a part of examples/build_groups.py, line by line."""
    page = (ROOT / "docs" / "contract.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    script = (ROOT / "examples" / "build_groups.py").read_text()
    assert textwrap.indent(code, "    ") in script
