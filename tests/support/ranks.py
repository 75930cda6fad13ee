"""Fork gloo ranks from the pre-imported test process: 0.2 s instead of a 10 s start.

``run_ranks(4, fn, *args)`` calls ``fn(rank, *args)`` in 4 forked processes which share a
default gloo process group, and returns the 4 results. An exception in a rank is raised in
the parent with the rank's traceback. The parent must not have run threaded torch code or
made a process group: ``tests/conftest.py`` keeps torch at one thread.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

TIMEOUT = timedelta(seconds=120)


def free_port() -> int:
    """A TCP port on loopback that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _child(
    rank: int,
    world_size: int,
    meeting: socket.socket,
    pipe: int,
    release: int,
    fn: Callable[..., Any],
    args: Any,
) -> None:
    os.setsid()
    host, port = meeting.getsockname()
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR=host,
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    descriptor = meeting.detach()
    try:
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
        payload = pickle.dumps((True, fn(rank, *args)))
    except BaseException:
        payload = pickle.dumps((False, traceback.format_exc()))
    with os.fdopen(pipe, "wb") as file:
        file.write(payload)
    sys.stdout.flush()
    sys.stderr.flush()
    os.read(release, 1)  # a rank that left early would reset its peers' connections
    os._exit(0)  # no interpreter shutdown: vLLM's and gloo's threads would hold it up


def run_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 240
) -> list[Any]:
    """Run ``fn(rank, *args)`` on every rank and return the results in rank order."""
    meeting = socket.create_server(("127.0.0.1", 0))
    release, held = os.pipe()  # ranks wait at one end until the parent closes the other
    pipes: dict[int, int] = {}
    pids: list[int] = []
    sys.stdout.flush()
    sys.stderr.flush()
    for rank in range(world_size):
        read_fd, write_fd = os.pipe()
        pid = os.fork()
        if pid == 0:
            for descriptor in (read_fd, held, *pipes):
                os.close(descriptor)
            _child(rank, world_size, meeting, write_fd, release, fn, args)
        os.close(write_fd)
        pipes[read_fd] = rank
        pids.append(pid)
    meeting.close()
    os.close(release)
    chunks: dict[int, list[bytes]] = {rank: [] for rank in range(world_size)}
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    try:
        while pipes:
            ready, _, _ = select.select(list(pipes), [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"ranks {sorted(pipes.values())} gave no result in {timeout} s")
            for fd in ready:
                data = os.read(fd, 1 << 20)
                if data:
                    chunks[pipes[fd]].append(data)
                    continue
                rank = pipes.pop(fd)
                os.close(fd)
                if not chunks[rank]:
                    raise RuntimeError(f"rank {rank} died without a result")
                ok, value = pickle.loads(b"".join(chunks[rank]))
                if not ok:
                    raise RuntimeError(f"rank {rank} failed:\n{value}")
                results[rank] = value
    finally:
        os.close(held)
        for fd in pipes:
            os.close(fd)
        for pid in pids:
            if len(results) < world_size:
                try:
                    os.killpg(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            os.waitpid(pid, 0)
    return [results[rank] for rank in range(world_size)]
