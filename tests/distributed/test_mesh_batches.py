"""Awkward batches on two replicas: uneven, too few samples, empty responses, any cut.

Each case is run once on two data-parallel ranks as planned, and once on one rank with every
step in a single micro-batch; gradients, norms and metrics must be the same. All cases of a
mesh share one fork.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch

from megappo.mesh.rank import MeshRank
from megappo.mesh.settings import (
    ExperienceMetrics,
    ExperienceSettings,
    MeshSettings,
    OptimizerSettings,
    PolicyLossSettings,
    RoleSettings,
    UpdateMetrics,
    ValueLossSettings,
)
from megappo.records import BatchPlan, Rollouts
from megappo.topology import Topology
from tests.support.canonical import Shards, canonical_vector, local_gradients, local_weights
from tests.support.models import make_llama
from tests.support.ranks import run_ranks
from tests.support.rollouts import KEY, held_by, make_plan, make_rollouts

ROLES = ("actor", "critic")
MODELS = TemporaryDirectory(prefix="batches-")


@dataclass(frozen=True)
class Case:
    """Samples and where they go on two replicas; samples are held round robin."""

    prompts: Sequence[int]
    responses: Sequence[int]
    steps: Sequence[int]
    replicas: Sequence[int]
    micro_batches: Sequence[int]
    counts: Sequence[int]

    def rollouts(self) -> Rollouts:
        """The whole batch."""
        return make_rollouts(self.prompts, self.responses)

    def plan(self, world: int) -> BatchPlan:
        """As written for two ranks; for one, everything in one micro-batch per step."""
        plan = make_plan(
            self.rollouts(),
            holder_ranks=np.arange(len(self.prompts)) % world,
            steps=self.steps,
            replicas=self.replicas,
            micro_batches=self.micro_batches,
            num_micro_batches=self.counts,
        )
        if world == 2:
            return plan
        nowhere = np.zeros_like(plan.replicas)
        ones = np.ones_like(plan.num_micro_batches)
        return replace(plan, replicas=nowhere, micro_batches=nowhere, num_micro_batches=ones)


def last_batch(count: int, batch: int, replicas: Sequence[int]) -> Case:
    """``count`` samples in steps of ``batch``, so that the last step is short (C36)."""
    steps = [i // batch for i in range(count)]
    prompts, responses = [2 + i % 3 for i in range(count)], [3 + (5 * i) % 7 for i in range(count)]
    zeros = [0] * count
    return Case(prompts, responses, steps, replicas, zeros, [1] * (max(steps) + 1))


def five(replicas: Sequence[int], micro_batches: Sequence[int], count: int) -> Case:
    """Five sequences of very different length in one step (C23)."""
    return Case([2, 3, 1, 4, 2], [1, 12, 5, 2, 8], [0] * 5, replicas, micro_batches, [count])


CASES = {
    # C36: a last step with fewer samples than replicas gets dummies that change no gradient.
    "c36: 5 samples, batch 4": last_batch(5, 4, [0, 1, 0, 1, 0]),
    "c36: 3 samples, batch 2, last on replica 1": last_batch(3, 2, [0, 1, 1]),
    "c36: 7 samples, batch 3": last_batch(7, 3, [0, 1, 0, 1, 1, 0, 1]),
    "c36: a single sample": last_batch(1, 4, [1]),
    # C37: token budgets fill replicas unevenly; all run the same number of micro-batches.
    "c37: four of 8 tokens against four of 2": Case(
        [4] * 4 + [1] * 4,
        [4] * 4 + [1] * 4,
        [0] * 8,
        [0] * 4 + [1] * 4,
        [0, 1, 2, 3, 0, 0, 0, 0],
        [4],
    ),
    "c37: four of 8 tokens against one sample": Case(
        [4] * 4 + [1], [4] * 4 + [7], [0] * 5, [0] * 4 + [1], [0, 1, 2, 3, 2], [4]
    ),
    "c37: all on one replica": Case([4, 4, 4], [4, 2, 4], [0, 0, 1], [0, 0, 0], [0, 1, 0], [2, 1]),
    "c37: holes in the middle": Case([1, 2, 3], [5, 4, 3], [0, 0, 0], [0, 1, 1], [2, 0, 2], [3]),
    # C23: the same step in 1, 2 and 5 micro-batches, on 1 and 2 replicas.
    "c23: one replica, one micro-batch": five([0] * 5, [0] * 5, 1),
    "c23: one replica, two micro-batches": five([0] * 5, [0, 1, 0, 1, 1], 2),
    "c23: one replica, five micro-batches": five([0] * 5, [0, 1, 2, 3, 4], 5),
    "c23: two replicas, one micro-batch": five([0, 1, 0, 1, 0], [0] * 5, 1),
    "c23: two replicas, two micro-batches": five([0, 1, 1, 1, 0], [0, 1, 0, 0, 1], 2),
    "c23: two replicas, five micro-batches": five([0, 1, 0, 1, 0], [0, 1, 2, 3, 4], 5),
    # C32: empty responses among others.
    "c32: 1 of 4 empty": Case([3, 2, 4, 1], [0, 4, 2, 5], [0] * 4, [0, 1, 0, 1], [0] * 4, [1]),
    "c32: a replica of empty responses": Case(
        [3, 2, 4], [0, 0, 6], [0] * 3, [0, 0, 1], [0, 1, 0], [2]
    ),
}
EMPTY = Case([3, 2, 4, 1], [0] * 4, [0, 0, 1, 1], [0, 1, 0, 1], [0] * 4, [1, 1])


@dataclass(frozen=True)
class Outcome:
    """One case on one rank: by (role, step) this rank's gradients, and their global norm."""

    experience: ExperienceMetrics
    gradients: dict[tuple[str, int], Shards]
    norms: dict[tuple[str, int], float]
    log_probs: dict[int, list[float]]


