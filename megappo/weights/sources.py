"""Which replica serves which taker: the own rank, then the same node, least loaded first.

Replicas are ranks that hold the same box; all that the same set of replicas serves is spread
evenly over them. Pure arithmetic on ranks and sizes, the same on every rank; knows no boxes.
"""

from __future__ import annotations

import numpy as np

from megappo.weights.layout import Ints


class SourceChoice:
    """Chooses among replicas, and remembers what each has to send.

    Args:
        ranks_per_node: Ranks ``n * ranks_per_node`` and up are on node ``n``; None for one node.
    """

    def __init__(self, ranks_per_node: int | None = None) -> None:
        """Starts with idle replicas."""
        self._ranks_per_node = ranks_per_node
        self._sent: dict[bytes, Ints] = {}

    def choose(self, replicas: Ints, takers: Ints, num_copies: int, size: int) -> Ints:
        """A replica for every copy.

        Loads come out most even when large copies are asked for before small ones.

        Args:
            replicas: Ranks [R], ascending, that hold the same boxes.
            takers: Ranks [T] that each take ``num_copies`` boxes.
            num_copies: N.
            size: Elements of each copy.

        Returns:
            Indices of replicas [T, N].
        """
        sent = self._sent.setdefault(replicas.tobytes(), np.zeros(len(replicas), dtype=np.int64))
        chosen = np.empty((len(takers), num_copies), dtype=np.int64)
        own = np.searchsorted(replicas, takers).clip(max=len(replicas) - 1)
        is_own = replicas[own] == takers
        chosen[is_own] = own[is_own, None]
        rest = np.flatnonzero(~is_own)
        if self._ranks_per_node:
            replica_nodes = replicas // self._ranks_per_node
            taker_nodes = takers[rest] // self._ranks_per_node
            for node in np.intersect1d(replica_nodes, taker_nodes):
                near = rest[taker_nodes == node]
                candidates = np.flatnonzero(replica_nodes == node)
                chosen[near] = _deal(sent, candidates, len(near), num_copies, size)
            rest = rest[~np.isin(taker_nodes, replica_nodes)]
        chosen[rest] = _deal(sent, np.arange(len(replicas)), len(rest), num_copies, size)
        return chosen


def _deal(sent: Ints, candidates: Ints, num_takers: int, num_copies: int, size: int) -> Ints:
    """Deals copies out to the candidates, [T, N], and adds them to what these have to send.

    A taker gets as much as possible from one candidate: fewer pairs of ranks, longer messages.
    """
    counts = fill(sent[candidates], num_takers * num_copies, size)
    sent[candidates] += counts * size
    return candidates.repeat(counts).reshape(num_takers, num_copies)


def fill(levels: Ints, count: int, size: int) -> Ints:
    """How many of ``count`` items of ``size`` go on each level so that levels come out even.

    Like putting every item on the lowest level, one after another, in a few operations.
    """
    ascending = np.sort(levels)
    # What it takes to raise all lower levels to each; as many are filled up as there is for.
    below = np.arange(len(levels)) * ascending - (np.cumsum(ascending) - ascending)
    active = int(np.searchsorted(below, count * size, side="right"))
    surface = (count * size + int(ascending[:active].sum())) // active
    counts: Ints = (surface - levels).clip(min=0) // size
    rest = count - int(counts.sum())
    while rest:
        lowest = np.argsort(levels + counts * size, kind="stable")[:rest]
        counts[lowest] += 1
        rest -= len(lowest)
    return counts
