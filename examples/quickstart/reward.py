"""The quickstart's reward: is the sum right, and if not, how much of it is?"""

from __future__ import annotations

from collections.abc import Sequence

from megappo.rewards.protocol import RewardSample


def reward_func(samples: Sequence[RewardSample]) -> list[dict[str, float]]:
    """Half a point for the exact answer, half for the share of digits in their place.

    ``accuracy`` beside ``reward`` is a named score: it is logged, not trained on.
    """
    return [_score(sample.response, str(sample.label)) for sample in samples]


def _score(response: str, answer: str) -> dict[str, float]:
    exact = float(response == answer)
    right = sum(given == wanted for given, wanted in zip(response, answer, strict=False))
    digits = right / max(len(response), len(answer))
    return {"reward": 0.5 * exact + 0.5 * digits, "accuracy": exact}
