"""From samples and statistics of the mesh to named metrics: pure functions, plain numbers.

The names are OpenRLHF's where it has the metric, with its prefixes as folders: ``train/``,
``rollout/``, ``eval/``, ``timing/``; ``docs/metrics.md`` lists them all. What depends on the
machine's speed is under ``timing/``, so that everything else repeats bit for bit. Does not
know tensors, ranks or sinks; the mesh's records come in as mappings of their fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from megappo.records import SampleInfo

_EXPERIENCE_NAMES = {
    "num_action_tokens": "rollout/num_action_tokens",
    "kl": "train/kl",
    "kl_reward": "train/return",
    "log_probs_diff": "train/logprobs_diff",
    "advantage_mean": "train/advantage_mean",
    "advantage_std": "train/advantage_std",
    "value_mean": "train/old_values",
    "return_mean": "train/value_targets",
    "engine_diff_mean": "train/vllm_logprobs_diff",
    "engine_diff_max": "train/vllm_logprobs_diff_max",
}

_UPDATE_NAMES = {
    "actor": {
        "loss": "train/policy_loss",
        "clip_frac": "train/ppo_clip_ratio",
        "approx_kl": "train/ppo_kl",
        "entropy": "train/entropy_loss",
        "ratio_mean": "train/ratio_mean",
        "ratio_max_diff": "train/ratio_max_diff",
        "grad_norm": "train/actor_grad_norm",
        "lr": "train/actor_lr",
    },
    "critic": {
        "loss": "train/critic_loss",
        "clip_frac": "train/value_clip_ratio",
        "value_mean": "train/values",
        "grad_norm": "train/critic_grad_norm",
        "lr": "train/critic_lr",
    },
}
_LAST = ("grad_norm", "lr")
_LARGEST = ("ratio_max_diff",)


def rollout_metrics(
    samples: Sequence[SampleInfo],
    rewards: Sequence[float],
    named: Sequence[Mapping[str, float]],
    groups: Sequence[int],
) -> dict[str, float]:
    """Metrics of a rollout batch of N >= 1 samples, before filtering or balancing.

    Args:
        samples: [N].
        rewards: [N], as the reward gave them (not clipped).
        named: [N], other numbers of the reward; a sample may lack a name.
        groups: [N]; samples that answer the same prompt have the same number.

    Raises:
        ValueError: if a name that the reward gave is one of this module's own.
    """
    reward = np.asarray(rewards, np.float64)
    response = np.asarray([sample.response_len for sample in samples], np.float64)
    prompt = np.asarray([sample.prompt_len for sample in samples], np.float64)
    values = {
        "train/reward": float(reward.mean()),
        "train/response_length": float(response.mean()),
        "train/total_length": float((prompt + response).mean()),
        "rollout/reward_mean": float(reward.mean()),
        "rollout/reward_std": float(reward.std(ddof=1)) if len(reward) > 1 else 0.0,
        "rollout/response_length_mean": float(response.mean()),
        "rollout/truncated_rate": _truncated_rate(samples),
        "rollout/empty_responses": float((response == 0).sum()),
        "rollout/num_samples": float(len(samples)),
    }
    values |= _group_metrics(reward, groups)
    return _with_named(values, named, "rollout")


def eval_metrics(
    samples: Sequence[SampleInfo],
    rewards: Sequence[float],
    named: Sequence[Mapping[str, float]],
) -> dict[str, float]:
    """Metrics of an evaluation of N >= 1 samples; arguments as for ``rollout_metrics``.

    Raises:
        ValueError: if a name that the reward gave is one of this module's own.
    """
    values = {
        "eval/reward_mean": float(np.mean(rewards)),
        "eval/response_length_mean": float(np.mean([s.response_len for s in samples])),
        "eval/truncated_rate": _truncated_rate(samples),
        "eval/num_samples": float(len(samples)),
    }
    return _with_named(values, named, "eval")


def experience_metrics(statistics: Mapping[str, float | None]) -> dict[str, float]:
    """Metrics of a batch's experience, from the fields of the mesh's ``ExperienceMetrics``."""
    return {
        _EXPERIENCE_NAMES[name]: float(value)
        for name, value in statistics.items()
        if value is not None
    }


def update_metrics(
    role: Literal["actor", "critic"], updates: Sequence[Mapping[str, float | None]]
) -> dict[str, float]:
    """Metrics of all optimizer updates of one role in a step.

    Args:
        role: whose updates they are.
        updates: fields of the mesh's ``UpdateMetrics``, in order. Means are weighted by
            ``num_action_tokens``; ``grad_norm`` and ``lr`` are the last update's, as in OpenRLHF.
            Updates that were ``skipped`` are counted and otherwise left out.
    """
    if not updates:
        return {}
    done = [update for update in updates if not update["skipped"]]
    metrics = {f"train/{role}_skipped_updates": float(len(updates) - len(done))}
    weights = [float(update["num_action_tokens"] or 0) for update in done]
    for name, label in _UPDATE_NAMES[role].items():
        given = [
            (float(value), weight)
            for update, weight in zip(done, weights, strict=True)
            if (value := update.get(name)) is not None
        ]
        if given:
            metrics[label] = _reduce(name, given)
    return metrics


def throughput(samples: Sequence[SampleInfo], timing: Mapping[str, float]) -> dict[str, float]:
    """Tokens per second of a step, from its ``timing/...`` metrics.

    ``timing/generation_tokens_per_second`` counts response tokens over the generation phase,
    ``timing/tokens_per_second`` prompt and response tokens over the whole step.
    """
    response = sum(sample.response_len for sample in samples)
    total = response + sum(sample.prompt_len for sample in samples)
    values = {}
    if timing.get("timing/generation"):
        values["timing/generation_tokens_per_second"] = response / timing["timing/generation"]
    if timing.get("timing/step_total"):
        values["timing/tokens_per_second"] = total / timing["timing/step_total"]
    return values


def _truncated_rate(samples: Sequence[SampleInfo]) -> float:
    return float(np.mean([sample.finish_reason == "length" for sample in samples]))


def _group_metrics(reward: npt.NDArray[np.float64], groups: Sequence[int]) -> dict[str, float]:
    """Spread of the rewards within prompts that have two samples or more."""
    by_group: dict[int, list[float]] = {}
    for group, value in zip(groups, reward.tolist(), strict=True):
        by_group.setdefault(group, []).append(value)
    shared = [values for values in by_group.values() if len(values) > 1]
    if not shared:
        return {}
    return {
        "train/group_reward_std": float(np.mean([np.std(values, ddof=1) for values in shared])),
        "rollout/zero_spread_fraction": float(np.mean([max(v) == min(v) for v in shared])),
    }


def _with_named(
    values: dict[str, float], named: Sequence[Mapping[str, float]], prefix: str
) -> dict[str, float]:
    """Add the mean of each named number over the samples that have it."""
    means = {
        f"{prefix}/{name}": float(np.mean([scores[name] for scores in named if name in scores]))
        for name in dict.fromkeys(name for scores in named for name in scores)
    }
    taken = sorted(values.keys() & means.keys())
    if taken:
        raise ValueError(
            f"the reward function names a field {taken[0].removeprefix(prefix + '/')!r}, but "
            f"{taken[0]} is a metric of its own; choose another name"
        )
    return values | means


def _reduce(name: str, given: Sequence[tuple[float, float]]) -> float:
    values = [value for value, _ in given]
    if name in _LAST:
        return values[-1]
    if name in _LARGEST:
        return max(values)
    return sum(value * weight for value, weight in given) / sum(weight for _, weight in given)
