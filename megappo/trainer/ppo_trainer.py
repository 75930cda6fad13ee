"""The PPO loop: generate, score, build experience, train critic and actor, sync, log, checkpoint.

``PPOTrainer`` sequences the phases and owns nothing but the driver's few numbers. Tokens,
log-probs, values and advantages stay on the mesh; how a call reaches it is the groups' affair.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from megappo.config.schema import Config
from megappo.data.packing import plan_batch
from megappo.mesh.settings import ExperienceMetrics, UpdateMetrics
from megappo.ppo.controllers import make_kl_controller
from megappo.records import BatchPlan, Prompt
from megappo.runtime.groups import RankGroup, Runtime
from megappo.trainer.evaluation import evaluate
from megappo.trainer.inputs import load_inputs, needs_critic, needs_reference, needs_reward_model
from megappo.trainer.rewards import Rewards
from megappo.trainer.sampling import RolloutBatch, generate, sample_seeds
from megappo.trainer.scoring import ScoredBatch, score
from megappo.trainer.session import Session
from megappo.trainer.settings import experience_settings

# Streams of the seed, one per use, so that no two uses draw the same numbers.
ROLLOUT_SEEDS, PLAN_SEEDS, ORDER_SEEDS = 0, 1, 2


class PPOTrainer:
    """PPO over groups of ranks.

    Args:
        actor_model_group: the policy.
        critic_model_group: the value model; None where the estimator does without.
        reward_model_group: the reward models; None where ``args`` names none.
        ref_model_group: the reference policy; None without a KL penalty.
        vllm_engines: the inference engines.
        strategy: the runtime that made the groups.
        args: the configuration; prompts and reward function are loaded from it here.

    Raises:
        ValueError: a group is missing or not wanted, or what ``args`` names cannot be used.
    """

    def __init__(
        self,
        *,
        actor_model_group: RankGroup,
        critic_model_group: RankGroup | None,
        reward_model_group: RankGroup | None,
        ref_model_group: RankGroup | None,
        vllm_engines: RankGroup,
        strategy: Runtime,
        args: Config,
    ) -> None:
        _check_groups(args, critic_model_group, reward_model_group, ref_model_group)
        self.actor = actor_model_group
        self.critic = critic_model_group
        self.ref = ref_model_group
        self.engines = vllm_engines
        self.strategy = strategy
        self.args = args
        self.inputs = load_inputs(args)
        self.rewards = Rewards(self.inputs.reward, reward_model_group, args)
        self.kl = make_kl_controller(
            args.algo.kl.init_coef, args.algo.kl.target, args.algo.kl.horizon
        )
        self.stopped_by: int | None = None
        """Number of the signal that ended ``fit`` early, if one did."""

    def fit(
        self,
        args: Config,
        consumed_samples: int = 0,
        num_update_steps_per_episode: int | None = None,
    ) -> dict[str, float]:
        """Train until the prompts (or ``train.max_steps``) run out, or a signal asks to stop.

        Args:
            args: the configuration given at construction.
            consumed_samples: prompts to skip, counted over all episodes.
            num_update_steps_per_episode: most steps per episode; None means all prompts.

        Returns:
            The metrics of the last step, by name.

        Raises:
            ValueError: ``args`` differ, or ``consumed_samples`` is given with a checkpoint to
                resume from.
        """
        if args != self.args:
            raise ValueError("fit() wants the args that PPOTrainer was constructed with")
        with Session(self, consumed_samples, num_update_steps_per_episode) as session:
            self.sync_weights(session.step)
            session.evaluate_before_first_step()
            for report, prompts in session.batches():
                step = report.step
                with report.phase("generation"):
                    rollouts = self.generate(prompts, step)
                with report.phase("reward"):
                    scored = score(self.rewards.ask(rollouts, training=True), rollouts, args)
                if session.stop.requested:
                    break  # nothing has changed yet: this step will be done again
                plan = self.plan(scored, step)
                with report.phase("make_experience"):
                    experience = self.make_experience(plan)
                for epoch in range(args.train.max_epochs):
                    for mini_batch in self.order(plan, step, epoch):
                        with report.phase("critic_train"):
                            critic_update = self.update_critic(mini_batch)
                        with report.phase("actor_train"):
                            actor_update = self.update_actor(mini_batch, step)
                        report.add_updates(actor_update, critic_update)
                self.actor.broadcast("release_batch")
                with report.phase("sync_weights"):
                    self.sync_weights(step)
                report.finish(scored, experience, self.kl.value)
                self.kl.update(experience.kl, len(scored.rewards))
                session.finish_step(report, scored)
            session.finish()
        self.stopped_by = session.stop.received
        return session.metrics

    def generate(self, prompts: Sequence[Prompt], step: int) -> RolloutBatch:
        """Draw the rollouts of a step; their tokens stay on the engine ranks."""
        n = self.args.rollout.n_samples_per_prompt
        return generate(
            self.engines,
            prompts,
            n,
            self.inputs.sampling(self.args),
            seeds=sample_seeds([self.args.train.seed, ROLLOUT_SEEDS, step], len(prompts) * n),
            key=f"step_{step}",
        )

    def plan(self, scored: ScoredBatch, step: int) -> BatchPlan:
        """Assign every sample to an optimizer step, a replica and a micro-batch."""
        samples = scored.rollouts.samples
        assert scored.rollouts.key is not None
        return plan_batch(
            key=scored.rollouts.key,
            sample_ids=[info.sample_id for info in samples],
            prompt_lens=[info.prompt_len for info in samples],
            response_lens=[info.response_len for info in samples],
            holder_ranks=[info.holder_rank for info in samples],
            scores=scored.scores.numpy(),
            train_batch_size=self.args.train.batch_size,
            num_replicas=self.actor.num_replicas,
            token_budget=self.args.train.max_tokens_per_gpu,
            seed=sample_seeds([self.args.train.seed, PLAN_SEEDS, step], 1)[0],
        )

    def make_experience(self, plan: BatchPlan) -> ExperienceMetrics:
        """Move the tokens to their replicas; log-probs, values, KL and advantages there."""
        self.actor.broadcast("load_batch", plan)
        self.actor.broadcast("compute_log_probs")
        if self.ref is not None:
            self.ref.broadcast("compute_log_probs")
        if self.critic is not None:
            self.critic.broadcast("compute_values")
        settings = experience_settings(self.args, self.kl.value)
        metrics: ExperienceMetrics = self.actor.broadcast("make_experience", settings)[0]
        return metrics

    def order(self, plan: BatchPlan, step: int, epoch: int) -> Iterator[int]:
        """The plan's mini-batches in this epoch's order."""
        rng = np.random.default_rng([self.args.train.seed, ORDER_SEEDS, step, epoch])
        return iter(rng.permutation(plan.num_steps).tolist())

    def update_critic(self, mini_batch: int) -> UpdateMetrics | None:
        """One optimizer step of the critic, if there is one."""
        if self.critic is None:
            return None
        metrics: UpdateMetrics = self.critic.broadcast("update", mini_batch)[0]
        return metrics

    def update_actor(self, mini_batch: int, step: int) -> UpdateMetrics | None:
        """One optimizer step of the actor, unless only the critic is trained so far."""
        if step <= self.args.critic.freezing_steps:
            return None
        metrics: UpdateMetrics = self.actor.broadcast("update", mini_batch)[0]
        return metrics

    def sync_weights(self, version: int) -> None:
        """Move the actor's weights into the engines."""
        self.engines.broadcast("sync_weights", version)

    def evaluate(self) -> dict[str, float]:
        """Mean rewards on ``eval.dataset``; empty without one."""
        return evaluate(self.engines, self.inputs, self.rewards, self.args)


def _check_groups(
    args: Config, critic: RankGroup | None, reward: RankGroup | None, ref: RankGroup | None
) -> None:
    estimator = args.algo.advantage.estimator
    if needs_critic(args) != (critic is not None):
        raise ValueError(
            f"algo.advantage.estimator = {estimator} "
            + ("needs a critic_model_group" if critic is None else "takes no critic_model_group")
        )
    if needs_reference(args) != (ref is not None):
        raise ValueError(
            f"algo.kl.init_coef = {args.algo.kl.init_coef} "
            + ("needs a ref_model_group" if ref is None else "takes no ref_model_group")
        )
    if needs_reward_model(args) != (reward is not None):
        raise ValueError(
            f"reward.model_name_or_path = {args.reward.model_name_or_path} "
            + ("needs a reward_model_group" if reward is None else "takes no reward_model_group")
        )
