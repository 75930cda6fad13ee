"""The responses of a step, kept for people to read: ``samples/step_N.jsonl``.

A file appears whole or not at all. Does not know how samples were drawn or scored.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megappo.records import FinishReason


@dataclass(frozen=True)
class SampleRow:
    """One line of the file.

    Attributes:
        prompt_id: 0-based line of the prompt in its file.
        prompt: text that the policy was asked.
        response: text that it answered.
        label: the prompt row's label, any JSON value.
        reward: as the reward function gave it.
        finish_reason: why the response ended.
        prompt_len: in tokens.
        response_len: in tokens.
        named: other numbers of the reward function.
    """

    prompt_id: int
    prompt: str
    response: str
    label: Any
    reward: float
    finish_reason: FinishReason
    prompt_len: int
    response_len: int
    named: Mapping[str, float] = field(default_factory=dict)


def forget_samples(folder: str | Path, after_step: int) -> None:
    """Remove the files of later steps, which an earlier run left."""
    for path in Path(folder).glob("step_*.jsonl"):
        step = path.stem.removeprefix("step_")
        if step.isdecimal() and int(step) > after_step:
            path.unlink()


def write_samples(folder: str | Path, step: int, rows: Sequence[SampleRow]) -> Path:
    """Write ``folder/step_N.jsonl``, in the place of an older one, and return its path."""
    path = Path(folder) / f"step_{step}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".jsonl.partial")
    # A response may hold half a surrogate pair: written as its escape, it is valid JSON.
    with partial.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
        for row in rows:
            file.write(json.dumps(asdict(row), ensure_ascii=False) + "\n")
    os.replace(partial, path)
    return path
