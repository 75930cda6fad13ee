"""Forks gloo ranks for a benchmark: one thread each, a default process group, results back."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

TIMEOUT = timedelta(minutes=10)


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Calls ``function(rank, *args)`` on every rank; results in the order of ranks.

    The caller must not have run threaded torch code.

    Raises:
        RuntimeError: with the traceback of a rank that failed; the others are ended.
    """
    context = multiprocessing.get_context("fork")
    meeting = socket.create_server(("127.0.0.1", 0))
    pipes, processes = [], []
    for rank in range(world_size):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank, args=(rank, world_size, meeting, theirs, function, args), daemon=True
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    meeting.close()
    try:
        results: dict[int, Any] = {}
        while len(results) < world_size:
            for pipe in wait([p for rank, p in enumerate(pipes) if rank not in results]):
                assert isinstance(pipe, Connection)
                rank = pipes.index(pipe)
                succeeded, results[rank] = pipe.recv()
                if not succeeded:
                    raise RuntimeError(f"rank {rank} failed:\n{results[rank]}")
        return [results[rank] for rank in range(world_size)]
    except EOFError:
        raise RuntimeError("a rank died without a word") from None
    finally:
        for process in processes:
            process.kill()
            process.join()


def _rank(
    rank: int,
    world_size: int,
    meeting: socket.socket,
    pipe: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    host, port = meeting.getsockname()
    try:
        descriptor = meeting.detach()
        store = TCPStore(
            host,
            port,
            world_size=world_size,
            is_master=rank == 0,
            timeout=TIMEOUT,
            master_listen_fd=descriptor if rank == 0 else None,
        )
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=TIMEOUT
        )
        outcome = (True, function(rank, *args))
        dist.barrier()
    except Exception:
        outcome = (False, traceback.format_exc())
    pipe.send(outcome)
    signal.pause()  # until killed: a rank that left early would reset its peers' connections
