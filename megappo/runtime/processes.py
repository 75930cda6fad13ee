"""Which processes a run has, what each of them holds, and the groups that reach them.

Processes are numbered: the mesh's ranks come first, and engine ranks that live in processes
of their own come after them. Weights and tokens that cross between the two kinds travel in
one communicator with these very numbers. Whether engines live inside the mesh's ranks is
decided here and nowhere else: the trainer sees groups, a role sees its mesh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from megappo.mesh.settings import ACTOR
from megappo.runtime.groups import ENGINE, Partners, RankGroup, Runtime
from megappo.topology import Topology


@dataclass(frozen=True)
class Processes:
    """The processes of a run.

    Attributes:
        topology: the mesh.
        engine_tp: ranks of one engine.
        num_apart: processes that hold an engine rank alone; 0 where engines live inside the
            mesh's ranks and fill them.
    """

    topology: Topology
    engine_tp: int
    num_apart: int = 0

    @property
    def count(self) -> int:
        """Number of processes."""
        return self.topology.world_size + self.num_apart

    @property
    def mesh(self) -> range:
        """Processes that hold a mesh rank."""
        return range(self.topology.world_size)

    @property
    def engines(self) -> range:
        """Processes that hold an engine rank."""
        return range(self.topology.world_size, self.count) if self.num_apart else self.mesh

    def name(self, target: str, process: int) -> str:
        """What an error calls a process in which ``target`` was called."""
        if process in self.mesh:
            return f"{target} rank {process}"
        return f"{ENGINE} rank {process - self.engines.start}"

    def log_path(self, log_dir: Path, process: int) -> Path:
        """File that a process's stdout and stderr go to."""
        if process in self.mesh:
            return log_dir / f"rank_{process}.log"
        return log_dir / f"engine_{process - self.engines.start}.log"

    def role_group(self, runtime: Runtime, role: str) -> RankGroup:
        """The group of one role: its replicas are the mesh's data-parallel replicas."""
        topology = self.topology
        return RankGroup(
            runtime,
            role,
            [topology.replica_ranks(d) for d in range(topology.dp)],
            [topology.output_rank(d) for d in range(topology.dp)],
            {"load_batch": Partners(ENGINE, self.engines)} if self.num_apart else {},
        )

    def engine_group(self, runtime: Runtime) -> RankGroup:
        """The group of the engines: a replica is one engine, its leader answers."""
        leaders = list(self.engines)[:: self.engine_tp]
        return RankGroup(
            runtime,
            ENGINE,
            [list(range(first, first + self.engine_tp)) for first in leaders],
            leaders,
            {"sync_weights": Partners(ACTOR, self.mesh)} if self.num_apart else {},
        )


def ranks_per_node(nodes: Sequence[str]) -> int | None:
    """How many neighbouring processes each node has, where all (but the last) have as many.

    Args:
        nodes: The node of every process, those of a node together.

    Returns:
        None where nodes differ, so that no arithmetic tells which processes are neighbours.
    """
    counts = [len(list(processes)) for _, processes in groupby(nodes)]
    alike = all(count == counts[0] for count in counts[:-1]) and counts[-1] <= counts[0]
    return counts[0] if alike else None
