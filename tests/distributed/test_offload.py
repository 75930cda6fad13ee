"""A role that leaves the device between its phases takes the very same steps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import pytest
import torch

from megappo.checkpoint import sharded
from megappo.mesh.memory import role_memory, role_tensors
from megappo.mesh.rank import MeshRank
from megappo.mesh.settings import (
    ExperienceSettings,
    MeshSettings,
    OptimizerSettings,
    PolicyLossSettings,
    RoleSettings,
    UpdateMetrics,
    ValueLossSettings,
)
from megappo.records import ScoreRequest, ScoreText
from megappo.topology import Topology
from tests.support.models import make_model
from tests.support.ranks import run_ranks
from tests.support.rollouts import KEY, make_plan, make_rollouts

FOLDERS = TemporaryDirectory(prefix="offload-")
ADAM = OptimizerSettings(lr=1e-2)
ROLES = ("actor", "critic", "ref", "reward")


@dataclass(frozen=True)
class Case:
    """A mesh and what its optimizers do."""

    topology: Topology
    family: str = "llama"
    dtype: Literal["fp32", "bf16"] = "fp32"
    sharded: bool = True

    def __str__(self) -> str:
        """Test id."""
        return f"{self.family}-{self.topology}-{self.dtype}-{self.sharded}"


@dataclass(frozen=True)
class Seen:
    """Metrics of all updates, scores, and every tensor of every role at the end."""

    updates: list[UpdateMetrics]
    scores: list[list[float]]
    tensors: dict[str, list[torch.Tensor]]


@cache
def folder(family: str, head: Literal["lm", "value"]) -> str:
    """A checkpoint."""
    path = Path(FOLDERS.name) / f"{family}-{head}"
    return str(make_model(path, family, layers=2, value_head=head == "value"))


def _make_folders(case: Case) -> None:
    """Before the ranks are forked: each of them would write the same files."""
    for head in ("lm", "value"):
        folder(case.family, head)


def steps(number: int, case: Case, offload: bool, checkpoint: str) -> Seen:
    """A batch, two updates of either role, a checkpoint saved and loaded, two more."""
    topology = case.topology
    rank = MeshRank(
        number,
        topology,
        MeshSettings(
            dtype=case.dtype,
            use_distributed_optimizer=case.sharded,
            sequence_parallel=topology.tp > 1,
        ),
    )
    policy, judge = folder(case.family, "lm"), folder(case.family, "value")
    for role in (
        RoleSettings("actor", policy, "lm", ADAM, PolicyLossSettings(), offload=offload),
        RoleSettings("critic", policy, "value", ADAM, ValueLossSettings(), offload=offload),
        RoleSettings("ref", policy, "lm", offload=offload),
        RoleSettings("reward", judge, "value", reads="text", offload=offload),
    ):
        rank.add_role(role)
        _look(rank, role.name, offload)
    scores = rank.score(ScoreRequest((ScoreText("1+", None, "2", True),), 16))
    _look(rank, "reward", offload)
    _load(rank, number, topology)
    for name in ("actor", "ref"):
        rank.compute_log_probs(name)
        _look(rank, name, offload)
    rank.compute_values("critic")
    rank.make_experience(ExperienceSettings(kl_coef=0.1))
    updates = [rank.update(role, 0) for role in ("critic", "actor") * 2]
    _look(rank, "actor", offload)
    for name in ("actor", "critic"):
        target = rank.use(name)
        path = Path(checkpoint) / name
        sharded.save_role(path, target.modules, target.optimizer, target.scheduler)
    updates += [rank.update("actor", 0)]
    for name in ("actor", "critic"):
        target = rank.use(name)
        path = Path(checkpoint) / name
        sharded.load_role(path, target.modules, target.optimizer, target.scheduler)
    rank.rest()
    _look(rank, None, offload)
    updates += [rank.update(role, 0) for role in ("critic", "actor")]
    tensors = {
        name: [tensor.detach().clone() for tensor in role_tensors(rank.use(name))] for name in ROLES
    }
    return Seen(updates, scores, tensors)


def references(number: int, case: Case, how: str) -> list[torch.Tensor]:
    """The reference's log-probs before and after updates of the actor, and the actor's weights."""
    settings = MeshSettings(
        dtype=case.dtype,
        use_distributed_optimizer=case.sharded,
        sequence_parallel=case.topology.tp > 1,
    )
    rank = MeshRank(number, case.topology, settings)
    policy = folder(case.family, "lm")
    away, host = how == "swap and offload", None if how == "own" else "actor"
    rank.add_role(RoleSettings("actor", policy, "lm", ADAM, PolicyLossSettings(), offload=away))
    rank.add_role(RoleSettings("ref", policy, "lm", in_place_of=host))
    assert sum(role.total > 0 for role in rank.memory()[number]) == (2 if host is None else 1)
    _load(rank, number, case.topology)
    found: list[torch.Tensor] = []
    for _ in range(2):
        for name in ("actor", "ref"):
            rank.compute_log_probs(name)
            found += rank._log_probs[name]
        rank.make_experience(ExperienceSettings(kl_coef=0.1, estimator="reinforce"))
        rank.update("actor", 0)
    return found + [tensor.detach().clone() for tensor in role_tensors(rank.use("actor"))]


def _load(rank: MeshRank, number: int, topology: Topology) -> None:
    rollouts = make_rollouts([3, 2, 4, 3], [5, 1, 6, 2])
    zeros = [0] * 4
    if number == 0:
        rank.store[KEY] = rollouts
    rank.load_batch(
        make_plan(
            rollouts,
            holder_ranks=zeros,
            steps=zeros,
            replicas=[i % topology.dp for i in range(4)],
            micro_batches=zeros,
            num_micro_batches=[1],
        )
    )


def _look(rank: MeshRank, present: str | None, offload: bool) -> None:
    """Only the role at work takes memory, if roles may leave."""
    for name, role in rank.roles.items():
        if offload and name != present:
            assert role_memory(role).total == 0, name
        else:
            assert role_memory(role).parameters > 0, name


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(Topology(1)), marks=pytest.mark.slow),
        Case(Topology(2), dtype="bf16"),
        pytest.param(Case(Topology(2), dtype="bf16", sharded=False), marks=pytest.mark.slow),
        Case(Topology(2, tp=2, ep=2), "qwen3_moe", "bf16"),
        pytest.param(Case(Topology(2, pp=2)), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_steps_are_the_same_bit_for_bit(case: Case, tmp_path: Path) -> None:
    """Metrics, scores, weights, gradients and optimizer state; a checkpoint between."""
    _make_folders(case)
    runs = []
    for offload in (False, True):
        checkpoint = str(tmp_path / str(offload))
        runs.append(run_ranks(case.topology.world_size, steps, case, offload, checkpoint))
    for there, away in zip(*runs, strict=True):
        assert away.updates == there.updates
        assert away.scores == there.scores
        for name in ROLES:
            pairs = zip(away.tensors[name], there.tensors[name], strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), name
        assert any(tensor.any() for tensor in there.tensors["actor"])


@pytest.mark.parametrize(
    "case",
    [
        Case(Topology(1)),
        pytest.param(Case(Topology(2), dtype="bf16"), marks=pytest.mark.slow),
        pytest.param(Case(Topology(2, tp=2, ep=2), "qwen3_moe"), marks=pytest.mark.slow),
        Case(Topology(2, pp=2), dtype="bf16", sharded=False),
    ],
    ids=str,
)
def test_a_reference_in_the_actors_place(case: Case) -> None:
    """Its log-probs are those of a copy of its own, before and after the actor has moved."""
    _make_folders(case)
    own, swapped, both = (
        run_ranks(case.topology.world_size, references, case, how)
        for how in ("own", "swap", "swap and offload")
    )
    for expected, *others in zip(own, swapped, both, strict=True):
        for found in others:
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    (actor, ref, moved, again, *_) = own[-1]
    assert torch.equal(actor, ref) and torch.equal(ref, again) and not torch.equal(moved, again)
