"""How one row of a family table is cut into local tensors: shared by Megatron and vLLM.

A local tensor is a stack of row ranges of canonical tensors, or a column range of one, with
zero rows below the vocabulary. This module turns such a description into pieces; which
ranges a rank gets is for ``megatron`` and ``vllm`` to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megappo.weights.layout import LocalTensor, Piece, Zeros


@dataclass(frozen=True)
class Rows:
    """Rows ``start`` to ``start + count`` of the ``part``-th canonical tensor of a table row."""

    part: int
    start: int
    count: int


def stack(rest: tuple[int, ...], rows: Sequence[Rows]) -> LocalTensor:
    """Row ranges laid end to end.

    Args:
        rest: The dimensions after the first, alike in all parts.
        rows: Ranges in local order.
    """
    origin = (0,) * len(rest)
    pieces, position = [], 0
    for r in rows:
        extent = (r.count, *rest)
        pieces.append(Piece(r.part, (r.start, *origin), (position, *origin), extent))
        position += r.count
    return LocalTensor((position, *rest), tuple(pieces))


def equal_share(part: int, size: int, index: int, count: int) -> Rows:
    """The ``index``-th of ``count`` equal row ranges."""
    assert size % count == 0, (size, count)
    return Rows(part, index * (size // count), size // count)


def window(rows: Sequence[Rows], start: int, count: int) -> list[Rows]:
    """The ranges that are left of a stack when only ``count`` rows from ``start`` are kept."""
    kept, position = [], 0
    for r in rows:
        first = max(start, position)
        last = min(start + count, position + r.count)
        if first < last:
            kept.append(Rows(r.part, r.start + first - position, last - first))
        position += r.count
    return kept


def columns(size: tuple[int, ...], index: int, count: int) -> LocalTensor:
    """The ``index``-th of ``count`` equal column ranges of a matrix."""
    rows, width = size[0], size[1] // count
    assert width * count == size[1], (size, count)
    shape = (rows, width)
    return LocalTensor(shape, (Piece(0, (0, index * width), (0, 0), shape),))


def vocabulary(size: tuple[int, ...], padded_rows: int, index: int, count: int) -> LocalTensor:
    """One of ``count`` equal row ranges of a matrix padded with zero rows to ``padded_rows``."""
    share = equal_share(0, padded_rows, index, count)
    real = max(0, min(size[0] - share.start, share.count))
    rest = size[1:]
    local = stack(rest, [Rows(0, share.start, real)] if real else [])
    zeros: tuple[Zeros, ...] = ()
    if real < share.count:
        zeros = (Zeros((real, *(0,) * len(rest)), (share.count - real, *rest)),)
    return LocalTensor((share.count, *rest), local.pieces, zeros)
