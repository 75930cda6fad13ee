"""Carries out a weight plan over a process group: each rank gets exactly its own bytes.

What stays on its rank is copied straight from tensor to tensor. What moves goes point to
point, cast to the receiver's type by the sender; small copies are packed through staging
buffers of fixed size, large ones go straight out of and into the tensors where they can.
While a round travels, the next one is packed. No tensor is ever whole anywhere unless the
destination layout says so. Knows no model: ``weights`` made the plan.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from megappo.config.errors import OtherRankError
from megappo.reshard.checksum import checksums
from megappo.reshard.formats import DTYPES, MAX_NAMES, Named, Side, agree, formats
from megappo.reshard.messages import Messages, Spot, Tensors, spot
from megappo.reshard.schedule import ALIGNMENT, make_schedule
from megappo.reshard.transport import default_group, exchange, gather, total
from megappo.weights.layout import Ints
from megappo.weights.plan import Plan

STAGING_BYTES = 512 * 1024**2
# Staging is cut into as many buffers: in each direction one that travels and one at work.
BUFFERS = 4


@dataclass(frozen=True)
class TransferStats:
    """What one run moved on this rank.

    Attributes:
        bytes_received: Payload that came from other ranks.
        bytes_sent: Payload that went to other ranks.
        bytes_kept: Payload copied from this rank's own tensors.
        bytes_zeroed: Padding that was written as zeros.
        bytes_staging: Memory that the staging buffers took.
        num_rounds: Rounds in which this rank sent or received.
    """

    bytes_received: int
    bytes_sent: int
    bytes_kept: int
    bytes_zeroed: int
    bytes_staging: int
    num_rounds: int


class Executor:
    """Runs one plan, any number of times.

    Args:
        plan: The same on all ranks of the group.
        rank: This rank in the plan, which is its rank in the group.
        group: Any process group, a joint one too; the default group if None.
        staging_bytes: Bound on the staging memory, both directions together.
        device: Where tensors and staging buffers live.
        verify: Compare checksums of what was sent and what arrived; the same on all ranks.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        group: dist.ProcessGroup | None = None,
        *,
        staging_bytes: int = STAGING_BYTES,
        device: torch.device | None = None,
        verify: bool = False,
    ) -> None:
        """Keeps the plan; the schedule is made at the first run, when dtypes are known."""
        if staging_bytes < BUFFERS * ALIGNMENT:
            raise ValueError(f"staging_bytes = {staging_bytes} is below {BUFFERS * ALIGNMENT}")
        self._plan = plan
        self._rank = rank
        self._sides = (
            Side("source", plan.source, rank),
            Side("destination", plan.destination, rank),
        )
        self._group = default_group() if group is None else group
        self._device = device or torch.device("cpu")
        self._verify = verify
        self._buffer_bytes = staging_bytes // BUFFERS // ALIGNMENT * ALIGNMENT
        self._agreed: Ints = np.empty(0, dtype=np.int64)
        self._work: _Work | None = None

    @torch.no_grad()
    def run(self, source: Named, destination: Named) -> TransferStats:
        """Writes every element of ``destination``; all ranks of the group call it together.

        Args:
            source: This rank's tensors by the names of the plan's source layout.
            destination: Its tensors by the names of the destination layout.

        Raises:
            ValueError: on all ranks, before anything moves, when one rank's tensors are not
                those of its layout; after it, when checksums differ.
            RuntimeError: when another rank failed while moving, or did not answer within the
                group's timeout. The destination is a mixture until a run succeeds.
        """
        plan, rank = self._plan, self._rank
        here, there = self._sides
        agreed = agree([(here, source), (there, destination)], self._group, self._device)
        if self._work is None or not np.array_equal(agreed, self._agreed):
            self._work = _Work(plan, rank, agreed, self._buffer_bytes, self._largest)
            self._agreed = agreed
        work = self._work
        tensors, written = here.by_id(source), there.by_id(destination)
        faults = _Faults()
        bytes_staging = self._move(work, tensors, written, faults)
        self._raise_together(faults)
        if self._verify:
            sums = checksums(plan, rank, tensors, written, work.types, self._device)
            self._compare(sums)
        return TransferStats(
            bytes_received=work.receives.num_bytes,
            bytes_sent=work.sends.num_bytes,
            bytes_kept=sum(there.num_bytes for _, there in work.kept),
            bytes_zeroed=sum(cell.num_bytes for cell in work.zeros),
            bytes_staging=bytes_staging,
            num_rounds=len(work.rounds),
        )

    def _move(self, work: _Work, tensors: Tensors, written: Tensors, faults: _Faults) -> int:
        """Sends and receives; while a round travels, its neighbours are packed and unpacked.

        A fault of this rank must not keep the others waiting: its messages go out whatever
        they hold, and ``faults`` tells afterwards. Returns the size of the buffers.
        """
        sends, receives = work.sends, work.receives
        out, into = (
            torch.empty((2, side.buffer_bytes), dtype=torch.uint8, device=self._device)
            for side in (sends, receives)
        )
        meanwhile: Callable[[], None] = partial(work.copy_on_the_spot, tensors, written, faults)
        for turn, now in enumerate(work.rounds):
            packed, brought = out[turn % 2], into[turn % 2]
            with faults.noted():
                sends.pack(now, tensors, packed)
            travelling = exchange(
                self._group,
                receives.messages(now, written, brought),
                sends.messages(now, tensors, packed),
            )
            meanwhile()
            meanwhile = partial(work.land, travelling, now, written, brought, faults)
        meanwhile()
        return out.nbytes + into.nbytes

    def _largest(self, number: int) -> int:
        """The largest of all ranks' numbers."""
        return int(gather(self._group, torch.tensor([number], device=self._device)).max())

    def _raise_together(self, faults: _Faults) -> None:
        """Raises on all ranks when one of them failed."""
        own = torch.tensor([faults.first is not None], dtype=torch.uint8, device=self._device)
        failed = gather(self._group, own).flatten().cpu().numpy()
        if faults.first is not None:
            raise faults.first
        if failed.any():
            ranks = ", ".join(map(str, np.flatnonzero(failed)))
            raise OtherRankError(f"weights moved in part: rank {ranks} failed, its log says why")

    def _compare(self, sums: torch.Tensor) -> None:
        different = np.flatnonzero(total(self._group, sums).cpu().numpy())
        if len(different):
            names = [self._plan.destination.canonical_names[i] for i in different[:MAX_NAMES]]
            raise ValueError(
                f"checksums of {len(different)} tensors differ between trainer and engine after "
                f"a weight sync: {', '.join(names)}"
            )


