"""Checkpoints of actor and critic: exact on the same mesh, loadable on another.

A mesh of TP2×PP2 trains one step, saves, and trains another one. The same mesh anew, and
meshes of other sizes, load what was saved and train that second step: weights after loading
are equal, and so is the step. A model with experts is saved from virtual chunks and spread
experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np
import pytest
import torch

from megappo.checkpoint.sharded import load_random_state, load_role, save_random_state, save_role
from megappo.data.packing import plan_batch
from megappo.mesh.rank import MeshRank
from megappo.mesh.settings import (
    ExperienceSettings,
    MeshSettings,
    OptimizerSettings,
    PolicyLossSettings,
    RoleSettings,
    ValueLossSettings,
)
from megappo.topology import Topology
from tests.support.canonical import Shards, canonical_vector, local_weights
from tests.support.models import make_llama, make_model
from tests.support.ranks import run_ranks
from tests.support.rollouts import KEY, held_by, make_rollouts

PLAIN = MeshSettings()
FOLDER = TemporaryDirectory(prefix="checkpoint-")
ADAM = OptimizerSettings(
    lr=1e-2, lr_scheduler="cosine_with_min_lr", warmup_steps=1, total_steps=5, weight_decay=0.1
)
SAVED_ON = {
    "tied": Topology(4, tp=2, pp=2),
    "experts": Topology(4, tp=2, pp=2, ep=2, vpp=2),
}
PROMPTS, RESPONSES = [3, 2, 4, 1, 5, 2], [5, 1, 6, 3, 2, 4]
ROLES = ("actor", "critic")


@dataclass(frozen=True)
class Result:
    """Of one rank: weights when the step began and when it ended, by role, and the rates."""

    before: dict[str, Shards]
    after: dict[str, Shards]
    lr: list[float]
    same_random_state: bool


@cache
def policy(model: str) -> str:
    """A policy's folder, by the names of ``SAVED_ON``."""
    folder = Path(FOLDER.name) / model
    if model == "tied":
        return str(make_llama(folder, layers=2, tied=True))
    return str(make_model(folder, "qwen3_moe", layers=5))


def build(
    number: int, topology: Topology, settings: MeshSettings = PLAIN, model: str = "tied"
) -> MeshRank:
    """Actor and critic."""
    rank = MeshRank(number, topology, settings)
    rank.add_role(RoleSettings("actor", policy(model), "lm", ADAM, PolicyLossSettings()))
    rank.add_role(RoleSettings("critic", policy(model), "value", ADAM, ValueLossSettings()))
    return rank


def settings_of(topology: Topology, model: str) -> MeshSettings:
    """Experts on several tensor ranks need sequence parallelism."""
    return MeshSettings(sequence_parallel=model == "experts" and topology.tp > 1)


def train(rank: MeshRank) -> list[float]:
    """One step of both roles on the batch; returns the learning rates."""
    count = len(PROMPTS)
    rank.store[KEY] = held_by(
        make_rollouts(PROMPTS, RESPONSES), range(count) if not rank.rank else []
    )
    rank.load_batch(
        plan_batch(
            key=KEY,
            sample_ids=range(100, 100 + count),
            prompt_lens=PROMPTS,
            response_lens=RESPONSES,
            holder_ranks=[0] * count,
            scores=[0.5, -1, 2, 0, 1, -2],
            train_batch_size=count,
            num_replicas=rank.topology.dp,
            token_budget=64,
            seed=1,
        )
    )
    rank.compute_log_probs("actor")
    rank.compute_values("critic")
    rank.make_experience(ExperienceSettings(kl_coef=0.0))
    return [rank.update(role, 0).lr for role in ROLES]


def weights(rank: MeshRank) -> dict[str, Shards]:
    """This rank's weights of both roles."""
    return {role: local_weights(rank.roles[role]) for role in ROLES}


def save(number: int, folder: str, model: str) -> Result:
    """Train, save, train."""
    topology = SAVED_ON[model]
    rank = build(number, topology, settings_of(topology, model), model)
    train(rank)
    for role in ROLES:
        target = rank.roles[role]
        save_role(Path(folder) / role, target.modules, target.optimizer, target.scheduler)
    if number == 0:
        (Path(folder) / "rng").mkdir()
    torch.distributed.barrier()
    save_random_state(Path(folder) / "rng")
    return _step(rank, weights(rank), True)


def _step(rank: MeshRank, before: dict[str, Shards], same: bool) -> Result:
    rates = train(rank)
    return Result(before, weights(rank), rates, same)


def load(number: int, folder: str, topology: Topology, model: str) -> Result:
    """Load, train."""
    rank = build(number, topology, settings_of(topology, model), model)
    for role in ROLES:
        target = rank.roles[role]
        load_role(Path(folder) / role, target.modules, target.optimizer, target.scheduler)
    return _step(rank, weights(rank), load_random_state(Path(folder) / "rng"))


