"""The composition root: from a configuration to a runtime, its groups, a trainer and a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megappo.config.errors import SIGNAL_EXIT_BASE
from megappo.config.schema import Config
from megappo.mesh.settings import ACTOR, CRITIC, REF, REWARD
from megappo.runtime.ray import RayRuntime
from megappo.trainer.inputs import load_inputs, needs_critic, needs_reference, needs_reward_model
from megappo.trainer.ppo_trainer import PPOTrainer
from megappo.trainer.resume import resume_point
from megappo.trainer.settings import host_settings, ray_settings


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    ``metrics`` are those of the last step; ``exit_code`` is 0, or 128 plus the signal's
    number when a signal stopped the run (its checkpoint is saved by then).
    """

    metrics: dict[str, float]
    exit_code: int


def make_runtime(args: Config) -> RayRuntime:
    """Check everything that needs no rank, then start the ranks of the mesh.

    The caller must ``shutdown`` the runtime, also after an error in between.

    Raises:
        ValueError: with one line that names the key or the file and line at fault.
        RankError: a rank failed to start.
    """
    load_inputs(args)
    resume_point(args)
    runtime = RayRuntime(host_settings(args), ray_settings(args), Path(args.output_dir) / "logs")
    try:
        runtime.start()
    except BaseException:
        runtime.shutdown()
        raise
    return runtime


def run(args: Config) -> RunResult:
    """Train as the configuration says, and take everything down at the end.

    Raises:
        ValueError: with one line that names the key or the file and line at fault.
        RankError: a rank failed or died.
    """
    runtime = make_runtime(args)
    try:
        trainer = PPOTrainer(
            actor_model_group=runtime.role_group(ACTOR),
            critic_model_group=runtime.role_group(CRITIC) if needs_critic(args) else None,
            reward_model_group=runtime.role_group(REWARD) if needs_reward_model(args) else None,
            ref_model_group=runtime.role_group(REF) if needs_reference(args) else None,
            vllm_engines=runtime.engine_group(),
            strategy=runtime,
            args=args,
        )
        metrics = trainer.fit(args)
    finally:
        runtime.shutdown()
    stopped = trainer.stopped_by
    return RunResult(metrics, 0 if stopped is None else SIGNAL_EXIT_BASE + stopped)
