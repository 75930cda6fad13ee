"""The Ray runtime: one Ray actor per mesh rank, placed by a placement group.

Starts a cluster on this machine (bound to loopback) or joins a running one, waits a bounded
time for the resources, packs ranks by node, and carries calls. A rank that raises or dies
ends the wait at once. It knows nothing of what the ranks compute: ``host.py`` does.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants
from ray._private.authentication.authentication_token_setup import (
    maybe_enable_token_auth_if_token_available,
)
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megappo.runtime.groups import RankCall, RankError, RankGroup, rank_log_path
from megappo.runtime.host import (
    Host,
    HostSettings,
    RankFaultError,
    Rendezvous,
    faults_for_the_driver,
    redirect_output,
)

OBJECT_STORE_BYTES = 128 * 1024 * 1024  # no tensor passes through it
REACH_SECONDS = 10.0
POLL_SECONDS = 0.5  # how often a wait lets Python handle signals


@dataclass(frozen=True)
class RaySettings:
    """Where and how ranks are placed.

    ``address`` None starts a cluster here. ``placement_timeout`` is in seconds.
    """

    address: str | None
    num_cpus_per_rank: float
    num_gpus_per_rank: float
    placement_timeout: float


class RankActor:
    """The Ray actor around one ``Host``. Light to create: ``start`` does the imports."""

    def __init__(self, rank: int, log_path: str) -> None:
        redirect_output(Path(log_path))
        self._rank = rank
        self._rendezvous: Rendezvous | None = None
        self._host: Host | None = None

    def listen(self) -> tuple[str, int]:
        """Open the socket at which the ranks meet; called on rank 0. Returns its address."""
        self._rendezvous = Rendezvous(ray.util.get_node_ip_address())
        return self._rendezvous.address

    def start(self, settings: HostSettings, master: tuple[str, int]) -> None:
        """Join the mesh and build roles and engine."""
        with faults_for_the_driver():
            self._host = Host(self._rank, settings, master, self._rendezvous)

    def call(self, call: RankCall) -> Any:
        """Run one call."""
        assert self._host is not None
        with faults_for_the_driver():
            return self._host.call(call)


class RayRuntime:
    """Mesh ranks as Ray actors. ``start`` must be called before any group is.

    Args:
        settings: what every rank hosts.
        ray_settings: placement.
        log_dir: folder for one log file per rank.
    """

    def __init__(self, settings: HostSettings, ray_settings: RaySettings, log_dir: Path) -> None:
        self._settings = settings
        self._ray = ray_settings
        self._log_dir = log_dir.resolve()
        self._actors: list[Any] = []
        self._placement: PlacementGroup | None = None
        self._connected = False

    def start(self) -> None:
        """Connect, place the ranks, start them together.

        Raises:
            ValueError: the cluster lacks the resources, or a rank found a user's error.
            RankError: a rank failed to start.
        """
        self._connect()
        self._log_dir.mkdir(parents=True, exist_ok=True)
        world = self._settings.topology.world_size
        placement, order = self._place(world)
        environment = {"env_vars": rank_environment(loopback=self._ray.address is None)}
        actor_class = ray.remote(RankActor)
        for rank, bundle in enumerate(order):
            self._actors.append(
                actor_class.options(
                    num_cpus=self._ray.num_cpus_per_rank,
                    num_gpus=self._num_gpus(),
                    runtime_env=environment,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        placement, placement_group_bundle_index=bundle
                    ),
                ).remote(rank, str(rank_log_path(self._log_dir, rank)))
            )
        master = self._collect({self._actors[0].listen.remote(): 0}, "mesh")[0]
        refs = {a.start.remote(self._settings, master): r for r, a in enumerate(self._actors)}
        self._collect(refs, "mesh")

    def role_group(self, role: str) -> RankGroup:
        """The group of one role: its replicas are the mesh's data-parallel replicas."""
        topology = self._settings.topology
        return RankGroup(
            self,
            role,
            [topology.replica_ranks(d) for d in range(topology.dp)],
            [topology.output_rank(d) for d in range(topology.dp)],
        )

    def engine_group(self) -> RankGroup:
        """The group of the engines: a replica is one engine, its leader answers."""
        size = self._settings.engine.tensor_parallel_size
        leaders = list(range(0, self._settings.topology.world_size, size))
        return RankGroup(self, "engine", [list(range(r, r + size)) for r in leaders], leaders)

    def dispatch(self, calls: Mapping[int, RankCall]) -> dict[int, Any]:
        """See ``Runtime.dispatch``."""
        target = next(iter(calls.values())).target
        refs = {self._actors[rank].call.remote(call): rank for rank, call in calls.items()}
        return self._collect(refs, target)

    def shutdown(self) -> None:
        """Kill the ranks, free the placement group, leave (or stop) the cluster."""
        if not self._connected:
            return
        self._connected = False
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        if self._placement is not None:
            remove_placement_group(self._placement)
        ray.shutdown()

    def _connect(self) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Ray gives its workers niceness 15, and ours are the run itself.
        os.environ.setdefault("RAY_worker_niceness", "0")
        options: dict[str, Any] = {
            "address": self._ray.address,
            "log_to_driver": False,
            "logging_level": logging.ERROR,
        }
        if self._ray.address is None:
            options |= {
                "address": "local",
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE_BYTES,
            }
        _bind_to_loopback(self._ray.address is None)
        try:
            if self._ray.address is not None:
                _reach(self._ray.address)
                # `ray start` uses this machine's token where there is one; so must we.
                maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
            self._connected = True
            ray.init(**options)
        except (OSError, ValueError) as error:
            self._connected = False
            raise ValueError(
                f"ray_address = {self._ray.address}: no Ray cluster answers there "
                f"({_one_line(error)}); start one with `ray start --head` and give its host:port, "
                "or leave ray_address unset"
            ) from error

    def _num_gpus(self) -> float:
        return self._ray.num_gpus_per_rank if self._settings.on_gpu else 0

    def _place(self, world: int) -> tuple[PlacementGroup, list[int]]:
        """Reserve one bundle per rank; bundle indices come with those of a node together."""
        bundle = {"CPU": self._ray.num_cpus_per_rank}
        if self._num_gpus():
            bundle["GPU"] = self._num_gpus()
        placement = placement_group([dict(bundle) for _ in range(world)], strategy="PACK")
        self._placement = placement
        deadline = time.monotonic() + self._ray.placement_timeout
        while not placement.wait(POLL_SECONDS):
            if time.monotonic() > deadline:
                needed = {name: amount * world for name, amount in bundle.items()}
                raise ValueError(
                    f"the mesh needs {needed} (megatron.world_size = {world} ranks of {bundle}), "
                    f"but within ray.placement_timeout = {self._ray.placement_timeout:g} s the "
                    f"cluster offered {_available(bundle)}; lower ray.num_cpus_per_rank or "
                    "megatron.world_size, or add nodes"
                )
        nodes = placement_group_table(placement)["bundles_to_node_id"]
        return placement, sorted(range(world), key=lambda index: (nodes[index], index))

    def _collect(self, refs: Mapping[Any, int], target: str) -> dict[int, Any]:
        """Wait for all results; the first failure ends the wait."""
        pending = list(refs)
        results: dict[int, Any] = {}
        while pending:
            ready, pending = ray.wait(pending, num_returns=1, timeout=POLL_SECONDS)
            for ref in ready:
                rank = refs[ref]
                try:
                    results[rank] = ray.get(ref)
                except RayTaskError as error:
                    raise self._failure(error.cause, target, rank) from error
                except RayActorError as error:
                    raise RankError(
                        f"{target} rank {rank} died: {_one_line(error)}; "
                        f"its log: {rank_log_path(self._log_dir, rank)}"
                    ) from error
        return results

    def _failure(self, cause: BaseException, target: str, rank: int) -> Exception:
        if not isinstance(cause, RankFaultError):
            kind, text = type(cause).__name__, _one_line(cause)
        elif cause.user_error:
            return ValueError(cause.text)
        else:
            kind, text = cause.kind, cause.text
        return RankError(
            f"{target} rank {rank} failed: {kind}: {text}; "
            f"its log: {rank_log_path(self._log_dir, rank)}"
        )


