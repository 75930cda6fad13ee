"""The bytes that a role is said to take are those of the tensors that are there."""

from __future__ import annotations

import gc
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import pytest
import torch

from megappo.mesh.rank import MeshRank
from megappo.mesh.settings import (
    MeshSettings,
    OptimizerSettings,
    PolicyLossSettings,
    RoleSettings,
    ValueLossSettings,
)
from megappo.records import RoleMemory
from megappo.topology import Topology
from tests.support.models import make_model
from tests.support.ranks import run_ranks

FOLDERS = TemporaryDirectory(prefix="memory-")
ADAM = OptimizerSettings(lr=1e-3)
Dtype = Literal["fp32", "bf16"]
Case = tuple[Dtype, bool]
Seen = tuple[list[RoleMemory], int, list[list[RoleMemory]]]


@cache
def folder(family: str) -> str:
    """A model large enough that small things do not count."""
    path = Path(FOLDERS.name) / family
    return str(make_model(path, family, layers=4, hidden=128, ffn=256))


def _all_bytes() -> int:
    """Storages of all tensors that Python knows."""
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def measure(rank: int, topology: Topology, family: str, case: Case) -> Seen:
    """A trainable policy, a trainable critic and a frozen reference."""
    dtype, sharded = case
    settings = MeshSettings(
        dtype=dtype, use_distributed_optimizer=sharded, sequence_parallel=topology.tp > 1
    )
    mesh = MeshRank(rank, topology, settings)
    path = folder(family)
    gc.collect()
    before = _all_bytes()
    mesh.add_role(RoleSettings("actor", path, "lm", ADAM, PolicyLossSettings()))
    mesh.add_role(RoleSettings("critic", path, "value", ADAM, ValueLossSettings()))
    mesh.add_role(RoleSettings("ref", path, "lm"))
    gc.collect()
    there = _all_bytes() - before
    everywhere = mesh.memory()
    return everywhere[rank], there, everywhere


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("topology", "family", "case"),
    [
        (Topology(1), "llama", ("fp32", True)),
        pytest.param(Topology(1), "llama", ("bf16", False), marks=SLOW),
        pytest.param(Topology(2), "llama", ("fp32", True), marks=SLOW),
        (Topology(2), "llama", ("bf16", True)),
        pytest.param(Topology(2), "llama", ("bf16", False), marks=SLOW),
        (Topology(2, tp=2), "llama", ("bf16", False)),
        (Topology(2, tp=2, ep=2), "qwen3_moe", ("bf16", True)),
        pytest.param(Topology(2, tp=2, ep=2), "qwen3_moe", ("fp32", True), marks=SLOW),
    ],
    ids=str,
)
def test_said_is_there(topology: Topology, family: str, case: Case) -> None:
    """To 2 %; every rank knows every rank's; frozen roles have parameters alone."""
    dtype, sharded = case
    folder(family)  # before the ranks are forked: each of them would write the same files
    for rank, (said, there, everywhere) in enumerate(
        run_ranks(topology.world_size, measure, topology, family, case)
    ):
        assert everywhere[rank] == said and len(everywhere) == topology.world_size
        assert sum(role.total for role in said) == pytest.approx(there, rel=0.02)
        actor, critic, ref = said
        assert [role.role for role in said] == ["actor", "critic", "ref"]
        assert ref.total == ref.parameters > 0
        item = 4 if dtype == "fp32" else 2
        assert actor.gradients == pytest.approx(actor.parameters * 4 / item, rel=0.02)
        share = topology.dp if sharded and family == "llama" else 1
        moments = actor.parameters * 8 / item / share
        if family == "llama":
            assert actor.optimizer_state == pytest.approx(moments, rel=0.05)
            main = 0 if dtype == "fp32" else moments / 2
            assert actor.main_parameters == pytest.approx(main, rel=0.05)
        assert critic.parameters < actor.parameters
