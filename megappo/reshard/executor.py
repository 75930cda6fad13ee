"""Carries out a weight plan over a process group: each rank gets exactly its own bytes.

What stays on its rank is copied straight from tensor to tensor. What moves goes point to
point, one contiguous message per pair of ranks and round, packed and cast to the receiver's
type by the sender, through staging buffers of fixed size. No tensor is ever whole anywhere
unless the destination layout says so. Knows no model: ``weights`` made the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megappo.reshard.schedule import ALIGNMENT, Copies, Schedule, aligned, make_schedule
from megappo.weights.layout import Ints, Layout, box_index
from megappo.weights.plan import Plan

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
STAGING_BYTES = 512 * 1024**2


@dataclass(frozen=True)
class TransferStats:
    """What one run moved on this rank.

    Attributes:
        bytes_received: Payload that came from other ranks.
        bytes_sent: Payload that went to other ranks.
        bytes_kept: Payload copied from this rank's own tensors.
        bytes_zeroed: Padding that was written as zeros.
        num_rounds: Rounds in which this rank sent or received.
    """

    bytes_received: int
    bytes_sent: int
    bytes_kept: int
    bytes_zeroed: int
    num_rounds: int


class Executor:
    """Runs one plan, any number of times.

    Args:
        plan: The same on all ranks of the group.
        rank: This rank in the plan, which is its rank in the group.
        group: Process group; the default group if None.
        staging_bytes: Bound on the staging memory, half of it for each direction.
        device: Where tensors and staging buffers live.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        group: dist.ProcessGroup | None = None,
        *,
        staging_bytes: int = STAGING_BYTES,
        device: torch.device | None = None,
    ) -> None:
        """Keeps the plan; the schedule is made at the first run, when dtypes are known."""
        if staging_bytes < 2 * ALIGNMENT:
            raise ValueError(f"staging_bytes = {staging_bytes} is below {2 * ALIGNMENT}")
        self._plan = plan
        self._rank = rank
        self._group = group
        self._device = device or torch.device("cpu")
        self._buffer_bytes = staging_bytes // 2 // ALIGNMENT * ALIGNMENT
        self._codes: Ints = np.empty(0, dtype=np.int64)
        self._schedule: Schedule | None = None

    @torch.no_grad()
    def run(
        self, source: Mapping[str, torch.Tensor], destination: Mapping[str, torch.Tensor]
    ) -> TransferStats:
        """Writes every element of ``destination``; all ranks of the group call it together.

        Args:
            source: This rank's tensors by the names of the plan's source layout.
            destination: Its tensors by the names of the destination layout.

        Raises:
            ValueError: on all ranks, when one rank's tensors are not those of its layout.
        """
        plan = self._plan
        problem = _mismatch("source", source, plan.source, self._rank)
        problem = problem or _mismatch("destination", destination, plan.destination, self._rank)
        codes = self._exchange_dtypes(destination, problem)
        if self._schedule is None or not np.array_equal(codes, self._codes):
            itemsize = np.array([d.itemsize for d in DTYPES])[codes]
            self._schedule = make_schedule(plan, self._rank, itemsize, self._buffer_bytes)
            self._codes = codes
        tensors = _by_id(source, plan.source, self._rank)
        written = _by_id(destination, plan.destination, self._rank)
        zeroed = self._fill_zeros(written)
        kept = self._copy_kept(tensors, written, self._schedule.kept)
        num_rounds = self._move(tensors, written, self._schedule, codes)
        return TransferStats(
            bytes_received=int(self._schedule.receives.num_bytes.sum()),
            bytes_sent=int(self._schedule.sends.num_bytes.sum()),
            bytes_kept=kept,
            bytes_zeroed=zeroed,
            num_rounds=num_rounds,
        )

    def _exchange_dtypes(
        self, destination: Mapping[str, torch.Tensor], problem: str | None
    ) -> Ints:
        """Every destination tensor's index in ``DTYPES``, agreed on by all ranks."""
        layout = self._plan.destination
        counts = np.bincount(layout.local_rank, minlength=layout.world_size)
        own = torch.zeros(1 + int(counts.max()), dtype=torch.uint8)
        if problem:
            own[0] = 1
        else:
            codes = [DTYPES.index(destination[n].dtype) for n in layout.local_ids(self._rank)]
            own[1 : 1 + len(codes)] = torch.tensor(codes, dtype=torch.uint8)
        own = own.to(self._device)
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(gathered, own, group=self._group)
        if problem:
            raise ValueError(problem)
        table = torch.stack(gathered).cpu().numpy().astype(np.int64)
        if table[:, 0].any():
            ranks = ", ".join(map(str, np.flatnonzero(table[:, 0])))
            raise ValueError(f"weights were not moved: tensors do not fit their layout on {ranks}")
        result = np.zeros(len(layout.local_rank), dtype=np.int64)
        for rank, row in enumerate(table[: layout.world_size]):
            result[layout.local_rank == rank] = row[1 : 1 + counts[rank]]
        return result

    def _fill_zeros(self, written: Mapping[int, torch.Tensor]) -> int:
        layout = self._plan.destination
        num_bytes = 0
        for i in np.flatnonzero(layout.local_rank[layout.zero_local] == self._rank):
            tensor = written[int(layout.zero_local[i])]
            box = _box(tensor, layout.zero_start[i], layout.zero_extent[i])
            num_bytes += box.zero_().nbytes
        return num_bytes

    def _copy_kept(
        self, tensors: Mapping[int, torch.Tensor], written: Mapping[int, torch.Tensor], kept: Ints
    ) -> int:
        plan, num_bytes = self._plan, 0
        for i in kept:
            here = tensors[int(plan.source_local[i])]
            there = written[int(plan.destination_local[i])]
            target = _box(there, plan.destination_start[i], plan.extent[i])
            source = _box(here, plan.source_start[i], plan.extent[i])
            num_bytes += target.copy_(source.view(target.shape)).nbytes
        return num_bytes

    def _move(
        self,
        tensors: Mapping[int, torch.Tensor],
        written: Mapping[int, torch.Tensor],
        schedule: Schedule,
        codes: Ints,
    ) -> int:
        """Sends and receives round by round; a round waits only for its own messages."""
        sends, receives = _Messages(schedule.sends, codes), _Messages(schedule.receives, codes)
        out, into = (
            torch.empty(m.buffer_bytes, dtype=torch.uint8, device=self._device)
            for m in (sends, receives)
        )
        rounds = sorted({*schedule.sends.round.tolist(), *schedule.receives.round.tolist()})
        for now in rounds:
            operations = []
            for peer, begin, end in receives.messages(now):
                operations.append(self._operation(dist.irecv, into[begin:end], peer))
            for row, cell in sends.cells(now, out):
                tensor = tensors[int(sends.copies.local[row])]
                box = _box(tensor, sends.copies.start[row], sends.copies.extent[row])
                cell.view(box.shape).copy_(box)
            for peer, begin, end in sends.messages(now):
                operations.append(self._operation(dist.isend, out[begin:end], peer))
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            for row, cell in receives.cells(now, into):
                tensor = written[int(receives.copies.local[row])]
                box = _box(tensor, receives.copies.start[row], receives.copies.extent[row])
                box.copy_(cell.view(box.shape))
        return len(rounds)

    def _operation(self, kind: Callable[..., Any], message: torch.Tensor, peer: int) -> dist.P2POp:
        world_rank = dist.get_global_rank(self._group, peer) if self._group else peer
        return dist.P2POp(kind, message, world_rank, self._group)