def start(number: int, world: int, folder: str) -> MeshRank:
    """Actor, critic and reference on ``world`` data-parallel ranks."""
    rank = MeshRank(number, Topology(world), MeshSettings())
    adam = OptimizerSettings(lr=1e-3)
    rank.add_role(RoleSettings("actor", folder, "lm", adam, PolicyLossSettings()))
    rank.add_role(RoleSettings("critic", folder, "value", adam, ValueLossSettings()))
    rank.add_role(RoleSettings("ref", folder, "lm"))
    return rank


def prepare(rank: MeshRank, case: Case) -> ExperienceMetrics:
    """Everything up to the first update."""
    world = rank.topology.world_size
    rows = range(rank.rank, len(case.prompts), world)
    rank.store[KEY] = held_by(case.rollouts(), rows)
    rank.load_batch(case.plan(world))
    rank.compute_log_probs("actor")
    rank.compute_log_probs("ref")
    rank.compute_values("critic")
    return rank.make_experience(ExperienceSettings(kl_coef=0.1))


def run_cases(number: int, world: int, folder: str) -> dict[str, Outcome]:
    """Gradients of every step of every case, without changing the weights."""
    rank = start(number, world, folder)
    outcomes = {}
    for name, case in CASES.items():
        experience = prepare(rank, case)
        gradients, norms = {}, {}
        for role in ROLES:
            optimizer = rank.roles[role].optimizer
            for step in range(len(case.counts)):
                rank.accumulate(role, step)
                gradients[role, step] = local_gradients(rank.roles[role])
                optimizer.prepare_grads()
                norms[role, step] = float(optimizer.get_grad_norm())
        outcomes[name] = Outcome(experience, gradients, norms, sample_log_probs(rank))
        rank.release_batch()
    return outcomes


def sample_log_probs(rank: MeshRank) -> dict[int, list[float]]:
    """The frozen log-probs of each sample that this rank's replica trains on."""
    found = {}
    for batches, experiences in zip(rank.steps, rank.experience, strict=True):
        for batch, experience in zip(batches, experiences, strict=True):
            for position, row in enumerate(batch.samples.tolist()):
                begin, end = batch.cu_seqlens[position : position + 2].tolist()
                found[row] = experience.log_probs[begin:end].tolist()
    return found


