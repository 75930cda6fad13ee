"""Named metrics from samples and statistics (C31's and C32's counters)."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from megappo.mesh.settings import ExperienceMetrics, UpdateMetrics
from megappo.metrics.aggregate import (
    eval_metrics,
    experience_metrics,
    rollout_metrics,
    throughput,
    update_metrics,
)
from megappo.records import FinishReason, SampleInfo


def infos(*lengths: int, prompt_len: int = 3) -> list[SampleInfo]:
    """Samples of the given response lengths; those of 8 tokens were cut."""
    reasons: list[FinishReason] = ["length" if n == 8 else "stop" for n in lengths]
    return [SampleInfo(i, prompt_len, n, reasons[i], "x" * n, 0) for i, n in enumerate(lengths)]


def test_rollout() -> None:
    """Means, spread, truncation and counts of a batch of two prompts."""
    values = rollout_metrics(
        infos(8, 2, 0, 2),
        [1.0, 0.0, 0.5, 0.5],
        [{"ok": 1.0}, {"ok": 0.0}, {}, {"x": 3.0}],
        [0, 0, 1, 1],
    )
    assert values == {
        "train/reward": 0.5,
        "train/response_length": 3.0,
        "train/total_length": 6.0,
        "rollout/reward_mean": 0.5,
        "rollout/reward_std": pytest.approx(math.sqrt(0.5 / 3)),
        "rollout/response_length_mean": 3.0,
        "rollout/truncated_rate": 0.25,
        "rollout/empty_responses": 1.0,
        "rollout/num_samples": 4.0,
        "train/group_reward_std": pytest.approx(math.sqrt(0.5) / 2),
        "rollout/zero_spread_fraction": 0.5,
        "rollout/ok": 0.5,
        "rollout/x": 3.0,
    }


@pytest.mark.parametrize(
    ("rewards", "groups", "wanted"),
    [
        ([1.0, 1.0, 1.0, 1.0], [0, 0, 0, 0], 1.0),
        ([1.0, 0.0, 0.0, 0.0], [0, 0, 0, 0], 0.0),
        ([0.0] + [0.95] * 7, [0] * 8, 0.0),
        ([1.0, 1.0, 0.0, 1.0], [0, 0, 1, 1], 0.5),
        ([1.0, 1.0, 2.0], [0, 0, 1], 1.0),
        ([1.0], [0], None),
        ([1.0, 2.0], [0, 1], None),
    ],
)
def test_c31_zero_spread(rewards: list[float], groups: list[int], wanted: float | None) -> None:
    """The share of prompts without spread; prompts with one sample do not count."""
    values = rollout_metrics(infos(*[2] * len(rewards)), rewards, [{}] * len(rewards), groups)
    assert values.get("rollout/zero_spread_fraction") == wanted
    assert all(math.isfinite(value) for value in values.values())


@pytest.mark.parametrize("lengths", [(0, 2, 2, 2), (0, 0, 0, 0), (0,), (2, 0)])
def test_c32_empty_responses(lengths: tuple[int, ...]) -> None:
    """Empty responses are counted, and no metric is NaN."""
    count = len(lengths)
    values = rollout_metrics(infos(*lengths), [0.0] * count, [{}] * count, [0] * count)
    assert values["rollout/empty_responses"] == lengths.count(0)
    assert all(math.isfinite(value) for value in values.values())


def test_names_of_the_reward_function() -> None:
    """A named number must not stand in for a metric of our own."""
    with pytest.raises(ValueError, match="field 'reward_mean', but rollout/reward_mean is"):
        rollout_metrics(infos(1), [1.0], [{"reward_mean": 1.0}], [0])
    with pytest.raises(ValueError, match="field 'num_samples', but eval/num_samples is"):
        eval_metrics(infos(1), [1.0], [{"num_samples": 1.0}])


def test_eval() -> None:
    """Evaluation has its own folder."""
    assert eval_metrics(infos(8, 2), [1.0, 0.0], [{"ok": 1.0}, {"ok": 0.0}]) == {
        "eval/reward_mean": 0.5,
        "eval/response_length_mean": 5.0,
        "eval/truncated_rate": 0.5,
        "eval/num_samples": 2.0,
        "eval/ok": 0.5,
    }


def test_experience() -> None:
    """The mesh's fields get OpenRLHF's names; what is None is left out."""
    assert experience_metrics({"kl": 0.1, "kl_reward": 0.4, "value_mean": None}) == {
        "train/kl": 0.1,
        "train/return": 0.4,
    }


def test_every_statistic_of_the_mesh_has_a_name() -> None:
    """A field that the mesh adds cannot be forgotten; docs/metrics.md lists every name."""
    statistics = {field.name: 1.0 for field in fields(ExperienceMetrics)}
    names = set(experience_metrics(statistics))
    assert len(names) == len(statistics)
    one = {field.name: 1.0 for field in fields(UpdateMetrics)} | {"skipped": 0.0}
    actor, critic = update_metrics("actor", [one]), update_metrics("critic", [one])
    known = len(one) - 1  # num_action_tokens is the weight
    assert len(actor) == known - 1  # value_mean is the critic's alone
    assert len(critic) == known - 4  # ratios, approx_kl and entropy are the policy's
    groups = rollout_metrics(infos(1, 1), [0.0, 1.0], [{}, {}], [0, 0])
    names |= actor.keys() | critic.keys() | groups.keys()
    names |= eval_metrics(infos(1), [0.0], [{}]).keys()
    names |= throughput(infos(1), {"timing/generation": 1.0, "timing/step_total": 1.0}).keys()
    text = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    assert sorted(name for name in names if f"`{name}`" not in text) == []


def update(tokens: int, **values: Any) -> dict[str, Any]:
    """Fields of one update."""
    return {"skipped": False, "num_action_tokens": tokens, **values}


def test_updates() -> None:
    """Means over action tokens; the last learning rate and norm; the largest ratio."""
    actor = [
        update(
            10, loss=1.0, clip_frac=0.0, lr=1e-3, grad_norm=2.0, ratio_max_diff=0.5, entropy=None
        ),
        update(
            30, loss=2.0, clip_frac=0.4, lr=2e-3, grad_norm=1.0, ratio_max_diff=0.2, entropy=None
        ),
        {"skipped": True, "num_action_tokens": 0, "loss": 0.0, "lr": 0.0},
    ]
    assert update_metrics("actor", actor) == {
        "train/actor_skipped_updates": 1.0,
        "train/policy_loss": 1.75,
        "train/ppo_clip_ratio": pytest.approx(0.3),
        "train/ratio_max_diff": 0.5,
        "train/actor_grad_norm": 1.0,
        "train/actor_lr": 2e-3,
    }
    assert update_metrics("critic", [update(4, loss=0.5, value_mean=-1.0, lr=1e-5)]) == {
        "train/critic_skipped_updates": 0.0,
        "train/critic_loss": 0.5,
        "train/values": -1.0,
        "train/critic_lr": 1e-5,
    }


def test_no_updates() -> None:
    """A frozen role has no metrics; one that skipped everything has the counter alone."""
    assert update_metrics("actor", []) == {}
    skipped = [{"skipped": True, "num_action_tokens": 0, "loss": 0.0}]
    assert update_metrics("actor", skipped) == {"train/actor_skipped_updates": 1.0}


def test_throughput() -> None:
    """Tokens per second, where the time is known."""
    timing = {"timing/generation": 2.0, "timing/step_total": 4.0}
    assert throughput(infos(8, 2), timing) == {
        "timing/generation_tokens_per_second": 5.0,
        "timing/tokens_per_second": 4.0,
    }
    assert throughput(infos(8, 2), {"timing/generation": 0.0}) == {}
