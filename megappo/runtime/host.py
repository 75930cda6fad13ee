"""What lives in one process of the mesh: its roles, its engine rank, the sync between them.

A host is the same in every runtime: it is told its rank and where rank 0 listens, joins the
process group, builds everything, and then answers calls. It starts no other process and
never calls another host's methods; ranks meet in collectives only.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from megappo.checkpoint import sharded
from megappo.config.errors import is_user_error
from megappo.device.platform import backend, device, set_device
from megappo.mesh.rank import MeshRank
from megappo.mesh.settings import ACTOR, MeshSettings, RoleSettings
from megappo.records import GenerateRequest, SampleInfo
from megappo.reshard.executor import Executor, TransferStats
from megappo.rollout.engine import EngineSettings
from megappo.rollout.vllm_engine import VLLMEngine
from megappo.runtime.groups import RankCall
from megappo.topology import Topology
from megappo.weights.plan import plan
from megappo.weights.vllm import vllm_layout

ENGINE = "engine"
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
JOIN_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True)
class HostSettings:
    """What every rank hosts; the same on all of them.

    ``on_gpu`` says whether a rank needs a GPU.
    """

    topology: Topology
    mesh: MeshSettings
    roles: tuple[RoleSettings, ...]
    engine: EngineSettings
    on_gpu: bool


class Rendezvous:
    """Where the ranks of a mesh meet: a socket that rank 0 holds open on one address only."""

    def __init__(self, address: str) -> None:
        self._socket = socket.create_server((address, 0))
        self.address: tuple[str, int] = (address, self._socket.getsockname()[1])

    def take(self) -> int:
        """The listening file descriptor; whoever takes it closes it."""
        return self._socket.detach()


def join_mesh(
    rank: int, world_size: int, master: tuple[str, int], rendezvous: Rendezvous | None
) -> None:
    """Make the default process group; ``rendezvous`` is rank 0's, None elsewhere."""
    store = TCPStore(
        *master,
        world_size=world_size,
        is_master=rendezvous is not None,
        timeout=JOIN_TIMEOUT,
        master_listen_fd=None if rendezvous is None else rendezvous.take(),
    )
    dist.init_process_group(
        backend(), store=store, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT
    )


class Host:
    """One rank's process, from joining the mesh to answering calls.

    Args:
        rank: this rank.
        settings: what to host.
        master: address and port that rank 0 listens on.
        rendezvous: on rank 0, the socket behind ``master``.
    """

    def __init__(
        self,
        rank: int,
        settings: HostSettings,
        master: tuple[str, int],
        rendezvous: Rendezvous | None,
    ) -> None:
        self._settings = settings
        self._rank = rank
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        set_device(0)  # a rank sees its own GPU alone
        join_mesh(rank, settings.topology.world_size, master, rendezvous)
        self._mesh = MeshRank(rank, settings.topology, settings.mesh)
        for role in settings.roles:
            self._mesh.add_role(role)
        self._engine = VLLMEngine(settings.engine)
        actor = self._mesh.roles[ACTOR]
        engines = vllm_layout(
            actor.shape, settings.topology.world_size, settings.engine.tensor_parallel_size
        )
        self._resharding = Executor(plan(actor.layout, engines), rank, device=device())

    def call(self, call: RankCall) -> Any:
        """Run one method of a role or of the engine."""
        if call.target == ENGINE:
            return self._call_engine(call.method, call.argument)
        return self._call_role(call.target, call.method, call.argument)

    def _call_engine(self, method: str, argument: Any) -> Any:
        match method:
            case "generate":
                return self._generate(argument)
            case "sync_weights":
                return self._sync_weights(argument)
        raise ValueError(f"the engine has no method {method!r}")

    def _call_role(self, role: str, method: str, argument: Any) -> Any:
        mesh = self._mesh
        match method:
            case "load_batch":
                return mesh.load_batch(argument)
            case "compute_log_probs":
                return mesh.compute_log_probs(role)
            case "compute_values":
                return mesh.compute_values(role)
            case "make_experience":
                return mesh.make_experience(argument)
            case "update":
                return mesh.update(role, argument)
            case "release_batch":
                return mesh.release_batch()
            case "export_hf":
                return mesh.export_hf(role, Path(argument))
            case "save":
                return self._save(role, Path(argument))
            case "load":
                return self._load(role, Path(argument))
            case "save_random_state":
                return sharded.save_random_state(Path(argument))
            case "load_random_state":
                return sharded.load_random_state(Path(argument))
        raise ValueError(f"a role has no method {method!r}")

    def _generate(self, request: GenerateRequest) -> list[SampleInfo]:
        rollouts, infos = self._engine.generate(request)
        if request.key is not None and self._rank == self._engine.leader_rank:
            self._mesh.store[request.key] = rollouts
        return infos

    def _sync_weights(self, version: int) -> TransferStats:
        """Move the actor's weights into the engines."""
        destination = self._engine.begin_update()
        stats = self._resharding.run(self._mesh.named_weights(ACTOR), destination)
        self._engine.finish_update(version)
        return stats

    def _save(self, role: str, folder: Path) -> None:
        target = self._mesh.roles[role]
        sharded.save_role(folder, target.modules, target.optimizer, target.scheduler)

    def _load(self, role: str, folder: Path) -> None:
        target = self._mesh.roles[role]
        sharded.load_role(folder, target.modules, target.optimizer, target.scheduler)


class RankFaultError(Exception):
    """What went wrong in a rank, fit to travel to the driver without its types.

    ``user_error`` says that megappo refused something, with ``text`` as the one line.
    """

    def __init__(self, kind: str, text: str, user_error: bool) -> None:
        super().__init__(kind, text, user_error)
        self.kind = kind
        self.text = text
        self.user_error = user_error


@contextlib.contextmanager
def faults_for_the_driver() -> Iterator[None]:
    """Print any exception to this rank's log and raise it as a ``RankFaultError``."""
    try:
        yield
    except BaseException as error:
        traceback.print_exc()
        text = " ".join(str(error).split())
        raise RankFaultError(type(error).__name__, text, is_user_error(error)) from None


def redirect_output(path: Path) -> None:
    """Send this process's stdout and stderr to a file, C libraries included."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
