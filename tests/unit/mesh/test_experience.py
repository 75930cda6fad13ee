"""Experience of one replica: independence of the cut, dummies, and batches without actions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from megappo.mesh.experience import make_experience, to_metrics
from megappo.mesh.settings import ExperienceMetrics, ExperienceSettings
from megappo.ppo.advantages import AdvantageEstimator
from megappo.records import Experience, PackedBatch

SETTINGS = ExperienceSettings(kl_coef=0.1, gamma=0.9, lambd=0.8)


def sample(prompt: int, response: int, seed: int) -> dict[str, torch.Tensor]:
    """One sequence with log-probs of both policies and values; 9s where no action is."""
    generator = torch.Generator().manual_seed(seed)
    total = prompt + response
    mask = torch.arange(total) >= prompt
    columns = {
        name: torch.where(mask, torch.randn(total, generator=generator), 9.0)
        for name in ("engine", "log_probs", "ref", "values")
    }
    columns["engine"] = torch.where(mask, columns["engine"], 0.0)
    return {"mask": mask, **columns}


def pack(samples: list[dict[str, torch.Tensor]], rows: list[int], dummy: int) -> PackedBatch:
    """A micro-batch of the samples at ``rows`` with a dummy tail."""
    lengths = [len(samples[i]["mask"]) for i in rows] + ([dummy] if dummy else [])
    mask = torch.cat([*(samples[i]["mask"] for i in rows), torch.zeros(dummy).bool()])
    return PackedBatch(
        tokens=torch.zeros(len(mask), dtype=torch.int64),
        cu_seqlens=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        action_mask=mask,
        engine_log_probs=torch.cat([*(samples[i]["engine"] for i in rows), torch.zeros(dummy)]),
        samples=torch.tensor(rows, dtype=torch.int64),
    )


def run(
    samples: list[dict[str, torch.Tensor]],
    cut: list[tuple[list[int], int]],
    scores: list[float],
    settings: ExperienceSettings = SETTINGS,
) -> tuple[dict[int, Experience], ExperienceMetrics]:
    """Experience per sample, and metrics, for a cut into (rows, dummy tokens)."""
    batches = [pack(samples, rows, dummy) for rows, dummy in cut]

    def columns(name: str) -> list[torch.Tensor]:
        return [
            torch.cat([*(samples[i][name] for i in rows), torch.full((dummy,), 9.0)])
            for rows, dummy in cut
        ]

    experiences, sums, maximum = make_experience(
        batches,
        columns("log_probs"),
        columns("ref"),
        columns("values"),
        np.array(scores, np.float32),
        settings,
        lambda x: x,
    )
    by_sample: dict[int, Experience] = {}
    for batch, experience in zip(batches, experiences, strict=True):
        for position, row in enumerate(batch.samples.tolist()):
            start, end = batch.cu_seqlens[position : position + 2].tolist()
            fields = {k: v[start:end] for k, v in vars(experience).items() if v is not None}
            by_sample[row] = replace(experience, **fields)
        tail = slice(int(batch.cu_seqlens[len(batch.samples)]), None)
        assert not experience.advantages[tail].any()
    return by_sample, to_metrics(sums, maximum, has_values=True)


CUTS = [
    [([0, 1, 2, 3], 0)],
    [([3, 1], 3), ([], 2), ([2, 0], 0)],
    [([0], 1), ([1], 1), ([2], 1), ([3], 1)],
]


@pytest.mark.parametrize("estimator", ["gae", "reinforce", "rloo", "group_norm"])
def test_the_cut_into_micro_batches_changes_nothing(estimator: AdvantageEstimator) -> None:
    """Order, dummies and the number of micro-batches leave every sample's numbers alone."""
    settings = replace(SETTINGS, estimator=estimator)
    samples = [sample(2, 3, 0), sample(1, 6, 1), sample(4, 1, 2), sample(3, 0, 3)]
    scores = [1.0, -0.5, 2.0, 0.3]
    expected, metrics = run(samples, CUTS[0], scores, settings)
    for cut in CUTS[1:]:
        found, found_metrics = run(samples, cut, scores, settings)
        for row in range(4):
            torch.testing.assert_close(found[row].advantages, expected[row].advantages)
            torch.testing.assert_close(found[row].returns, expected[row].returns)
        assert vars(found_metrics) == pytest.approx(vars(metrics), abs=1e-6)


def test_hand_computed_batch() -> None:
    """One action token per sample: reward is score minus KL penalty, whitened over the batch."""
    samples = [sample(1, 1, 0), sample(2, 1, 1)]
    for entry, log_prob, ref, value in zip(
        samples, (-1.0, -2.0), (-1.5, -1.0), (0.5, 1.0), strict=True
    ):
        entry["log_probs"][-1], entry["ref"][-1], entry["values"][-1] = log_prob, ref, value
        entry["engine"][-1] = log_prob + 0.25
    found, metrics = run(samples, [([0, 1], 0)], [1.0, 3.0])
    # k1: 0.5 and -1; rewards 0.95 and 3.1; advantages 0.45 and 2.1, whitened to -1 and 1.
    torch.testing.assert_close(found[0].advantages, torch.tensor([0.0, -1.0]))
    torch.testing.assert_close(found[1].advantages, torch.tensor([0.0, 0.0, 1.0]))
    assert found[1].returns is not None
    torch.testing.assert_close(found[1].returns, torch.tensor([0.0, 0.0, 3.1]))
    assert metrics.num_action_tokens == 2
    assert metrics.kl == pytest.approx(-0.25)
    assert metrics.kl_reward == pytest.approx((0.95 + 3.1) / 2)
    assert metrics.advantage_mean == pytest.approx((0.45 + 2.1) / 2)
    assert metrics.advantage_std == pytest.approx((2.1 - 0.45) / 2)
    assert metrics.value_mean == pytest.approx(0.75)
    assert metrics.engine_diff_mean == pytest.approx(0.25)
    assert metrics.engine_diff_max == pytest.approx(0.25)


@pytest.mark.parametrize("responses", [(0, 3, 2), (0, 0, 1), (0, 0, 0)])
def test_empty_responses_give_no_nan(responses: tuple[int, ...]) -> None:
    """C32: an empty response adds nothing; a batch of them gives zeros."""
    samples = [sample(2, response, i) for i, response in enumerate(responses)]
    found, metrics = run(samples, [([0, 1, 2], 1)], [1.0, 2.0, 3.0])
    assert not found[0].advantages.any()
    assert all(np.isfinite(x) for x in vars(metrics).values())
    assert metrics.num_action_tokens == sum(responses)
    if not sum(responses):
        assert set(vars(metrics).values()) == {0.0}


def test_kl_is_the_mean_over_samples_of_the_token_mean() -> None:
    """A long response does not outweigh a short one in the logged KL."""
    samples = [sample(1, 1, 0), sample(1, 9, 1)]
    for entry, difference in zip(samples, (1.0, 0.0), strict=True):
        entry["ref"] = torch.where(entry["mask"], entry["log_probs"] - difference, 9.0)
    _, metrics = run(samples, [([0, 1], 0)], [0.0, 0.0])
    assert metrics.kl == pytest.approx(0.5, abs=1e-6)
    assert metrics.log_probs_diff == pytest.approx(0.1, abs=1e-6)
