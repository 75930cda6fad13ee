"""Layouts as values: their ranks in another world, boxes cut to a size."""

from __future__ import annotations

import numpy as np
import pytest

from megappo.topology import Topology
from megappo.weights.layout import shifted, widened
from megappo.weights.megatron import megatron_layout
from megappo.weights.plan import plan
from megappo.weights.vllm import vllm_layout
from tests.support.weights import (
    apply_plan,
    assert_equal_ranks,
    blank,
    megatron_reference,
    numbered,
    tiny_shape,
    vllm_reference,
)


def test_engines_beside_the_mesh() -> None:
    """Two worlds joined: engine ranks come after mesh ranks, and every byte crosses."""
    shape, topology = tiny_shape(), Topology(2, 2)
    weights = numbered(shape)
    mesh = widened(megatron_layout(shape, topology), 6)
    engines = shifted(vllm_layout(shape, 4, 2), 2, 6)
    assert [len(mesh.local_ids(r)) > 0 for r in range(6)] == [True] * 2 + [False] * 4
    assert [len(engines.local_ids(r)) > 0 for r in range(6)] == [False] * 2 + [True] * 4
    to_engines = plan(mesh, engines)
    assert set(np.unique(to_engines.source_rank)) == {0, 1}
    assert set(np.unique(to_engines.destination_rank)) == {2, 3, 4, 5}
    ranks = blank(engines)
    apply_plan(to_engines, megatron_reference(shape, topology, weights), ranks)
    assert_equal_ranks(ranks[2:], vllm_reference(shape, 4, 2, weights))


@pytest.mark.parametrize(("first_rank", "world_size"), [(-1, 8), (5, 8), (0, 3), (8, 8)])
def test_ranks_outside_the_world(first_rank: int, world_size: int) -> None:
    """A world too small for the layout is refused with its size."""
    with pytest.raises(ValueError, match=f"not all in a world of {world_size} ranks"):
        shifted(vllm_layout(tiny_shape(), 4, 2), first_rank, world_size)
