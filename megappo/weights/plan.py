"""The planner: two layouts in, the copies that turn one into the other out.

Pure arithmetic on boxes. Canonical tensors that both sides cut alike, and hold on the same
ranks, are planned together; every destination element is written by exactly one copy or is a
declared zero. The same plan is made on every rank, and carried out by ``reshard`` or priced
without being carried out. Knows no tensors, no dtypes and no process groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from megappo.weights.layout import Ints, Layout
from megappo.weights.sources import SourceChoice

Ints32 = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Plan:
    """Copies from ``source`` to ``destination``, K of them.

    Attributes:
        source: Layout that is read.
        destination: Layout that is written; its zero boxes are written as zeros.
        ends: int32 [4, K]: box of the source, its local tensor, box of the destination, its
            local tensor. All else follows, and is computed when it is asked for.
    """

    source: Layout
    destination: Layout
    ends: Ints32

    def part(self, copies: slice | Ints) -> Plan:
        """Some of the copies."""
        return replace(self, ends=self.ends[:, copies])

    @property
    def canonical(self) -> Ints:
        """int64 [K], index of the canonical tensor in ``destination``."""
        canonical: Ints = self.destination.box_canonical[self.ends[2]]
        return canonical

    @cached_property
    def source_local(self) -> Ints:
        """int64 [K], index of the local tensor in ``source``."""
        local: Ints = self.ends[1].astype(np.int64)
        return local

    @cached_property
    def source_rank(self) -> Ints:
        """int64 [K]."""
        rank: Ints = self.source.local_rank[self.ends[1]]
        return rank

    @cached_property
    def source_start(self) -> Ints:
        """int64 [K, 3], of the box in the source tensor."""
        return _local_start(self.source, self.ends[0], self._meeting[0])

    @cached_property
    def destination_local(self) -> Ints:
        """int64 [K], index of the local tensor in ``destination``."""
        local: Ints = self.ends[3].astype(np.int64)
        return local

    @cached_property
    def destination_rank(self) -> Ints:
        """int64 [K]."""
        rank: Ints = self.destination.local_rank[self.ends[3]]
        return rank

    @cached_property
    def destination_start(self) -> Ints:
        """int64 [K, 3], of the box in the destination tensor."""
        return _local_start(self.destination, self.ends[2], self._meeting[0])

    @property
    def extent(self) -> Ints:
        """int64 [K, 3], of both boxes."""
        return self._meeting[1]

    @cached_property
    def _meeting(self) -> tuple[Ints, Ints]:
        """Start and extent [K, 3], in the canonical tensor, of what both boxes share."""
        boxes = (_boxes(self.source, self.ends[0]), _boxes(self.destination, self.ends[2]))
        return _intersection(*boxes)


def plan(source: Layout, destination: Layout, *, ranks_per_node: int | None = None) -> Plan:
    """Plans the copies.

    Among ranks that hold the same box, the destination rank itself is taken if it is one of
    them, else one on the same node, else any; each time the one that has least to send.

    Args:
        source: Where the weights are. Boxes of different pieces are equal or disjoint.
        destination: Where they shall be; a rank that is in both layouts is the same process.
        ranks_per_node: Ranks ``n * ranks_per_node`` and up are on node ``n``; None for one node.

    Raises:
        ValueError: when the source does not hold all that the destination needs; names the
            tensors.
    """
    meetings = list(_meetings(source, destination))
    stops = np.cumsum([0, *(meeting.num_copies for meeting in meetings)])
    ends = np.empty((4, stops[-1]), dtype=np.int32)
    assert max(*ends.shape, len(source.box_tensor), len(destination.box_tensor)) < 2**31
    choice = SourceChoice(ranks_per_node)
    for i in sorted(range(len(meetings)), key=lambda i: -meetings[i].size):
        meetings[i].write(choice, ends[:, stops[i] : stops[i + 1]])
    return Plan(source, destination, ends)


@dataclass(frozen=True)
class _Holders:
    """H local tensors that hold a box, in each of N canonical tensors that are alike.

    Attributes:
        rank: int64 [H].
        row: int64 [H], of ``box`` and ``first_local``.
        nth: int64 [H], of the ranks that hold the row's distinct tensor.
        box: int64 [rows, N], the layout's boxes.
        first_local: int64 [rows, N], first local tensor of the distinct tensor.
    """

    rank: Ints
    row: Ints
    nth: Ints
    box: Ints
    first_local: Ints

    @property
    def num_alike(self) -> int:
        """N."""
        return len(self.box.T)

    def ends(self, chosen: Ints) -> tuple[Ints, Ints]:
        """Box and local tensor of chosen holders: an index [T, N], or one for all [T, 1]."""
        row, alike = self.row[chosen], np.arange(self.num_alike)
        return self.box[row, alike], self.first_local[row, alike] + self.nth[chosen]

    def one_per_rank(self) -> _Holders:
        """Holders by ascending rank, without a second local tensor of the same rank."""
        rank, first = np.unique(self.rank, return_index=True)
        return replace(self, rank=rank, row=self.row[first], nth=self.nth[first])


@dataclass(frozen=True)
class _Meeting:
    """A source box that shares ``size`` elements with a destination box, N times over."""

    replicas: _Holders
    takers: _Holders
    size: int

    @property
    def num_alike(self) -> int:
        """N."""
        return self.takers.num_alike

    @property
    def num_copies(self) -> int:
        """T * N."""
        return len(self.takers.rank) * self.num_alike

    def write(self, choice: SourceChoice, ends: Ints32) -> None:
        """Writes the copies [4, T * N], one source for each taker."""
        takers = np.arange(len(self.takers.rank))[:, None]
        chosen = choice.choose(self.replicas.rank, self.takers.rank, self.num_alike, self.size)
        columns = ends.reshape(4, *chosen.shape)
        assert np.shares_memory(columns, ends)
        columns[0], columns[1] = self.replicas.ends(chosen)
        columns[2], columns[3] = self.takers.ends(takers)


class _Side:
    """A layout, sorted so that canonical tensors that it holds alike can be recognised."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        numbers: dict[bytes, int] = {}
        self._ranks = [layout.local_rank[a:b] for a, b in pairwise(layout.first_local.tolist())]
        rank_set = [numbers.setdefault(ranks.tobytes(), len(numbers)) for ranks in self._ranks]
        boxes = _boxes(layout)
        kind = _numbered([np.array(rank_set, dtype=np.int64)[layout.box_tensor], *boxes.T])
        self._order = np.lexsort((kind, layout.box_canonical))
        self._kind = kind[self._order]
        canonical = np.arange(len(layout.canonical_names) + 1)
        self._first = np.searchsorted(layout.box_canonical[self._order], canonical).tolist()

    def signature(self, canonical: int) -> bytes:
        """Equal for canonical tensors that are cut alike and held by the same ranks."""
        kinds: Ints = self._kind[self._first[canonical] : self._first[canonical + 1]]
        return kinds.tobytes()

    def boxes(self, canonicals: list[int]) -> Ints:
        """The layout's boxes in N canonical tensors of one signature, [N, rows]."""
        first = np.array([self._first[c] for c in canonicals])
        rows = self._first[canonicals[0] + 1] - self._first[canonicals[0]]
        found: Ints = self._order[first[:, None] + np.arange(rows)]
        return found

    def holders(self, boxes: Ints) -> _Holders:
        """All local tensors that hold boxes [N, rows]; the rows are the same box."""
        tensors = self._layout.box_tensor[boxes.T]
        ranks = [self._ranks[tensor] for tensor in tensors[:, 0]]
        return _Holders(
            rank=np.concatenate(ranks),
            row=np.arange(len(ranks)).repeat([len(r) for r in ranks]),
            nth=np.concatenate([np.arange(len(r)) for r in ranks]),
            box=boxes.T,
            first_local=self._layout.first_local[tensors],
        )


