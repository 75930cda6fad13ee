"""From the configuration to what each part of a rank is told.

The lower layers take small records of their own; this is the one place that fills them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from megappo.config.checks import reward_folders
from megappo.config.mesh import topology
from megappo.config.schema import ActorConfig, Config, CriticConfig
from megappo.device.platform import is_cuda
from megappo.mesh.settings import (
    ACTOR,
    CRITIC,
    REF,
    REWARD,
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
from megappo.trainer.fp8 import fp8_settings
from megappo.trainer.inputs import critic_folder, needs_critic, needs_reference, total_steps


def host_settings(args: Config) -> HostSettings:
    """What the processes of the run host."""
    return HostSettings(
        topology=topology(args.megatron),
        mesh=MeshSettings(
            dtype=args.megatron.params_dtype,
            sequence_parallel=args.megatron.sequence_parallel,
            recompute=args.megatron.recompute_granularity,
            use_distributed_optimizer=args.megatron.use_distributed_optimizer,
            temperature=args.rollout.temperature,
            seed=args.train.seed,
            fp8=fp8_settings(args.megatron),
            implementation=args.megatron.transformer_impl,
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
        num_engine_processes=_num_engine_processes(args),
        verify_weights=args.vllm.verify_weights,
    )


def _num_engine_processes(args: Config) -> int:
    """Processes that hold an engine rank alone."""
    if args.train.colocate_all:
        return 0
    return (args.vllm.num_engines or 1) * args.vllm.tensor_parallel_size


def ray_settings(args: Config) -> RaySettings:
    """Where processes are placed."""
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
            offload=args.actor.offload,
        )
    ]
    if needs_critic(args):
        folder = str(critic_folder(args).resolve())
        optimizer = _optimizer(args, args.critic, total_steps(args))
        loss = ValueLossSettings(args.critic.value_clip)
        roles.append(
            RoleSettings(CRITIC, folder, "value", optimizer, loss, offload=args.critic.offload)
        )
    if needs_reference(args):
        host = ACTOR if args.ref.swap_with_actor else None
        ref = RoleSettings(REF, policy, "lm", offload=args.ref.offload, in_place_of=host)
        roles.append(ref)
    for number, folder in enumerate(reward_folders(args.reward.model_name_or_path), 1):
        name = REWARD if number == 1 else f"{REWARD}_{number}"
        reads: Literal["text", "chat"] = "chat" if args.data.apply_chat_template else "text"
        roles.append(
            RoleSettings(
                name,
                str(Path(folder).resolve()),
                "value",
                reads=reads,
                offload=args.reward.offload,
            )
        )
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
