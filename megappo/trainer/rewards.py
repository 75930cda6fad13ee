"""The reward of every sample: the user's function, reward models on the mesh, or their sum.

Knows texts and scores; clipping and group baselines are ``scoring``'s, tokens are the mesh's.
"""

from __future__ import annotations

from collections.abc import Sequence

from megappo.config.checks import reward_folders
from megappo.config.schema import Config
from megappo.ppo.moments import RunningMoments
from megappo.records import ScoreRequest, ScoreText
from megappo.rewards.protocol import RewardFunction, RewardSample, Score
from megappo.runtime.groups import RankGroup
from megappo.trainer.sampling import RolloutBatch


class Rewards:
    """Asks whatever rewards a run has.

    Args:
        function: the user's; None where there are reward models alone.
        models: the group of the reward models; None where there are none.
        args: the configuration.
    """

    def __init__(
        self, function: RewardFunction | None, models: RankGroup | None, args: Config
    ) -> None:
        assert function is not None or models is not None
        count = len(reward_folders(args.reward.model_name_or_path))
        self._function = function
        self._models = models
        self._weights = args.reward.model_weights or (1.0,) * count
        self._normalised = args.reward.normalize_enable
        self._token_budget = args.train.max_tokens_per_gpu
        self._moments = [RunningMoments() for _ in range(count)]

    def ask(self, rollouts: RolloutBatch, *, training: bool) -> tuple[Score, ...]:
        """One reward per sample, empty responses included.

        Args:
            rollouts: the samples.
            training: whether reward models are normalised, and the scores count among those
                of the run; an evaluation's are as the models say, to be comparable over a run.

        Raises:
            ValueError: the function raised, or returned something that is no score; or a reward
                model cannot read a sample.
        """
        totals = [Score(0.0)] * len(rollouts.samples)
        if self._function is not None:
            totals = self._function(_reward_samples(rollouts))
        if self._models is None:
            return tuple(totals)
        for number, scores in enumerate(self._ask_models(self._models, rollouts), 1):
            moments, weight = self._moments[number - 1], self._weights[number - 1]
            values = scores
            if training and self._normalised:
                moments.update(scores)
                values = [moments.normalise(s) for s in scores]
            name = "reward_model" if number == 1 else f"reward_model_{number}"
            totals = [
                Score(total.reward + weight * value, {**total.named, name: s})
                for total, s, value in zip(totals, scores, values, strict=True)
            ]
        return tuple(totals)

    def state(self) -> list[list[float]]:
        """What ``load`` takes, for the checkpoint."""
        return [moments.state() for moments in self._moments]

    def load(self, state: Sequence[Sequence[float]]) -> None:
        """Go on from a checkpoint's state; that of another number of models is left."""
        if len(state) == len(self._moments):
            for moments, saved in zip(self._moments, state, strict=True):
                moments.load(saved)

    def _ask_models(self, models: RankGroup, rollouts: RolloutBatch) -> list[list[float]]:
        """The scores of every model, in the samples' order."""
        texts = _texts(rollouts)
        replicas = models.num_replicas
        answers = models.call(
            "score",
            [ScoreRequest(tuple(texts[d::replicas]), self._token_budget) for d in range(replicas)],
        )
        found = [[0.0] * len(texts) for _ in self._moments]
        for replica, by_model in enumerate(answers):
            for scores, part in zip(found, by_model, strict=True):
                scores[replica::replicas] = part
        return found


def _texts(rollouts: RolloutBatch) -> list[ScoreText]:
    """What reward models are shown of every sample."""
    return [
        ScoreText(prompt.text, prompt.messages, info.response, info.finish_reason == "stop")
        for prompt, info in rollouts.answers()
    ]


def _reward_samples(rollouts: RolloutBatch) -> list[RewardSample]:
    return [
        RewardSample(
            prompt=prompt.text,
            response=info.response,
            label=prompt.label,
            prompt_id=prompt.prompt_id,
            finish_reason=info.finish_reason,
            response_len=info.response_len,
        )
        for prompt, info in rollouts.answers()
    ]