class _Work:
    """What one rank does in a run, for tensors of the formats that were agreed on."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        agreed: Ints,
        buffer_bytes: int,
        largest: Callable[[int], int],
    ) -> None:
        found = formats(plan, agreed)
        schedule = make_schedule(plan, rank, found, buffer_bytes, largest)
        source, destination = plan.source, plan.destination
        self.types: Sequence[torch.dtype] = [DTYPES[i] for i in found.destination_type]
        self.sends = Messages(schedule.sends, source, self.types)
        self.receives = Messages(schedule.receives, destination, self.types)
        self.rounds = sorted(self.sends.rounds | self.receives.rounds)
        self.kept: list[tuple[Spot, Spot]] = []
        for i in schedule.kept:
            extent, there = plan.extent[i], int(plan.destination_local[i])
            num_bytes = int(extent.prod() * found.itemsize[there])
            self.kept.append(
                (
                    spot(
                        source, int(plan.source_local[i]), plan.source_start[i], extent, num_bytes
                    ),
                    spot(destination, there, plan.destination_start[i], extent, num_bytes),
                )
            )
        self.zeros: list[Spot] = []
        for i in np.flatnonzero(destination.local_rank[destination.zero_local] == rank):
            extent, there = destination.zero_extent[i], int(destination.zero_local[i])
            num_bytes = int(extent.prod() * found.itemsize[there])
            start = destination.zero_start[i]
            self.zeros.append(spot(destination, there, start, extent, num_bytes))

    def copy_on_the_spot(self, tensors: Tensors, written: Tensors, faults: _Faults) -> None:
        """Does what needs no other rank: padding, and copies within this one."""
        with faults.noted():
            for there in self.zeros:
                there.box(written).zero_()
            for here, there in self.kept:
                target = there.box(written)
                target.copy_(here.box(tensors).view(target.shape))

    def land(
        self,
        travelling: list[dist.Work],
        now: int,
        written: Tensors,
        buffer: torch.Tensor,
        faults: _Faults,
    ) -> None:
        """Waits for a round's messages and unpacks them."""
        for work in travelling:
            work.wait()
        with faults.noted():
            self.receives.unpack(now, written, buffer)


class _Faults:
    """Remembers this rank's first exception, so that it can be raised when all have moved."""

    def __init__(self) -> None:
        self.first: Exception | None = None

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Keeps an exception of the block instead of raising it."""
        try:
            yield
        except Exception as error:
            self.first = self.first or error
