"""Layouts: for every local tensor, which box of which checkpoint tensor it holds, and where.

The checkpoint's tensors are the canonical coordinates. A ``Layout`` describes all ranks of a
place that holds weights (a mesh, a set of engines, a folder) in columns of numpy arrays, so
that it can be made for any model on any number of ranks without allocating a weight. It
knows no file, no model and no parallel size: ``megatron``, ``vllm`` and ``canonical`` build
layouts, ``plan`` turns two of them into copies. A tensor that many ranks hold alike is
described once: 235 B parameters with 128 experts on 1,024 ranks are 38 million pieces, but
half a million boxes.

Boxes have three dimensions, a start and an extent in each. Tensors with fewer have leading
dimensions of length 1, so a piece has one extent on both sides: a matrix [r, c] that is one
slice of a stack [e, r, c] needs no special case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
DIMS = 3


@dataclass(frozen=True)
class Piece:
    """A box of a local tensor that equals a box of a canonical tensor.

    ``part`` counts the canonical tensors that the local tensor is made of; ``local_start``,
    ``canonical_start`` and ``extent`` have the tensor's dimensions.
    """

    part: int
    canonical_start: tuple[int, ...]
    local_start: tuple[int, ...]
    extent: tuple[int, ...]


@dataclass(frozen=True)
class Zeros:
    """A box of a local tensor that no canonical tensor fills: zeros by definition."""

    start: tuple[int, ...]
    extent: tuple[int, ...]


@dataclass(frozen=True)
class LocalTensor:
    """One local tensor for a ``LayoutBuilder``: the pieces and zeros tile its shape."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    zeros: tuple[Zeros, ...] = ()


