"""What the executor asks of a process group, by the group object's own methods.

Ranks are ranks of the group, so the default group, a part of it and a joint group of
processes with different default groups are all alike. Knows no weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

# A contiguous tensor and the rank that it goes to or comes from.
Message = tuple[torch.Tensor, int]


def default_group() -> dist.ProcessGroup:
    """The default process group, which must have been made."""
    group = dist.group.WORLD
    assert group is not None, "no default process group"
    return group


def exchange(
    group: dist.ProcessGroup, receives: Sequence[Message], sends: Sequence[Message]
) -> list[dist.Work]:
    """Starts messages in both directions; between two ranks they match in order.

    Nothing may touch the tensors until the returned works have been waited for.
    """
    messages = [*receives, *sends]
    if not messages:
        return []
    device = messages[0][0].device
    if device.type == "cuda":  # NCCL: both directions in one launch, or ranks wait in a circle
        group._start_coalescing(device)
    works = [group.recv([tensor], peer, 0) for tensor, peer in receives]
    works += [group.send([tensor], peer, 0) for tensor, peer in sends]
    if device.type == "cuda":
        return [group._end_coalescing(device)]
    return works


def gather(group: dist.ProcessGroup, own: torch.Tensor) -> torch.Tensor:
    """Every rank's tensor of one shape, stacked in the order of ranks."""
    rows = [torch.empty_like(own) for _ in range(group.size())]
    group.allgather([rows], [own]).wait()
    return torch.stack(rows)


def total(group: dist.ProcessGroup, own: torch.Tensor) -> torch.Tensor:
    """The sum of every rank's tensor; ``own`` is overwritten."""
    group.allreduce([own]).wait()
    return own
