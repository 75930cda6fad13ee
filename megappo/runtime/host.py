"""What lives in one process of a run: roles of the mesh, an engine rank, or both.

A host is the same in every runtime: it is told its number and where the process groups meet,
joins them, builds everything, and then answers calls. It starts no other process and never
calls another host's methods; processes meet in collectives and messages only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from megappo.checkpoint import sharded
from megappo.checkpoint.model_files import write_model_files
from megappo.config.errors import is_user_error
from megappo.device.platform import backend, device, set_device
from megappo.mesh.exchange import send_tokens
from megappo.mesh.rank import MeshRank
from megappo.mesh.settings import ACTOR, MeshSettings, RoleSettings
from megappo.records import BatchPlan, GenerateRequest, Rollouts, SampleInfo
from megappo.reshard.executor import Executor, TransferStats
from megappo.reshard.joint import joint_group
from megappo.rollout.engine import EngineSettings
from megappo.rollout.vllm_engine import VLLMEngine
from megappo.runtime.groups import ENGINE, RankCall
from megappo.runtime.processes import Processes
from megappo.topology import Topology
from megappo.weights.families import load_shape
from megappo.weights.layout import shifted, widened
from megappo.weights.megatron import megatron_layout
from megappo.weights.plan import Plan, plan
from megappo.weights.vllm import vllm_layout

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
JOIN_TIMEOUT = timedelta(minutes=5)
Address = tuple[str, int]


@dataclass(frozen=True)
class HostSettings:
    """What the processes of a run host; the same on all of them.

    ``on_gpu`` says whether a process needs a GPU. ``num_engine_processes`` is 0 where engines
    live inside the mesh's ranks. ``verify_weights`` compares checksums after every sync.
    ``ranks_per_node`` lets weights come from the same node, where nodes are alike.
    """

    topology: Topology
    mesh: MeshSettings
    roles: tuple[RoleSettings, ...]
    engine: EngineSettings
    on_gpu: bool
    num_engine_processes: int = 0
    verify_weights: bool = False
    ranks_per_node: int | None = None

    @property
    def processes(self) -> Processes:
        """Which processes there are."""
        return Processes(self.topology, self.engine.tensor_parallel_size, self.num_engine_processes)


class Rendezvous:
    """Where a process group meets: a socket that its rank 0 holds open on one address only."""

    def __init__(self, address: str) -> None:
        self._socket = socket.create_server((address, 0))
        self.address: Address = (address, self._socket.getsockname()[1])

    def take(self) -> int:
        """The listening file descriptor; whoever takes it closes it."""
        return self._socket.detach()


@dataclass(frozen=True)
class Meetings:
    """Where the process groups meet; the last two only with engines in their own processes.

    Attributes:
        mesh: the mesh's ranks; process 0 listens.
        engines: the engines' ranks; the first of them listens.
        joint: all processes; process 0 listens.
    """

    mesh: Address
    engines: Address | None = None
    joint: Address | None = None


def join_group(rank: int, world_size: int, master: Address, rendezvous: Rendezvous | None) -> None:
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


class Host(Protocol):
    """A process that answers calls."""

    def call(self, call: RankCall) -> Any:
        """Run one method of what lives here."""


def make_host(
    process: int,
    settings: HostSettings,
    meetings: Meetings,
    listening: Mapping[Address, Rendezvous],
) -> Host:
    """Join the process groups and build what this process hosts.

    Args:
        process: this process's number.
        settings: what to host.
        meetings: where the groups meet.
        listening: the sockets that this process opened for some of them, by address.
    """
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    set_device(0)  # a rank sees its own GPU alone
    processes = settings.processes
    in_mesh = process in processes.mesh
    peers, meeting = processes.mesh, meetings.mesh
    if not in_mesh:
        assert meetings.engines is not None
        peers, meeting = processes.engines, meetings.engines
    join_group(process - peers.start, len(peers), meeting, listening.get(meeting))
    joint = None
    if meetings.joint is not None:
        rendezvous = listening.get(meetings.joint)
        descriptor = None if rendezvous is None else rendezvous.take()
        joint = joint_group(meetings.joint, process, processes.count, listen_fd=descriptor)
    if in_mesh:
        return MeshHost(process, settings, joint)
    assert joint is not None
    return EngineHost(process, settings, joint)


class MeshHost:
    """One rank of the mesh, with an engine rank inside unless engines have their own processes."""

    def __init__(self, rank: int, settings: HostSettings, joint: dist.ProcessGroup | None) -> None:
        self._mesh = MeshRank(rank, settings.topology, settings.mesh, joint)
        for role in settings.roles:
            self._mesh.add_role(role)
        weights = _weight_plan(settings)
        self._engine: EngineRank | None = None
        if rank in settings.processes.engines:
            self._engine = EngineRank(rank, settings, weights, self._mesh.store)
        self._resharding = Executor(
            weights, rank, joint, device=device(), verify=settings.verify_weights
        )

    def call(self, call: RankCall) -> Any:
        """Run one method of a role or of the engine inside."""
        if call.target == ENGINE:
            return self._call_engine(call.method, call.argument)
        return self._call_role(call.target, call.method, call.argument)

    def _call_engine(self, method: str, argument: Any) -> Any:
        assert self._engine is not None
        match method:
            case "generate":
                self._mesh.rest()
                return self._engine.generate(argument)
            case "sync_weights":
                weights = self._mesh.named_weights(ACTOR)
                return self._engine.take_weights(self._resharding, weights, argument)
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
            case "score":
                return mesh.score(argument)
            case "make_experience":
                return mesh.make_experience(argument)
            case "update":
                return mesh.update(role, argument)
            case "release_batch":
                return mesh.release_batch()
            case "sync_weights":  # to engines elsewhere
                return self._resharding.run(mesh.named_weights(role), {})
            case "memory":
                return mesh.memory()
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

    def _save(self, role: str, folder: Path) -> None:
        target = self._mesh.use(role)
        sharded.save_role(folder, target.modules, target.optimizer, target.scheduler)
        if self._mesh.rank == 0:
            hf_dir, head = Path(target.settings.hf_dir), target.settings.head
            write_model_files(folder, hf_dir, head=head, topology=self._mesh.topology)

    def _load(self, role: str, folder: Path) -> None:
        target = self._mesh.use(role)
        sharded.load_role(folder, target.modules, target.optimizer, target.scheduler)


class EngineHost:
    """One engine rank in a process of its own; its tokens go to the mesh over the joint group."""

    def __init__(self, process: int, settings: HostSettings, joint: dist.ProcessGroup) -> None:
        self._process = process
        self._topology = settings.topology
        self._joint = joint
        self._store: dict[str, Rollouts] = {}
        weights = _weight_plan(settings)
        self._engine = EngineRank(process, settings, weights, self._store)
        self._resharding = Executor(
            weights, process, joint, device=device(), verify=settings.verify_weights
        )

    def call(self, call: RankCall) -> Any:
        """Run one method of the engine."""
        assert call.target == ENGINE, call.target
        match call.method:
            case "generate":
                return self._engine.generate(call.argument)
            case "sync_weights":
                return self._engine.take_weights(self._resharding, {}, call.argument)
            case "load_batch":
                return self._send_tokens(call.argument)
        raise ValueError(f"the engine has no method {call.method!r}")

    def _send_tokens(self, batch: BatchPlan) -> None:
        rollouts = self._store.pop(batch.key, None)
        send_tokens(
            batch, rollouts, self._topology, self._process, device=device(), group=self._joint
        )


class EngineRank:
    """An engine rank, whichever process it lives in.

    Args:
        process: this process's number.
        settings: what the run hosts.
        weights: how new weights will come.
        store: where rollouts are left, by the key of their request.

    Raises:
        ValueError: the engine cannot start, or has other parameters than the plan writes.
    """

    def __init__(
        self, process: int, settings: HostSettings, weights: Plan, store: dict[str, Rollouts]
    ) -> None:
        self._process = process
        self._first = settings.processes.engines.start
        self._store = store
        self._engine = VLLMEngine(settings.engine)
        self._engine.require_parameters(weights.destination.local_shapes(process))

    def generate(self, request: GenerateRequest) -> list[SampleInfo]:
        """Draw responses; the engine's first rank keeps the tokens if the request says so."""
        rollouts, infos = self._engine.generate(request)
        holder = self._first + self._engine.leader_rank
        if request.key is not None and self._process == holder:
            self._store[request.key] = rollouts
        return [dataclasses.replace(info, holder_rank=holder) for info in infos]

    def take_weights(
        self, resharding: Executor, own: Mapping[str, torch.Tensor], version: int
    ) -> TransferStats:
        """Take the actor's weights; ``own`` are those of them that are in this process."""
        stats = resharding.run(own, self._engine.begin_update())
        self._engine.finish_update(version)
        return stats


def _weight_plan(settings: HostSettings) -> Plan:
    """The way of the actor's weights into the engines; the same in every process."""
    processes = settings.processes
    (actor,) = (role for role in settings.roles if role.name == ACTOR)
    shape = load_shape(actor.hf_dir)
    engines = vllm_layout(shape, len(processes.engines), processes.engine_tp)
    return plan(
        widened(megatron_layout(shape, settings.topology), processes.count),
        shifted(engines, processes.engines.start, processes.count),
        ranks_per_node=settings.ranks_per_node,
    )


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
