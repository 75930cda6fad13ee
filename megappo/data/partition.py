"""Numbers shared out to bins: as even as can be, and into as few of one capacity as can be.

Even bins by Karmarkar and Karp's largest differencing method in its form for many bins:
of all partial divisions, the two with the largest spread are merged again and again, the
fullest bins of one onto the emptiest of the other, so that the spread of a result is never
above that of its parts. Few bins by best fit decreasing. Both depend on the numbers and
their order alone.

Does not know samples, replicas or micro-batches.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

# One bin: its load, its first item (so that no two are equal), all of its items.
_Bin = tuple[int, int, list[int]]


def even_bins(sizes: Ints, num_bins: int) -> Ints:
    """Bin of each number, int64 [N]; the fullest and the emptiest differ by the largest at most."""
    return _assigned(sizes, ([(size, i, [i])] for i, size in enumerate(sizes.tolist())), num_bins)


def even_groups(sizes: Ints, num_groups: int) -> Ints:
    """Group of each number, int64 [N]: groups of as many numbers each, and about as large sums.

    N is a multiple of ``num_groups``.
    """
    order = np.argsort(sizes, kind="stable").tolist()
    assert len(order) % num_groups == 0, (len(order), num_groups)
    # Each part has one number for every group, and so has whatever parts are merged to.
    parts = (
        [(int(sizes[i]), i, [i]) for i in order[start : start + num_groups]]
        for start in range(0, len(order), num_groups)
    )
    return _assigned(sizes, parts, num_groups)


def few_bins(sizes: Ints, capacity: int) -> Ints:
    """Bin of each number, int64 [N]: largest first, each where it leaves the least room.

    No number is above the capacity, and no two bins would fit into one.
    """
    bins = np.empty(len(sizes), np.int64)
    rooms: list[tuple[int, int]] = []  # ascending: room, bin
    for item in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[item])
        at = bisect_left(rooms, (size, -1))
        room, index = rooms.pop(at) if at < len(rooms) else (capacity, len(rooms))
        insort(rooms, (room - size, index))
        bins[item] = index
    return bins


def loads(sizes: Ints, bins: Ints, num_bins: int) -> Ints:
    """Sum of each bin, int64 [num_bins]."""
    sums = np.zeros(num_bins, np.int64)
    np.add.at(sums, bins, sizes)
    return sums


def _assigned(sizes: Ints, parts: Iterable[list[_Bin]], num_bins: int) -> Ints:
    """Merge parts (bins ascending, empty ones left out) until one is left; bin of each number."""
    heap = [(-_spread(part, num_bins), number, part) for number, part in enumerate(parts)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, number, one = heapq.heappop(heap)
        _, _, other = heap[0]
        longer, shorter = (one, other) if len(one) >= len(other) else (other, one)
        merged = _merged(longer, shorter, num_bins)
        heapq.heapreplace(heap, (-_spread(merged, num_bins), number, merged))
    bins = np.empty(len(sizes), np.int64)
    # The fullest bin is the first.
    for index, (_, _, items) in enumerate(reversed(heap[0][2] if heap else [])):
        bins[items] = index
    return bins


def _spread(part: list[_Bin], num_bins: int) -> int:
    return part[-1][0] - (part[0][0] if len(part) == num_bins else 0)


def _merged(longer: list[_Bin], shorter: list[_Bin], num_bins: int) -> list[_Bin]:
    """Both together: the shorter one's fullest bins go to empty ones, then to the emptiest."""
    num_empty = num_bins - len(longer)
    fullest_first = shorter[::-1]
    changed = fullest_first[:num_empty]
    onto = fullest_first[num_empty:]
    for (load, first, items), (more, other, others) in zip(longer, onto, strict=False):
        items.extend(others)
        changed.append((load + more, min(first, other), items))
    rest = longer[len(onto) :]
    for changed_bin in changed:
        insort(rest, changed_bin)
    return rest
