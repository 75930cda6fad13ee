"""Rank arithmetic against Megatron-Core's own rank generator."""

from __future__ import annotations

import pytest
from megatron.core.parallel_state import RankGenerator

from megappo.topology import Topology

SIZES = [(1, 1, 1), (2, 2, 1), (2, 1, 2), (4, 2, 1), (8, 2, 2), (12, 3, 2), (16, 2, 4)]


@pytest.mark.parametrize(("world", "tp", "pp"), SIZES)
def test_groups_equal_megatrons(world: int, tp: int, pp: int) -> None:
    """Tensor, data and pipeline groups of every rank are Megatron's."""
    topology = Topology(world, tp, pp)
    generator = RankGenerator(tp=tp, ep=1, dp=topology.dp, pp=pp, cp=1, order="tp-cp-ep-dp-pp")
    stages = [topology.stage_ranks(p, d) for p in range(pp) for d in range(topology.dp)]
    assert sorted(generator.get_ranks("tp")) == sorted(stages)
    replicas = [topology.replica_ranks(d) for d in range(topology.dp)]
    assert sorted(sorted(g) for g in generator.get_ranks("tp-pp")) == sorted(replicas)


@pytest.mark.parametrize(("world", "tp", "pp"), SIZES)
def test_rank_and_coordinates_are_inverse(world: int, tp: int, pp: int) -> None:
    """A rank's position leads back to it, and the output rank is on the last stage."""
    topology = Topology(world, tp, pp)
    for rank in range(world):
        at = topology.coordinates(rank)
        assert topology.rank(at.pp, at.dp, at.tp) == rank
        assert topology.is_first_stage(rank) == (at.pp == 0)
        assert topology.is_last_stage(rank) == (at.pp == pp - 1)
    for replica in range(topology.dp):
        at = topology.coordinates(topology.output_rank(replica))
        assert (at.pp, at.dp, at.tp) == (pp - 1, replica, 0)


@pytest.mark.parametrize(("world", "tp", "pp"), [(3, 2, 1), (4, 3, 1), (6, 2, 2), (2, 1, 4)])
def test_sizes_that_do_not_divide_are_refused(world: int, tp: int, pp: int) -> None:
    """The message has all three numbers."""
    with pytest.raises(ValueError, match=rf"world_size = {world} .* {tp} x {pp} = {tp * pp}"):
        Topology(world, tp, pp)


@pytest.mark.parametrize(("world", "tp", "pp"), [(0, 1, 1), (1, 0, 1), (1, 1, -1)])
def test_sizes_below_one_are_refused(world: int, tp: int, pp: int) -> None:
    """Nothing is divided by zero."""
    with pytest.raises(ValueError, match="at least 1"):
        Topology(world, tp, pp)
