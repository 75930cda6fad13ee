"""Starts and ends Megatron's model-parallel groups on an existing default process group.

The caller has made the default group (every runtime does, in its own way); this module hands
its ranks to Megatron in the order of ``Topology`` and seeds the generators.
"""

from __future__ import annotations

import torch
from megatron.core import parallel_state, tensor_parallel

from megappo.topology import Topology

# Megatron seeds tensor ranks apart, but all pipeline stages alike.
_SEED_STRIDE_PER_STAGE = 100


def initialize(topology: Topology, seed: int) -> None:
    """Make the model-parallel groups and seed this rank's generators.

    Args:
        topology: the mesh; its size is that of the default process group.
        seed: base seed; replicas share it, tensor ranks and pipeline stages differ.
    """
    assert torch.distributed.get_world_size() == topology.world_size, topology
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=topology.tp,
        pipeline_model_parallel_size=topology.pp,
        virtual_pipeline_model_parallel_size=topology.vpp if topology.vpp > 1 else None,
        expert_model_parallel_size=topology.ep,
        expert_tensor_parallel_size=1,
    )
    place = topology.coordinates(torch.distributed.get_rank())
    stage_seed = seed + _SEED_STRIDE_PER_STAGE * place.pp
    torch.manual_seed(stage_seed)
    tensor_parallel.model_parallel_cuda_manual_seed(stage_seed)
    assert place.tp == parallel_state.get_tensor_model_parallel_rank()
    assert place.pp == parallel_state.get_pipeline_model_parallel_rank()
    assert place.dp == parallel_state.get_data_parallel_rank()
    stage_rank = place.dp * topology.tp + place.tp
    assert stage_rank % topology.ep == parallel_state.get_expert_model_parallel_rank()


def destroy() -> None:
    """Forget the model-parallel groups; the default group stays with its owner."""
    parallel_state.destroy_model_parallel()
