"""Gradients and optimizer steps of the families' special parts do not depend on the mesh.

Head norms, biases, experts and routers are reduced over other groups of ranks than dense
matrices are; virtual pipeline chunks run in another order. Every layout takes one step on the
same sequences; gradient, norm and change of the weights are those of one process with one
micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import pytest
import torch

from megappo.mesh.role import Role
from megappo.mesh.schedule import accumulate_gradients
from megappo.mesh.settings import (
    MeshSettings,
    OptimizerSettings,
    PolicyLossSettings,
    RoleSettings,
)
from megappo.models import parallel
from megappo.models.config import Recompute
from megappo.records import PackedBatch
from megappo.topology import Topology
from tests.support.canonical import Shards, canonical_vector, local_gradients, local_weights
from tests.support.models import make_model
from tests.support.packed import VOCAB, pack
from tests.support.ranks import run_ranks

LENGTHS = (7, 4, 11, 9, 6, 13)
DENSE: dict[str, dict[str, Any]] = {"qwen2": {}, "qwen3": {"kv_heads": 1}}
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"sliding_window": 6},
    "qwen3_moe": {"norm_topk_prob": False},
}
MODELS = DENSE | EXPERTS
FOLDERS = TemporaryDirectory(prefix="family-gradients-")
# The update is linear in the clipped gradient; plain Adam cannot see its scale.
LINEAR = OptimizerSettings(lr=30.0, eps=1e3, weight_decay=0.0, max_norm=0.1)


@dataclass(frozen=True)
class Layout:
    """A mesh, its micro-batches per replica, and what it shards."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    vpp: int = 1
    micro_batches: int = 1
    sequence_parallel: bool = True
    shard_optimizer: bool = True
    experts_only: bool = True
    recompute: Recompute | None = None
    dtype: Literal["fp32", "bf16"] = "fp32"

    def __str__(self) -> str:
        """Test id."""
        flags = "" if self.sequence_parallel else "-whole-sequence"
        flags += "" if self.shard_optimizer else "-whole-optimizer"
        flags += "" if self.recompute is None else f"-{self.recompute}"
        sizes = f"tp{self.tp}-pp{self.pp}-dp{self.dp}-ep{self.ep}-vpp{self.vpp}"
        return f"{sizes}-micro{self.micro_batches}{flags}"

    @property
    def topology(self) -> Topology:
        """The mesh."""
        return Topology(self.tp * self.pp * self.dp, self.tp, self.pp, self.ep, self.vpp)

    @property
    def models(self) -> tuple[str, ...]:
        """Those of the layout; models with experts need sequence parallelism."""
        dense = () if self.experts_only else tuple(DENSE)
        return dense + (tuple(EXPERTS) if self.sequence_parallel else ())


LAYOUTS = [
    Layout(tp=2, sequence_parallel=False, experts_only=False),
    Layout(tp=2, experts_only=False),
    Layout(dp=2, ep=2),
    Layout(tp=2, ep=2, micro_batches=2, recompute="full"),
    Layout(pp=2, vpp=2, micro_batches=3, experts_only=False, recompute="selective"),
    Layout(pp=2, vpp=2, experts_only=False),
    Layout(dp=2, ep=2, shard_optimizer=False),
    Layout(tp=2, dp=2, ep=2, experts_only=False),
    Layout(tp=2, pp=2, ep=2, vpp=2, micro_batches=2),
]
SLOW = [
    Layout(tp=2, shard_optimizer=False),
    Layout(tp=2, dp=2),
    Layout(dp=4, ep=2),
    Layout(dp=4, ep=4),
    Layout(pp=2, dp=2, ep=2, micro_batches=3),
    Layout(pp=2, vpp=2, micro_batches=6, experts_only=False),
]


@cache
def folder(name: str) -> str:
    """A checkpoint of the family; two stages share its five layers unevenly."""
    return str(make_model(Path(FOLDERS.name) / name, name, layers=5, **MODELS[name]))


