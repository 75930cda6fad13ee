"""Layouts that no model has, for property tests: random boxes in random tensors on random ranks.

Every rank's tensors are made beside the layout, from the boxes as they are drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from hypothesis import strategies as st

from megappo.weights.layout import Layout, LayoutBuilder, LocalTensor, Piece, Zeros
from tests.support.weights import Tensors

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Box:
    """A box of a canonical tensor of three dimensions."""

    name: str
    start: tuple[int, ...]
    extent: tuple[int, ...]

    def of(self, weights: Tensors) -> torch.Tensor:
        """What is in it."""
        index = tuple(slice(a, a + n) for a, n in zip(self.start, self.extent, strict=True))
        return weights[self.name][index]


@st.composite
def shapes(draw: st.DrawFn) -> Shapes:
    """Up to three canonical tensors, some of them alike."""
    lengths = st.tuples(*[st.integers(1, 4)] * 3)
    sizes = draw(st.lists(lengths, min_size=1, max_size=3))
    repeats = draw(st.integers(1, 2))
    return {f"{i}.{r}": size for i, size in enumerate(sizes) for r in range(repeats)}


@st.composite
def _tiling(draw: st.DrawFn, canonical: Shapes) -> list[Box]:
    """Boxes that tile all canonical tensors, in any order."""
    boxes = []
    for name, size in canonical.items():
        cuts = []
        for length in size:
            inner = draw(st.sets(st.integers(1, length), max_size=2)) - {length}
            edges = [0, *sorted(inner), length]
            cuts.append(list(zip(edges[:-1], edges[1:], strict=True)))
        for ranges in product(*cuts):
            extent = tuple(b - a for a, b in ranges)
            boxes.append(Box(name, tuple(a for a, _ in ranges), extent))
    return draw(st.permutations(boxes))


@st.composite
def held(
    draw: st.DrawFn, canonical: Shapes, weights: Tensors, world_size: int, outside: float
) -> tuple[Layout, list[Tensors]]:
    """A layout that holds every element somewhere, and the tensors of every rank.

    Boxes lie one after another along the first dimension of local tensors; what is beside a
    narrower one is ``outside``, zero by definition.
    """
    builder = LayoutBuilder(world_size, canonical)
    ranks: list[Tensors] = [{} for _ in range(world_size)]
    boxes = draw(_tiling(canonical))
    # Alike on several ranks, or once more in other local tensors.
    for replica in range(draw(st.integers(1, 2))):
        rest = boxes
        while rest:
            count = draw(st.integers(1, 3))
            here, rest = rest[:count], rest[count:]
            holders = sorted(draw(st.sets(st.integers(0, world_size - 1), min_size=1)))
            name = f"{replica}.{len(rest)}"
            local = _stacked(here)
            builder.add(holders, [name], local, builder.canonical_ids([[b.name for b in here]]))
            for rank in holders:
                tensor = torch.full(local.shape, outside, dtype=torch.float64)
                position = 0
                for box in here:
                    a, b, c = box.extent
                    tensor[position : position + a, :b, :c] = box.of(weights)
                    position += a
                ranks[rank][name] = tensor
    return builder.build(), ranks


def _stacked(boxes: list[Box]) -> LocalTensor:
    """Boxes along the first dimension, with zeros beside the narrower ones."""
    rows, columns = (max(box.extent[dim] for box in boxes) for dim in (1, 2))
    pieces, zeros, position = [], [], 0
    for part, box in enumerate(boxes):
        a, b, c = box.extent
        pieces.append(Piece(part, box.start, (position, 0, 0), box.extent))
        if b < rows:
            zeros.append(Zeros((position, b, 0), (a, rows - b, columns)))
        if c < columns:
            zeros.append(Zeros((position, 0, c), (a, b, columns - c)))
        position += a
    return LocalTensor((position, rows, columns), tuple(pieces), tuple(zeros))
