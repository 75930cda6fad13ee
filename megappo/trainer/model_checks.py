"""Checks that need the models' configuration files: parallel sizes against model dimensions.

Runs in the driver before any weight is read. What needs the configuration alone is in
``config/checks.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from megappo.config.checks import reward_folders
from megappo.config.mesh import topology
from megappo.config.schema import Config
from megappo.device.platform import layer_implementation
from megappo.trainer.fp8 import fp8_settings
from megappo.weights.megatron import check_divisible, check_sequence_parallel
from megappo.weights.shape import ModelShape
from megappo.weights.vllm import check_engine_divisible

KV_BLOCK_TOKENS = 128  # the largest block that vLLM takes by itself, the CPU's


def check_models(
    args: Config,
    policy: ModelShape,
    critic: ModelShape | None,
    reward_models: Sequence[ModelShape] = (),
) -> None:
    """Refuse models that cannot play their role, and sizes that they cannot be cut into.

    Raises:
        ValueError: with one line that names the key, both numbers and what would fit.
    """
    if policy.value_head:
        raise ValueError(
            f"actor.model_name_or_path = {args.actor.model_name_or_path} has a score head: "
            "it is a reward or value model, and a policy with a language-model head is wanted"
        )
    ep = args.megatron.expert_model_parallel_size
    models = (policy, critic, *reward_models)
    if ep > 1 and not any(shape and shape.num_experts for shape in models):
        raise ValueError(
            f"megatron.expert_model_parallel_size = {ep}, but no model of this run has experts: "
            "set it to 1"
        )
    _check_mesh("actor", args, policy)
    if critic is not None:
        _check_mesh("critic", args, critic)
        if critic.vocab_size != policy.vocab_size:
            raise ValueError(
                f"critic.model_name_or_path = {args.critic.model_name_or_path} has a vocabulary "
                f"of {critic.vocab_size}, the policy one of {policy.vocab_size}; the critic reads "
                "the policy's tokens, so they must be equal"
            )
    folders = reward_folders(args.reward.model_name_or_path)
    for folder, shape in zip(folders, reward_models, strict=True):
        if not shape.value_head:
            raise ValueError(
                f"reward.model_name_or_path = {folder} has no score head (its config.json names "
                "no ...ForSequenceClassification), so it is no reward model"
            )
        _check_mesh("reward", args, shape)
    for whose, model in (("policy", policy), ("critic", critic)):
        if model is not None and args.data.max_len > model.max_position_embeddings:
            raise ValueError(
                f"data.max_len = {args.data.max_len} is more than the {whose}'s "
                f"max_position_embeddings = {model.max_position_embeddings}"
            )
    _check_engine(args, policy)


def _check_engine(args: Config, policy: ModelShape) -> None:
    engine_tp = args.vllm.tensor_parallel_size
    check_engine_divisible(policy, engine_tp)
    heads = max(policy.num_kv_heads // engine_tp, 1)
    item = 4 if args.megatron.params_dtype == "fp32" else 2
    # vLLM keeps one block empty, and one more where a window may start inside a block.
    blocks = -(-args.data.max_len // KV_BLOCK_TOKENS) + 1 + (policy.sliding_window is not None)
    tokens = blocks * KV_BLOCK_TOKENS
    needed = 2 * policy.num_layers * heads * policy.head_dim * item * tokens
    if args.vllm.kv_cache_memory_bytes < needed:
        raise ValueError(
            f"vllm.kv_cache_memory_bytes = {args.vllm.kv_cache_memory_bytes} holds no sequence of "
            f"data.max_len = {args.data.max_len} tokens; the policy needs at least {needed}"
        )


def _check_mesh(role: str, args: Config, shape: ModelShape) -> None:
    mesh = topology(args.megatron)
    try:
        check_divisible(shape, mesh)
        check_sequence_parallel(shape, mesh, args.megatron.sequence_parallel)
        made_of = layer_implementation(args.megatron.transformer_impl)
        if (fp8 := fp8_settings(args.megatron)) is not None:
            fp8.check(
                shape.num_layers,
                mesh,
                recompute=args.megatron.recompute_granularity,
                emulated=made_of == "local",
            )
    except ValueError as error:
        raise ValueError(f"{role}: {error}") from error