def micro_batches(layout: Layout, replica: int) -> tuple[list[PackedBatch], list[torch.Tensor]]:
    """A replica's sequences, packed, and the weight of every token in the loss."""
    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randint(4, VOCAB, (n,), generator=generator) for n in LENGTHS]
    weights = [torch.randn(n, generator=generator) for n in LENGTHS]
    mine = range(replica, len(LENGTHS), layout.dp)
    batches, weight = [], []
    for first in range(layout.micro_batches):
        rows = mine[first :: layout.micro_batches]
        batch = pack([tokens[i] for i in rows])
        real = sum(LENGTHS[i] for i in rows)
        mask = torch.arange(len(batch.tokens)) < real
        batches.append(replace(batch, action_mask=mask))
        tail = torch.zeros(len(batch.tokens) - real)
        weight.append(torch.cat([*(weights[i] for i in rows), tail]))
    return batches, weight


@dataclass(frozen=True)
class Step:
    """What one rank saw of one model's step."""

    gradient: Shards
    norm: float
    change: Shards


def rank_steps(rank: int, layout: Layout, folders: dict[str, str]) -> dict[str, Step]:
    """One optimizer step of every model."""
    topology = layout.topology
    parallel.initialize(topology, seed=7)
    settings = MeshSettings(
        dtype=layout.dtype,
        sequence_parallel=layout.sequence_parallel,
        use_distributed_optimizer=layout.shard_optimizer,
        recompute=layout.recompute,
    )
    batches, weights = micro_batches(layout, topology.coordinates(rank).dp)
    steps = {}
    for name, source in folders.items():
        actor = RoleSettings("actor", source, "lm", LINEAR, PolicyLossSettings())
        role = Role(rank, topology, settings, actor)

        def loss(
            output: torch.Tensor, index: int, role: Role = role
        ) -> tuple[torch.Tensor, torch.Tensor]:
            log_probs = role.log_probs(output, batches[index])
            return (log_probs * weights[index]).sum(), log_probs.detach()

        role.zero_gradients()
        reports = accumulate_gradients(role.chunks, batches, loss)
        assert len(reports) == (len(batches) if topology.is_last_stage(rank) else 0)
        gradient, before = local_gradients(role), local_weights(role)
        norm = role.step()
        change = {key: after - before[key] for key, after in local_weights(role).items()}
        steps[name] = Step(gradient, norm, change)
    return steps


@cache
def merged(layout: Layout) -> dict[str, tuple[torch.Tensor, float, torch.Tensor]]:
    """Gradient, norm and change of the weights by model, in canonical coordinates."""
    folders = {name: folder(name) for name in layout.models}
    ranks = run_ranks(layout.topology.world_size, rank_steps, layout, folders)

    def join(name: str, shards: list[Shards]) -> torch.Tensor:
        return canonical_vector(shards, folders[name], layout.topology, value_head=False)

    return {
        name: (
            join(name, [steps[name].gradient for steps in ranks]),
            ranks[0][name].norm,
            join(name, [steps[name].change for steps in ranks]),
        )
        for name in folders
    }


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what was expected."""
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    "layout", [*LAYOUTS, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)], ids=str
)
def test_steps_agree_with_one_process(layout: Layout) -> None:
    """Full gradients and norms to 1e-5, changes of the weights to 1e-4."""
    baseline = merged(Layout(experts_only=False))
    for name, (gradient, norm, change) in merged(layout).items():
        expected, expected_norm, expected_change = baseline[name]
        assert relative(gradient, expected) < 1e-5, name
        assert norm == pytest.approx(expected_norm, rel=1e-5), name
        assert norm == pytest.approx(float(expected.norm()), rel=1e-5), name
        assert norm > LINEAR.max_norm
        assert relative(change, expected_change) < 1e-4, name


@pytest.mark.slow
def test_bf16_steps_follow_fp32() -> None:
    """With bf16 weights, experts spread and fp32 main gradients: the same direction and size."""
    baseline = merged(Layout(experts_only=False))
    for name, (gradient, norm, _) in merged(Layout(dp=2, ep=2, dtype="bf16")).items():
        expected, expected_norm, _ = baseline[name]
        assert norm == pytest.approx(expected_norm, rel=0.1), name
        assert relative(gradient, expected) < 0.2, name
