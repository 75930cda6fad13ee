"""A communicator of processes whose default process groups are different, or absent.

Trainer ranks and the ranks of engines in processes of their own meet here, so that weights
go from one to the other. Neither side's default group is looked at or changed: the group
made here is no part of ``torch.distributed``'s registry, has ranks of its own, and is used
through its methods. Knows no weights; ``executor`` carries out plans over it.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, PrefixStore, TCPStore
from torch.distributed import distributed_c10d

from megappo.device.platform import backend

TIMEOUT = timedelta(minutes=30)
JOIN_TIMEOUT = timedelta(minutes=5)


def joint_group(
    master: tuple[str, int],
    rank: int,
    world_size: int,
    *,
    listen_fd: int | None = None,
    timeout: timedelta = TIMEOUT,
    join_timeout: timedelta = JOIN_TIMEOUT,
) -> dist.ProcessGroup:
    """Joins the communicator; returns when all of its ranks have.

    Args:
        master: Address and port that rank 0's process listens on.
        rank: This process's rank in the communicator, whatever its rank elsewhere.
        world_size: Number of processes that join.
        listen_fd: On rank 0, the descriptor of a socket that is bound to ``master`` and
            listens; taken over. None on the other ranks.
        timeout: After which an operation that waits for another rank fails.
        join_timeout: After which joining fails.

    Returns:
        A group over NCCL on CUDA (this process's current device), else over gloo. Ranks in
        its methods are ranks of the communicator.

    Raises:
        torch.distributed.DistError: when the others do not join in time.
    """
    assert (rank == 0) == (listen_fd is not None), "rank 0 listens, the others do not"
    store = TCPStore(
        *master,
        world_size=world_size,
        is_master=listen_fd is not None,
        timeout=join_timeout,
        master_listen_fd=listen_fd,
    )
    named = PrefixStore("joint", store)
    group = dist.ProcessGroup(named, rank, world_size)
    member: Backend
    if backend() == "nccl":
        options = distributed_c10d.ProcessGroupNCCL.Options()
        options._timeout = timeout
        member = distributed_c10d.ProcessGroupNCCL(named, rank, world_size, options)
        device, kind = torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL
    else:
        member = distributed_c10d.ProcessGroupGloo(named, rank, world_size, timeout=timeout)
        device, kind = torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    member._set_sequence_number_for_group()
    group._register_backend(device, kind, member)
    return group
