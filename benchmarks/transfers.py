"""What the executor is measured against: a plain copy of as many bytes, and a full gather."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import torch
import torch.distributed as dist

from megappo.reshard.transport import default_group, exchange
from megappo.topology import Topology
from megappo.weights.layout import Layout, box_index, unpadded
from megappo.weights.plan import Plan

Tensors = dict[str, torch.Tensor]


def filled(layout: Layout, rank: int, dtype: torch.dtype) -> Tensors:
    """A rank's tensors, cut out of random canonical tensors that are the same for any layout."""
    tensors = {name: torch.zeros(s, dtype=dtype) for name, s in layout.local_shapes(rank).items()}
    by_id = {i: tensors[name] for name, i in layout.local_ids(rank).items()}
    mine = np.flatnonzero(layout.local_rank[layout.piece_local] == rank)
    for canonical in np.unique(layout.piece_canonical[mine]):
        shape = layout.canonical_shapes[canonical]
        random = torch.Generator().manual_seed(int(canonical))
        whole = torch.randn(tuple(shape.tolist()), generator=random).to(dtype)
        for p in mine[layout.piece_canonical[mine] == canonical]:
            extent = layout.piece_extent[p]
            tensor = by_id[int(layout.piece_local[p])]
            box = tensor[box_index(layout.piece_local_start[p], extent, tensor.dim())]
            box.copy_(whole[box_index(layout.piece_canonical_start[p], extent, 3)].view(box.shape))
    return tensors


class PlainCopy:
    """As many bytes between the same ranks: one contiguous message a pair, one copy at home."""

    def __init__(self, plan: Plan, rank: int, dtype: torch.dtype) -> None:
        """Makes the buffers."""
        num_bytes = plan.extent.prod(axis=1) * dtype.itemsize
        world = range(plan.destination.world_size)
        pairs = np.zeros((len(world), len(world)), dtype=np.int64)
        np.add.at(pairs, (plan.source_rank, plan.destination_rank), num_bytes)
        self._here, self._there = (
            torch.ones(int(pairs[rank, rank]), dtype=torch.uint8) for _ in range(2)
        )
        self._sends, self._receives = (
            [(torch.ones(int(row[p]), dtype=torch.uint8), p) for p in world if row[p] and p != rank]
            for row in (pairs[rank], pairs[:, rank])
        )

    def __call__(self) -> None:
        """Moves them, copying at home while messages travel."""
        works = exchange(default_group(), self._receives, self._sends)
        self._there.copy_(self._here)
        for work in works:
            work.wait()


@dataclass(frozen=True)
class _Whole:
    """A tensor that the ranks of one stage hold in parts, of one shape.

    Attributes:
        name: Of each part, in the source layout.
        stage: That holds it.
        shape: Of a part.
        parts: For every part the ranks that hold it, in order.
    """

    name: str
    stage: int
    shape: tuple[int, ...]
    parts: tuple[tuple[int, ...], ...]

    def cliques(self) -> list[tuple[int, ...]]:
        """Ranks that hold all parts together, one part each; replicas make several."""
        return list(zip(*self.parts, strict=True))


@dataclass(frozen=True)
class _Cut:
    """One box of a target tensor, and where it lies in the gathered parts."""

    target: torch.Tensor
    part: int
    index: tuple[slice, ...]


