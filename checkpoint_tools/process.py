"""The process group that Megatron wants, for one process or for the ranks of ``torchrun``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from megappo.models import parallel
from megappo.topology import Topology

# Ranks wait for the slowest one, and for rank 0's check of the logits.
TIMEOUT = timedelta(hours=6)


@contextlib.contextmanager
def mesh() -> Iterator[Topology]:
    """Megatron's groups over all ranks, each of which holds whole models; ended on leaving.

    An existing default process group is used and left alone.
    """
    ours = not dist.is_initialized()
    if ours and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo", timeout=TIMEOUT)
    elif ours:
        # Gloo listens even when it is alone; nobody else has to reach this process.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    topology = Topology(dist.get_world_size())
    parallel.initialize(topology, seed=0)
    try:
        yield topology
    finally:
        parallel.destroy()
        if ours:
            dist.destroy_process_group()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread: many small copies are far slower when threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
