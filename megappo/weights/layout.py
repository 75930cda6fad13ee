"""Layouts: for every local tensor, which box of which checkpoint tensor it holds, and where.

The checkpoint's tensors are the canonical coordinates. A ``Layout`` describes all ranks of a
place that holds weights (a mesh, a set of engines, a folder) in columns of numpy arrays, so
that it can be made for any model on any number of ranks without allocating a weight. It
knows no file, no model and no parallel size: ``megatron``, ``vllm`` and ``canonical`` build
layouts, ``plan`` turns two of them into copies.

Boxes have three dimensions, a start and an extent in each. Tensors with fewer have leading
dimensions of length 1, so a piece has one extent on both sides: a matrix [r, c] that is one
slice of a stack [e, r, c] needs no special case.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
DIMS = 3


@dataclass(frozen=True)
class Piece:
    """A box of a local tensor that equals a box of a canonical tensor.

    Used to describe one tensor to a ``LayoutBuilder``; layouts themselves hold columns.
    ``local_start``, ``canonical_start`` and ``extent`` have the tensor's dimensions.
    """

    canonical: str
    canonical_start: tuple[int, ...]
    local_start: tuple[int, ...]
    extent: tuple[int, ...]


@dataclass(frozen=True)
class Zeros:
    """A box of a local tensor that no canonical tensor fills: zeros by definition."""

    start: tuple[int, ...]
    extent: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Where every weight is, over all ranks. C canonical and L local tensors, P pieces, Z zeros.

    Attributes:
        world_size: Number of ranks.
        canonical_names: C names.
        canonical_shapes: int64 [C, 3].
        names: The distinct names of local tensors; ranks share them.
        local_rank: int64 [L], the rank that holds each local tensor.
        local_name: int64 [L], index into ``names``.
        local_shape: int64 [L, 3].
        local_ndim: int64 [L], dimensions that the tensor really has.
        piece_local: int64 [P], index of the local tensor.
        piece_canonical: int64 [P], index of the canonical tensor.
        piece_local_start: int64 [P, 3].
        piece_canonical_start: int64 [P, 3].
        piece_extent: int64 [P, 3].
        zero_local: int64 [Z], index of the local tensor.
        zero_start: int64 [Z, 3].
        zero_extent: int64 [Z, 3].
    """

    world_size: int
    canonical_names: tuple[str, ...]
    canonical_shapes: Ints
    names: tuple[str, ...]
    local_rank: Ints
    local_name: Ints
    local_shape: Ints
    local_ndim: Ints
    piece_local: Ints
    piece_canonical: Ints
    piece_local_start: Ints
    piece_canonical_start: Ints
    piece_extent: Ints
    zero_local: Ints
    zero_start: Ints
    zero_extent: Ints

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
        self._ranks: list[Sequence[int]] = []
        self._tensors: list[tuple[int, ...]] = []
        self._pieces: list[tuple[int, ...]] = []
        self._zeros: list[tuple[int, ...]] = []

    def add(
        self,
        ranks: Sequence[int],
        name: str,
        shape: tuple[int, ...],
        pieces: Iterable[Piece],
        zeros: Iterable[Zeros] = (),
    ) -> None:
        """Adds one tensor that every rank of ``ranks`` holds, as pieces and zeros that tile it."""
        tensor = len(self._tensors)
        name_id = self._name_id.setdefault(name, len(self._name_id))
        self._ranks.append(ranks)
        self._tensors.append((name_id, len(shape), *padded(shape, 1)))
        volume = 0
        for piece in pieces:
            self._pieces.append(
                (
                    tensor,
                    self._canonical_id[piece.canonical],
                    *padded(piece.local_start, 0),
                    *padded(piece.canonical_start, 0),
                    *padded(piece.extent, 1),
                )
            )
            volume += int(np.prod(piece.extent))
        for zero in zeros:
            self._zeros.append((tensor, *padded(zero.start, 0), *padded(zero.extent, 1)))
            volume += int(np.prod(zero.extent))
        assert volume == int(np.prod(shape)), (name, shape, volume)

    def build(self) -> Layout:
        """The layout of everything added."""
        counts = np.array([len(r) for r in self._ranks], dtype=np.int64)
        first = np.cumsum(counts) - counts
        tensors = _table(self._tensors, 2 + DIMS).repeat(counts, axis=0)
        pieces, piece_local = _per_rank(_table(self._pieces, 2 + 3 * DIMS), counts, first)
        zeros, zero_local = _per_rank(_table(self._zeros, 1 + 2 * DIMS), counts, first)
        return Layout(
            world_size=self._world_size,
            canonical_names=tuple(self._canonical),
            canonical_shapes=_table([padded(s, 1) for s in self._canonical.values()], DIMS),
            names=tuple(self._name_id),
            local_rank=np.array([r for ranks in self._ranks for r in ranks], dtype=np.int64),
            local_name=tensors[:, 0],
            local_ndim=tensors[:, 1],
            local_shape=tensors[:, 2:],
            piece_local=piece_local,
            piece_canonical=pieces[:, 1],
            piece_local_start=pieces[:, 2:5],
            piece_canonical_start=pieces[:, 5:8],
            piece_extent=pieces[:, 8:],
            zero_local=zero_local,
            zero_start=zeros[:, 1:4],
            zero_extent=zeros[:, 4:],
        )


def _table(rows: Sequence[Sequence[int]], width: int) -> Ints:
    return np.array(rows, dtype=np.int64).reshape(len(rows), width)


def _per_rank(rows: Ints, counts: Ints, first: Ints) -> tuple[Ints, Ints]:
    """Repeats rows (column 0: tensor) for each rank of their tensor; also the local ids."""
    repeats = counts[rows[:, 0]]
    expanded = rows.repeat(repeats, axis=0)
    nth = np.arange(len(expanded)) - (np.cumsum(repeats) - repeats).repeat(repeats)
    return expanded, first[expanded[:, 0]] + nth
