"""Parallel sizes and micro-batch cuts do not change the mathematics of a PPO step.

Every layout trains the same tiny actor and critic on the same synthetic rollouts, in forked
gloo ranks. Compared with one process that takes each step in one micro-batch: the full
gradient vectors in canonical coordinates, their norms, and the *change* of the weights after
two steps. Each comparison is also shown to notice when one rank's gradient is 1 % too large.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import pytest
import torch

from megappo.data.packing import plan_batch
from megappo.mesh.rank import MeshRank
from megappo.mesh.role import Role
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
from megappo.records import BatchPlan
from megappo.topology import Topology
from tests.support.canonical import Shards, canonical_vector, local_gradients, local_weights
from tests.support.models import make_llama
from tests.support.ranks import run_ranks
from tests.support.rollouts import KEY, held_by, make_rollouts

PROMPTS = [3, 1, 7, 2, 5, 4, 6, 2, 3, 8, 1, 4]
RESPONSES = [6, 9, 2, 8, 0, 7, 5, 12, 3, 4, 10, 1]
ADAM = OptimizerSettings(lr=1e-3, weight_decay=0.01)
# With this epsilon the update is linear in the gradient; plain Adam cannot see its scale.
LINEAR = replace(ADAM, eps=1e3, lr=30.0, weight_decay=0.0, max_norm=0.0)
ROLES = ("actor", "critic")
MODELS = TemporaryDirectory(prefix="invariance-")


@dataclass(frozen=True)
class Layout:
    """Parallel sizes and the token budget of a micro-batch; 1000 tokens is one per step."""

    world: int = 1
    tp: int = 1
    pp: int = 1
    sequence_parallel: bool = False
    budget: int = 1000
    tied: bool = False
    recompute: Literal["full", "selective"] | None = None
    shard_optimizer: bool = True

    def __str__(self) -> str:
        """Test id."""
        flags = "+sp" * self.sequence_parallel + "+tied" * self.tied
        flags += "" if self.recompute is None else f"+{self.recompute}-recompute"
        flags += "" if self.shard_optimizer else "+whole-optimizer"
        dp = self.world // (self.tp * self.pp)
        return f"tp{self.tp}-pp{self.pp}-dp{dp}{flags}-budget{self.budget}"


LAYOUTS = [
    Layout(budget=48),
    Layout(budget=16),
    Layout(2, tp=2),
    Layout(2, pp=2, budget=48),
    Layout(2, budget=16),
    Layout(4, tp=2, pp=2, budget=16),
    Layout(8, tp=2, pp=2, budget=24),
    Layout(2, tp=2, sequence_parallel=True, budget=48),
    Layout(2, pp=2, budget=16, tied=True, recompute="selective"),
    Layout(4, tp=2, pp=2, sequence_parallel=True, budget=24, recompute="full"),
    Layout(2, budget=48, shard_optimizer=False),
]


@dataclass(frozen=True)
class Result:
    """What one rank saw; the shards are put together in the parent.

    ``norms``, ``gradients`` and ``changes`` are by role. ``faulty_*`` are with one rank's
    gradient scaled by 1.01; the ``linear`` role is the actor with a huge epsilon.
    """

    experience: ExperienceMetrics
    updates: list[UpdateMetrics]
    norms: dict[str, float]
    faulty_norms: dict[str, float]
    gradients: dict[str, Shards]
    faulty_gradients: dict[str, Shards]
    changes: dict[str, Shards]


@contextmanager
def one_rank_scaled(rank: MeshRank, role: Role) -> Iterator[None]:
    """Scale what the mesh's last rank contributes to the gradient by 1.01."""
    chunk = role.chunks[0]
    original = chunk.finish_grad_sync

    def scaled(*args: Any, **kwargs: Any) -> None:
        if rank.rank == rank.topology.world_size - 1:
            chunk.scale_gradients(1.01)
        original(*args, **kwargs)

    chunk.finish_grad_sync = scaled
    yield
    del chunk.finish_grad_sync


