"""Checks that need the models' configuration files: parallel sizes against model dimensions.

Runs in the driver before any weight is read. What needs the configuration alone is in
``config/checks.py``.
"""

from __future__ import annotations

from megappo.config.schema import Config
from megappo.weights.shape import ModelShape


def check_models(args: Config, policy: ModelShape, critic: ModelShape | None) -> None:
    """Refuse sizes that the models cannot be cut into.

    Raises:
        ValueError: with one line that names the key, both numbers and what would fit.
    """
    if policy.value_head:
        raise ValueError(
            f"actor.model_name_or_path = {args.actor.model_name_or_path} has a score head: "
            "it is a reward or value model, and a policy with a language-model head is wanted"
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
    for whose, shape in (("policy", policy), ("critic", critic)):
        if shape is not None and args.data.max_len > shape.max_position_embeddings:
            raise ValueError(
                f"data.max_len = {args.data.max_len} is more than the {whose}'s "
                f"max_position_embeddings = {shape.max_position_embeddings}"
            )
    _check_engine(args, policy)


def _check_engine(args: Config, policy: ModelShape) -> None:
    engine_tp = args.vllm.tensor_parallel_size
    if policy.num_heads % engine_tp:
        raise ValueError(
            f"vllm.tensor_parallel_size = {engine_tp} does not divide the policy's "
            f"{policy.num_heads} attention heads"
        )
    small, large = sorted((engine_tp, policy.num_kv_heads))
    if large % small:
        raise ValueError(
            f"vllm.tensor_parallel_size = {engine_tp} and the policy's {policy.num_kv_heads} "
            "key/value heads do not divide one another"
        )
    heads = max(policy.num_kv_heads // engine_tp, 1)
    item = 4 if args.megatron.params_dtype == "fp32" else 2
    needed = 2 * policy.num_layers * heads * policy.head_dim * item * args.data.max_len
    if args.vllm.kv_cache_memory_bytes < needed:
        raise ValueError(
            f"vllm.kv_cache_memory_bytes = {args.vllm.kv_cache_memory_bytes} holds no sequence of "
            f"data.max_len = {args.data.max_len} tokens; the policy needs at least {needed}"
        )


def _check_mesh(role: str, args: Config, shape: ModelShape) -> None:
    tp = args.megatron.tensor_model_parallel_size
    pp = args.megatron.pipeline_model_parallel_size
    for what, number in (
        ("attention heads", shape.num_heads),
        ("key/value heads", shape.num_kv_heads),
        ("feed-forward columns", shape.ffn_hidden_size),
    ):
        if number % tp:
            fits = [size for size in range(1, tp) if number % size == 0]
            raise ValueError(
                f"megatron.tensor_model_parallel_size = {tp} does not divide the {role}'s "
                f"{number} {what}; use one of {fits}"
            )
    if shape.num_layers % pp:
        raise ValueError(
            f"megatron.pipeline_model_parallel_size = {pp} does not divide the {role}'s "
            f"{shape.num_layers} layers"
        )
