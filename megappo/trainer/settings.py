"""From the configuration to what each part of a rank is told.

The lower layers take small records of their own; this is the one place that fills them.
"""

from __future__ import annotations

from pathlib import Path

from megappo.config.schema import ActorConfig, Config, CriticConfig
from megappo.device.platform import is_cuda
from megappo.mesh.settings import (
    ACTOR,
    CRITIC,
    REF,
    ExperienceSettings,
    MeshSettings,
    OptimizerSettings,
    PolicyLossSettings,
    RoleSettings,
    ValueLossSettings,
)
from megappo.rollout.engine import EngineSettings
from megappo.runtime.host import HostSettings
from megappo.runtime.ray import RaySettings
from megappo.topology import Topology
from megappo.trainer.inputs import critic_folder, needs_critic, needs_reference, total_steps


def host_settings(args: Config) -> HostSettings:
    """What every rank hosts."""
    return HostSettings(
        topology=Topology(
            args.megatron.world_size,
            args.megatron.tensor_model_parallel_size,
            args.megatron.pipeline_model_parallel_size,
        ),
        mesh=MeshSettings(
            dtype=args.megatron.params_dtype,
            sequence_parallel=args.megatron.sequence_parallel,
            recompute=args.megatron.recompute_granularity,
            use_distributed_optimizer=args.megatron.use_distributed_optimizer,
            temperature=args.rollout.temperature,
            seed=args.train.seed,
        ),
        roles=_roles(args),
        engine=EngineSettings(
            model_dir=str(Path(args.actor.model_name_or_path).resolve()),
            tensor_parallel_size=args.vllm.tensor_parallel_size,
            dtype=args.megatron.params_dtype,
            max_model_len=args.data.max_len,
            kv_cache_memory_bytes=args.vllm.kv_cache_memory_bytes,
            max_num_seqs=args.vllm.max_num_seqs,
            enable_prefix_caching=args.vllm.enable_prefix_caching,
            enforce_eager=args.vllm.enforce_eager,
            seed=args.train.seed,
        ),
        on_gpu=is_cuda(),
    )


def ray_settings(args: Config) -> RaySettings:
    """Where ranks are placed."""
    return RaySettings(
        args.ray_address,
        args.ray.num_cpus_per_rank,
        args.ray.num_gpus_per_rank,
        args.ray.placement_timeout,
    )


def experience_settings(args: Config, kl_coef: float) -> ExperienceSettings:
    """How this step's token rewards become advantages."""
    return ExperienceSettings(
        kl_coef=kl_coef,
        kl_estimator=args.algo.kl.estimator,
        estimator=args.algo.advantage.estimator,
        gamma=args.algo.advantage.gamma,
        lambd=args.algo.advantage.lambd,
    )


def _roles(args: Config) -> tuple[RoleSettings, ...]:
    policy = str(Path(args.actor.model_name_or_path).resolve())
    low, high = args.actor.eps_clip_low_high or (args.actor.eps_clip, args.actor.eps_clip)
    frozen_steps = max(args.critic.freezing_steps, 0)
    roles = [
        RoleSettings(
            ACTOR,
            policy,
            "lm",
            _optimizer(args, args.actor, max(total_steps(args) - frozen_steps, 1)),
            PolicyLossSettings(low, high, args.actor.dual_clip, args.actor.entropy_coef),
        )
    ]
    if needs_critic(args):
        folder = str(critic_folder(args).resolve())
        optimizer = _optimizer(args, args.critic, total_steps(args))
        loss = ValueLossSettings(args.critic.value_clip)
        roles.append(RoleSettings(CRITIC, folder, "value", optimizer, loss))
    if needs_reference(args):
        roles.append(RoleSettings(REF, policy, "lm"))
    return tuple(roles)


def _optimizer(args: Config, role: ActorConfig | CriticConfig, steps: int) -> OptimizerSettings:
    samples = args.rollout.batch_size * args.rollout.n_samples_per_prompt
    total = steps * args.train.max_epochs * (samples // args.train.batch_size)
    return OptimizerSettings(
        lr=role.adam.lr,
        betas=role.adam.betas,
        eps=role.adam.eps,
        weight_decay=role.adam.weight_decay,
        max_norm=role.max_norm,
        lr_scheduler=role.lr_scheduler,
        warmup_steps=round(total * role.lr_warmup_ratio),
        total_steps=total,
        min_lr_ratio=role.min_lr_ratio,
    )