def two_step_plan(topology: Topology, budget: int) -> BatchPlan:
    """The batch in two optimizer steps; samples are held round robin."""
    count = len(PROMPTS)
    return plan_batch(
        key=KEY,
        sample_ids=range(100, 100 + count),
        prompt_lens=PROMPTS,
        response_lens=RESPONSES,
        holder_ranks=[i % topology.world_size for i in range(count)],
        scores=[((i * 7) % 5 - 2) / 2 for i in range(count)],
        train_batch_size=6,
        num_replicas=topology.dp,
        token_budget=budget,
        seed=3,
    )


def build(number: int, layout: Layout, folders: dict[str, str]) -> MeshRank:
    """All roles of one rank, with its share of the rollouts in its store."""
    topology = Topology(layout.world, layout.tp, layout.pp)
    rank = MeshRank(
        number,
        topology,
        MeshSettings(
            temperature=0.7,
            sequence_parallel=layout.sequence_parallel,
            recompute=layout.recompute,
            use_distributed_optimizer=layout.shard_optimizer,
        ),
    )
    policy, value = PolicyLossSettings(), ValueLossSettings()
    rank.add_role(RoleSettings("actor", folders["actor"], "lm", ADAM, policy))
    rank.add_role(RoleSettings("critic", folders["critic"], "value", ADAM, value))
    rank.add_role(RoleSettings("ref", folders["ref"], "lm"))
    for name in ("linear", "faulty_linear"):
        rank.add_role(RoleSettings(name, folders["actor"], "lm", LINEAR, policy))
    rows = range(number, len(PROMPTS), topology.world_size)
    rank.store[KEY] = held_by(make_rollouts(PROMPTS, RESPONSES), rows)
    return rank


def gradient(rank: MeshRank, name: str, step: int) -> tuple[Shards, float]:
    """Accumulate a step's gradient; returns this rank's part of it and the global norm."""
    role = rank.roles[name]
    rank.accumulate(name, step)
    shards = local_gradients(role)
    role.optimizer.prepare_grads()
    return shards, float(role.optimizer.get_grad_norm())


def train(number: int, layout: Layout, folders: dict[str, str]) -> Result:
    """One rank's run: experience, gradients with and without the fault, two steps."""
    rank = build(number, layout, folders)
    plan = two_step_plan(rank.topology, layout.budget)
    rank.load_batch(plan)
    for name in ("actor", "ref"):
        rank.compute_log_probs(name)
    rank.compute_values("critic")
    experience = rank.make_experience(ExperienceSettings(kl_coef=0.1, gamma=0.99, lambd=0.95))

    gradients, norms, faulty_gradients, faulty_norms = {}, {}, {}, {}
    for name in ROLES:
        with one_rank_scaled(rank, rank.roles[name]):
            faulty_gradients[name], faulty_norms[name] = gradient(rank, name, 0)
        gradients[name], norms[name] = gradient(rank, name, 0)

    updates, changes = [], {}
    for name in (*ROLES, "linear", "faulty_linear"):
        role = rank.roles[name]
        before = local_weights(role)
        for step in range(plan.num_steps):
            if name == "faulty_linear":
                with one_rank_scaled(rank, role):
                    updates.append(rank.update(name, step))
            else:
                updates.append(rank.update(name, step))
        after = local_weights(role)
        changes[name] = {key: after[key] - before[key] for key in after}
    rank.release_batch()
    assert not rank.store
    return Result(experience, updates, norms, faulty_norms, gradients, faulty_gradients, changes)


@dataclass(frozen=True)
class Merged:
    """A layout's results with vectors in canonical coordinates, by role."""

    first: Result
    gradients: dict[str, torch.Tensor]
    faulty_gradients: dict[str, torch.Tensor]
    changes: dict[str, torch.Tensor]


@cache
def folders(tied: bool) -> dict[str, str]:
    """Checkpoints of actor, reference and critic; the critic brings its own value head."""
    root = Path(MODELS.name) / ("tied" if tied else "untied")
    return {
        "actor": str(make_llama(root / "actor", layers=2, tied=tied)),
        "ref": str(make_llama(root / "ref", layers=2, tied=tied, seed=1)),
        "critic": str(make_llama(root / "critic", layers=2, seed=2, value_head=True)),
    }


