"""Which copy of a plan travels in which round, so that no rank's staging buffer overflows.

Every rank makes its own part from the same plan, and the parts fit together. What a rank
exchanges in a round fits the buffer of one direction; boxes that are large for the buffer
are cut. Small copies of a pair of ranks share one message; a large one that lies in
one piece in its tensor, on either side, is a message of its own and passes by the buffer on
that side. Pure arithmetic, no tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil

import numpy as np
import numpy.typing as npt

from megappo.weights.layout import Ints, Layout, split_box
from megappo.weights.plan import Plan

# Copies start at multiples of this in a message, so that any dtype can view them.
ALIGNMENT = 16
# From this size on, packing a copy costs more than a message of its own.
ALONE_BYTES = 128 * 1024

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Formats:
    """How all ranks hold their tensors: of the source layout S, of the destination layout D.

    Attributes:
        source_type: int64 [S], a number for each dtype.
        source_dense: bool [S], whether the tensor is contiguous.
        destination_type: int64 [D], the same numbers.
        destination_dense: bool [D].
        itemsize: int64 [D], bytes per element of the destination tensor.
    """

    source_type: Ints
    source_dense: Bools
    destination_type: Ints
    destination_dense: Bools
    itemsize: Ints


@dataclass(frozen=True)
class Copies:
    """Copies of one rank and one direction, by rounds, then peers, those alone last.

    Attributes:
        round: int64 [K], ascending.
        peer: int64 [K], ascending within a round.
        local: int64 [K], index of this rank's tensor in its layout.
        start: int64 [K, 3], of the box in that tensor.
        extent: int64 [K, 3].
        destination_local: int64 [K], index of the destination tensor, which sets the dtype.
        num_bytes: int64 [K], of the payload.
        alone: bool [K], whether the copy is a message of its own.
        staged: bool [K], whether it passes through this rank's buffer.
    """

    round: Ints
    peer: Ints
    local: Ints
    start: Ints
    extent: Ints
    destination_local: Ints
    num_bytes: Ints
    alone: Bools
    staged: Bools


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


def make_schedule(
    plan: Plan, rank: int, formats: Formats, buffer_bytes: int, largest: Callable[[int], int]
) -> Schedule:
    """The part of one rank in the schedule of all; all ranks call it together.

    A rank looks at its own copies only, of which a mixture of experts on a large mesh has
    tens of millions in all. Both ends of a pair see the same copies and find the same rounds;
    whether a round fits the buffers of all its ranks, they ask each other.

    Args:
        plan: The same on all ranks.
        rank: Whose part.
        formats: Of the tensors of all ranks; the same on all ranks.
        buffer_bytes: What a round holds of one direction, at least 16.
        largest: The largest of the numbers that the ranks call it with.
    """
    sent = (plan.source.local_rank == rank)[plan.ends[1]]
    received = (plan.destination.local_rank == rank)[plan.ends[3]]
    sides = [
        _Side(plan.part(np.flatnonzero(mine & ~both)), formats, sends=mine is sent)
        for mine, both in ((sent, received), (received, sent))
    ]
    needed = largest(max(-(-side.num_bytes // buffer_bytes) for side in sides))
    for cut in _cuts(needed, buffer_bytes):
        sends, receives = (side.copies(cut) for side in sides)
        fill = max(_fill(sends), _fill(receives))
        if largest(int(fill > buffer_bytes)) == 0:
            return Schedule(np.flatnonzero(sent & received), sends, receives)
    raise AssertionError("one message of a pair of ranks does not fit the buffer")


@dataclass(frozen=True)
class _Cut:
    """A way to spread the copies of every pair of ranks over rounds.

    Attributes:
        part_bytes: Boxes are cut to this size; a multiple of ``ALIGNMENT``.
        num_rounds: Over which each pair spreads its copies evenly; None for one part of a
            pair at a time, and a round for each distance between ranks.
    """

    part_bytes: int
    num_rounds: int | None


def _cuts(needed: int, buffer_bytes: int) -> Iterator[_Cut]:
    """Ways from the fastest to the one that always fits.

    The finer the parts, the nearer are the rounds to equal shares of a pair's bytes; the
    last way meets one peer in a round.
    """
    for parts, slack in ((8, 1.0), (16, 1.1), (32, 1.25), (64, 1.5), (128, 2.0)):
        yield _Cut(_multiple(buffer_bytes // parts), ceil(needed * slack))
    yield _Cut(_multiple(buffer_bytes // 2), None)


def _multiple(num_bytes: int) -> int:
    return max(ALIGNMENT, num_bytes // ALIGNMENT * ALIGNMENT)


def _fill(copies: Copies) -> int:
    """The most bytes in a round."""
    order = np.unique(copies.round, return_inverse=True)[1]
    return int(np.bincount(order, weights=aligned(copies.num_bytes)).max(initial=0))


class _Side:
    """What leaves one rank, or what comes to it.

    Args:
        plan: These copies alone.
        formats: Of the tensors of all ranks.
        sends: Whether they leave.
    """

    def __init__(self, plan: Plan, formats: Formats, *, sends: bool) -> None:
        self._plan = plan
        self._formats = formats
        self._sends = sends
        self._peer = plan.destination_rank if sends else plan.source_rank
        sizes = plan.extent.prod(axis=1) * formats.itemsize[plan.destination_local]
        self.num_bytes = int(aligned(sizes).sum())

    def copies(self, cut: _Cut) -> Copies:
        """The copies cut to parts, in their rounds."""
        plan, formats = self._plan, self._formats
        copy, offset, extent = _fitting(plan, formats.itemsize, cut.part_bytes)
        order = np.lexsort((plan.canonical[copy], self._peer[copy]))
        copy, offset, extent = copy[order], offset[order], extent[order]
        num_bytes = extent.prod(axis=1) * formats.itemsize[plan.destination_local[copy]]
        rounds = self._rounds(copy, aligned(num_bytes), cut)
        readable, writable = _in_place(plan, copy, extent, formats)
        alone = (num_bytes >= ALONE_BYTES) & (readable | writable)
        staged = ~(alone & (readable if self._sends else writable))
        local, start = (
            (plan.source_local, plan.source_start)
            if self._sends
            else (plan.destination_local, plan.destination_start)
        )
        by = np.lexsort((alone, self._peer[copy], rounds))
        copy = copy[by]
        return Copies(
            round=rounds[by],
            peer=self._peer[copy],
            local=local[copy],
            start=start[copy] + offset[by],
            extent=extent[by],
            destination_local=plan.destination_local[copy],
            num_bytes=num_bytes[by],
            alone=alone[by],
            staged=staged[by],
        )

    def _rounds(self, copy: Ints, num_bytes: Ints, cut: _Cut) -> Ints:
        """The round of each copy; copies of a peer are neighbours, in the order of both ends.

        Every peer begins elsewhere in the cycle of rounds, by its distance, so that those
        with a copy or two do not all meet in one round.
        """
        ranks = self._plan.destination.world_size
        distance = (self._plan.destination_rank - self._plan.source_rank)[copy] % ranks
        peer = self._peer[copy]
        end = np.cumsum(num_bytes)
        first = np.searchsorted(peer, peer)
        begin = end - num_bytes - (end - num_bytes)[first]
        if cut.num_rounds is None:
            turns: Ints = begin // cut.part_bytes * ranks + distance
            return turns
        whole = np.bincount(first, weights=num_bytes).astype(np.int64)[first]
        even = (2 * begin + num_bytes) * cut.num_rounds // (2 * whole)
        rounds: Ints = (even + distance * cut.num_rounds // ranks) % cut.num_rounds
        return rounds


def _in_place(plan: Plan, copies: Ints, extent: Ints, formats: Formats) -> tuple[Bools, Bools]:
    """Whether boxes can be sent right from the source tensor, and received right into the other."""
    source, destination = plan.source_local[copies], plan.destination_local[copies]
    readable = formats.source_dense[source] & _in_one_piece(plan.source, source, extent)
    readable &= formats.source_type[source] == formats.destination_type[destination]
    writable = formats.destination_dense[destination] & _in_one_piece(
        plan.destination, destination, extent
    )
    return readable, writable


def _in_one_piece(layout: Layout, local: Ints, extent: Ints) -> Bools:
    """Whether boxes of these extents lie in consecutive elements of their tensors."""
    whole = extent == layout.local_shape[local]
    outer = np.cumprod(extent, axis=1) // extent  # of the dimensions before each
    result: Bools = (whole | (outer == 1)).all(axis=1)
    return result


def _fitting(plan: Plan, itemsize: Ints, max_bytes: int) -> tuple[Ints, Ints, Ints]:
    """All copies cut to ``max_bytes`` at most: index in the plan, offset in its box, extent."""
    extent = plan.extent
    size = itemsize[plan.destination_local]
    large = extent.prod(axis=1) * size > max_bytes
    copies = np.arange(len(large))
    index, offsets, extents = [copies[~large]], [np.zeros_like(extent[~large])], [extent[~large]]
    kinds, kind_of = np.unique(np.c_[extent, size][large], axis=0, return_inverse=True)
    for i, kind in enumerate(kinds):
        offset, part = split_box(kind[:-1], max_bytes // int(kind[-1]))
        alike = copies[large][kind_of.reshape(-1) == i]
        index.append(alike.repeat(len(part)))
        offsets.append(np.tile(offset, (len(alike), 1)))
        extents.append(np.tile(part, (len(alike), 1)))
    return np.concatenate(index), np.concatenate(offsets), np.concatenate(extents)
