"""Rank-to-rank token exchange on real process groups, for meshes of every form."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from megappo.mesh.exchange import load_micro_batches, send_tokens
from megappo.records import BatchPlan, PackedBatch, Rollouts
from megappo.reshard.transport import default_group
from megappo.topology import Topology
from tests.support.ranks import run_ranks
from tests.support.rollouts import held_by, make_plan, make_rollouts

CPU = torch.device("cpu")
# Meshes that fill the 8 ranks, and smaller ones whose tokens lie on the other ranks.
MESHES = [
    *(Topology(8, tp, pp) for tp, pp in [(1, 1), (2, 2), (1, 4), (4, 2), (2, 1), (1, 8)]),
    *(Topology(6, tp, pp) for tp, pp in [(1, 3), (2, 1)]),
    Topology(1),
]


def random_case(topology: Topology, seed: int) -> tuple[Rollouts, BatchPlan]:
    """A batch of 17 samples, trained on all over the mesh; some ranks hold or get nothing."""
    generator = np.random.default_rng(seed)
    count = 17
    rollouts = make_rollouts(generator.integers(1, 9, count), generator.integers(0, 9, count))
    beyond = topology.world_size % dist.get_world_size()  # 0 where nothing is beyond the mesh
    plan = make_plan(
        rollouts,
        holder_ranks=generator.integers(beyond, dist.get_world_size(), count),
        steps=generator.integers(0, 2, count),
        replicas=generator.integers(0, topology.dp, count),
        micro_batches=generator.integers(0, 3, count),
        num_micro_batches=[3, 3],
    )
    return rollouts, plan


def exchange_everywhere(rank: int) -> list[str]:
    """Run the exchange on every mesh and compare with one rank that holds everything."""
    problems = []
    for seed, topology in enumerate(MESHES):
        rollouts, plan = random_case(topology, seed)
        rows = np.nonzero(plan.holder_ranks == rank)[0].tolist()
        mine = held_by(rollouts, rows) if rows else None
        if rank >= topology.world_size:
            send_tokens(plan, mine, topology, rank, device=CPU, group=default_group())
            continue
        found = load_micro_batches(plan, mine, topology, rank, multiple=2, device=CPU)
        expected = expect(topology, rank, rollouts, plan)
        for step in range(2):
            for index in range(3):
                where = f"{topology} rank {rank} step {step} micro-batch {index}"
                problems += differences(where, found[step][index], expected[step][index])
    return problems


def expect(
    topology: Topology, rank: int, rollouts: Rollouts, plan: BatchPlan
) -> list[list[PackedBatch]]:
    """What this rank should get, built by slicing the global batch."""
    offsets = rollouts.cu_seqlens.tolist()
    replica = topology.coordinates(rank).dp
    steps: list[list[PackedBatch]] = [[], []]
    for step in range(2):
        for index in range(3):
            here = (plan.steps == step) & (plan.replicas == replica)
            rows = np.nonzero(here & (plan.micro_batches == index))[0].tolist()
            spans = [torch.arange(offsets[i], offsets[i + 1]) for i in rows]
            real = sum(len(span) for span in spans)
            dummy = real % 2 if real else 2
            positions = torch.cat([*spans, torch.empty(0).long()])
            lengths = [len(span) for span in spans] + ([dummy] if dummy else [])
            tail = torch.zeros(dummy)
            last = topology.is_last_stage(rank)
            reads = last or topology.is_first_stage(rank)
            steps[step].append(
                PackedBatch(
                    tokens=torch.cat([rollouts.tokens[positions] * reads, tail.long()]),
                    cu_seqlens=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
                    action_mask=torch.cat([rollouts.action_mask[positions] & last, tail.bool()]),
                    engine_log_probs=torch.cat([rollouts.log_probs[positions] * last, tail]),
                    samples=torch.tensor(rows, dtype=torch.int64),
                )
            )
    return steps


def differences(where: str, found: PackedBatch, expected: PackedBatch) -> list[str]:
    """Fields that differ in value or type."""
    return [
        f"{where}: {name}"
        for name, tensor in vars(expected).items()
        if getattr(found, name).dtype != tensor.dtype
        or not torch.equal(getattr(found, name), tensor)
    ]


def test_every_rank_gets_exactly_what_its_stage_reads() -> None:
    """First stages get tokens, last stages all, middle stages lengths, whoever holds them."""
    for problems in run_ranks(8, exchange_everywhere):
        assert problems == []
