"""The schedule: every element once, both ends agree, and no buffer overflows."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.reshard import schedule as scheduling
from megappo.reshard.schedule import Bools, Formats, Schedule, aligned, make_schedule
from megappo.topology import Topology
from megappo.weights.layout import Ints, Layout, split_box, unpadded
from megappo.weights.megatron import megatron_layout
from megappo.weights.plan import Plan, plan
from megappo.weights.vllm import vllm_layout
from tests.support.weights import tiny_shape


def _formats(to_engines: Plan, itemsize: int, rng: np.random.Generator | None = None) -> Formats:
    """All tensors alike and contiguous, or by chance of another type or not contiguous."""
    num_source = len(to_engines.source.local_rank)
    num_destination = len(to_engines.destination.local_rank)

    def by_chance(count: int) -> Bools:
        return np.ones(count, dtype=bool) if rng is None else rng.random(count) < 0.7

    return Formats(
        source_type=by_chance(num_source).astype(np.int64),
        source_dense=by_chance(num_source),
        destination_type=np.ones(num_destination, dtype=np.int64),
        destination_dense=by_chance(num_destination),
        itemsize=np.full(num_destination, itemsize),
    )


def _schedules(to_engines: Plan, formats: Formats, buffer_bytes: int) -> list[Schedule]:
    """All ranks' parts, each made in a thread of its own."""
    ranks = to_engines.destination.world_size
    numbers = [0] * ranks
    barrier = threading.Barrier(ranks)

    def part(rank: int) -> Schedule:
        def largest(number: int) -> int:
            numbers[rank] = number
            barrier.wait()
            result = max(numbers)
            barrier.wait()
            return result

        return make_schedule(to_engines, rank, formats, buffer_bytes, largest)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(part, range(ranks)))


def _is_dense(layout: Layout, local: int, start: Ints, extent: Ints) -> bool:
    """Whether a box lies in one piece, as numpy sees it."""
    ndim = int(layout.local_ndim[local])
    whole = np.empty(unpadded(layout.local_shape[local], ndim), dtype=np.int8)
    first, count = unpadded(start, ndim), unpadded(extent, ndim)
    box = whole[tuple(slice(a, a + n) for a, n in zip(first, count, strict=True))]
    return bool(box.flags.c_contiguous)


@settings(max_examples=15, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2]),
    dp=st.sampled_from([1, 2]),
    itemsize=st.sampled_from([2, 4]),
    buffer_bytes=st.sampled_from([16, 112, 1024, 1 << 20]),
    seed=st.integers(0, 1000),
)
def test_both_ends_agree_and_buffers_hold(
    tp: int, pp: int, dp: int, itemsize: int, buffer_bytes: int, seed: int
) -> None:
    """C18: whatever the buffer, messages fit it, match on both ends and carry everything."""
    topology = Topology(tp * pp * dp, tp, pp)
    ranks = topology.world_size
    shape = tiny_shape(vocab=7)
    to_engines = plan(megatron_layout(shape, topology), vllm_layout(shape, ranks, 1))
    formats = _formats(to_engines, itemsize, np.random.default_rng(seed))
    with mock.patch.object(scheduling, "ALONE_BYTES", 48):
        schedules = _schedules(to_engines, formats, buffer_bytes)
    messages: list[dict[tuple[int, int, int], list[tuple[int, ...]]]] = [{}, {}]
    for rank, schedule in enumerate(schedules):
        for end, copies in enumerate((schedule.sends, schedule.receives)):
            layout = to_engines.destination if end else to_engines.source
            dense = formats.destination_dense if end else formats.source_dense
            fill = np.bincount(copies.round, weights=aligned(copies.num_bytes))
            assert fill.max(initial=0) <= buffer_bytes
            order = list(zip(copies.round, copies.peer, copies.alone, strict=True))
            assert order == sorted(order)
            for k in range(len(copies.round)):
                peer, local = int(copies.peer[k]), int(copies.local[k])
                pair = (rank, peer) if end == 0 else (peer, rank)
                cell = (
                    int(copies.destination_local[k]),
                    int(copies.alone[k]),
                    *copies.extent[k].tolist(),
                )
                messages[end].setdefault((int(copies.round[k]), *pair), []).append(cell)
                needs_cast = end == 0 and formats.source_type[local] != 1
                in_place = _is_dense(layout, local, copies.start[k], copies.extent[k])
                passes_by = dense[local] and in_place and not needs_cast
                assert copies.staged[k] == (copies.num_bytes[k] < 48 or not passes_by)
                assert copies.staged[k] or copies.alone[k]
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
    formats = _formats(to_engines, 4)
    schedules = _schedules(to_engines, formats, 2048)
    num_rounds = 1 + max(int(s.sends.round.max()) for s in schedules)
    busiest = max(
        int(aligned(side.num_bytes).sum()) for s in schedules for side in (s.sends, s.receives)
    )
    assert num_rounds <= 1.25 * busiest / 2048
