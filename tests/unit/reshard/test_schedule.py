"""The schedule: every element once, both ends agree, and no buffer overflows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.reshard.schedule import aligned, make_schedule
from megappo.topology import Topology
from megappo.weights.layout import split_box
from megappo.weights.megatron import megatron_layout
from megappo.weights.plan import plan
from megappo.weights.vllm import vllm_layout
from tests.support.weights import tiny_shape


@settings(max_examples=10, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2]),
    dp=st.sampled_from([1, 2]),
    itemsize=st.sampled_from([2, 4]),
    buffer_bytes=st.sampled_from([16, 112, 1024, 1 << 20]),
)
def test_both_ends_agree_and_buffers_hold(
    tp: int, pp: int, dp: int, itemsize: int, buffer_bytes: int
) -> None:
    """C18: whatever the buffer, messages fit it, match on both ends and carry everything."""
    topology = Topology(tp * pp * dp, tp, pp)
    ranks = topology.world_size
    shape = tiny_shape(vocab=7)
    to_engines = plan(megatron_layout(shape, topology), vllm_layout(shape, ranks, 1))
    sizes = np.full(len(to_engines.destination.local_rank), itemsize)
    schedules = [make_schedule(to_engines, r, sizes, buffer_bytes) for r in range(ranks)]
    messages: list[dict[tuple[int, int, int], list[tuple[int, ...]]]] = [{}, {}]
    for rank, schedule in enumerate(schedules):
        for end, copies in enumerate((schedule.sends, schedule.receives)):
            fill = np.bincount(copies.round, weights=aligned(copies.num_bytes))
            assert fill.max(initial=0) <= buffer_bytes
            order = list(zip(copies.round, copies.peer, strict=True))
            assert order == sorted(order)
            for k in range(len(copies.round)):
                peer = int(copies.peer[k])
                pair = (rank, peer) if end == 0 else (peer, rank)
                cell = (int(copies.destination_local[k]), *copies.extent[k].tolist())
                messages[end].setdefault((int(copies.round[k]), *pair), []).append(cell)
    assert messages[0] == messages[1]
    received = sum(int(s.receives.extent.prod(axis=1).sum()) for s in schedules)
    kept = sum(int(to_engines.extent[s.kept].prod(axis=1).sum()) for s in schedules)
    assert received + kept == to_engines.extent.prod(axis=1).sum()


@pytest.mark.parametrize(
    ("extent", "limit", "count"),
    [((1, 1, 10), 4, 3), ((1, 6, 10), 20, 3), ((1, 6, 10), 9, 12), ((2, 3, 4), 1, 24)],
)
def test_split_box(extent: tuple[int, ...], limit: int, count: int) -> None:
    """Parts tile the box, none is larger than the limit, and rows stay whole where they fit."""
    offsets, extents = split_box(np.array(extent), limit)
    assert len(offsets) == count
    assert (extents.prod(axis=1) <= limit).all()
    painted = np.zeros(extent, dtype=int)
    for offset, part in zip(offsets, extents, strict=True):
        painted[tuple(slice(a, a + n) for a, n in zip(offset, part, strict=True))] += 1
    assert (painted == 1).all()


def test_stages_send_at_the_same_time() -> None:
    """The rounds are about as many as the busiest rank alone needs, not one stage after another."""
    topology = Topology(8, 1, 4)
    shape = tiny_shape(layers=4)
    to_engines = plan(megatron_layout(shape, topology), vllm_layout(shape, 8, 1))
    sizes = np.full(len(to_engines.destination.local_rank), 4)
    schedules = [make_schedule(to_engines, r, sizes, 2048) for r in range(8)]
    num_rounds = 1 + max(int(s.sends.round.max()) for s in schedules)
    busiest = max(
        int(aligned(side.num_bytes).sum()) for s in schedules for side in (s.sends, s.receives)
    )
    assert num_rounds <= 1.25 * busiest / 2048
