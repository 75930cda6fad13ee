"""Function and reward models: who is asked what, and what becomes of the answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from megappo.config.schema import Config, RewardConfig
from megappo.records import Prompt, SampleInfo, ScoreRequest
from megappo.rewards.protocol import RewardSample, Score
from megappo.runtime.groups import RankCall, RankGroup
from megappo.trainer.rewards import Rewards
from megappo.trainer.sampling import RolloutBatch

CHAT = ({"role": "user", "content": "b"},)
PROMPTS = (Prompt(0, (1,), "a"), Prompt(1, (1,), "b", messages=CHAT), Prompt(2, (1,), "c"))
RESPONSES = ["", "xx", "x", "xxxx", "xxx", "xxxxx"]
ROLLOUTS = RolloutBatch(
    key="k",
    prompts=PROMPTS,
    n_samples_per_prompt=2,
    samples=tuple(
        SampleInfo(i, 1, len(text), "length" if i == 1 else "stop", text, 0)
        for i, text in enumerate(RESPONSES)
    ),
)
LENGTHS = [float(len(text)) for text in RESPONSES]


class Judges:
    """A runtime whose reward models say the response's length, and ten times it."""

    def __init__(self) -> None:
        self.asked: list[ScoreRequest] = []

    def dispatch(self, calls: Mapping[int, RankCall]) -> dict[int, Any]:
        """Answer as ranks would."""
        self.asked = [call.argument for call in calls.values()]
        return {rank: self._answer(call) for rank, call in calls.items()}

    def shutdown(self) -> None:
        """Nothing runs."""

    @staticmethod
    def _answer(call: RankCall) -> list[list[float]]:
        assert call.method == "score"
        lengths = [float(len(sample.response)) for sample in call.argument.samples]
        return [lengths, [10 * length for length in lengths]]


def models(judges: Judges, replicas: int) -> RankGroup:
    """The group of both models."""
    return RankGroup(judges, "reward", [[r] for r in range(replicas)], list(range(replicas)))


def args(**keys: Any) -> Config:
    """Two reward models."""
    return Config(reward=RewardConfig(model_name_or_path="one, two", **keys))


def half(samples: Sequence[RewardSample], /) -> list[Score]:
    """A function beside the models."""
    return [Score(0.5, {"seen": 1.0}) for _ in samples]


@pytest.mark.parametrize("replicas", [1, 2, 3, 7])
def test_every_sample_gets_its_own_score(replicas: int) -> None:
    """However they are spread over replicas, more of them than samples included."""
    judges = Judges()
    scores = Rewards(None, models(judges, replicas), args()).ask(ROLLOUTS, training=True)
    assert [s.reward for s in scores] == [11 * length for length in LENGTHS]
    assert [s.named["reward_model"] for s in scores] == LENGTHS
    assert [s.named["reward_model_2"] for s in scores] == [10 * length for length in LENGTHS]
    shown = [sample for request in judges.asked for sample in request.samples]
    assert sorted(sample.response for sample in shown) == sorted(RESPONSES)
    chats = {sample.response: sample.messages for sample in shown}
    assert chats["x"] == chats["xxxx"] == CHAT and chats[""] is None
    assert [s.response for s in shown if not s.ended] == ["xx"]


def test_weights_and_a_function_beside_them() -> None:
    """The sum, and every named number."""
    rewards = Rewards(half, models(Judges(), 2), args(model_weights=(2.0, -0.1)))
    for length, score in zip(LENGTHS, rewards.ask(ROLLOUTS, training=True), strict=True):
        assert score.reward == pytest.approx(0.5 + 2 * length - length)
        assert score.named == {"seen": 1.0, "reward_model": length, "reward_model_2": 10 * length}


def test_normalised_by_all_scores_so_far() -> None:
    """Each model by its own; an evaluation is raw and leaves no trace; a checkpoint goes on."""
    config = args(normalize_enable=True, model_weights=(1.0, 0.0))
    rewards = Rewards(None, models(Judges(), 2), config)
    raw = rewards.ask(ROLLOUTS, training=False)
    assert [s.reward for s in raw] == LENGTHS
    assert rewards.state() == [[0, 0.0, 0.0]] * 2
    # Lengths 0..5: mean 2.5, variance 17.5 / 6.
    first = rewards.ask(ROLLOUTS, training=True)
    expected = [(length - 2.5) / (17.5 / 6) ** 0.5 for length in LENGTHS]
    assert [s.reward for s in first] == pytest.approx(expected)
    assert [s.named["reward_model"] for s in first] == LENGTHS
    again = Rewards(None, models(Judges(), 1), config)
    again.load(rewards.state())
    assert again.ask(ROLLOUTS, training=True) == rewards.ask(ROLLOUTS, training=True)
    assert again.state() == rewards.state()


def test_a_function_alone() -> None:
    """No model is asked for."""
    scores = Rewards(half, None, Config()).ask(ROLLOUTS, training=True)
    assert scores == (Score(0.5, {"seen": 1.0}),) * 6
