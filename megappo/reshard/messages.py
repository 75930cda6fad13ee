"""One direction of a schedule on one rank: what lies where in the buffer, round by round.

Packs copies into a buffer, names the messages of a round, unpacks what came. Knows neither
the process group nor which buffer is in flight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from megappo.reshard.schedule import Copies, aligned
from megappo.reshard.transport import Message
from megappo.weights.layout import Ints, Layout, box_index

# This rank's tensors by their index in a layout.
Tensors = Mapping[int, torch.Tensor]


@dataclass(frozen=True)
class Spot:
    """A box of one of this rank's tensors.

    Attributes:
        local: Index of the tensor in its layout.
        index: Takes the box out of the tensor.
        num_bytes: Of the payload, in the destination's type.
    """

    local: int
    index: tuple[slice, ...]
    num_bytes: int

    def box(self, tensors: Tensors) -> torch.Tensor:
        """The box itself."""
        return tensors[self.local][self.index]


@dataclass(frozen=True)
class _Cell:
    """A spot whose payload comes from, or goes to, another rank.

    Attributes:
        spot: Where, in this rank's tensors.
        dtype: Of the payload.
        begin: First byte in the buffer, if it passes through it.
        peer: The other rank.
        staged: Whether it passes through the buffer.
    """

    spot: Spot
    dtype: torch.dtype
    begin: int
    peer: int
    staged: bool

    def payload(self, buffer: torch.Tensor) -> torch.Tensor:
        """Its place in the buffer, flat."""
        return buffer[self.begin : self.begin + self.spot.num_bytes].view(self.dtype)


@dataclass
class _Round:
    """Cells that pass through the buffer, shared messages (peer, begin, end), lone cells."""

    staged: list[_Cell] = field(default_factory=list)
    shared: dict[int, tuple[int, int]] = field(default_factory=dict)
    alone: list[_Cell] = field(default_factory=list)


class Messages:
    """The copies of one rank and direction.

    Args:
        copies: Its rows of the schedule.
        layout: Of this rank's tensors.
        types: The destination tensors' dtypes, by their index in the destination layout.

    Attributes:
        num_bytes: Payload of all rounds.
        buffer_bytes: The most that a round needs in the buffer.
        rounds: Those in which there is something to do.
    """

    def __init__(self, copies: Copies, layout: Layout, types: Sequence[torch.dtype]) -> None:
        """Lays out the buffer of every round."""
        size = np.where(copies.staged, aligned(copies.num_bytes), 0)
        end = np.cumsum(size)
        # Each round starts again at the buffer's first byte.
        _, first, count = np.unique(copies.round, return_index=True, return_counts=True)
        begin = end - size - np.repeat((end - size)[first], count)
        self.num_bytes = int(copies.num_bytes.sum())
        self.buffer_bytes = int((begin + size).max(initial=0))
        self._rounds: dict[int, _Round] = defaultdict(_Round)
        for row, now in enumerate(copies.round.tolist()):
            local, num_bytes = int(copies.local[row]), int(copies.num_bytes[row])
            cell = _Cell(
                spot=spot(layout, local, copies.start[row], copies.extent[row], num_bytes),
                dtype=types[copies.destination_local[row]],
                begin=int(begin[row]),
                peer=int(copies.peer[row]),
                staged=bool(copies.staged[row]),
            )
            here = self._rounds[now]
            if cell.staged:
                here.staged.append(cell)
            if copies.alone[row]:
                here.alone.append(cell)
            else:
                start, _ = here.shared.get(cell.peer, (cell.begin, 0))
                here.shared[cell.peer] = start, int(begin[row] + size[row])
        self.rounds = frozenset(self._rounds)

    def messages(self, now: int, tensors: Tensors, buffer: torch.Tensor) -> list[Message]:
        """The messages of a round, those of one peer in the order that it knows, too."""
        if now not in self.rounds:
            return []
        here = self._rounds[now]
        shared = [(buffer[start:end], peer) for peer, (start, end) in here.shared.items()]
        alone = [
            (c.payload(buffer) if c.staged else c.spot.box(tensors), c.peer) for c in here.alone
        ]
        return shared + alone

    def pack(self, now: int, tensors: Tensors, buffer: torch.Tensor) -> None:
        """Fills the buffer for a round, casting to the receivers' types."""
        for cell in self._staged(now):
            box = cell.spot.box(tensors)
            cell.payload(buffer).view(box.shape).copy_(box)

    def unpack(self, now: int, tensors: Tensors, buffer: torch.Tensor) -> None:
        """Writes what a round brought into the tensors."""
        for cell in self._staged(now):
            box = cell.spot.box(tensors)
            box.copy_(cell.payload(buffer).view(box.shape))

    def _staged(self, now: int) -> list[_Cell]:
        return self._rounds[now].staged if now in self.rounds else []


def spot(layout: Layout, local: int, start: Ints, extent: Ints, num_bytes: int) -> Spot:
    """The spot of a box [3], [3] in a layout's local tensor."""
    return Spot(local, box_index(start, extent, int(layout.local_ndim[local])), num_bytes)