@cache
def merged(layout: Layout) -> Merged:
    """Run a layout once, for all tests."""
    models = folders(layout.tied)
    results: list[Result] = run_ranks(layout.world, train, layout, models)
    topology = Topology(layout.world, layout.tp, layout.pp)
    for result in results:
        assert result.experience == results[0].experience
        assert result.updates == results[0].updates

    def join(
        pick: Callable[[Result], dict[str, Shards]], faulty: bool = False
    ) -> dict[str, torch.Tensor]:
        return {
            name: canonical_vector(
                [pick(result)[name] for result in results],
                models["critic" if name == "critic" else "actor"],
                topology,
                value_head=name == "critic",
                copies_agree=not (faulty or name == "faulty_linear"),
            )
            for name in pick(results[0])
        }

    return Merged(
        results[0],
        join(lambda r: r.gradients),
        join(lambda r: r.faulty_gradients, faulty=True),
        join(lambda r: r.changes),
    )


def baseline(layout: Layout) -> Merged:
    """One process, one micro-batch per step."""
    return merged(Layout(tied=layout.tied))


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what was expected."""
    return float((found - expected).norm() / expected.norm())


every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=str)


@every_layout
@pytest.mark.parametrize("role", ROLES)
def test_gradients_agree(layout: Layout, role: str) -> None:
    """Full gradient vector and norm to 1e-5; one rank's 1 % shows in both."""
    found, expected = merged(layout), baseline(layout)
    assert relative(found.gradients[role], expected.gradients[role]) < 1e-5
    assert found.first.norms[role] == pytest.approx(expected.first.norms[role], rel=1e-5)
    norm = float(expected.gradients[role].norm())
    assert expected.first.norms[role] == pytest.approx(norm, rel=1e-5)
    assert relative(found.faulty_gradients[role], expected.gradients[role]) > 1e-4
    assert abs(found.first.faulty_norms[role] / norm - 1) > 1e-4


@every_layout
@pytest.mark.parametrize("role", ROLES)
def test_weight_changes_agree(layout: Layout, role: str) -> None:
    """What two Adam steps change, relative to the change itself."""
    found, expected = merged(layout).changes[role], baseline(layout).changes[role]
    assert expected.abs().max() > 1e-4
    assert relative(found, expected) < 1e-2


@every_layout
def test_weight_changes_notice_a_scaled_shard(layout: Layout) -> None:
    """In an update that is linear in the gradient, one rank's 1 % shows a hundredfold."""
    found, expected = merged(layout).changes, baseline(layout).changes["linear"]
    assert relative(found["linear"], expected) < 1e-4
    assert relative(found["faulty_linear"], expected) > 1e-3


@every_layout
def test_metrics_agree(layout: Layout) -> None:
    """Experience and update metrics are those of one process, on every rank."""
    found, expected = merged(layout).first, baseline(layout).first
    assert vars(found.experience) == pytest.approx(vars(expected.experience), rel=1e-4, abs=1e-5)
    for update, other in zip(found.updates[:4], expected.updates[:4], strict=True):
        one, two = ({k: v for k, v in vars(x).items() if v is not None} for x in (update, other))
        one.pop("clip_frac"), two.pop("clip_frac")  # a count: one token may sit on the edge
        assert one == pytest.approx(two, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("layout", [Layout(), *LAYOUTS], ids=str)
def test_first_step_is_on_policy(layout: Layout) -> None:
    """Before the first update the ratio is 1 and nothing is clipped (C30)."""
    actor, _, critic, *_ = merged(layout).first.updates
    assert actor.ratio_mean == pytest.approx(1, abs=1e-5)
    assert actor.ratio_max_diff is not None and actor.ratio_max_diff < 1e-4
    assert actor.clip_frac == 0 and critic.clip_frac == 0
    assert actor.approx_kl == pytest.approx(0, abs=1e-8)