def _meetings(source: Layout, destination: Layout) -> Iterator[_Meeting]:
    """All boxes of both sides that meet, once for canonical tensors that are alike."""
    in_source = {name: i for i, name in enumerate(source.canonical_names)}
    absent = [n for n in destination.canonical_names if n not in in_source]
    if absent:
        raise ValueError(f"the source has no {', '.join(absent[:10])}")
    here, there = _Side(source), _Side(destination)
    alike: dict[tuple[bytes, bytes], list[int]] = {}
    for i, name in enumerate(destination.canonical_names):
        alike.setdefault((here.signature(in_source[name]), there.signature(i)), []).append(i)
    for wanted in alike.values():
        held = [in_source[destination.canonical_names[i]] for i in wanted]
        have, have_of, replicas = _distinct(source, here, held)
        want, want_of, takers = _distinct(destination, there, wanted)
        assert not _shared(have, have)[~np.eye(len(have), dtype=bool)].any(), "boxes overlap"
        shared = _shared(have, want)
        if not np.array_equal(shared.sum(0), want[:, 3:].prod(axis=1)):
            name = destination.canonical_names[wanted[0]]
            raise ValueError(f"the source does not hold all of {name}")
        sources = [here.holders(replicas[:, have_of == u]).one_per_rank() for u in range(len(have))]
        targets = [there.holders(takers[:, want_of == v]) for v in range(len(want))]
        for u, v in np.argwhere(shared):
            yield _Meeting(sources[u], targets[v], int(shared[u, v]))


def _distinct(layout: Layout, side: _Side, canonicals: list[int]) -> tuple[Ints, Ints, Ints]:
    """Distinct boxes [U, 6] of alike canonical tensors; of which every row is; the rows."""
    rows = side.boxes(canonicals)
    distinct, box_of = np.unique(_boxes(layout, rows[0]), axis=0, return_inverse=True)
    return distinct, box_of.reshape(-1), rows


def _local_start(layout: Layout, box: Ints32, canonical_start: Ints) -> Ints:
    """Where in local tensors what begins at ``canonical_start`` begins, [K, 3]."""
    start: Ints = layout.box_local_start[box] + canonical_start - layout.box_canonical_start[box]
    return start


def _boxes(layout: Layout, chosen: Ints | Ints32 | slice = slice(None)) -> Ints:
    """Canonical boxes as start and extent, [B, 6]."""
    start, extent = layout.box_canonical_start[chosen], layout.box_extent[chosen]
    return np.concatenate((start, extent), axis=1)


def _intersection(a: Ints, b: Ints) -> tuple[Ints, Ints]:
    """Start and extent of what boxes share; a negative extent when they do not meet."""
    start = np.maximum(a[..., :3], b[..., :3])
    stop = np.minimum(a[..., :3] + a[..., 3:], b[..., :3] + b[..., 3:])
    return start, stop - start


def _shared(a: Ints, b: Ints) -> Ints:
    """Number of elements that boxes [A, 6] and [B, 6] share, [A, B]."""
    extent = _intersection(a[:, None], b[None])[1]
    volume: Ints = extent.clip(min=0).prod(axis=2)
    return volume


def _numbered(columns: list[Ints]) -> Ints:
    """A number for every row, equal where rows are."""
    number, limit = np.zeros(len(columns[0]), dtype=np.int64), 1
    for column in columns:
        radix = int(column.max(initial=0)) + 1
        if limit * radix >= 2**63:
            number = np.unique(number, return_inverse=True)[1]
            limit = int(number.max(initial=0)) + 1
        number, limit = number * radix + column, limit * radix
    return number