def _reach(address: str) -> None:
    """Open a connection and close it: Ray itself ends the process where nobody answers.

    Raises:
        OSError: nobody answers.
        ValueError: the address is not ``host:port``.
    """
    host, colon, port = address.rpartition(":")
    if not colon:
        raise ValueError("it is not host:port")
    socket.create_connection((host, int(port)), timeout=REACH_SECONDS).close()


def _bind_to_loopback(only: bool) -> None:
    """Make a cluster that is started here listen on loopback, and nowhere else.

    Ray takes the address of a public interface even where it is told 127.0.0.1, unless this
    switch, which it has for other systems' firewalls, is off.
    """
    ray_constants.ENABLE_RAY_CLUSTER = not only
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0" if only else "1"


def rank_environment(*, loopback: bool) -> dict[str, str]:
    """Environment of every rank process: one OpenMP thread, no network, quiet vendors."""
    interface = {"GLOO_SOCKET_IFNAME": "lo"} if loopback else {}
    return interface | {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "MKL_NUM_THREADS": os.environ.get("MKL_NUM_THREADS", "1"),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore",  # deprecations inside the vendors, once per call and rank
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }


def _available(bundle: Mapping[str, float]) -> dict[str, float]:
    resources = ray.cluster_resources()
    return {name: float(resources.get(name, 0.0)) for name in bundle}


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