@cache
def saved(model: str) -> tuple[str, list[Result]]:
    """The checkpoint's folder and what its mesh did next."""
    policy(model)  # made once, before the ranks are
    folder = Path(FOLDER.name) / f"{model}_step_1"
    folder.mkdir()
    return str(folder), run_ranks(SAVED_ON[model].world_size, save, str(folder), model)


def joined(
    results: list[Result], part: str, role: str, topology: Topology, model: str
) -> torch.Tensor:
    """A role's weights in canonical coordinates."""
    shards = [getattr(result, part)[role] for result in results]
    return canonical_vector(shards, policy(model), topology, value_head=role == "critic")


@pytest.mark.parametrize(
    ("model", "topology"),
    [
        ("tied", SAVED_ON["tied"]),
        ("tied", Topology(2, tp=2)),
        ("tied", Topology(2)),
        ("tied", Topology(1)),
        ("tied", Topology(2, pp=2)),
        ("experts", SAVED_ON["experts"]),
        ("experts", Topology(1)),
        ("experts", Topology(2, ep=2)),
        ("experts", Topology(2, tp=2)),
    ],
    ids=str,
)
def test_any_mesh_goes_on_from_a_checkpoint(model: str, topology: Topology) -> None:
    """Weights are bit-equal after loading; moments, schedule and step count carry on."""
    source = SAVED_ON[model]
    folder, original = saved(model)
    results = run_ranks(topology.world_size, load, folder, topology, model)
    assert {tuple(r.lr) for r in results} == {tuple(r.lr) for r in original}
    assert {r.same_random_state for r in results} == {topology.world_size == source.world_size}
    for role in ROLES:
        loaded = joined(results, "before", role, topology, model)
        assert torch.equal(loaded, joined(original, "before", role, source, model))
        expected = joined(original, "after", role, source, model)
        after = joined(results, "after", role, topology, model)
        if topology == source:
            assert torch.equal(after, expected)
        moved = float((expected - loaded).norm())
        assert float((after - expected).norm()) <= 1e-2 * moved and moved > 0


def save_twice(number: int, folder: str, settings: MeshSettings) -> list[dict[str, Shards]]:
    """Save before the first step and after it; weights when saved, and one step later."""
    rank = build(number, Topology(1), settings)
    seen = []
    for name in ("untrained", "trained"):
        for role in ROLES:
            target = rank.roles[role]
            save_role(
                Path(folder) / name / role, target.modules, target.optimizer, target.scheduler
            )
        seen.append(weights(rank))
        train(rank)
        seen.append(weights(rank))
    return seen


def load_twice(number: int, folder: str, settings: MeshSettings) -> list[dict[str, Shards]]:
    """The same weights from the two checkpoints, loaded into one mesh after another."""
    rank = build(number, Topology(1), settings)
    seen = []
    for name in ("untrained", "trained"):
        for role in ROLES:
            target = rank.roles[role]
            load_role(
                Path(folder) / name / role, target.modules, target.optimizer, target.scheduler
            )
        seen.append(weights(rank))
        train(rank)
        seen.append(weights(rank))
    return seen


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("distributed", [True, False])
def test_every_kind_of_optimizer_goes_on(
    tmp_path: Path, dtype: Literal["bf16", "fp32"], distributed: bool
) -> None:
    """Also from before its first step: a frozen actor, or a run stopped before it trained."""
    policy("tied")  # made once, before the ranks are
    settings = MeshSettings(dtype=dtype, use_distributed_optimizer=distributed)
    expected = run_ranks(1, save_twice, str(tmp_path), settings)[0]
    found = run_ranks(1, load_twice, str(tmp_path), settings)[0]
    for left, right in zip(found, expected, strict=True):
        for role in ROLES:
            assert left[role].keys() == right[role].keys()
            assert all(np.array_equal(left[role][n], right[role][n]) for n in left[role])
    untrained, trained = (next(iter(seen["critic"].values())) for seen in expected[:2])
    assert not np.array_equal(untrained, trained)


def load_from(number: int, folder: str) -> None:
    """Load the actor alone."""
    target = build(number, Topology(1)).roles["actor"]
    load_role(Path(folder), target.modules, target.optimizer, target.scheduler)


def save_without_optimizer(number: int, folder: str) -> None:
    """Save the actor's model alone."""
    save_role(Path(folder), build(number, Topology(1)).roles["actor"].modules, None, None)


def test_a_checkpoint_without_optimizer_state_is_refused(tmp_path: Path) -> None:
    """Moments are never silently fresh (C42); a folder that is no checkpoint is named."""
    run_ranks(1, save_without_optimizer, str(tmp_path / "model_only"))
    for folder, reason in (
        ("model_only", "holds no optimizer state"),
        ("nowhere", "not a Megatron-Core distributed checkpoint"),
    ):
        with pytest.raises(RuntimeError, match=reason):
            run_ranks(1, load_from, str(tmp_path / folder))
