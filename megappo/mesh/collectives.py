"""The two reductions that statistics need: over the replicas, then to all stages.

Statistics exist on last-stage ranks only. ``summed`` and ``largest`` combine the replicas
there; ``from_last_stage`` then gives every rank of a replica the result, so that each phase
reports the same numbers on every rank of the mesh. Models must be initialised
(``models.parallel``). Nothing here knows what is counted.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state


def is_last_stage() -> bool:
    """Whether this rank computes logits, values and losses."""
    return bool(parallel_state.is_pipeline_last_stage(ignore_virtual=True))


def summed(values: torch.Tensor) -> torch.Tensor:
    """Sum over replicas, in place; any shape. Called by all ranks of a stage together."""
    dist.all_reduce(values, group=parallel_state.get_data_parallel_group())
    return values


def largest(values: torch.Tensor) -> torch.Tensor:
    """Elementwise maximum over replicas, in place; any shape."""
    dist.all_reduce(values, dist.ReduceOp.MAX, group=parallel_state.get_data_parallel_group())
    return values


def from_last_stage(values: torch.Tensor) -> torch.Tensor:
    """Overwrite ``values`` with the last stage's, on all stages; same shape and type on all."""
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        source = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(values, source, group=parallel_state.get_pipeline_model_parallel_group())
    return values
