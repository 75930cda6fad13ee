"""Which copy of a plan travels in which round, so that no rank's staging buffer overflows.

Every rank makes the same schedule from the same plan and keeps its own rows of it. In a round
a rank exchanges at most one message with each peer, and its messages of one direction fit the
buffer together; boxes that are large for the buffer are cut. Pure arithmetic, no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megappo.weights.layout import Ints, split_box
from megappo.weights.plan import Plan

# Copies start at multiples of this in a message, so that any dtype can view them.
ALIGNMENT = 16
# Boxes are cut to this part of the buffer, so that a rank serves several peers in a round.
CUTS = 8


@dataclass(frozen=True)
class Copies:
    """Copies of one rank and one direction, in the order of rounds, then peers.

    Attributes:
        round: int64 [K], ascending.
        peer: int64 [K], ascending within a round.
        local: int64 [K], index of this rank's tensor in its layout.
        start: int64 [K, 3], of the box in that tensor.
        extent: int64 [K, 3].
        destination_local: int64 [K], index of the destination tensor, which sets the dtype.
        num_bytes: int64 [K], of the payload.
    """

    round: Ints
    peer: Ints
    local: Ints
    start: Ints
    extent: Ints
    destination_local: Ints
    num_bytes: Ints


@dataclass(frozen=True)
class Schedule:
    """What one rank does: copies on the spot, and messages in rounds.

    Attributes:
        kept: int64 [K], copies of the plan whose source and destination are this rank.
        sends: What leaves this rank.
        receives: What comes to it.
    """

    kept: Ints
    sends: Copies
    receives: Copies


def aligned(num_bytes: Ints) -> Ints:
    """Bytes that payloads take in a message."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def make_schedule(plan: Plan, rank: int, itemsize: Ints, buffer_bytes: int) -> Schedule:
    """The part of one rank in the schedule of all.

    Args:
        plan: The same on all ranks.
        rank: Whose part.
        itemsize: int64, bytes per element of each destination tensor, by its index.
        buffer_bytes: Size of one direction's buffer, at least 16.
    """
    moved = np.flatnonzero(plan.source_rank != plan.destination_rank)
    copy, offset, extent = _fitting(plan, moved, itemsize, max(ALIGNMENT, buffer_bytes // CUTS))
    num_bytes = extent.prod(axis=1) * itemsize[plan.destination_local[copy]]
    order = _fair_order(plan, copy, num_bytes)
    copy, offset, extent, num_bytes = copy[order], offset[order], extent[order], num_bytes[order]
    rounds = _rounds(
        plan.source_rank[copy], plan.destination_rank[copy], aligned(num_bytes), buffer_bytes
    )

    def side(own: Ints, peer: Ints, local: Ints, start: Ints) -> Copies:
        mine = np.flatnonzero(own[copy] == rank)
        mine = mine[np.lexsort((peer[copy[mine]], rounds[mine]))]
        chosen = copy[mine]
        return Copies(
            round=rounds[mine],
            peer=peer[chosen],
            local=local[chosen],
            start=start[chosen] + offset[mine],
            extent=extent[mine],
            destination_local=plan.destination_local[chosen],
            num_bytes=num_bytes[mine],
        )

    stays = (plan.source_rank == rank) & (plan.destination_rank == rank)
    return Schedule(
        kept=np.flatnonzero(stays),
        sends=side(plan.source_rank, plan.destination_rank, plan.source_local, plan.source_start),
        receives=side(
            plan.destination_rank, plan.source_rank, plan.destination_local, plan.destination_start
        ),
    )


def _fitting(plan: Plan, copies: Ints, itemsize: Ints, max_bytes: int) -> tuple[Ints, Ints, Ints]:
    """Copies cut to ``max_bytes`` at most: index in the plan, offset in its box, extent."""
    extent = plan.extent[copies]
    size = itemsize[plan.destination_local[copies]]
    large = extent.prod(axis=1) * size > max_bytes
    index, offsets, extents = [copies[~large]], [np.zeros_like(extent[~large])], [extent[~large]]
    kinds, kind_of = np.unique(np.c_[extent, size][large], axis=0, return_inverse=True)
    for i, kind in enumerate(kinds):
        offset, part = split_box(kind[:-1], max_bytes // int(kind[-1]))
        alike = copies[large][kind_of.reshape(-1) == i]
        index.append(alike.repeat(len(part)))
        offsets.append(np.tile(offset, (len(alike), 1)))
        extents.append(np.tile(part, (len(alike), 1)))
    return np.concatenate(index), np.concatenate(offsets), np.concatenate(extents)


def _fair_order(plan: Plan, copy: Ints, num_bytes: Ints) -> Ints:
    """The order in which copies look for a round: all pairs of ranks advance together.

    In the plan's own order all destinations would ask the ranks of the first pipeline stage
    at once while the others wait. Within one step of progress, pairs come by the distance of
    their ranks, so that neighbouring copies meet neither end again.
    """
    ranks = plan.destination.world_size
    source, destination = plan.source_rank[copy], plan.destination_rank[copy]
    pairs, pair = np.unique(source * ranks + destination, return_inverse=True)
    pair_bytes = np.bincount(pair, weights=num_bytes, minlength=len(pairs))
    by_pair = np.lexsort((plan.canonical[copy], pair))
    sent = np.empty(len(copy))
    sent[by_pair] = np.cumsum(num_bytes[by_pair])
    progress = (sent - np.cumsum(pair_bytes)[pair]) / pair_bytes[pair]
    order: Ints = np.lexsort(((destination - source) % ranks, progress))
    return order


def _rounds(sources: Ints, destinations: Ints, num_bytes: Ints, buffer_bytes: int) -> Ints:
    """The round of each copy: the first with room on both ends, never going back."""
    num_ranks = int(max(sources.max(initial=0), destinations.max(initial=0))) + 1
    send_round, send_fill = [0] * num_ranks, [0] * num_ranks
    receive_round, receive_fill = [0] * num_ranks, [0] * num_ranks
    rounds = []
    for s, d, size in zip(sources.tolist(), destinations.tolist(), num_bytes.tolist(), strict=True):
        now = max(send_round[s], receive_round[d])
        sent = send_fill[s] if send_round[s] == now else 0
        received = receive_fill[d] if receive_round[d] == now else 0
        if max(sent, received) + size > buffer_bytes:
            now, sent, received = now + 1, 0, 0
        send_round[s], send_fill[s] = now, sent + size
        receive_round[d], receive_fill[d] = now, received + size
        rounds.append(now)
    return np.array(rounds, dtype=np.int64)
