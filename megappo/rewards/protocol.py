"""What a reward is asked and what it answers.

``RewardFunction`` is what the trainer calls, whatever stands behind it. Does not know
where samples come from, nor what becomes of the scores (clipping, baselines, KL).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from megappo.records import FinishReason


@dataclass(frozen=True)
class RewardSample:
    """One response to score.

    Attributes:
        prompt: the text that the policy was asked, after template or chat template.
        response: what it answered, without the token that ended it; may be empty.
        label: the prompt row's label, as the file holds it; None without ``data.label_key``.
        prompt_id: 0-based line of the prompt in its file. Samples of one prompt share it.
        finish_reason: "stop", or "length" where the response was cut at the limit.
        response_len: tokens of the response.
    """

    prompt: str
    response: str
    label: Any
    prompt_id: int
    finish_reason: FinishReason
    response_len: int


@dataclass(frozen=True)
class Score:
    """The answer for one sample: the reward to train on, and named numbers to log beside it."""

    reward: float
    named: Mapping[str, float] = field(default_factory=dict)


class RewardError(ValueError):
    """A reward failed or answered something that cannot be trained on."""


class RewardFunction(Protocol):
    """Scores samples: one finite :class:`Score` each, in order."""

    def __call__(self, samples: Sequence[RewardSample], /) -> list[Score]:
        """Score the samples.

        Raises:
            RewardError: if the reward fails or an answer is not a finite number.
        """
        ...