@dataclass(frozen=True)
class Layout:
    """Where every weight is, over all ranks.

    T distinct tensors, each held alike by one or more ranks, make L local tensors, which come
    in the order of T, then of ranks. C canonical tensors; B boxes lie in distinct tensors, and
    are P pieces, one for each rank that holds the box; Z boxes of zeros in local tensors.

    Attributes:
        world_size: Number of ranks.
        canonical_names: C names.
        canonical_shapes: int64 [C, 3].
        names: The distinct names of local tensors; ranks share them.
        first_local: int64 [T + 1], the first local tensor of each distinct one, and L.
        local_rank: int64 [L], the rank that holds each local tensor.
        local_name: int64 [L], index into ``names``.
        local_shape: int64 [L, 3].
        local_ndim: int64 [L], dimensions that the tensor really has.
        box_tensor: int64 [B], index of the distinct tensor.
        box_canonical: int64 [B], index of the canonical tensor.
        box_local_start: int64 [B, 3].
        box_canonical_start: int64 [B, 3].
        box_extent: int64 [B, 3].
        zero_local: int64 [Z], index of the local tensor.
        zero_start: int64 [Z, 3].
        zero_extent: int64 [Z, 3].
    """

    world_size: int
    canonical_names: tuple[str, ...]
    canonical_shapes: Ints
    names: tuple[str, ...]
    first_local: Ints
    local_rank: Ints
    local_name: Ints
    local_shape: Ints
    local_ndim: Ints
    box_tensor: Ints
    box_canonical: Ints
    box_local_start: Ints
    box_canonical_start: Ints
    box_extent: Ints
    zero_local: Ints
    zero_start: Ints
    zero_extent: Ints

    @cached_property
    def _pieces(self) -> tuple[Ints, Ints]:
        """Box and local tensor of every piece."""
        return _per_rank(self.box_tensor, self.first_local)

    @property
    def piece_local(self) -> Ints:
        """int64 [P], index of the local tensor."""
        return self._pieces[1]

    @cached_property
    def piece_canonical(self) -> Ints:
        """int64 [P], index of the canonical tensor."""
        return self.box_canonical[self._pieces[0]]

    @cached_property
    def piece_local_start(self) -> Ints:
        """int64 [P, 3]."""
        return self.box_local_start[self._pieces[0]]

    @cached_property
    def piece_canonical_start(self) -> Ints:
        """int64 [P, 3]."""
        return self.box_canonical_start[self._pieces[0]]

    @cached_property
    def piece_extent(self) -> Ints:
        """int64 [P, 3]."""
        return self.box_extent[self._pieces[0]]

    def local_ids(self, rank: int) -> dict[str, int]:
        """Index of each local tensor of a rank, by name."""
        ids = np.flatnonzero(self.local_rank == rank)
        return {self.names[self.local_name[i]]: int(i) for i in ids}

    def local_shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Shape of each local tensor of a rank, by name."""
        return {
            name: unpadded(self.local_shape[i], int(self.local_ndim[i]))
            for name, i in self.local_ids(rank).items()
        }


def widened(layout: Layout, world_size: int) -> Layout:
    """The same layout in a world of ``world_size`` ranks, where the further ranks hold nothing.

    Raises:
        ValueError: when the layout has more ranks than that.
    """
    return shifted(layout, 0, world_size)


def shifted(layout: Layout, first_rank: int, world_size: int) -> Layout:
    """The same layout on ranks ``first_rank`` and up of a world of ``world_size`` ranks.

    Raises:
        ValueError: when the layout's ranks do not lie in that world.
    """
    last = first_rank + layout.world_size
    if first_rank < 0 or last > world_size:
        raise ValueError(
            f"ranks {first_rank} to {last - 1} are not all in a world of {world_size} ranks"
        )
    return replace(layout, world_size=world_size, local_rank=layout.local_rank + first_rank)


def padded(values: Sequence[int], fill: int) -> tuple[int, ...]:
    """``values`` with leading ``fill`` up to three dimensions."""
    assert len(values) <= DIMS, values
    return (fill,) * (DIMS - len(values)) + tuple(values)


def unpadded(row: Ints, ndim: int) -> tuple[int, ...]:
    """The last ``ndim`` entries of a padded row, as Python integers."""
    return tuple(int(x) for x in row[DIMS - ndim :])


def box_index(start: Ints, extent: Ints, ndim: int) -> tuple[slice, ...]:
    """The index that takes a box out of a tensor of ``ndim`` dimensions."""
    first = unpadded(start, ndim)
    return tuple(slice(a, a + n) for a, n in zip(first, unpadded(extent, ndim), strict=True))


def split_box(extent: Ints, limit: int) -> tuple[Ints, Ints]:
    """Cuts a box into boxes of at most ``limit`` elements, in order of memory.

    Args:
        extent: int64 [3].
        limit: At least 1.

    Returns:
        Offsets [K, 3] in the box and extents [K, 3].
    """
    inner = 1
    steps: list[int] = []
    for length in (int(n) for n in extent[::-1]):
        steps.insert(0, max(1, min(length, limit // inner)))
        inner *= length
    axes = [np.arange(0, n, step) for n, step in zip(extent, steps, strict=True)]
    offsets = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, DIMS)
    return offsets, np.minimum(np.array(steps), extent - offsets)


class LayoutBuilder:
    """Collects local tensors, each held alike by one or many ranks, into a ``Layout``.

    Args:
        world_size: Number of ranks.
        canonical: Shape of every canonical tensor by name.
    """

    def __init__(self, world_size: int, canonical: Mapping[str, tuple[int, ...]]) -> None:
        """Starts with no local tensor."""
        self._world_size = world_size
        self._canonical = dict(canonical)
        self._canonical_id = {name: i for i, name in enumerate(self._canonical)}
        self._name_id: dict[str, int] = {}
        self._num_tensors = 0
        self._ranks: list[Ints] = []
        self._tensors: list[Ints] = []
        self._boxes: list[Ints] = []
        self._zeros: list[Ints] = []

    def canonical_ids(self, names: Sequence[Sequence[str]]) -> Ints:
        """The numbers of canonical tensors, for ``add``: the same shape as ``names``."""
        return np.array([[self._canonical_id[n] for n in row] for row in names], dtype=np.int64)

    def add(
        self, ranks: Sequence[int], names: Sequence[str], tensor: LocalTensor, canonical: Ints
    ) -> None:
        """Adds N tensors that every rank of ``ranks`` holds, alike but for what is in them.

        Args:
            ranks: Distinct ranks.
            names: N local names.
            tensor: All of them.
            canonical: int64 [N, parts], numbers of the canonical tensors that they are made of.
        """
        extents = [box.extent for box in tensor.pieces] + [box.extent for box in tensor.zeros]
        assert sum(map(prod, extents)) == prod(tensor.shape), (names, tensor)
        number = np.arange(self._num_tensors, self._num_tensors + len(names))
        self._num_tensors += len(names)
        name_ids = [self._name_id.setdefault(name, len(self._name_id)) for name in names]
        kind = (len(ranks), len(tensor.shape), *padded(tensor.shape, 1))
        self._ranks.append(np.tile(np.array(ranks, dtype=np.int64), len(names)))
        self._tensors.append(_beside(np.array(name_ids, dtype=np.int64)[:, None], _table([kind])))
        if tensor.pieces:
            places = _table(
                [
                    (
                        *padded(piece.local_start, 0),
                        *padded(piece.canonical_start, 0),
                        *padded(piece.extent, 1),
                    )
                    for piece in tensor.pieces
                ]
            )
            parts = canonical[:, [piece.part for piece in tensor.pieces]]
            ids = np.stack((np.broadcast_to(number[:, None], parts.shape), parts), axis=2)
            self._boxes += [_beside(of_tensor, places) for of_tensor in ids]
        for zero in tensor.zeros:
            place = _table([(*padded(zero.start, 0), *padded(zero.extent, 1))])
            self._zeros.append(_beside(number[:, None], place))

    def build(self) -> Layout:
        """The layout of everything added."""
        tensors = _joined(self._tensors, 3 + DIMS)
        first_local = np.concatenate(([0], np.cumsum(tensors[:, 1])))
        boxes = _joined(self._boxes, 2 + 3 * DIMS)
        zeros = _joined(self._zeros, 1 + 2 * DIMS)
        zero, zero_local = _per_rank(zeros[:, 0], first_local)
        tensor_of_local = np.arange(len(tensors)).repeat(tensors[:, 1])
        return Layout(
            world_size=self._world_size,
            canonical_names=tuple(self._canonical),
            canonical_shapes=_table([padded(s, 1) for s in self._canonical.values()]),
            names=tuple(self._name_id),
            first_local=first_local,
            local_rank=np.concatenate(self._ranks),
            local_name=tensors[tensor_of_local, 0],
            local_ndim=tensors[tensor_of_local, 2],
            local_shape=tensors[tensor_of_local, 3:],
            box_tensor=boxes[:, 0],
            box_canonical=boxes[:, 1],
            box_local_start=boxes[:, 2:5],
            box_canonical_start=boxes[:, 5:8],
            box_extent=boxes[:, 8:],
            zero_local=zero_local,
            zero_start=zeros[zero, 1:4],
            zero_extent=zeros[zero, 4:],
        )


def _table(rows: Sequence[Sequence[int]]) -> Ints:
    return np.array(rows, dtype=np.int64)


def _beside(left: Ints, right: Ints) -> Ints:
    """Two tables side by side; the one with a single row serves every row of the other."""
    rows = max(len(left), len(right))
    columns = [np.broadcast_to(table, (rows, table.shape[1])) for table in (left, right)]
    return np.concatenate(columns, axis=1)


def _joined(tables: Sequence[Ints], width: int) -> Ints:
    return np.concatenate((np.empty((0, width), dtype=np.int64), *tables))


def _per_rank(tensor: Ints, first_local: Ints) -> tuple[Ints, Ints]:
    """Repeats rows, each in a distinct tensor, for each of its ranks: the row and the local."""
    counts = np.diff(first_local)[tensor]
    row = np.arange(len(tensor)).repeat(counts)
    nth = np.arange(len(row)) - (np.cumsum(counts) - counts).repeat(counts)
    return row, first_local[tensor[row]] + nth
