"""Evaluation during the run: responses to held-out prompts, their mean rewards.

Draws through the same engines as training, keeps no tokens, changes nothing.
"""

from __future__ import annotations

from megappo.config.schema import Config
from megappo.runtime.groups import RankGroup
from megappo.trainer.inputs import RunInputs
from megappo.trainer.report import evaluation_values
from megappo.trainer.rewards import Rewards
from megappo.trainer.sampling import generate, sample_seeds

EVAL_SEEDS = 3


def evaluate(
    engines: RankGroup, inputs: RunInputs, rewards: Rewards, args: Config
) -> dict[str, float]:
    """Mean reward and mean of every named reward over ``eval.dataset``.

    Every evaluation of a run draws with the same seeds.

    Returns:
        ``eval/reward_mean``, ``eval/<name>`` per named reward and more; nothing without a
        dataset.

    Raises:
        ValueError: a reward failed.
    """
    if inputs.eval_prompts is None:
        return {}
    prompts = [inputs.eval_prompts[index] for index in range(len(inputs.eval_prompts))]
    n = args.eval.n_samples_per_prompt
    rollouts = generate(
        engines,
        prompts,
        n,
        inputs.eval_sampling(args),
        seeds=sample_seeds([args.train.seed, EVAL_SEEDS], len(prompts) * n),
        key=None,
    )
    return evaluation_values(rollouts, rewards.ask(rollouts, training=False))