class FullGather:
    """Every tensor whole on every engine rank: gathered, broadcast, and cut there.

    Parts are gathered by all ranks of a tensor- or expert-parallel group, replicas at the same
    time. Where engines live in the mesh, every rank then broadcasts to its counterparts in the
    other stages; where they do not, one rank of the stage broadcasts to all engine ranks.

    Args:
        plan: Says what is cut out of what.
        topology: Of the trainer ranks, the first of the world.
        rank: This rank.
        source: Its tensors in the source layout.
        target: Its tensors in the destination layout.
    """

    def __init__(
        self, plan: Plan, topology: Topology, rank: int, source: Tensors, target: Tensors
    ) -> None:
        """Makes the process groups, in the same order on all ranks, and the buffer."""
        self._rank, self._source, self._topology = rank, source, topology
        self._engines = tuple(range(topology.world_size, plan.source.world_size))
        self._wholes, part_of = _wholes(plan.source, topology)
        groups = {clique for whole in self._wholes for clique in whole.cliques()}
        groups |= {group for whole in self._wholes for group in self._reached(whole)}
        self._groups = {g: dist.new_group(list(g)) for g in sorted(groups) if len(g) > 1}
        self._cuts: dict[tuple[str, int], list[_Cut]] = {}
        targets = {i: target[name] for name, i in plan.destination.local_ids(rank).items()}
        for k in np.flatnonzero(plan.destination_rank == rank):
            tensor = targets[int(plan.destination_local[k])]
            whole, part = part_of[int(plan.source_local[k])]
            cut = _Cut(
                tensor[box_index(plan.destination_start[k], plan.extent[k], tensor.dim())],
                part,
                box_index(plan.source_start[k], plan.extent[k], len(whole.shape)),
            )
            self._cuts.setdefault((whole.name, whole.stage), []).append(cut)
        most = max(len(w.parts) * prod(w.shape) for w in self._wholes)
        self._buffer = torch.ones(most, dtype=next(iter((source or target).values())).dtype)
        here = [w for w in self._wholes if (w.name, w.stage) in self._cuts]
        elements = sum(len(w.parts) * prod(w.shape) for w in here)
        self.bytes_received = elements * self._buffer.itemsize

    def __call__(self) -> None:
        """Refreshes the target."""
        for whole in self._wholes:
            size = (len(whole.parts), *whole.shape)
            stack = self._buffer[: prod(size)].view(size)
            for clique in whole.cliques():
                if self._rank in clique:
                    own = self._source[whole.name]
                    if len(clique) > 1:
                        dist.all_gather(list(stack), own, group=self._groups[clique])
                    else:
                        stack = own[None]
            for group in self._reached(whole):
                if self._rank in group and len(group) > 1:
                    dist.broadcast(stack, self._sender(whole, group), group=self._groups[group])
            for cut in self._cuts.get((whole.name, whole.stage), ()):
                cut.target.copy_(stack[cut.part][cut.index].view(cut.target.shape))

    def _reached(self, whole: _Whole) -> list[tuple[int, ...]]:
        """The groups in which a gathered tensor is broadcast."""
        topology = self._topology
        if self._engines:
            return [(whole.parts[0][0], *self._engines)]
        return [
            tuple(topology.rank(stage, dp, tp) for stage in range(topology.pp))
            for dp in range(topology.dp)
            for tp in range(topology.tp)
        ]

    def _sender(self, whole: _Whole, group: tuple[int, ...]) -> int:
        return group[0] if self._engines else group[whole.stage]


def _wholes(
    layout: Layout, topology: Topology
) -> tuple[list[_Whole], dict[int, tuple[_Whole, int]]]:
    """All wholes in order, and for every local tensor its whole and which part it is."""
    boxes = np.c_[layout.piece_canonical, layout.piece_canonical_start, layout.piece_local_start]
    holders: dict[tuple[int, str], dict[bytes, list[int]]] = {}
    tensors: dict[tuple[int, str, bytes], list[int]] = {}
    for i, rank in enumerate(layout.local_rank.tolist()):
        stage, name = topology.coordinates(rank).pp, layout.names[layout.local_name[i]]
        content = boxes[layout.piece_local == i].tobytes()
        holders.setdefault((stage, name), {}).setdefault(content, []).append(rank)
        tensors.setdefault((stage, name, content), []).append(i)
    wholes, part_of = [], {}
    for (stage, name), contents in holders.items():
        first = tensors[stage, name, next(iter(contents))][0]
        shape = unpadded(layout.local_shape[first], int(layout.local_ndim[first]))
        whole = _Whole(name, stage, shape, tuple(tuple(sorted(r)) for r in contents.values()))
        wholes.append(whole)
        for part, content in enumerate(contents):
            part_of.update({i: (whole, part) for i in tensors[stage, name, content]})
    return wholes, part_of