class _Messages:
    """Where the copies of one direction lie in its staging buffer, round by round."""

    def __init__(self, copies: Copies, codes: Ints) -> None:
        self.copies = copies
        self._dtype = [DTYPES[c] for c in codes[copies.destination_local]]
        size = aligned(copies.num_bytes)
        end = np.cumsum(size)
        # Each round starts again at the buffer's first byte.
        _, first, count = np.unique(copies.round, return_index=True, return_counts=True)
        self._begin = end - size - np.repeat((end - size)[first], count)
        self._end = self._begin + size
        self.buffer_bytes = int(self._end.max(initial=0))

    def _rows(self, now: int) -> range:
        return range(*np.searchsorted(self.copies.round, (now, now + 1)).tolist())

    def messages(self, now: int) -> Iterator[tuple[int, int, int]]:
        """Peer and byte range of each message of a round."""
        rows = self._rows(now)
        peers = self.copies.peer[rows.start : rows.stop]
        for peer in np.unique(peers):
            first, last = np.searchsorted(peers, (peer, peer + 1)) + rows.start
            yield int(peer), int(self._begin[first]), int(self._end[last - 1])

    def cells(self, now: int, buffer: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Row and flat view into the buffer of each copy of a round."""
        for row in self._rows(now):
            begin = int(self._begin[row])
            payload = buffer[begin : begin + int(self.copies.num_bytes[row])]
            yield row, payload.view(self._dtype[row])


def _box(tensor: torch.Tensor, start: Ints, extent: Ints) -> torch.Tensor:
    return tensor[box_index(start, extent, tensor.dim())]


def _by_id(
    tensors: Mapping[str, torch.Tensor], layout: Layout, rank: int
) -> dict[int, torch.Tensor]:
    return {i: tensors[name] for name, i in layout.local_ids(rank).items()}


def _mismatch(
    side: str, tensors: Mapping[str, torch.Tensor], layout: Layout, rank: int
) -> str | None:
    """Why these tensors are not those of the layout; None when they are."""
    shapes = layout.local_shapes(rank) if rank < layout.world_size else {}
    odd = sorted(set(tensors) ^ set(shapes))
    if odd:
        where = "has no such tensor" if odd[0] in shapes else "is not in the layout"
        return f"rank {rank}: {side} tensor {odd[0]} {where} ({len(odd)} names differ)"
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            found = tuple(tensors[name].shape)
            return f"rank {rank}: {side} tensor {name} has shape {found}, the layout says {shape}"
        if tensors[name].dtype not in DTYPES:
            return f"rank {rank}: {side} tensor {name} has type {tensors[name].dtype}"
    return None
