"""The Ray runtime: one Ray actor per process of the run, placed by a placement group.

Starts a cluster on this machine (bound to loopback) or joins a running one, waits a bounded
time for the resources, packs processes by node, and carries calls. A process that raises or
dies ends the wait at once. It knows nothing of what they compute: ``host.py`` does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
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

from megappo.runtime.deaths import cause_of_death
from megappo.runtime.groups import RankCall, RankError, RankGroup
from megappo.runtime.host import (
    Address,
    Host,
    HostSettings,
    Meetings,
    RankFaultError,
    Rendezvous,
    faults_for_the_driver,
    make_host,
    redirect_output,
)
from megappo.runtime.processes import ranks_per_node
from megappo.runtime.ray_errors import describe, is_cause, is_echo, one_line

OBJECT_STORE_BYTES = 128 * 1024 * 1024  # no tensor passes through it
REACH_SECONDS = 10.0
POLL_SECONDS = 0.5  # how often a wait lets Python handle signals
DEATH_SECONDS = 5.0  # in which a death that made other ranks fail is told
MESH = "mesh"  # what a mesh rank is called while it starts


@dataclass(frozen=True)
class RaySettings:
    """Where and how processes are placed; a rank is a process, of the mesh or of an engine.

    ``address`` None starts a cluster here. ``placement_timeout`` is in seconds.
    """

    address: str | None
    num_cpus_per_rank: float
    num_gpus_per_rank: float
    placement_timeout: float


@dataclass(frozen=True)
class Called:
    """A process that was called, and what an error calls it."""

    process: int
    name: str


class RankActor:
    """The Ray actor around the ``Host`` of one process."""

    def __init__(self, process: int, log_path: str) -> None:
        redirect_output(Path(log_path))
        self._process = process
        self._listening: dict[Address, Rendezvous] = {}
        self._host: Host | None = None

    def listen(self) -> Address:
        """Open a socket at which a process group will meet. Returns its address."""
        rendezvous = Rendezvous(ray.util.get_node_ip_address())
        self._listening[rendezvous.address] = rendezvous
        return rendezvous.address

    def start(self, settings: HostSettings, meetings: Meetings) -> None:
        """Join the process groups and build what this process hosts."""
        with faults_for_the_driver():
            self._host = make_host(self._process, settings, meetings, self._listening)

    def call(self, call: RankCall) -> Any:
        """Run one call."""
        assert self._host is not None
        with faults_for_the_driver():
            return self._host.call(call)


class EngineActor(RankActor):
    """The same for an engine in a process of its own, under a name that `ps` shows."""


class RayRuntime:
    """The processes of a run as Ray actors. ``start`` must be called before any group is.

    Args:
        settings: what they host.
        ray_settings: placement.
        log_dir: folder for one log file per process.
    """

    def __init__(self, settings: HostSettings, ray_settings: RaySettings, log_dir: Path) -> None:
        self._settings = settings
        self._processes = settings.processes
        self._ray = ray_settings
        self._log_dir = log_dir.resolve()
        self._actors: list[Any] = []
        self._placement: PlacementGroup | None = None
        self._connected = False

    def start(self) -> None:
        """Connect, place the processes, start them together.

        Raises:
            ValueError: the cluster lacks the resources, or a rank found a user's error.
            RankError: a rank failed to start.
        """
        self._connect()
        self._log_dir.mkdir(parents=True, exist_ok=True)
        placement, order, nodes = self._place()
        settings = replace(self._settings, ranks_per_node=ranks_per_node(nodes))
        environment = {"env_vars": rank_environment(loopback=self._ray.address is None)}
        for process, bundle in enumerate(order):
            kind = RankActor if process in self._processes.mesh else EngineActor
            log_path = self._processes.log_path(self._log_dir, process)
            self._actors.append(
                ray.remote(kind)
                .options(
                    num_cpus=self._ray.num_cpus_per_rank,
                    num_gpus=self._num_gpus(),
                    runtime_env=environment,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        placement, placement_group_bundle_index=bundle
                    ),
                )
                .remote(process, str(log_path))
            )
        meetings = self._open_meetings()
        self._collect(
            {
                actor.start.remote(settings, meetings): self._called(process, MESH)
                for process, actor in enumerate(self._actors)
            }
        )

    def _open_meetings(self) -> Meetings:
        def listen(process: int) -> Address:
            ref = self._actors[process].listen.remote()
            address: Address = self._collect({ref: self._called(process, MESH)})[process]
            return address

        if not self._processes.num_apart:
            return Meetings(listen(0))
        return Meetings(listen(0), listen(self._processes.engines.start), listen(0))

    def role_group(self, role: str) -> RankGroup:
        """The group of one role."""
        return self._processes.role_group(self, role)

    def engine_group(self) -> RankGroup:
        """The group of the engines."""
        return self._processes.engine_group(self)

    def dispatch(self, calls: Mapping[int, RankCall]) -> dict[int, Any]:
        """See ``Runtime.dispatch``."""
        return self._collect(
            {
                self._actors[process].call.remote(call): self._called(process, call.target)
                for process, call in calls.items()
            }
        )

    def shutdown(self) -> None:
        """Kill the processes, free the placement group, leave (or stop) the cluster."""
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
        # The first failure is raised; the others, which it caused, are in the ranks' logs.
        os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
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
        try:
            if self._ray.address is not None:
                _reach(self._ray.address)
                # `ray start` uses this machine's token where there is one; so must we.
                maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
            self._connected = True
            with _own_signal_handler(), _listening_on_loopback(self._ray.address is None):
                ray.init(**options)
        except (OSError, ValueError) as error:
            self._connected = False
            raise ValueError(
                f"ray_address = {self._ray.address}: no Ray cluster answers there "
                f"({one_line(error)}); start one with `ray start --head` and give its host:port, "
                "or leave ray_address unset"
            ) from error

    def _num_gpus(self) -> float:
        return self._ray.num_gpus_per_rank if self._settings.on_gpu else 0

    def _place(self) -> tuple[PlacementGroup, list[int], list[str]]:
        """Reserve one bundle per process; bundles and their nodes, those of a node together."""
        count = self._processes.count
        bundle = {"CPU": self._ray.num_cpus_per_rank}
        if self._num_gpus():
            bundle["GPU"] = self._num_gpus()
        placement = placement_group([dict(bundle) for _ in range(count)], strategy="PACK")
        self._placement = placement
        deadline = time.monotonic() + self._ray.placement_timeout
        while not placement.wait(POLL_SECONDS):
            if time.monotonic() > deadline:
                raise ValueError(self._does_not_fit(bundle))
        nodes = placement_group_table(placement)["bundles_to_node_id"]
        order = sorted(range(count), key=lambda index: (nodes[index], index))
        return placement, order, [nodes[index] for index in order]

    def _does_not_fit(self, bundle: Mapping[str, float]) -> str:
        count, apart = self._processes.count, self._processes.num_apart
        needed = {name: amount * count for name, amount in bundle.items()}
        ranks, keys = f"megatron.world_size = {count - apart} ranks", ["megatron.world_size"]
        if apart:
            ranks += f" and {apart} ranks of engines"
            keys += ["vllm.num_engines", "vllm.tensor_parallel_size"]
        return (
            f"the run needs {needed} ({ranks} of {dict(bundle)}), but within "
            f"ray.placement_timeout = {self._ray.placement_timeout:g} s the cluster offered "
            f"{_available(bundle)}; lower ray.num_cpus_per_rank or {' or '.join(keys)}, "
            "or add nodes"
        )

    def _collect(self, refs: Mapping[Any, Called]) -> dict[int, Any]:
        """Wait for the results of all processes; the first failure ends the wait."""
        pending = list(refs)
        results: dict[int, Any] = {}
        while pending:
            ready, pending = ray.wait(pending, num_returns=1, timeout=POLL_SECONDS)
            for ref in ready:
                called = refs[ref]
                try:
                    results[called.process] = ray.get(ref)
                except (RayTaskError, RayActorError) as error:
                    failure = self._failure(called, error)
                    if not is_cause(error):
                        others = {ref: refs[ref] for ref in pending}
                        failure = self._cause_among(others, is_echo(error)) or failure
                    raise failure from error
        return results

    def _cause_among(self, refs: Mapping[Any, Called], any_failure: bool) -> Exception | None:
        """What made a process fail, if another one tells it within ``DEATH_SECONDS``.

        A death breaks the others' connections, and they may speak first; so may a rank that
        only heard of a failure, and then any other failure is taken for the cause.
        """
        pending = list(refs)
        deadline = time.monotonic() + DEATH_SECONDS
        while pending and (left := deadline - time.monotonic()) > 0:
            ready, pending = ray.wait(pending, num_returns=1, timeout=left)
            for ref in ready:
                try:
                    ray.get(ref)
                except (RayTaskError, RayActorError) as error:
                    if is_cause(error) or (any_failure and not is_echo(error)):
                        return self._failure(refs[ref], error)
        return None

    def _failure(self, called: Called, error: RayTaskError | RayActorError) -> Exception:
        """What the driver raises for it."""
        if isinstance(error, RayActorError):
            return self._death(called, error)
        cause = error.cause
        if isinstance(cause, RankFaultError) and cause.user_error:
            return ValueError(cause.text)
        path = self._log_path(called.process)
        return RankError(f"{called.name} failed: {describe(cause)}; its log: {path}")

    def _death(self, called: Called, error: RayActorError) -> RankError:
        path = self._log_path(called.process)
        cause = cause_of_death(path, one_line(error))
        return RankError(f"{called.name} died: {cause}; its log: {path}")

    def _called(self, process: int, target: str) -> Called:
        return Called(process, self._processes.name(target, process))

    def _log_path(self, process: int) -> Path:
        return self._processes.log_path(self._log_dir, process)


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


@contextlib.contextmanager
def _own_signal_handler() -> Iterator[None]:
    """Keep this program's answer to SIGTERM: Ray installs one that ends the process."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def _listening_on_loopback(only: bool) -> Iterator[None]:
    """Make a cluster that is started meanwhile listen on loopback, and nowhere else.

    Ray takes the address of a public interface even where it is told 127.0.0.1, unless this
    switch, which it has for other systems' firewalls, is off. Where a cluster is joined the
    switch stays as the user has it, who may have started a cluster of this kind.
    """
    if not only:
        yield
        return
    variable = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
    before, constant = os.environ.get(variable), ray_constants.ENABLE_RAY_CLUSTER
    os.environ[variable], ray_constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = constant
        del os.environ[variable]
        if before is not None:
            os.environ[variable] = before


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
