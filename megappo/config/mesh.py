"""The mesh that a configuration describes. Imports no torch."""

from __future__ import annotations

from megappo.config.schema import MegatronConfig
from megappo.topology import Topology


def topology(mesh: MegatronConfig) -> Topology:
    """The ranks of a run and their parallel sizes.

    Raises:
        ValueError: the sizes do not fit into each other; names the keys and the numbers.
    """
    return Topology(
        mesh.world_size,
        tp=mesh.tensor_model_parallel_size,
        pp=mesh.pipeline_model_parallel_size,
        ep=mesh.expert_model_parallel_size,
        vpp=mesh.virtual_pipeline_model_parallel_size,
    )