@cache
def folder() -> str:
    """One checkpoint for all roles."""
    return str(make_llama(Path(MODELS.name) / "model", layers=2))


@cache
def outcomes(world: int) -> list[dict[str, Outcome]]:
    """All cases on a mesh of ``world`` ranks, by rank."""
    results: list[dict[str, Outcome]] = run_ranks(world, run_cases, world, folder())
    return results


every_case = pytest.mark.parametrize("name", CASES)


@every_case
def test_gradients_equal_one_process(name: str) -> None:
    """C23, C36, C37: gradient and norm to 1e-6, whatever the cut and the dummies."""
    (expected,), found = [[rank[name] for rank in outcomes(world)] for world in (1, 2)]
    for key, norm in expected.norms.items():
        vectors = [
            canonical_vector(
                [rank.gradients[key] for rank in ranks],
                folder(),
                Topology(len(ranks)),
                value_head=key[0] == "critic",
            )
            for ranks in (found, [expected])
        ]
        assert norm == pytest.approx(float(vectors[1].norm()), rel=1e-6)
        assert found[0].norms[key] == found[1].norms[key] == pytest.approx(norm, rel=1e-6)
        assert norm > 0 and float((vectors[0] - vectors[1]).norm()) <= 1e-6 * norm


@every_case
def test_metrics_equal_one_process(name: str) -> None:
    """C32, C36: metrics count real samples and tokens only, and are finite."""
    (expected,), found = [[rank[name] for rank in outcomes(world)] for world in (1, 2)]
    assert found[0].experience == found[1].experience
    assert all(np.isfinite(x) for x in vars(expected.experience).values())
    assert vars(found[0].experience) == pytest.approx(vars(expected.experience), rel=1e-5, abs=1e-5)
    assert expected.experience.num_action_tokens == sum(CASES[name].responses)


@every_case
def test_log_probs_do_not_depend_on_company(name: str) -> None:
    """C30: a sample alone, or packed with longer ones, has the same log-probs."""
    (expected,), found = [[rank[name] for rank in outcomes(world)] for world in (1, 2)]
    together = found[0].log_probs | found[1].log_probs
    assert set(together) == set(expected.log_probs) == set(range(len(CASES[name].prompts)))
    for row, values in expected.log_probs.items():
        assert together[row] == pytest.approx(values, abs=1e-5)


@every_case
def test_no_divergence_from_a_reference_of_equal_weights(name: str) -> None:
    """C30: the KL to a reference that equals the policy is 0."""
    for world in (1, 2):
        assert outcomes(world)[0][name].experience.kl == pytest.approx(0, abs=1e-6)


def skip_empty(number: int, folder: str) -> tuple[list[UpdateMetrics], bool, bool, bool]:
    """Update on a batch without action tokens, then on a batch with some."""
    rank = start(number, 2, folder)
    experience = prepare(rank, EMPTY)
    role = rank.roles["actor"]
    before = local_weights(role)
    updates = [rank.update(name, step) for name in ROLES for step in range(2)]
    unchanged = all(np.array_equal(before[k], v) for k, v in local_weights(role).items())
    counted = role.scheduler.num_steps
    prepare(rank, CASES["c36: 5 samples, batch 4"])
    updates.append(rank.update("actor", 0))
    changed = any(not np.array_equal(before[k], v) for k, v in local_weights(role).items())
    return updates, unchanged, changed, experience.num_action_tokens == 0 == counted


def test_a_step_without_actions_is_skipped() -> None:
    """C32: all responses empty: nothing changes, the step says so, the next one trains."""
    for updates, unchanged, changed, nothing_counted in run_ranks(2, skip_empty, folder()):
        assert [update.skipped for update in updates] == [True] * 4 + [False]
        assert unchanged and changed and nothing_counted
        assert updates[-1].num_action_tokens > 0 and torch.isfinite(torch.tensor(updates[-1].loss))
