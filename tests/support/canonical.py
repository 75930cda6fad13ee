"""Puts the shards of all ranks together in canonical coordinates, where layouts compare.

A rank hands out its own part of a role's gradients or weights by local name; the parent
process joins the parts through ``megatron_layout`` into one vector over the checkpoint's
tensors. Copies of the same element on several ranks must agree, and every element must come
from somewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megappo.mesh.role import Role
from megappo.topology import Topology
from megappo.weights.families import load_shape
from megappo.weights.layout import box_index
from megappo.weights.megatron import megatron_layout

Shards = dict[str, npt.NDArray[np.float32]]


def local_weights(role: Role) -> Shards:
    """This rank's weights by local name."""
    return {name: t.float().numpy().copy() for name, t in role.tensors.items()}


def local_gradients(role: Role) -> Shards:
    """This rank's gradients by local name, after the reduction over replicas.

    With the distributed optimizer a rank has the final gradient of its share of each bucket
    only; the shares are gathered here.
    """
    dense = parallel_state.get_data_parallel_group()
    experts = parallel_state.get_expert_data_parallel_group()
    for chunk in role.chunks:
        if not chunk.ddp_config.use_distributed_optimizer:
            continue
        for buffers, group in ((chunk.buffers, dense), (chunk.expert_parallel_buffers, experts)):
            for bucket in (b for buffer in buffers for b in buffer.buckets):
                shares = list(bucket.grad_data.view(group.size(), -1))
                dist.all_gather(shares, shares[group.rank()].clone(), group=group)
                bucket.grad_data.copy_(torch.cat(shares))
    return {
        f"{number}.{name}": parameter.main_grad.float().numpy().copy()
        for number, module in enumerate(role.modules)
        for name, parameter in module.named_parameters()
    }


def canonical_vector(
    shards: Sequence[Shards],
    hf_dir: str,
    topology: Topology,
    *,
    value_head: bool,
    copies_agree: bool = True,
) -> torch.Tensor:
    """All canonical elements in one float64 vector, from the shards of every rank in order.

    With ``copies_agree=False`` copies may differ, and the highest rank's counts.
    """
    layout = megatron_layout(load_shape(hf_dir), topology, value_head=value_head)
    tensors = [np.full(shape, np.nan) for shape in layout.canonical_shapes.tolist()]
    scale = max(float(np.abs(shard).max()) for rank in shards for shard in rank.values())
    for piece, local in enumerate(layout.piece_local):
        rank, name = int(layout.local_rank[local]), layout.names[layout.local_name[local]]
        extent = layout.piece_extent[piece]
        shard = shards[rank][name].reshape(layout.local_shape[local])
        part = shard[box_index(layout.piece_local_start[piece], extent, 3)]
        target = tensors[layout.piece_canonical[piece]]
        box = box_index(layout.piece_canonical_start[piece], extent, 3)
        known = ~np.isnan(target[box])
        spread = np.abs(target[box] - part)[known].max(initial=0.0)
        assert not copies_agree or spread <= 1e-6 * scale, (rank, name)
        target[box] = part
    vector = np.concatenate([tensor.ravel() for tensor in tensors])
    assert not np.isnan(vector).any()
    return torch.from_numpy(vector)
