"""The values that each key may take by itself, as a table of rules.

Rules that need two keys or the file system are in ``checks.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """A test of one value, and what it expects in words. NaN passes no test."""

    holds: Callable[[float], bool]
    expected: str


def _at_least(bound: float) -> Rule:
    return Rule(lambda value: bound <= value < math.inf, f"at least {bound}")


def _above(bound: float) -> Rule:
    return Rule(lambda value: bound < value < math.inf, f"above {bound}")


_COUNT = _at_least(1)
_NOT_NEGATIVE = _at_least(0)
_POSITIVE = _above(0)
_SHARE = Rule(lambda value: 0 <= value <= 1, "from 0 to 1")
_BELOW_ONE = Rule(lambda value: 0 <= value < 1, "at least 0 and below 1")
_EVERY = Rule(lambda value: value == -1 or value >= 1, "-1 or at least 1")
_LOWEST_TEMPERATURE = 0.01  # vLLM raises a temperature between 0 and this to it, unasked
_SEED = Rule(lambda value: 0 <= value < 2**32, "at least 0 and below 2**32")

# A pair of numbers is tested number by number; null always passes.
RANGES: dict[str, Rule] = {
    "actor.adam.lr": _NOT_NEGATIVE,
    "actor.adam.betas": _BELOW_ONE,
    "actor.adam.eps": _POSITIVE,
    "actor.adam.weight_decay": _NOT_NEGATIVE,
    "actor.lr_warmup_ratio": _SHARE,
    "actor.min_lr_ratio": _SHARE,
    "actor.max_norm": _NOT_NEGATIVE,
    "actor.eps_clip": _POSITIVE,
    "actor.eps_clip_low_high": _POSITIVE,
    "actor.dual_clip": _above(1),
    "actor.entropy_coef": _NOT_NEGATIVE,
    "critic.adam.lr": _NOT_NEGATIVE,
    "critic.adam.betas": _BELOW_ONE,
    "critic.adam.eps": _POSITIVE,
    "critic.adam.weight_decay": _NOT_NEGATIVE,
    "critic.lr_warmup_ratio": _SHARE,
    "critic.min_lr_ratio": _SHARE,
    "critic.max_norm": _NOT_NEGATIVE,
    "critic.value_clip": _POSITIVE,
    "critic.freezing_steps": _at_least(-1),
    "reward.model_weights": Rule(math.isfinite, "finite numbers"),
    "rollout.batch_size": _COUNT,
    "rollout.n_samples_per_prompt": _COUNT,
    "rollout.max_new_tokens": _COUNT,
    "rollout.temperature": Rule(
        lambda value: _LOWEST_TEMPERATURE <= value < math.inf,
        f"at least {_LOWEST_TEMPERATURE} (greedy rollouts have no probability ratio to learn "
        "from, and vLLM knows nothing in between)",
    ),
    "rollout.top_p": Rule(
        lambda value: value == 1, "1 (off): the trainer cannot reproduce cut-off log-probs yet"
    ),
    "rollout.top_k": Rule(
        lambda value: value == -1, "-1 (off): the trainer cannot reproduce cut-off log-probs yet"
    ),
    "vllm.num_engines": _COUNT,
    "vllm.tensor_parallel_size": _COUNT,
    "vllm.kv_cache_memory_bytes": _COUNT,
    "vllm.max_num_seqs": _COUNT,
    "algo.advantage.gamma": _SHARE,
    "algo.advantage.lambd": _SHARE,
    "algo.kl.init_coef": _NOT_NEGATIVE,
    "algo.kl.target": _POSITIVE,
    "algo.kl.horizon": _COUNT,
    "train.batch_size": _COUNT,
    "train.max_epochs": _COUNT,
    "train.num_episodes": _COUNT,
    "train.max_steps": _COUNT,
    "train.max_tokens_per_gpu": _COUNT,
    "train.seed": _SEED,
    "data.max_len": _COUNT,
    "data.max_samples": _COUNT,
    "eval.steps": _EVERY,
    "eval.temperature": Rule(
        lambda value: value == 0 or _LOWEST_TEMPERATURE <= value < math.inf,
        f"0 (greedy) or at least {_LOWEST_TEMPERATURE}",
    ),
    "eval.n_samples_per_prompt": _COUNT,
    "ckpt.save_steps": _EVERY,
    "ckpt.max_num": _COUNT,
    "megatron.world_size": _COUNT,
    "megatron.tensor_model_parallel_size": _COUNT,
    "megatron.pipeline_model_parallel_size": _COUNT,
    "megatron.virtual_pipeline_model_parallel_size": _COUNT,
    "megatron.expert_model_parallel_size": _COUNT,
    "megatron.num_layers_at_start_in_bf16": _NOT_NEGATIVE,
    "megatron.num_layers_at_end_in_bf16": _NOT_NEGATIVE,
    "ray.num_cpus_per_rank": _POSITIVE,
    "ray.num_gpus_per_rank": Rule(
        lambda value: value >= 1 and float(value).is_integer(),
        "a whole number: NCCL gives every rank a GPU of its own",
    ),
    "ray.placement_timeout": _POSITIVE,
}
