"""The planner: two layouts in, the copies that turn one into the other out.

Pure arithmetic on boxes, vectorised per canonical tensor; every destination element is
written by exactly one copy or is a declared zero. The same plan is made on every rank, and
carried out by ``reshard`` or priced without being carried out. Knows no tensors, no dtypes
and no process groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megappo.weights.layout import Ints, Layout


@dataclass(frozen=True)
class Plan:
    """Copies from ``source`` to ``destination``, K of them, in columns.

    Attributes:
        source: Layout that is read.
        destination: Layout that is written; its zero boxes are written as zeros.
        canonical: int64 [K], index of the canonical tensor in ``destination``.
        source_rank: int64 [K].
        source_local: int64 [K], index of the local tensor in ``source``.
        source_start: int64 [K, 3], of the box in the source tensor.
        destination_rank: int64 [K].
        destination_local: int64 [K], index of the local tensor in ``destination``.
        destination_start: int64 [K, 3], of the box in the destination tensor.
        extent: int64 [K, 3], of both boxes.
    """

    source: Layout
    destination: Layout
    canonical: Ints
    source_rank: Ints
    source_local: Ints
    source_start: Ints
    destination_rank: Ints
    destination_local: Ints
    destination_start: Ints
    extent: Ints


def plan(source: Layout, destination: Layout) -> Plan:
    """Plans the copies.

    Among ranks that hold the same box, the destination rank itself is taken if it is one of
    them, else they take turns.

    Args:
        source: Where the weights are. Boxes of different pieces are equal or disjoint.
        destination: Where they shall be; a rank that is in both layouts is the same process.

    Raises:
        ValueError: when the source does not hold all that the destination needs; names the
            tensors.
    """
    canonical = {name: i for i, name in enumerate(source.canonical_names)}
    absent = [n for n in destination.canonical_names if n not in canonical]
    if absent:
        raise ValueError(f"the source has no {', '.join(absent[:10])}")
    source_order = np.argsort(source.piece_canonical, kind="stable")
    source_sorted = source.piece_canonical[source_order]
    destination_order = np.argsort(destination.piece_canonical, kind="stable")
    destination_sorted = destination.piece_canonical[destination_order]
    pairs = []
    for i, name in enumerate(destination.canonical_names):
        there = slice(*np.searchsorted(destination_sorted, (i, i + 1)))
        here = slice(*np.searchsorted(source_sorted, (canonical[name], canonical[name] + 1)))
        try:
            pairs.append(
                _pairs(source, destination, source_order[here], destination_order[there], turn=i)
            )
        except _NotCoveredError as error:
            raise ValueError(f"the source does not hold all of {name}") from error
    source_piece, destination_piece = (
        np.concatenate(column) for column in zip(*pairs, strict=True)
    )
    return _columns(source, destination, source_piece, destination_piece)


class _NotCoveredError(Exception):
    """A destination box is not the sum of source boxes."""


def _columns(
    source: Layout, destination: Layout, source_piece: Ints, destination_piece: Ints
) -> Plan:
    """The copies of paired pieces: where their canonical boxes meet."""
    source_box = source.piece_canonical_start[source_piece]
    destination_box = destination.piece_canonical_start[destination_piece]
    start = np.maximum(source_box, destination_box)
    stop = np.minimum(
        source_box + source.piece_extent[source_piece],
        destination_box + destination.piece_extent[destination_piece],
    )
    source_local = source.piece_local[source_piece]
    destination_local = destination.piece_local[destination_piece]
    return Plan(
        source=source,
        destination=destination,
        canonical=destination.piece_canonical[destination_piece],
        source_rank=source.local_rank[source_local],
        source_local=source_local,
        source_start=source.piece_local_start[source_piece] + start - source_box,
        destination_rank=destination.local_rank[destination_local],
        destination_local=destination_local,
        destination_start=(
            destination.piece_local_start[destination_piece] + start - destination_box
        ),
        extent=stop - start,
    )


def _pairs(
    source: Layout, destination: Layout, sources: Ints, destinations: Ints, *, turn: int
) -> tuple[Ints, Ints]:
    """Which source piece serves which destination piece, for one canonical tensor.

    Replicas hold equal boxes, so the distinct boxes are intersected once; then every
    destination piece picks one replica of each source box that it meets.

    Args:
        source: Layout.
        destination: Layout.
        sources: Pieces of the source that lie in the canonical tensor.
        destinations: Pieces of the destination that lie in it.
        turn: Shifts whose turn it is first, so that rank 0 is not always it.

    Returns:
        Indices of source pieces and of destination pieces, paired.
    """
    have, have_of = _distinct(source, sources)
    want, want_of = _distinct(destination, destinations)
    assert not _volumes(have, have)[~np.eye(len(have), dtype=bool)].any(), "source boxes overlap"
    shared = _volumes(have, want)
    if not np.array_equal(shared.sum(0), np.prod(want[:, 3:], axis=1)):
        raise _NotCoveredError
    source_rank = source.local_rank[source.piece_local[sources]]
    destination_rank = destination.local_rank[destination.piece_local[destinations]]
    source_column, destination_column = [], []
    for box, met in enumerate(shared > 0):
        takers = np.flatnonzero(met[want_of])
        replicas = np.flatnonzero(have_of == box)
        replicas = replicas[np.argsort(source_rank[replicas], kind="stable")]
        chosen = _choose(source_rank[replicas], destination_rank[takers], turn)
        source_column.append(sources[replicas[chosen]])
        destination_column.append(destinations[takers])
    if not source_column:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    return np.concatenate(source_column), np.concatenate(destination_column)


def _choose(replica_ranks: Ints, taker_ranks: Ints, turn: int) -> Ints:
    """For every taker the index of a replica: on its own rank if there is one, else by turns."""
    nearest = np.searchsorted(replica_ranks, taker_ranks).clip(max=len(replica_ranks) - 1)
    own = replica_ranks[nearest] == taker_ranks
    by_turns = (np.cumsum(~own) + turn) % len(replica_ranks)
    chosen: Ints = np.where(own, nearest, by_turns)
    return chosen


def _distinct(layout: Layout, pieces: Ints) -> tuple[Ints, Ints]:
    """Distinct canonical boxes of pieces as (start, extent) [U, 6], and each piece's box."""
    boxes = np.concatenate(
        (layout.piece_canonical_start[pieces], layout.piece_extent[pieces]), axis=1
    )
    distinct, box_of = np.unique(boxes, axis=0, return_inverse=True)
    return distinct, box_of.reshape(-1)


def _volumes(a: Ints, b: Ints) -> Ints:
    """Number of elements that boxes [A, 6] and [B, 6] share, [A, B]."""
    start = np.maximum(a[:, None, :3], b[None, :, :3])
    stop = np.minimum((a[:, :3] + a[:, 3:])[:, None], (b[:, :3] + b[:, 3:])[None])
    volume: Ints = np.prod((stop - start).clip(min=0), axis=2)
    return volume
