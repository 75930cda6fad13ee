"""Rewards a short, finished answer: at most two sentences, with a full stop at the end."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megappo.rewards.protocol import RewardSample

MAX_SENTENCES = 2
MIN_WORDS = 3
_BETWEEN_SENTENCES = re.compile(r"(?<=[.!?])\s+|\n+")


def reward_func(samples: Sequence[RewardSample]) -> list[dict[str, float]]:
    """Scores each answer.

    Half a point for brevity (less for every sentence too many), half for the full stop,
    and -1 for an answer of fewer than three words, which would be the cheapest way to be
    brief. ``satisfied`` beside it says whether the answer has both properties.
    """
    return [_score(sample.response.strip()) for sample in samples]


def _score(answer: str) -> dict[str, float]:
    if len(answer.split()) < MIN_WORDS:
        return {"reward": -1.0, "satisfied": 0.0}
    excess = max(0, num_sentences(answer) - MAX_SENTENCES)
    stopped = answer.endswith(".")
    return {
        "reward": 0.5 / (1 + excess) + 0.5 * stopped,
        "satisfied": float(stopped and not excess),
    }


def num_sentences(text: str) -> int:
    """Sentences in a text, the last one finished or not; a line break ends one, too."""
    return sum(bool(piece.strip()) for piece in _BETWEEN_SENTENCES.split(text))
